// The view of models: the served one, those on this Mac's disk, and a form to serve another.

import { by, define, el, say } from "./dom.js";
import * as keys from "./keys.js";
import { administer } from "./net.js";
import { showUsage, startUsage } from "./usage.js";
import { cluster } from "./watch.js";
import { bytes, COMING, count, groupWords, place, seconds, stageWord, stateAlone, why } from "./words.js";

const SHARE = 0.05; // of the weights; less memory is not from reading them
const AGAIN_MS = 5000; // between two checks of the disk while a model is downloading
let disk = null;
let lookedAt = -Infinity;
let looking = false;
let troubled = false;
let shown = ""; // the last list of deployments, which is redrawn only on changes

export function startModels() {
  by("admin-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keys.setAdmin(by("admin-key").value);
    by("admin-key").value = "";
  });
  by("serve-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const model = by("model").value.trim();
    if (model) serve(model);
    else problem("Name a model: an id on the Hub, or a folder that every Mac has.");
  });
  by("unload").addEventListener("click", () => act("unload", {}, () => "The model is unloaded."));
  keys.onKeys(() => {
    disk = null;
    lookedAt = -Infinity;
    problem("");
    access();
  });
  startUsage();
  access();
}

export function showModels({ now, connected }) {
  access();
  if (connected) showUsage();
  if (connected && !by("manage").hidden && performance.now() - lookedAt > (now.state === "ready" ? 60_000 : AGAIN_MS)) look();
  served(now);
  deployed(now);
}

function access() {
  const has = Boolean(keys.admin());
  by("admin-form").hidden = has;
  by("manage").hidden = !has;
  if (has && cluster.now && !disk && performance.now() - lookedAt > AGAIN_MS) look();
}

async function look() {
  if (looking) return;
  looking = true;
  lookedAt = performance.now();
  try {
    const { models } = await administer("GET", "models", keys.admin());
    if (JSON.stringify(models) !== JSON.stringify(disk)) by("disk").replaceChildren(...models.map(row));
    disk = models;
  } catch (error) {
    if (error.status === 403) keys.onlyChats();
    refused(error);
  } finally {
    looking = false;
  }
}

function row(model) {
  const where = model.source === "embedded" ? "comes with mlxtp" : "in the Hub's cache";
  const whole = model.complete ? "" : ", not complete: serving it downloads the rest";
  return el(
    "li",
    {},
    el("button", { type: "button", "aria-label": `Serve ${model.name}`, click: () => serve(model.name) }, "Serve"),
    el("b", {}, model.name),
    el("span", { class: "about" }, `${bytes(model.size_bytes)}, ${where}${whole}`),
  );
}

function serve(model) {
  const [nodes, replicas] = [by("spread").value.trim(), by("replicas").value.trim()];
  act("serve", { model, nodes, replicas }, (said) =>
    said.coming
      ? `${said.model} is downloading. Until it is here, ${said.until_then || "no model"} is served.`
      : `${said.model} ${CHANGES[said.change] ?? CHANGES.added}.${said.downloads ? " It is downloaded first." : ""}`,
  );
}

const CHANGES = { added: "is added", changed: "is changed", kept: "is deployed already" };

async function act(what, body, words) {
  problem("");
  say(by("models-said"), "");
  try {
    say(by("models-said"), words(await administer("POST", what, keys.admin(), body)));
  } catch (error) {
    refused(error);
  }
}

function refused(error) {
  if (error.status === 401) {
    keys.setAdmin("");
    problem("That key is not valid: each start of the agent makes a new one. `mlxtp page` prints it.");
    by("admin-key").focus();
  } else problem(error.message);
}

const problem = (words) => say(by("models-problem"), words);

// --- the deployments ----------------------------------------------------------------------------------------

function deployed(now) {
  const rows = now.deployments ?? [];
  const manages = Boolean(keys.admin());
  by("deployed-card").hidden = !rows.length;
  by("unload-only").hidden = rows.length > 1; // each has a button of its own
  const key = JSON.stringify([rows, manages]);
  if (key === shown) return;
  shown = key;
  by("deployed").replaceChildren(...rows.map((each) => deployment(each, manages)));
}

