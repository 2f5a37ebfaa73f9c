// Conversations, stored only in this browser. Each has its own key, so that two tabs do not overwrite each
// other's.

const PREFIX = "mlxtp.conversation.";
const PARAMETERS = "mlxtp.parameters";

/** Return a new conversation, which is stored once it has a message. */
export function begin() {
  const id = `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
  return { id, title: "New conversation", named: false, created: Date.now(), changed: Date.now(), turns: [] };
}

/** Return all stored conversations, the last changed one first. */
export function all() {
  try {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    return keys.map(conversation).filter(Boolean).sort((a, b) => b.changed - a.changed);
  } catch {
    return []; // this browser stores nothing for this page
  }
}

export const get = (id) => conversation(PREFIX + id);

/** Store a conversation. Return false when this browser has no room or stores nothing. */
export function keep(talk) {
  try {
    localStorage.setItem(PREFIX + talk.id, JSON.stringify(talk));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // this browser stores nothing for this page
  }
}

/** Return the title of a conversation until the user names it: its beginning. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 48 ? `${line.slice(0, 47).trimEnd()}…` : line || "New conversation";
}

/** Call `tell` after each change by another tab, with the id of the conversation if it was one. */
export const onChange = (tell) =>
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) tell(event.key?.slice(PREFIX.length));
  });

export function parameters() {
  const found = read(PARAMETERS);
  return found && typeof found === "object" ? found : {};
}

export function keepParameters(values) {
  try {
    localStorage.setItem(PARAMETERS, JSON.stringify(values));
  } catch {
    // they apply until the user leaves the page
  }
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

// --- what another version, or another program, has written -----------------------------------------------

/** Return a stored conversation; null if it cannot be read. */
function conversation(key) {
  const found = read(key);
  const turns = turnsOf(found);
  if (!turns) return null;
  const title = words(found.title) || titleOf(turns[0]?.content ?? "");
  return { ...found, id: key.slice(PREFIX.length), title, model: words(found.model), changed: Number(found.changed) || 0, turns };
}

/** Return the messages of a conversation from elsewhere, with what is known of each; null if one cannot be read. Pure. */
export function turnsOf(found) {
  const turns = Array.isArray(found?.turns) ? found.turns.map(turnOf) : [null];
  return turns.includes(null) ? null : turns;
}

export const words = (value) => (typeof value === "string" ? value : "");

function turnOf(turn) {
  if (!["user", "assistant"].includes(turn?.role) || typeof turn.content !== "string") return null;
  const { role, content, parent } = turn;
  const kept = { role, content, ...(Number.isInteger(parent) ? { parent } : {}) };
  if (role === "user") return kept;
  const texts = ["model", "reasoning", "problem", "finish"].map((name) => [name, words(turn[name])]);
  const { calls, numbers } = turn;
  return {
    ...kept,
    ...Object.fromEntries(texts),
    phase: words(turn.phase) || "over",
    stopped: turn.stopped === true,
    ...(Array.isArray(calls) ? { calls: calls.filter(Boolean) } : {}),
    ...(Array.isArray(numbers?.speed_of) ? { numbers } : {}),
  };
}
