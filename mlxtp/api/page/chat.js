// The shown conversation, and the list of stored ones.

import { answer } from "./answer.js";
import { by, el, icon, question, say, speak } from "./dom.js";
import { copyButton, render } from "./markdown.js";
import * as talks from "./talks.js";
import { cluster, onMoment } from "./watch.js";
import { count, seconds, shortName } from "./words.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEEP_MS = 1000; // between stores of an answer while it arrives
const NEAR_PX = 120; // distance from the end within which the page follows the answer
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
let atEnd = true;
const rows = new Map(); // turn -> its elements

export function startChat() {
  [talk = talk] = talks.all();
  closeBroken(talk);
  restoreParameters();
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
    if (event.key === "Escape" && !event.isComposing && !by("asking").open) running?.stop.abort();
  });
  by("new-conversation").addEventListener("click", () => open(talks.begin()));
  by("show-conversations").addEventListener("click", () => showList(by("show-conversations").ariaExpanded !== "true"));
  by("rename").addEventListener("click", rename);
  by("export").addEventListener("click", exportTalk);
  by("delete").addEventListener("click", removeTalk);
  talks.onChange(drawList);
  onMoment(drawEmpty);
  by("chat").addEventListener("scroll", () => (atEnd = isNear()));
  const sizes = new ResizeObserver(([{ contentRect }]) => {
    atEnd ||= contentRect.height === 0; // hidden: show the end when the view returns
    if (atEnd) toEnd();
  });
  sizes.observe(by("chat"));
  sizes.observe(by("composer"));
  addEventListener("pagehide", () => running && talks.keep(running.talk));
  draw();
  toEnd();
}

// --- one conversation -------------------------------------------------------------------------------------

