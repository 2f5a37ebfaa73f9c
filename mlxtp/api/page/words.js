// Text for figures and states. Unknown facts are shown as such.

export const COMING = ["starting", "forming", "loading", "restarting"]; // states with a model that is loading
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

/** Return an amount and the whole that it is of: "205 of 512 GB". */
export function ofWhole(part, whole) {
  const [[figure, unit], sum] = [bytes(part).split(" "), bytes(whole)];
  return `${sum.endsWith(unit) ? figure : `${figure} ${unit}`} of ${sum}`;
}

export function clock(at) {
  const then = new Date(at * 1000);
  const today = new Date().toDateString() === then.toDateString();
  return today ? then.toLocaleTimeString() : then.toLocaleString();
}

export const count = (number, one, more = `${one}s`) => `${number} ${number === 1 ? one : more}`;

/** Return the cluster's reason for not serving; empty without one. */
export const why = (now) => (["ready", "loading", "stopped"].includes(now.state) ? "" : now.reason || now.waiting || "");

/** Return the state of the cluster as one sentence, for display and screen readers. */
export const stateWords = (now) =>
  (now.starting ? ["Starting", now.starting] : [stateAlone(now), why(now)]).filter(Boolean).join(": ");

/** Return the same without the reason. */
export function stateAlone(now) {
  switch (now.state) {
    case "ready":
      return `Ready: ${[now.model ? shortName(now.model) : "a model", place(now)].filter(Boolean).join(" ")}`;
    case "starting":
    case "forming":
      return now.epoch > 1 ? "Starting again" : "Starting";
    case "loading":
      return `Loading ${now.deployments.length ? shortName(now.deployments[0].model) : "the model"}`;
    case "restarting":
      return "Starting again";
    case "idle":
      return "No model is loaded";
    case "draining":
      return "Stopping: no new requests";
    case "failed":
      return "Failed";
    case "stopped":
      return "The agent has stopped";
    default:
      return `State ${now.state}`;
  }
}

/** Return "on 2 Macs" or "in 2 processes"; empty for one. */
export function place(now) {
  const macs = new Set(now.ranks.map((each) => each.node)).size;
  const size = now.group?.world_size ?? 0;
  if (macs > 1) return `on ${macs} Macs`;
  return size > 1 ? `in ${size} processes` : "";
}

/** Return names as one phrase: "studio, mini and book". */
export const all = (names) => [names.slice(0, -1).join(", "), ...names.slice(-1)].filter(Boolean).join(" and ");

/** Return where a group runs, how, and its work; its state and speed too if it is one of `several`. */
export function groupWords(group, several) {
  const { running, waiting } = group.requests;
  const work = [running ? `${running} writing` : "", waiting ? `${waiting} waiting` : ""];
  const parts = [
    `On ${all(group.members.map(({ name }) => name))}`,
    several ? groupWord(group.state) : "",
    several && group.tokens_per_second ? rate(group.tokens_per_second) : "",
    [group.kind, stages(group)].filter(Boolean).join(", "),
    work.filter(Boolean).join(", "),
    group.cached_tokens ? `${group.cached_tokens.toLocaleString("en")} tokens cached` : "",
  ];
  return parts.filter(Boolean).join(" · ");
}

/** Return the layers of each Mac of a pipeline, in the order of its ranks. */
export const stages = ({ split }) => (split?.length ? `pipeline of ${split.join(" + ")} layers` : "");

/** Return the deployments that a Mac works for, with the number of the replica where there are several. */
export function works(node, now) {
  const found = (now.deployments ?? []).flatMap(({ model, groups }) =>
    groups.filter(({ id }) => (node.works_for ?? []).includes(id)).map((group) => replicaWords(model, groups, group)),
  );
  return found.length ? `Works for ${found.join(", ")}` : "";
}

const replicaWords = (model, groups, group) =>
  groups.length > 1 ? `${shortName(model)} (replica ${groups.indexOf(group) + 1})` : shortName(model);

/** Return the name of a group by its id: its model, with the number of the replica where there are several. */
export function groupName(id, now) {
  for (const { model, groups } of now.deployments ?? []) {
    const found = groups.find((group) => group.id === id);
    if (found) return replicaWords(model, groups, found);
  }
  return id;
}

/** Return how often a group's caches of earlier prompts helped. */
export function reuseWords({ reused, reused_tokens: tokens, fetched_tokens: fetched }) {
  if (!reused) return "not used yet";
  const disk = fetched ? `, ${fetched.toLocaleString("en")} of them from disk` : "";
  return `${count(reused, "prompt")} began with them: ${tokens.toLocaleString("en")} tokens not read again${disk}`;
}

/** Return the room on disk of a group's Macs, and its use. It has none where the disk is off, or has failed. */
export function diskWords({ disk_bytes: held, disk_room_bytes: room }) {
  if (room) return `${bytes(held)} of ${bytes(room)} on disk`;
  return held ? `${bytes(held)} on disk, to which none are added` : "none on disk";
}

/** Return the name of a model without its owner or folder. */
export const shortName = (model) => model.split("/").filter(Boolean).at(-1) ?? model;

const PHASES = { prefill: "reading a prompt", decode: "writing", forming: "connecting", proving: "checking the connection" };
const STATES = { alive: "connected", away: "not seen yet", suspect: "not answering", dead: "lost" };
const STAGES = { spawned: "processes started", linked: "processes ready", formed: "connected", proven: "checked", loaded: "model loaded" };
const word = (table) => (term) => (Object.hasOwn(table, term) ? table[term] : term);
export const [phaseWord, macWord, stageWord] = [PHASES, STATES, STAGES].map(word);

export const NETWORKS = { thunderbolt: "Thunderbolt", ethernet: "Ethernet", wifi: "Wi-Fi", loopback: "loopback" };

export function linkWords(link) {
  const how = [NETWORKS[link.network] ?? link.network, link.rdma ? "RDMA" : "", speed(link.mbps)];
  return how.filter(Boolean).join(", ");
}

/** Return what a group does on one Mac: the phase of its ranks there, where known, else that of the group. */
export function phaseOf(group, node, now) {
  if (group.state !== "ready") return groupWord(group.state) + (group.loaded_percent === null || group.loaded_percent === undefined ? "" : ` ${group.loaded_percent} %`);
  const ranks = group.id === now.shown ? now.ranks.filter((rank) => rank.node === node.node_id && rank.phase) : [];
  if (ranks.length) return [...new Set(ranks.map(({ phase }) => phaseWord(phase)))].join(" and ");
  const { running, waiting } = group.requests;
  return running ? "writing" : waiting ? "reading a prompt" : "idle";
}

const OF_GROUPS = { ready: "ready", starting: "starting", forming: "connecting", loading: "loading", restarting: "starting again", idle: "not running", draining: "about to stop", failed: "failed", stopped: "stopped" };
export const groupWord = word(OF_GROUPS);

/** Return the seconds that are left, in coarse words. */
export function left(count) {
  if (count === null || count === undefined) return "";
  if (count < 60) return `about ${Math.max(Math.ceil(count / 5) * 5, 5)} s left`;
  if (count < 5400) return `about ${Math.round(count / 60)} min left`;
  return `about ${Math.round(count / 3600)} h left`;
}
