// State of the cluster, as the agent reports it. All views of it subscribe here.

import { askForApiKey, onKeys } from "./keys.js";
import { askOnce, events } from "./net.js";

const SILENCE_MS = 12_000; // the agent sends an event every three seconds
const AGAIN_MS = [300, 1000, 2000, 4000];

/** `now` is the newest snapshot, null before the first; `connected`: it is up to date; `locked`: the reason for a key. */
export const cluster = { now: null, connected: false, locked: "", problem: "" };

const listeners = [];

export function onMoment(tell) {
  listeners.push(tell);
  if (cluster.now || cluster.problem) tell(cluster);
}

function tellAll() {
  listeners.forEach((tell) => tell(cluster));
}

/** Return true while no group serves open requests. */
export const forming = () => cluster.connected && !["ready", "draining"].includes(cluster.now.state);

export async function watch() {
  let failures = 0;
  for (;;) {
    try {
      await once(() => (failures = 0));
      cluster.problem = "The agent has ended the connection.";
    } catch (error) {
      cluster.problem = error.message || "The connection to the agent broke.";
      cluster.locked = error.status === 401 ? error.message : "";
    }
    cluster.connected = false;
    tellAll();
    if (cluster.locked) await unlocked();
    await pause(AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]);
    failures += 1;
  }
}

async function once(alive) {
  const cut = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => cut.abort(), SILENCE_MS);
  };
  heard();
  try {
    const response = await askOnce("cluster/events", { signal: cut.signal });
    for await (const data of events(response)) {
      heard();
      alive();
      if (data === null) continue;
      cluster.now = JSON.parse(data);
      cluster.connected = true;
      cluster.problem = cluster.locked = "";
      tellAll();
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Prompt for the key. Return once there is another one: the user may cancel, and enter it later. */
function unlocked() {
  const other = new Promise((resolve) => onKeys(resolve));
  askForApiKey(cluster.locked);
  return other;
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
