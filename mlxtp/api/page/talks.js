// Conversations, kept in this browser and nowhere else: each under a key of its own, so that two tabs do not
// overwrite each other's.

const PREFIX = "mlxtp.conversation.";
const PARAMETERS = "mlxtp.parameters";

/** A new conversation, which is kept once something is said in it. */
export function begin() {
  const id = `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
  return { id, title: "New conversation", named: false, created: Date.now(), changed: Date.now(), turns: [] };
}

/** All that are kept, the one that changed last first. */
export function all() {
  try {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    return keys.map(read).filter(Boolean).sort((a, b) => b.changed - a.changed);
  } catch {
    return []; // this browser keeps nothing for this page
  }
}

export const get = (id) => read(PREFIX + id);

/** Keep it as it is now. Gives false when this browser has no room or keeps nothing. */
export function keep(talk) {
  try {
    localStorage.setItem(PREFIX + talk.id, JSON.stringify(talk));
    return true;
  } catch {
    return false;
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);

/** What a conversation is called until somebody names it: how it begins. */
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
    // they count until the page is left
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
