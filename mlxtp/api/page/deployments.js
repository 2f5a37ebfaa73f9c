// What is served: a list with states, progress and, for keys that may, replicas and the end of each.

import { act, rights } from "./admin.js";
import { by, el, question, update } from "./dom.js";
import { groupsOf, mark } from "./marks.js";
import { cluster } from "./watch.js";
import { all, bytes, count, groupWord, groupWords, left, ofWhole, rate, seconds, shortName, stageWord } from "./words.js";

const RESTS = 1000; // ms between two measurements of a load's speed
let loads = new Map(); // id of a group -> { percent, at, speed } of its load

export function showDeployments(now) {
  const rows = now.deployments ?? [];
  const groups = groupsOf(now);
  measure(groups);
  const known = new Set(rows.map(({ model }) => model));
  const strays = [...new Set(now.transfers.map(({ model }) => model))].filter((model) => !known.has(bare(model)) && !known.has(model));
  const items = [...rows.map((each) => deployment(each, groups, now)), ...strays.map((model) => coming(model, now))];
  update(by("deployments"), items.length ? items : [el("li", { class: "none" }, "No model is loaded.")]);
  by("load-link").textContent = rights.may ? "Load a model" : "Use a key to load models";
}

const place = (group, several) => el("p", { class: "about" }, several ? mark(group.id) : null, groupWords(group, several));

const bare = (model) => model.split("@")[0];

function deployment(each, groups, now) {
  const own = groups.filter(({ deployment }) => deployment.name === each.name);
  const { ready, wanted } = each.replicas;
  const speed = own.reduce((sum, group) => sum + (group.tokens_per_second ?? 0), 0);
  const replicas = wanted === 1 ? "" : wanted ? `${ready} of ${count(wanted, "replica")} ready` : `${count(ready, "replica")} ready, as many as fit`;
  const state = [groupWord(each.state), replicas, speed ? rate(speed) : ""].filter(Boolean).join(" · ");
  const fetched = now.transfers.filter(({ model }) => model === each.model || bare(model) === each.model);
  return el(
    "li",
    { "data-state": each.state, "data-key": `${rights.may} ${each.name}` },
    el("h3", { title: each.model }, ...own.map(({ id }) => mark(id)), shortName(each.model)),
    el("p", { class: "state" }, `${state[0].toUpperCase()}${state.slice(1)}`),
    ...own.filter((group) => group.members.length).map((group) => place(group, own.length > 1)),
    ...own.filter(({ exposed }) => exposed).map(({ exposed }) => el("p", { class: "trouble" }, exposed)),
    ...own.filter(({ faster }) => faster).map(({ faster }) => el("p", { class: "state" }, `Faster: ${faster}`)),
    each.why ? el("p", { class: "trouble" }, each.why) : null,
    ...fetched.map(transfer),
    ...own.filter(({ state }) => state === "loading").map((group) => load(group, now)),
    rights.may ? actions(each) : null,
  );
}

/** Return a model that comes to a disk and is not served. */
const coming = (model, now) =>
  el("li", { "data-state": "coming" }, el("h3", { title: model }, shortName(bare(model))), el("p", { class: "state" }, "On its way"), ...now.transfers.filter((each) => each.model === model).map(transfer));

// --- progress ---------------------------------------------------------------------------------------------

function transfer({ name, lender, held_bytes: held, total_bytes: total, bytes_per_s: speed, left_s: rest, waits }) {
  const how = lender ? `copied from ${lender} to ${name}` : `downloaded to ${name}`;
  const words = [total ? `${ofWhole(held, total)} ${how}` : `To be ${how}`, waits ? "waits for others" : speed ? `${bytes(speed)}/s` : "", total && speed ? left(rest) : ""];
  return progress(words.filter(Boolean).join(", "), total ? held : null, total);
}

function load(group, now) {
  const macs = all(group.members.map(({ name }) => name));
  const { loaded_percent: percent } = group;
  const known = percent !== null && percent !== undefined && percent > 0;
  const speed = loads.get(group.id)?.speed;
  const told = now.history.find((each) => each.group === group.id);
  const stage = told && told.lasted_s === null && told.stages.length ? told.stages.at(-1) : null;
  const words = known
    ? [`${percent} % loaded${macs ? ` on ${macs}` : ""}`, speed ? left((100 - percent) / speed) : ""]
    : [stage ? `so far: ${stageWord(stage[0])} after ${seconds(stage[1])}` : "progress is not known yet"];
  const line = words.filter(Boolean).join(", ");
  return progress(`${line[0].toUpperCase()}${line.slice(1)}`, known ? percent : null, 100);
}

const progress = (words, value, max) => el("label", { class: "progress" }, el("span", { class: "about" }, words), value === null ? el("progress") : el("progress", { value, max }));

/** Keep how fast the weights of each group are read, in percent per second. */
function measure(groups, clock = performance.now()) {
  const found = new Map();
  for (const { id, state, loaded_percent: percent } of groups) {
    if (state !== "loading" || percent === null || percent === undefined) continue;
    const first = loads.get(id) ?? { percent, at: clock };
    const passed = clock - first.at;
    const speed = passed >= RESTS && percent > first.percent ? (1000 * (percent - first.percent)) / passed : first.speed;
    found.set(id, { percent: first.percent, at: first.at, speed });
  }
  loads = found;
}

// --- commands ---------------------------------------------------------------------------------------------

const CHANGES = { added: "is added", changed: "is changed", kept: "is deployed already" };

/** Load a model, or change how it is served. Fields that are empty stay as they are. */
export const serve = (model, asked = {}) =>
  act("serve", { model, ...asked }, (said) =>
    said.coming
      ? `${said.model} is downloading. Until it is here, ${said.until_then || "no model"} is served.`
      : `${said.model} ${CHANGES[said.change] ?? CHANGES.added}.${said.downloads ? " It is downloaded first." : ""}`,
  );

function actions({ name, model, replicas }) {
  const shown = shortName(model);
  const change = (by) => serve(model, { replicas: String(now(name).replicas.wanted + by) });
  const { wanted } = replicas;
  return el(
    "div",
    { class: "actions" },
    wanted
      ? el(
          "span",
          { class: "stepper", role: "group", "aria-label": `Replicas of ${shown}` },
          el("span", { "aria-hidden": "true" }, "Replicas"),
          el("button", { type: "button", disabled: wanted < 2, "aria-label": `One replica of ${shown} less`, title: "One replica less", click: () => change(-1) }, "−"),
          el("output", { "aria-live": "off" }, String(wanted)),
          el("button", { type: "button", "aria-label": `One more replica of ${shown}`, title: "One more replica", click: () => change(1) }, "+"),
        )
      : el("span", { class: "about" }, "as many replicas as fit"),
    el("button", { type: "button", class: "quiet", "aria-label": `Unload ${shown}`, click: () => unload(name) }, "Unload"),
  );
}

/** Return a deployment as it is at this time. */
const now = (name) => cluster.now.deployments.find((each) => each.name === name);

async function unload(name) {
  const { model, groups } = now(name);
  const open = groups.reduce((sum, { requests }) => sum + requests.running + requests.waiting, 0);
  const words = open ? `${count(open, "open request")} will end with an error.` : "Nothing is being asked of it now.";
  const sure = await question({ title: `Unload ${shortName(model)}?`, words: `${words} Its files stay on the disk.`, yes: "Unload" });
  if (sure) await act("unload", { model }, () => `${model} is unloaded.`);
}