function deployment(each, manages) {
  const { ready, wanted } = each.replicas;
  const replicas = wanted ? `${ready} of ${count(wanted, "replica")} ready` : `${count(ready, "replica")} ready, as many as fit`;
  const unload = () => act("unload", { model: each.model }, () => `${each.model} is unloaded.`);
  return el(
    "li",
    {},
    manages ? el("button", { type: "button", "aria-label": `Unload ${each.model}`, click: unload }, "Unload") : el("span"),
    el("b", {}, each.model),
    el(
      "span",
      {},
      el("span", { class: "about" }, replicas),
      ...each.groups.filter(({ members }) => members.length).map((group) => el("span", { class: "about" }, groupWords(group))),
      each.why ? el("span", { class: "trouble" }, each.why) : null,
    ),
  );
}

// --- the shown group and its model ---------------------------------------------------------------------------------------

function served(now) {
  const wanted = now.desired?.model;
  const over = now.desired?.nodes ? `, on ${spread(now.desired.nodes)}` : "";
  const found = [
    ["State", now.ready ? "Ready" : stateAlone(now)], // the line above, on every view, has its reason
    ["Model", now.model],
    [now.model ? "Next" : "Model", wanted && wanted !== now.model ? wanted + over : ""],
    ["Context", now.context ? `${now.context.toLocaleString("en")} tokens` : ""],
    ["Weights", now.model_bytes ? `${bytes(now.model_bytes)} on disk` : ""],
    ["Runs", now.model ? place(now) || "on this Mac" : ""],
  ];
  define(by("served"), found.filter(([, value]) => value));
  by("served-notes").replaceChildren(...[...(now.coming ?? []), ...problems(now)].map((line) => el("li", {}, line)));
  const busy = COMING.includes(now.state) && Boolean(wanted);
  by("loading").hidden = !busy;
  if (busy) progress(now);
}

/** Return the Macs' reasons not to serve it: each once, without those shown above. */
function problems(now) {
  const macs = new Map();
  for (const { name, model_problem: problem } of now.nodes) if (problem) macs.set(problem, [...(macs.get(problem) ?? []), name]);
  const trouble = now.state === "failed" || macs.size > 0;
  if (trouble && !troubled) say(by("models-said"), "");
  troubled = trouble;
  const unsaid = [...macs].filter(([problem]) => !why(now).includes(problem));
  return unsaid.map(([problem, names]) => `${names.join(", ")}: ${problem}`);
}

const spread = (nodes) => (nodes === "auto" ? "as many Macs as are fastest" : nodes === "all" ? "all Macs" : count(Number(nodes), "Mac"));

/** Show the progress of loading: the memory of all ranks grows to about the weights' size on disk. */
function progress(now) {
  const story = now.history.find((each) => each.group === now.shown);
  const held = now.ranks.map((each) => (each.phase === "loading" ? each.memory_bytes : null));
  const sum = held.reduce((all, each) => all + (each ?? 0), 0);
  const reads = now.model_bytes && sum >= SHARE * now.model_bytes;
  const stages = story && story.lasted_s === null ? story.stages : [];
  const begun = held.some((each) => each !== null) && stages.length > 0;
  const bar = by("loaded");
  if (reads) {
    bar.max = now.model_bytes;
    bar.value = Math.min(sum, now.model_bytes);
  } else bar.removeAttribute("value");
  const unread = begun ? `So far: ${stageWord(stages.at(-1)[0])}` : "Progress is not known yet";
  say(by("loaded-label"), reads ? `${bytes(sum)} of about ${bytes(now.model_bytes)} loaded` : unread);
  by("stages").replaceChildren(...stages.map(([stage, took]) => el("li", {}, `${stageWord(stage)} after ${seconds(took)}`)));
}
