// The two keys: of the endpoint, if it requires one, and of this agent's administration. Kept until the tab closes.

import { question } from "./dom.js";

const ADMIN = "mlxtp.admin-key";
const API = "mlxtp.api-key";

const listeners = [];
let asking = null;

function read(name) {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

function write(name, value) {
  try {
    if (value) sessionStorage.setItem(name, value);
    else sessionStorage.removeItem(name);
  } catch {
    // a browser without storage prompts again
  }
  listeners.forEach((tell) => tell());
}

export const admin = () => read(ADMIN);
export const setAdmin = (key) => write(ADMIN, key.trim());
export const onKeys = (tell) => listeners.push(tell);

/** Use the key of the administration for the endpoint alone: it may not load models. */
export function onlyChats() {
  if (!read(API)) write(API, read(ADMIN));
  write(ADMIN, "");
}

/** Take the key out of `#key=...`, so that it is neither in the address bar nor in bookmarks. */
export function takeFromAddress() {
  const found = /^#key=([^&]+)$/.exec(location.hash);
  if (!found) return false;
  history.replaceState(null, "", `${location.pathname}${location.search}#models`);
  setAdmin(decodeURIComponent(found[1]));
  return true;
}

/** Return the headers of a request: with the endpoint's key, or this agent's own, which opens everything. */
export function authorization() {
  const key = read(API) || read(ADMIN);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Prompt for the endpoint's key, once for all callers. Return true if there is a new one. */
export function askForApiKey(words) {
  asking ??= question({
    title: "API key",
    words,
    field: "Key",
    yes: "Use it",
    secret: true,
  }).then((key) => {
    asking = null;
    if (key) write(API, key);
    return Boolean(key);
  });
  return asking;
}
