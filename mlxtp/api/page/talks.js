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
    return keys.map(read).filter(Boolean).sort((a, b) => b.changed - a.changed);
  } catch {
    return []; // this browser stores nothing for this page
  }
}

export const get = (id) => read(PREFIX + id);

/** Store a conversation. Return false when this browser has no room or stores nothing. */
export function keep(talk) {
  try {
    localStorage.setItem(PREFIX + talk.id, JSON.stringify(talk));
    return true;
  } catch {
    return false;
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);

/** Return the title of a conversation until the user names it: its beginning. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 48 ? `${line.slice(0, 47).trimEnd()}…` : line || "New conversation";
}

export const onChange = (tell) =>
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) tell();
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
    const found = JSON.parse(localStorage.getItem(key));
    return key === PARAMETERS || Array.isArray(found?.turns) ? found : null;
  } catch {
    return null;
  }
}