function open(other) {
  talk = running?.talk.id === other.id ? running.talk : other;
  if (talk !== running?.talk) closeBroken(talk);
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

function send(words) {
  const text = words.trim();
  if (!text || running) return;
  by("say").value = "";
  talk.turns.push({ role: "user", content: text });
  if (!talk.named && talk.turns.length === 1) talk.title = talks.titleOf(text);
  go();
}

function regenerate() {
  if (running || talk.turns.at(-1)?.role !== "assistant") return;
  talk.turns.pop();
  go();
  by("stop").focus(); // the pressed button is gone
}

async function go() {
  const turn = { role: "assistant", content: "", reasoning: "", phase: "asking", model: cluster.now?.model };
  const asked = { ...body(), messages: messages(talk) };
  const own = { turn, talk, stop: new AbortController(), gone: false };
  talk.turns.push(turn);
  running = own;
  keepNow(talk);
  draw();
  toEnd();
  speak("Sent.");
  await answer(asked, turn, () => changed(own), own.stop.signal);
  running = null;
  cancelAnimationFrame(drawing);
  drawing = 0;
  if (!own.gone) keepNow(own.talk);
  if (talk === own.talk) follow(draw);
  else drawList();
  speak((rows.get(turn)?.said.textContent || turn.content).slice(0, 2000));
  if (!turn.content) speak(turn.problem ?? (turn.stopped ? "Stopped." : ""));
}

/** Return the messages to send, without thoughts and empty answers. */
function messages(of) {
  const system = by("system").value.trim();
  const said = of.turns
    .filter((turn) => turn.content)
    .map((turn) => ({ role: turn.role, content: turn.content }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

function changed(own) {
  if (performance.now() - keptAt > KEEP_MS && !own.gone) keepNow(own.talk);
  if (talk !== own.talk || drawing) return;
  drawing = requestAnimationFrame(() => {
    drawing = 0;
    follow(() => drawTurn(own.turn));
  });
}

function keepNow(of) {
  keptAt = performance.now();
  of.changed = Date.now();
  if (!talks.keep(of)) say(by("chat-problem"), "The browser's storage is full. Delete a conversation, or export this one.");
}

/** Draw, and stay at the end if the user was there. */
function follow(change) {
  change();
  if (atEnd) toEnd();
}

function isNear() {
  const { clientHeight, scrollTop, scrollHeight } = by("chat");
  return clientHeight + scrollTop >= scrollHeight - NEAR_PX;
}

function toEnd() {
  atEnd = true;
  by("chat").scrollTop = by("chat").scrollHeight;
}

// --- parameters -------------------------------------------------------------------------------------------

function restoreParameters() {
  const kept = talks.parameters();
  for (const name of [...NUMBERS, "system"]) {
    by(name).value = kept[name] ?? "";
    by(name).addEventListener("change", () => {
      talks.keepParameters(Object.fromEntries([...NUMBERS, "system"].map((each) => [each, by(each).value])));
    });
  }
}

/** Return the settings of a request. Empty ones are not sent. */
function body() {
  const given = NUMBERS.filter((name) => by(name).value.trim() !== "");
  return { model: "default", ...Object.fromEntries(given.map((name) => [name, Number(by(name).value)])) };
}

// --- display -----------------------------------------------------------------------------------------

function draw() {
  say(by("chat-title"), talk.title);
  rows.clear();
  by("turns").replaceChildren(...talk.turns.map(row));
  if (!running && document.activeElement === by("stop")) by("say").focus();
  by("stop").hidden = !running;
  by("send").hidden = Boolean(running);
  drawEmpty();
  drawList();
}

/** Show the model, its context and examples, before the first message. */
function drawEmpty() {
  const empty = talk.turns.length === 0;
  by("empty").hidden = !empty;
  by("bar").hidden = empty;
  by("new-conversation").disabled = empty;
  const { model, context } = cluster.now ?? {};
  say(by("empty-model"), model ? shortName(model) : "No model is ready yet");
  say(by("empty-context"), context ? `${context.toLocaleString("en")} tokens of context` : "");
  const words = model === "tiny" ? TOY_EXAMPLES : EXAMPLES;
  if (by("examples").textContent === words.join("")) return;
  const example = (text) => el("li", {}, el("button", { type: "button", click: () => send(text) }, text));
  by("examples").replaceChildren(...words.map(example));
}

function row(turn) {
  const mine = turn.role === "user";
  const parts = {
    who: el("h2", { class: mine ? "unseen" : "who" }, mine ? "You" : ""),
    thinking: el("details", { class: "thinking" }, el("summary", {}, "Thinking"), el("div", { class: "said" })),
    said: el("div", { class: mine ? "said plain-text" : "said" }),
    waits: el("p", { class: "waits" }),
    problem: el("p", { class: "problem", role: "alert" }),
    end: el("div", { class: "end" }, el("p", { class: "numbers" }), el("p", { class: "icons" })),
  };
  rows.set(turn, parts);
  const made = el("li", { class: `turn ${turn.role}` }, ...Object.values(parts));
  drawTurn(turn);
  return made;
}

function drawTurn(turn) {
  const parts = rows.get(turn);
  if (!parts) return;
  if (turn.role === "user") say(parts.said, turn.content);
  else {
    render(parts.said, turn.content);
    say(parts.who, turn.model ? shortName(turn.model) : "Model");
    parts.who.title = turn.model ?? "";
  }
  parts.thinking.hidden = !turn.reasoning;
  if (turn.reasoning) render(parts.thinking.lastElementChild, turn.reasoning);
  say(parts.waits, waitWords(turn));
  parts.waits.hidden = !parts.waits.textContent;
  say(parts.problem, turn.problem ?? "");
  parts.problem.hidden = !turn.problem;
  const [numbers, buttons] = parts.end.children;
  say(numbers, turn.numbers ? numberWords(turn) : "");
  numbers.hidden = !numbers.textContent;
  const over = turn.phase === "over";
  parts.end.hidden = !over;
  if (over && !buttons.childElementCount) {
    if (turn.content) buttons.append(copyButton(() => turn.content, "Copy the answer"));
    if (turn === talk.turns.at(-1)) {
      const label = "Regenerate the answer";
      const again = { type: "button", class: "quiet again", "aria-label": label, title: label, click: regenerate };
      buttons.append(el("button", again, icon("again")));
    }
  }
}

function waitWords(turn) {
  switch (turn.phase) {
    case "asking":
      return "Sending…";
    case "first token":
      return "Reading the prompt…";
    case "group":
      return "Waiting for the model to start again. The answer goes on then…";
    default:
      return "";
  }
}

/** Return the figures of a finished answer. */
function numberWords({ numbers, finish, stopped }) {
  const { first_token_s: first, tokens_per_second: speed, tokens, prompt_tokens: prompt, cached_tokens: cached } = numbers;
  const [about, overall] = numbers.speed_of ?? [];
  const known = (value, words) => (value === null ? "" : words(value));
  return [
    stopped ? "stopped" : "",
    finish === "length" ? "cut off at the token limit" : "",
    known(speed, (value) => [about, value.toFixed(1), "tokens/s", overall].filter(Boolean).join(" ")),
    known(tokens, (value) => count(value, "token")),
    known(first, (value) => `${seconds(value)} to first token`),
    known(prompt, (value) => `prompt ${value}${cached ? ` (${cached} cached)` : ""}`),
    numbers.waited_s ? `paused ${seconds(numbers.waited_s)} for a restart` : "",
  ]
    .filter(Boolean)
    .join(" · ");
}

// --- the list ---------------------------------------------------------------------------------------------

function drawList() {
  const kept = talks.all();
  const item = (each) =>
    el(
      "li",
      {},
      el(
        "button",
        { type: "button", "aria-current": each.id === talk.id ? "true" : null, click: () => open(talks.get(each.id) ?? each) },
        each.title,
      ),
    );
  by("conversations").replaceChildren(...kept.map(item));
  by("show-conversations").disabled = kept.length === 0;
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
  open(talks.all()[0] ?? talks.begin());
}

function exportTalk() {
  const text = JSON.stringify({ format: "mlxtp conversation 1", ...talk }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const name = talk.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
  el("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
