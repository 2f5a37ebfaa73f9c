// The desk: a picture of the Macs, what they serve, the open requests, what happened, and all of it in words.

import { by, define, el, svg, update } from "./dom.js";
import { showDeployments } from "./deployments.js";
import { flow, written } from "./flow.js";
import { mark } from "./marks.js";
import { describe, draw, plan } from "./picture.js";
import { asked, showRequests } from "./requests.js";
import { story, told } from "./story.js";
import { bytes, count, diskWords, groupName, linkWords, macWord, micros, phaseWord, place, reuseWords, stages, stateAlone, UNKNOWN, works } from "./words.js";

let shown = ""; // what was drawn last: it is redrawn only on changes
let picture = null; // { root, scene, tokens, plan }

/** Show the desk. `news`: the state has come just now, so that its tokens pass along the bands. */
export function showDesk({ now, connected }, news = false) {
  by("desk").classList.toggle("old", !connected);
  by("desk").classList.add("known");
  const tokens = news ? written(now) : new Map();
  const width = by("picture").clientWidth;
  if (!width) return;
  const key = JSON.stringify([now, connected, width]);
  if (key !== shown) {
    shown = key;
    drawPicture(now, width);
    headline(now);
    troubles(now);
    showDeployments(now);
    showRequests(now);
    const entries = story(now).map(told);
    update(by("history"), entries.length ? entries : [none("Nothing has started yet.")]);
    inWords(now);
  }
  flow(picture.tokens, picture.plan, tokens);
}

/** Draw what depends on something other than the agent's state again. */
export function redraw() {
  shown = "";
}

const none = (words) => el("li", { class: "none" }, words);

