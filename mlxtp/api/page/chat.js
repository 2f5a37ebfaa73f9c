// The conversation that is shown, and the list of those that are kept.

import { answer } from "./answer.js";
import { by, el, question, say, speak } from "./dom.js";
import { copyButton, render } from "./markdown.js";
import * as talks from "./talks.js";
import { seconds } from "./words.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEEP_MS = 1000; // how often an answer is kept while it comes
const NEAR_PX = 120; // who is so near to the end sees what comes

let talk = talks.begin();
let running = null; // { turn, talk, stop, gone }
let keptAt = 0;
let drawing = 0;
const rows = new Map(); // turn -> its elements

export function startChat() {
  [talk = talk] = talks.all();
  closeBroken(talk);
  restoreParameters();
  by("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  by("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
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
  addEventListener("pagehide", () => running && talks.keep(running.talk));
  draw();
}

// --- one conversation -------------------------------------------------------------------------------------

function open(other) {
  talk = running?.talk.id === other.id ? running.talk : other;
  if (talk !== running?.talk) closeBroken(talk);
  showList(false);
  draw();
  by("say").focus();
}

/** An answer that was coming when the page was closed has no end. */
function closeBroken(found) {
  for (const turn of found.turns) {
    if (turn.phase && turn.phase !== "over") {
      turn.phase = "over";
      turn.problem = "The answer is incomplete: the page was closed.";
    }
  }
}

function send() {
  const text = by("say").value.trim();
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
  by("stop").focus(); // the button that was pressed is gone
}

async function go() {
  const turn = { role: "assistant", content: "", reasoning: "", phase: "asking" };
  const asked = { ...body(), messages: messages(talk) };
  const own = { turn, talk, stop: new AbortController(), gone: false };
  talk.turns.push(turn);
  running = own;
  keepNow(talk);
  draw();
  toEnd();
  speak("The model is asked.");
  await answer(asked, turn, () => changed(own), own.stop.signal);
  running = null;
  cancelAnimationFrame(drawing);
  drawing = 0;
  if (!own.gone) keepNow(own.talk);
  if (talk === own.talk) draw();
  else drawList();
  speak((rows.get(turn)?.said.textContent || turn.content).slice(0, 2000));
  if (turn.problem && !turn.content) speak(turn.problem);
}

/** What is sent: no thoughts, and no answer that says nothing. */
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
    const near = innerHeight + scrollY >= document.documentElement.scrollHeight - NEAR_PX;
    drawTurn(own.turn);
    if (near) toEnd();
  });
}

function keepNow(of) {
  keptAt = performance.now();
  of.changed = Date.now();
  if (!talks.keep(of)) say(by("say-hint"), "This browser keeps no more conversations: delete some, or export this one.");
}

const toEnd = () => scrollTo({ top: document.documentElement.scrollHeight });

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

/** The settings of a request; what is empty is not sent. */
function body() {
  const given = NUMBERS.filter((name) => by(name).value.trim() !== "");
  return { model: "default", ...Object.fromEntries(given.map((name) => [name, Number(by(name).value)])) };
}

// --- what is seen -----------------------------------------------------------------------------------------

function draw() {
  say(by("chat-title"), talk.title);
  rows.clear();
  by("turns").replaceChildren(...talk.turns.map(row));
  by("empty").hidden = talk.turns.length > 0;
  if (!running && document.activeElement === by("stop")) by("say").focus();
  by("stop").hidden = !running;
  by("send").hidden = Boolean(running);
  const kept = talk.turns.length > 0;
  for (const name of ["rename", "export", "delete"]) by(name).disabled = !kept;
  drawList();
}

function row(turn) {
  const mine = turn.role === "user";
  const parts = {
    thinking: el("details", { class: "thinking" }, el("summary", {}, "Thinking"), el("div", { class: "said" })),
    said: el("div", { class: mine ? "said plain-text" : "said" }),
    waits: el("p", { class: "waits" }),
    problem: el("p", { class: "problem", role: "alert" }),
    numbers: el("p", { class: "numbers" }),
    buttons: el("p", { class: "buttons" }),
  };
  rows.set(turn, parts);
  const made = el("li", { class: `turn ${turn.role}` }, el("h2", { class: "who" }, mine ? "You" : "Model"), ...Object.values(parts));
  drawTurn(turn);
  return made;
}

function drawTurn(turn) {
  const parts = rows.get(turn);
  if (!parts) return;
  if (turn.role === "user") say(parts.said, turn.content);
  else render(parts.said, turn.content);
  parts.thinking.hidden = !turn.reasoning;
  if (turn.reasoning) render(parts.thinking.lastElementChild, turn.reasoning);
  say(parts.waits, waitWords(turn));
  parts.waits.hidden = !parts.waits.textContent;
  say(parts.problem, turn.problem ?? "");
  parts.problem.hidden = !turn.problem;
  say(parts.numbers, turn.numbers ? numberWords(turn) : "");
  parts.numbers.hidden = !parts.numbers.textContent;
  const over = turn.phase === "over";
  parts.buttons.hidden = !over;
  if (over && !parts.buttons.childElementCount) {
    if (turn.content) parts.buttons.append(copyButton(() => turn.content, "Copy the answer"));
    if (turn === talk.turns.at(-1)) {
      parts.buttons.append(el("button", { type: "button", class: "again", click: regenerate }, "Regenerate"));
    }
  }
}

function waitWords(turn) {
  switch (turn.phase) {
    case "asking":
      return "Asking…";
    case "first token":
      return "Waiting for the first token…";
    case "group":
      return "Waiting for the group to form again; the answer goes on then…";
    default:
      return "";
  }
}

/** What is known of an answer that is over. */
function numberWords({ numbers, finish }) {
  const { first_token_s: first, tokens_per_second: speed, tokens, prompt_tokens: prompt, cached_tokens: cached } = numbers;
  const known = (value, words) => (value === null ? "" : words(value));
  return [
    known(first, (value) => `first token after ${seconds(value)}`),
    known(speed, (value) => `${value.toFixed(1)} tokens/s`),
    known(tokens, (value) => `tokens ${value}`),
    known(prompt, (value) => `prompt ${value}`),
    known(cached, (value) => `cached ${value}`),
    numbers.waited_s ? `waited ${seconds(numbers.waited_s)} for the group` : "",
    finish === "length" ? "cut off at the most tokens" : "",
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
