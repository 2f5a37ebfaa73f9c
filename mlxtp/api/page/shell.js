// The frame of the page: which views are shown, the chat beside another one, and the keys.

import { by } from "./dom.js";
import { takeFromAddress } from "./keys.js";
import { shortcut, startShortcuts } from "./shortcuts.js";

const VIEWS = { desk: "Desk", chat: "Chat", models: "Models" };
const LAYOUT = "mlxtp.layout";
const wide = matchMedia("(min-width: 75rem)");
const STEP = 2; // rem, of a key on the divider
const [LEAST, MOST] = [20, 60]; // rem, of the chat's width

const listeners = [];
let layout = { view: "desk", beside: true, width: 30 };
let view = "desk";

/** Call `tell` after each change of what is shown. */
export const onShow = (tell) => listeners.push(tell);

export const shows = (name) => !by(name).hidden;

export function startShell() {
  restore();
  by("skip").addEventListener("click", (event) => {
    event.preventDefault();
    by("main").focus();
  });
  by("beside").addEventListener("click", () => keep({ beside: !layout.beside }));
  divide();
  startShortcuts();
  for (const [i, name] of Object.keys(VIEWS).entries()) shortcut(String(i + 1), VIEWS[name], () => go(name));
  shortcut("b", "Chat beside the others, on a wide screen", () => wide.matches && keep({ beside: !layout.beside }));
  shortcut("/", "Write a message", () => {
    if (!shows("chat")) go("chat");
    by("say").focus();
  });
  addEventListener("hashchange", show);
  wide.addEventListener("change", show);
  show();
}

function go(name) {
  if (location.hash === `#${name}`) return;
  location.hash = name;
  show();
}

function show() {
  takeFromAddress();
  const asked = location.hash.slice(1);
  view = Object.hasOwn(VIEWS, asked) ? asked : layout.view;
  const beside = wide.matches && layout.beside && view !== "chat";
  for (const [name, title] of Object.entries(VIEWS)) {
    by(name).hidden = name !== view && !(name === "chat" && beside);
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (name === view) document.title = `${title} – mlxtp`;
  }
  by("main").classList.toggle("beside", beside);
  by("divider").hidden = !beside;
  by("beside").disabled = view === "chat";
  by("beside").setAttribute("aria-pressed", String(beside));
  if (view !== layout.view) store({ view });
  listeners.forEach((tell) => tell());
}

// --- the width of the chat --------------------------------------------------------------------------------

function divide() {
  const divider = by("divider");
  const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);
  const wanted = (x) => (by("main").getBoundingClientRect().right - x) / rem();
  divider.addEventListener("pointerdown", (event) => divider.setPointerCapture(event.pointerId));
  divider.addEventListener("pointermove", (event) => divider.hasPointerCapture(event.pointerId) && widen(wanted(event.clientX)));
  divider.addEventListener("lostpointercapture", () => store({}));
  divider.addEventListener("keydown", ({ key }) => {
    const by = { ArrowLeft: STEP, ArrowRight: -STEP }[key];
    if (by) widen(layout.width + by);
    if (by) store({});
  });
  widen(layout.width);
}

function widen(width) {
  layout.width = Math.round(Math.min(Math.max(width, LEAST), MOST) * 4) / 4;
  by("main").style.setProperty("--chat-width", `${layout.width}rem`);
  by("divider").setAttribute("aria-valuenow", String(Math.round(layout.width)));
}

// --- what is remembered -----------------------------------------------------------------------------------

function keep(changes) {
  store(changes);
  show();
}

function store(changes) {
  layout = { ...layout, ...changes };
  try {
    localStorage.setItem(LAYOUT, JSON.stringify(layout));
  } catch {
    // it lasts until the user leaves the page
  }
}

function restore() {
  try {
    const { view, beside, width } = JSON.parse(localStorage.getItem(LAYOUT));
    layout = { view: Object.hasOwn(VIEWS, view) ? view : "desk", beside: beside !== false, width: Number(width) || 30 };
  } catch {
    // nothing is remembered
  }
}
