// Figures and states in words. What is not known is said to be not known.

export const UNKNOWN = "not known";

export function bytes(count) {
  if (count === null || count === undefined) return UNKNOWN;
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export function seconds(count) {
  if (count === null || count === undefined) return UNKNOWN;
  if (count < 1) return `${Math.round(count * 1000)} ms`;
  if (count < 100) return `${count.toFixed(1)} s`;
  if (count < 3600) return `${Math.floor(count / 60)} min ${Math.round(count % 60)} s`;
  return `${Math.floor(count / 3600)} h ${Math.round((count % 3600) / 60)} min`;
}

export function micros(count) {
  if (count === null || count === undefined) return UNKNOWN;
  return count < 1000 ? `${count} µs` : `${(count / 1000).toFixed(1)} ms`;
}

export function rate(value) {
  return value === null || value === undefined ? UNKNOWN : `${value} tokens/s`;
}

export function speed(mbps) {
  if (mbps === null || mbps === undefined) return "";
  return mbps >= 1000 ? `${mbps / 1000} Gbit/s` : `${mbps} Mbit/s`;
}

export function clock(at) {
  const then = new Date(at * 1000);
  const today = new Date().toDateString() === then.toDateString();
  return today ? then.toLocaleTimeString() : then.toLocaleString();
}

export const count = (number, one, more = `${one}s`) => `${number} ${number === 1 ? one : more}`;

/** Why the cluster does not serve, as far as it says. */
export const why = (now) => (["ready", "loading", "stopped"].includes(now.state) ? "" : now.reason || now.waiting || "");

/** What the cluster is doing, as one sentence for people, whoever reads or listens. */
export const stateWords = (now) => [stateAlone(now), why(now)].filter(Boolean).join(": ");

/** The same without the reason. */
export function stateAlone(now) {
  const size = now.group ? now.group.world_size : 0;
  switch (now.state) {
    case "ready":
      return `Ready: ${now.model ?? "a model"} on ${count(size, "rank")}`;
    case "starting":
    case "forming":
      return `Forming the group of epoch ${now.epoch}`;
    case "loading":
      return `Loading ${now.desired?.model || "the model"}`;
    case "restarting":
      return "The group has ended and forms again";
    case "idle":
      return "Nothing is served";
    case "draining":
      return "No new requests";
    case "failed":
      return "Failed";
    case "stopped":
      return "The agent has stopped";
    default:
      return `State ${now.state}`;
  }
}

const NETWORKS = { thunderbolt: "Thunderbolt", ethernet: "Ethernet", wifi: "Wi-Fi", loopback: "loopback" };

export function linkWords(link) {
  const how = [NETWORKS[link.network] ?? link.network, link.rdma ? "RDMA" : "", speed(link.mbps)];
  return how.filter(Boolean).join(", ");
}
