// The shown conversation, and the list of stored ones.

import { answer } from "./answer.js";
import * as composer from "./composer.js";
import { by, el, question, say, speak } from "./dom.js";
import * as talks from "./talks.js";
import * as transfer from "./transfer.js";
import { add, before, choose, shownTurns } from "./tree.js";
import { Turns } from "./turns.js";
import { cluster } from "./watch.js";
import { shortName } from "./words.js";

const KEEP_MS = 1000; // between stores of an answer while it arrives
const NEAR_PX = 80; // distance from the end within which the page follows the answer
const REST = 3; // the part of the time that is left to the rest of the page while an answer is drawn
const EXAMPLES = [
  "Explain in three sentences how a transistor works.",
  "Write a Python function that tells whether a word is a palindrome.",
  "Plan a weekend in Rome for two people who love food.",
];
const TOY_EXAMPLES = ["Count from 1 to 60.", "Repeat exactly: Hello, Macs!", "What can you do?"]; // the embedded model knows only these

let talk = talks.begin();
let running = null; // { turn, talk, stop, gone }
let keptAt = 0;
let drawing = 0;
let drawnAt = 0; // when the next drawing of an answer may begin
let atEnd = true;
const turns = new Turns(by("turns"), { regenerate, edit, choose: chooseVersion });

export function startChat() {
  [talk = talk] = talks.all();
  closeBroken(talk);
  composer.startParameters();
  composer.startFiles();
  composer.chooseModel(talk.model ?? "");
  composer.startModelChoice(rememberModel, drawEmpty);
  by("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(by("say").value);
  });
  by("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send(by("say").value);
  });
  by("stop").addEventListener("click", () => running?.stop.abort());
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open], :popover-open")) return;
    running?.stop.abort();
  });
  by("new-conversation").addEventListener("click", () => open(fresh()));
  by("show-conversations").addEventListener("click", () => showList(by("show-conversations").ariaExpanded !== "true"));
  by("rename").addEventListener("click", rename);
  by("delete").addEventListener("click", removeTalk);
  startTransfer();
  talks.onChange(changedElsewhere);
  startFollowing();
  addEventListener("pagehide", () => running && talks.keep(running.talk));
  draw();
  toEnd();
}

// --- one conversation -------------------------------------------------------------------------------------

const fresh = () => ({ ...talks.begin(), model: talk.model });

function open(other) {
  talk = running?.talk.id === other.id ? running.talk : other;
  if (talk !== running?.talk) closeBroken(talk);
  composer.chooseModel(talk.model ?? "");
  say(by("chat-problem"), "");
  showList(false);
  draw();
  toEnd();
  by("say").focus();
}

/** Mark an answer as incomplete that was arriving when the page was closed. */
function closeBroken(found) {
  for (const turn of found.turns) {
    if (turn.phase && turn.phase !== "over") {
      turn.phase = "over";
      turn.problem = "The answer is incomplete: the page was closed.";
    }
  }
}

/** Take what another tab has stored, so that a message from here follows it. */
function changedElsewhere(id) {
  const found = id === talk.id && running?.talk !== talk && talks.get(id);
  if (!found) return drawList();
  const same = (turn, i) => JSON.stringify(turn) === JSON.stringify(talk.turns[i]);
  talk = { ...found, turns: found.turns.map((turn, i) => (same(turn, i) ? talk.turns[i] : turn)) };
  draw();
}

function rememberModel(id) {
  talk.model = id;
  if (talk.turns.length) keepNow(talk);
}

function send(words) {
  const text = words.trim();
  if (!text || running) return;
  by("say").value = "";
  say(by("chat-problem"), "");
  if (!talk.named && talk.turns.length === 0) talk.title = talks.titleOf(text);
  ask(text, shownTurns(talk).at(-1));
}

/** Send another version of a message of the user. */
function edit(turn, text) {
  if (running) return;
  ask(text, before(talk, turn));
  by("stop").focus(); // the form is gone
}

function ask(text, after) {
  const turn = { role: "user", content: text };
  add(talk, turn, after);
  go(turn);
}

/** Ask for another version of an answer. One without content gives way to it. */
function regenerate(turn) {
  if (running) return;
  const asked = before(talk, turn);
  if (!turn.content && turn === talk.turns.at(-1)) talk.turns.pop();
  go(asked);
  by("stop").focus(); // the pressed button is gone
}

function chooseVersion(turn) {
  choose(talk, turn);
  keepNow(talk);
  atEnd = false;
  draw();
}

async function go(asked) {
  const model = composer.model();
  const turn = { role: "assistant", content: "", reasoning: "", phase: "asking", model: model.id ?? cluster.now?.model };
  const own = { turn, talk, stop: new AbortController(), gone: false };
  add(talk, turn, asked);
  const body = { model: talk.model || "default", ...composer.parameters(), messages: messages(talk) };
  running = own;
  keepNow(talk);
  draw();
  toEnd();
  speak("Sent.");
  await answer(body, turn, () => changed(own), own.stop.signal);
  running = null;
  cancelAnimationFrame(drawing);
  drawing = 0;
  if (!own.gone) keepNow(own.talk);
  if (talk === own.talk) {
    turns.draw(turn);
    draw();
  } else drawList();
  speak((turns.textOf(turn) || turn.content).slice(0, 2000));
  speak(turn.problem ?? (turn.stopped ? "Stopped." : ""));
}

