// What is around the message that the user writes: the model, the parameters, and files that are pasted or dropped.

import { by, el, say } from "./dom.js";
import { ask } from "./net.js";
import * as talks from "./talks.js";
import { cluster, onMoment } from "./watch.js";
import { bytes, COMING, shortName } from "./words.js";

// --- parameters -------------------------------------------------------------------------------------------

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const FIELDS = [...NUMBERS, "system"];

export function startParameters() {
  const kept = talks.parameters();
  for (const name of FIELDS) {
    by(name).value = kept[name] ?? "";
    by(name).addEventListener("change", () => talks.keepParameters(Object.fromEntries(FIELDS.map((each) => [each, by(each).value]))));
  }
}

export const systemPrompt = () => by("system").value.trim();

/** Return the settings of a request. Empty ones are not sent. */
export function parameters() {
  const given = NUMBERS.filter((name) => by(name).value.trim() !== "");
  return Object.fromEntries(given.map((name) => [name, Number(by(name).value)]));
}

// --- the model --------------------------------------------------------------------------------------------

const AGAIN_MS = 10_000; // between two requests for the list when one has failed
let listed = []; // of /v1/models
let chosen = ""; // the id of a model; empty for the first one
let known = ""; // the state of the deployments when the list was asked for
let failedAt = null; // when that failed

/** Let the user choose a model. `changed` is called with its id, and `drawn` when the list has changed. */
export function startModelChoice(changed, drawn) {
  by("chat-model").addEventListener("change", () => {
    chosen = by("chat-model").value;
    changed(chosen);
    drawn();
  });
  by("chat-model").addEventListener("focus", async () => {
    await look(); // models on the disk that load when asked may be others by now
    drawChoice();
  });
  onMoment(async ({ now, connected }) => {
    const state = JSON.stringify([now?.model, (now?.deployments ?? []).map(({ name, state }) => [name, state])]);
    const again = failedAt !== null && performance.now() - failedAt > AGAIN_MS;
    if (connected && (state !== known || again)) {
      known = state;
      await look();
    }
    drawChoice();
    drawn();
  });
}

async function look() {
  try {
    const response = await ask("v1/models");
    listed = (await response.json()).data;
    failedAt = null;
  } catch {
    failedAt = performance.now();
  }
}

/** Show the choice of another conversation. */
export function chooseModel(id) {
  chosen = id;
  drawChoice();
}

/** Return the model of the next answer: its id, and its context in tokens; empty before the list is known. */
export const model = () => choices(listed, cluster.now, chosen).find(({ id }) => !chosen || id === chosen) ?? {};

/**
 * Return the models to choose from: those that are listed, then deployments that are on their way.
 *
 * Each has an `id`, a `name`, its `context`, and its `state` in words, empty when it is ready. Pure.
 */
export function choices(models, now, wanted = "") {
  const deployments = now?.deployments ?? [];
  const of = (id) => deployments.find(({ name, model }) => [name, model].includes(id));
  const ready = (id) => of(id)?.state === "ready" || (!deployments.length && id === now?.model);
  const all = models.map(({ id, context_length: context }) => ({ id, context, state: ready(id) ? "" : stateOf(of(id)) }));
  for (const each of deployments) {
    const there = all.some(({ id }) => [each.name, each.model].includes(id));
    if (!there && each.state !== "ready") all.push({ id: each.name, state: stateOf(each) });
  }
  if (wanted && !all.some(({ id }) => id === wanted)) all.push({ id: wanted, state: "not served" });
  const shorts = all.map(({ id }) => shortName(id));
  return all.map((each, i) => ({ ...each, name: shorts.indexOf(shorts[i]) === shorts.lastIndexOf(shorts[i]) ? shorts[i] : each.id }));
}

function stateOf(deployment) {
  if (!deployment) return "loads when asked";
  if (COMING.includes(deployment.state)) return "loading";
  return deployment.state === "draining" ? "stopping" : deployment.state;
}

function drawChoice() {
  const select = by("chat-model");
  const all = choices(listed, cluster.now, chosen);
  const words = all.map(({ name, state }) => [name, state].filter(Boolean).join(" · "));
  const options = [...select.options];
  if (options.length !== all.length || all.some(({ id }, i) => options[i].value !== id || options[i].text !== words[i])) {
    select.replaceChildren(...all.map(({ id }, i) => el("option", { value: id }, words[i])));
  }
  select.value = chosen || all[0]?.id || "";
  select.title = select.value;
  select.hidden = !all.length;
}

// --- files ------------------------------------------------------------------------------------------------

const LARGEST = 100_000; // bytes of a file of text

/** Take files that are pasted or dropped: texts go into the message, others are refused in words. */
export function startFiles() {
  const area = by("chat");
  by("say").addEventListener("paste", (event) => {
    const { files } = event.clipboardData;
    if (!files.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    take(files);
  });
  const over = (is) => area.classList.toggle("dropping", is);
  area.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    over(true);
  });
  area.addEventListener("dragleave", (event) => area.contains(event.relatedTarget) || over(false));
  area.addEventListener("drop", (event) => {
    over(false);
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    take(event.dataTransfer.files);
  });
  by("say").addEventListener("input", () => say(by("chat-problem"), ""));
}

async function take(files) {
  const refused = [];
  for (const file of files) {
    const [text, why] = await read(file);
    if (why) refused.push(`${file.name || "That file"} is not sent: ${why}`);
    else insert(`${file.name}:\n\n${fenced(text, file.name)}\n`);
  }
  say(by("chat-problem"), refused.join(" "));
}

async function read(file) {
  const others = "the model takes text only.";
  if (/^(image|audio|video|font)\/|pdf$/.test(file.type)) return ["", others];
  if (file.size > LARGEST) return ["", `it has ${bytes(file.size)}; a text file may have ${bytes(LARGEST)}.`];
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? ["", others] : [text, ""];
  } catch {
    return ["", others];
  }
}

/** Return a text as a block of code. Pure. */
export function fenced(text, name) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const mark = "`".repeat(longest + 1);
  const language = /\.(\w{1,12})$/.exec(name)?.[1] ?? "";
  return `${mark}${language}\n${text.replace(/\n*$/, "\n")}${mark}`;
}

function insert(text) {
  const field = by("say");
  field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
  field.dispatchEvent(new Event("input"));
  field.focus();
}