function drawPicture(now, width) {
  if (!picture) {
    picture = { scene: svg("g"), tokens: svg("g"), drawn: "" };
    picture.root = svg("svg", { role: "img", class: "picture" }, picture.scene, picture.tokens);
    by("picture").replaceChildren(picture.root);
  }
  const made = plan(now, width);
  picture.plan = made;
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${made.height}`, width, height: made.height, "data-state": now.state, "aria-label": describe(now) })) {
    picture.root.setAttribute(name, value);
  }
  picture.scene.replaceChildren(...draw(made, now));
}

/** Show the figures that are read from afar. */
function headline(now) {
  const groups = (now.deployments ?? []).flatMap((each) => each.groups);
  const known = groups.filter(({ tokens_per_second: each }) => each !== null && each !== undefined);
  const sum = known.reduce((all, each) => all + each.tokens_per_second, 0);
  const { value, of } = now.tokens_per_second;
  const speed = known.length ? sum : value;
  const { open, writing, waiting } = asked(now);
  const free = now.nodes.filter((node) => node.state === "alive" && node.free_bytes);
  const total = (field) => free.reduce((all, node) => all + node[field], 0);
  const found = [
    [speed ? String(speed >= 10 ? Math.round(speed) : speed) : "0", "tokens/s", speed && of === "here" && !known.length ? "asked here" : ""],
    [String(open), open === 1 ? "open request" : "open requests", [writing ? `${writing} writing` : "", waiting ? `${waiting} waiting` : ""].filter(Boolean).join(", ")],
    free.length ? [bytes(total("free_bytes")), "of memory free", `of ${bytes(total("memory_bytes"))}`] : null,
  ];
  const items = found.filter(Boolean).map(([figure, words, more]) => el("div", {}, el("dt", {}, words), el("dd", {}, figure), more ? el("dd", { class: "about" }, more) : null));
  update(by("headline"), items);
}

/** Show what people have to mend. */
function troubles(now) {
  const macs = now.nodes.flatMap(({ name, notes, model_problem: problem }) => [problem, ...notes].filter(Boolean).map((words) => [words, name]));
  const names = new Map();
  for (const [words, name] of macs) names.set(words, [...(names.get(words) ?? []), name]);
  const said = by("state").textContent;
  const rows = [...names].filter(([words]) => !said.includes(words)).map(([words, all]) => `${all.join(", ")}: ${words}`);
  update(by("troubles"), [said.includes(now.problem) ? "" : now.problem, ...rows].filter(Boolean).map((words) => el("li", { class: "trouble" }, words)).concat((now.coming ?? []).filter((line) => !now.transfers.some(({ model }) => line.includes(model.split("@")[0]))).map((line) => el("li", {}, line))));
}

// --- the same in words ------------------------------------------------------------------------------------

function inWords(now) {
  by("links-part").hidden = now.nodes.length === 1;
  define(by("facts"), facts(now));
  update(by("nodes"), now.nodes.map((each) => node(each, now)));
  update(by("links"), links(now));
  by("caches-part").hidden = !now.caches?.length;
  update(by("caches"), (now.caches ?? []).map((each) => kept(each, now)));
}

function facts(now) {
  const { group } = now;
  const shared = group?.world_size > 1;
  const found = [
    ["State", now.ready ? "Ready" : stateAlone(now)],
    ["Model", now.model ?? (now.deployments.length ? `${now.deployments[0].model} (not ready)` : "none")],
    ["Context", now.context ? `${now.context.toLocaleString("en")} tokens` : ""],
    ["Runs", place(now)],
    ["Shared over", shared ? [group.kind || group.backend, stages(group)].filter(Boolean).join(", ") : ""],
    ["Sync", shared ? sync(group) : ""],
    ["Coordinator", now.cluster ? name(now, now.coordinator) ?? "none yet" : ""],
  ];
  return found.filter(([, value]) => value);
}

function sync({ fabric }) {
  if (!fabric) return UNKNOWN;
  return `${micros(fabric.collective_us)} for each exchange (${fabric.by === "bench" ? "measured by mlxtp bench" : "measured at the start"})`;
}

function node(each, now) {
  const roles = [each.self ? "this Mac" : macWord(each.state), each.coordinator ? "coordinator" : "", each.draining ? "about to stop" : ""];
  const chip = each.chip ?? (now.cluster ? `chip ${UNKNOWN}` : "");
  const free = each.free_bytes ? `, ${bytes(each.free_bytes)} free` : "";
  const memoryWords = each.memory_bytes ? `${bytes(each.memory_bytes)} of memory${free}` : `memory ${UNKNOWN}`;
  const lines = [[chip, memoryWords].filter(Boolean).join(", "), works(each, now), ...memory(each, now)];
  return el(
    "li",
    { "data-state": each.state },
    el("b", {}, each.name),
    ` · ${roles.filter(Boolean).join(", ")}`,
    ...lines.filter(Boolean).map((line) => el("span", { class: "about" }, line)),
    ...[each.model_problem, each.refused, ...each.notes].filter(Boolean).map((words) => el("span", { class: "trouble" }, words)),
  );
}

/** Return a Mac's memory that the shown model takes, and the phases of its processes. */
function memory(each, now) {
  const ranks = now.ranks.filter((rank) => rank.node === each.node_id);
  if (!ranks.length) return [];
  const sum = (field) => ranks.reduce((all, rank) => (all === null || rank[field] === null ? null : all + rank[field]), 0);
  const held = sum("memory_bytes");
  const phases = ranks.map((rank) => phaseWord(rank.phase ?? (now.ready ? "serving" : now.state)));
  const doing = [ranks.length > 1 ? count(ranks.length, "process", "processes") : "", [...new Set(phases)].join(" and "), busy(sum)];
  const line = doing.filter(Boolean).join(", ");
  if (held === null) return [`${line} · use of memory ${UNKNOWN} here`];
  const kv = sum("kv_bytes");
  return [`Model: ${bytes(held)} (weights ${bytes(sum("weight_bytes"))}${kv ? `, conversations ${bytes(kv)}` : ""})`, line];
}

/** Return the part of the time with requests in which stages of a pipeline compute and do not wait. */
function busy(sum) {
  const [busy, all] = [sum("stage_busy_us"), sum("stage_busy_us") + sum("stage_waiting_us")];
  return busy ? `busy ${Math.round((100 * busy) / all)} % of the time` : "";
}

/** Return what one group keeps of earlier prompts, and how often that helped. */
function kept(each, now) {
  return el(
    "li",
    {},
    el("b", {}, mark(each.group), groupName(each.group, now)),
    ` · ${reuseWords(each)}`,
    el("span", { class: "about" }, [`${bytes(each.kept_bytes)} in memory`, diskWords(each)].join(", ")),
  );
}

/** Return the connections; equal ones without a latency of their own are one entry. */
function links(now) {
  if (!now.links.length) return [none(`Their cables and networks are ${UNKNOWN}.`)];
  const found = new Map();
  for (const link of now.links) {
    const words = [linkWords(link), latency(now, link)];
    const key = words.join("\n");
    found.set(key, { words, pairs: [...(found.get(key)?.pairs ?? []), `${name(now, link.a)} – ${name(now, link.b)}`] });
  }
  return [...found.values()].map(({ words: [how, took], pairs }) =>
    el("li", {}, el("b", {}, pairs.length > 6 ? `${pairs.length} pairs of Macs` : pairs.join(", ")), ` · ${how}`, el("span", { class: "about" }, took)),
  );
}

/** Return a link's latency. Only in a group of two, a collective's time is that of its one link. */
function latency(now, link) {
  const ends = new Set(now.ranks.map((each) => each.node));
  const alone = now.ranks.length === 2 && ends.has(link.a) && ends.has(link.b);
  const took = alone ? now.group?.fabric?.collective_us : null;
  const measured = [took ? `${micros(took)} for each exchange` : "", link.trip_us ? `${micros(link.trip_us)} round trip between the agents` : ""];
  return measured.filter(Boolean).join(", ") || `latency ${UNKNOWN}`;
}

const name = (now, id) => now.nodes.find((each) => each.node_id === id)?.name;