/** Return the messages to send, without thoughts and empty answers. */
function messages(of) {
  const system = composer.systemPrompt();
  const said = shownTurns(of)
    .filter((turn) => turn.content)
    .map((turn) => ({ role: turn.role, content: turn.content }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

/** Draw an answer that has grown, before the next frame; more seldom where that takes long. */
function changed(own) {
  if (performance.now() - keptAt > KEEP_MS && !own.gone) keepNow(own.talk);
  if (talk !== own.talk || drawing) return;
  const draws = (now) => {
    if (now < drawnAt) return (drawing = requestAnimationFrame(draws));
    drawing = 0;
    const began = performance.now();
    turns.draw(own.turn);
    const ended = performance.now();
    drawnAt = ended + REST * (ended - began);
  };
  drawing = requestAnimationFrame(draws);
}

function keepNow(of) {
  keptAt = performance.now();
  of.changed = Date.now();
  if (!talks.keep(of)) say(by("chat-problem"), "The browser's storage is full. Delete a conversation, or export this one.");
}

// --- the place in a conversation --------------------------------------------------------------------------

/** Stay at the end while the conversation grows, unless the user has scrolled up. */
function startFollowing() {
  by("chat").addEventListener("scroll", () => (atEnd = isNear()));
  const sizes = new ResizeObserver(() => {
    atEnd ||= by("chat").clientHeight === 0; // hidden: show the end when the view returns
    if (atEnd) toEnd();
  });
  for (const name of ["chat", "composer", "turns"]) sizes.observe(by(name));
}

function isNear() {
  const { clientHeight, scrollTop, scrollHeight } = by("chat");
  return clientHeight + scrollTop >= scrollHeight - NEAR_PX;
}

function toEnd() {
  atEnd = true;
  by("chat").scrollTop = by("chat").scrollHeight;
}

// --- display -----------------------------------------------------------------------------------------

function draw() {
  say(by("chat-title"), talk.title);
  turns.show(talk, shownTurns(talk));
  if (!running && document.activeElement === by("stop")) by("say").focus();
  by("stop").hidden = !running;
  by("send").hidden = Boolean(running);
  by("turns").classList.toggle("busy", Boolean(running));
  drawEmpty();
  drawList();
}

/** Show the model, its context and examples, before the first message. */
function drawEmpty() {
  const empty = talk.turns.length === 0;
  by("empty").hidden = !empty;
  by("bar").hidden = empty;
  by("new-conversation").disabled = empty;
  const { now } = cluster;
  const model = composer.model();
  const { id, context, state } = model.id ? model : { id: now?.model, context: now?.context };
  const about = [state, context ? `${context.toLocaleString("en")} tokens of context` : ""];
  say(by("empty-model"), id ? shortName(id) : "No model is ready yet");
  say(by("empty-context"), about.filter(Boolean).join(" · "));
  const words = id === "tiny" ? TOY_EXAMPLES : EXAMPLES;
  if (by("examples").textContent === words.join("")) return;
  const example = (text) => el("li", {}, el("button", { type: "button", click: () => send(text) }, text));
  by("examples").replaceChildren(...words.map(example));
}

// --- the list ---------------------------------------------------------------------------------------------

function drawList() {
  const kept = talks.all();
  const item = (each) => {
    const here = each.id === talk.id ? "true" : null;
    const show = () => open(talks.get(each.id) ?? each);
    return el("li", {}, el("button", { type: "button", "aria-current": here, title: each.title, click: show }, each.title));
  };
  by("conversations").replaceChildren(...kept.map(item));
}

function showList(shown) {
  by("show-conversations").ariaExpanded = String(shown);
}

async function rename() {
  const of = talk;
  const title = await question({ title: "Rename the conversation", field: "Name", value: of.title, yes: "Rename" });
  if (!title) return;
  of.title = title.slice(0, 200);
  of.named = true;
  keepNow(of);
  draw();
}

async function removeTalk() {
  const of = talk;
  const sure = await question({
    title: "Delete the conversation?",
    words: `“${of.title}” is kept in this browser only. It cannot be brought back.`,
    yes: "Delete",
  });
  if (!sure) return;
  if (running?.talk === of) {
    running.gone = true;
    running.stop.abort();
  }
  talks.remove(of.id);
  open(talks.all()[0] ?? fresh());
}

// --- files of conversations -------------------------------------------------------------------------------

function startTransfer() {
  const menu = by("export-menu");
  menu.addEventListener("toggle", ({ newState }) => {
    if (newState !== "open") return;
    const { bottom, right } = by("export").getBoundingClientRect();
    Object.assign(menu.style, { top: `${bottom + 4}px`, left: `${Math.max(8, right - menu.offsetWidth)}px` });
  });
  const exports = {
    "export-markdown": () => transfer.download(transfer.toMarkdown(talk), "text/markdown", talk.title, "md"),
    "export-json": () => transfer.download(transfer.toJson(talk), "application/json", talk.title, "json"),
  };
  for (const [name, act] of Object.entries(exports)) {
    by(name).addEventListener("click", () => {
      menu.hidePopover();
      act();
    });
  }
  by("import").addEventListener("click", () => by("import-file").click());
  by("import-file").addEventListener("change", importTalk);
}

async function importTalk() {
  const [file] = by("import-file").files;
  by("import-file").value = "";
  try {
    if (file.size > transfer.LARGEST_BYTES) throw new Error("it is too large.");
    const found = transfer.fromJson(await file.text());
    if (!talks.keep(found)) throw new Error("the browser's storage is full.");
    open(found);
  } catch (error) {
    say(by("chat-problem"), `“${file.name}” is not imported: ${error.message}`);
  }
}
