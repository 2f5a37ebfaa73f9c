// Single keys for actions, where no field has the focus, and the panel that lists them.

import { by, define, el } from "./dom.js";

const OFF = "mlxtp.keys-off";
const all = new Map(); // key -> { words, act }

/** Let a key call `act`. `words` say in the panel what it does. */
export function shortcut(key, words, act) {
  all.set(key, { words, act });
  define(by("keys-list"), [...all].map(([each, { words }]) => [el("kbd", {}, each), words]));
}

export function startShortcuts() {
  const show = () => by("keys").open || by("keys").showModal();
  by("show-keys").addEventListener("click", show);
  by("keys-close").addEventListener("click", () => by("keys").close());
  by("keys-on").checked = !off();
  by("keys-on").addEventListener("change", () => turn(by("keys-on").checked));
  shortcut("?", "This list", show);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (document.querySelector("dialog[open]") || event.target.closest?.("input, textarea, select, [contenteditable]")) return;
    const found = all.get(event.key);
    if (!found || off()) return;
    event.preventDefault();
    found.act();
  });
}

function off() {
  try {
    return localStorage.getItem(OFF) === "yes";
  } catch {
    return false;
  }
}

function turn(on) {
  try {
    if (on) localStorage.removeItem(OFF);
    else localStorage.setItem(OFF, "yes");
  } catch {
    // they stay on
  }
}
