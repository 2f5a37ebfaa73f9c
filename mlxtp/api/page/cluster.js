// The desk: a picture, and the same facts as text.

import { by, define, el } from "./dom.js";
import { draw } from "./picture.js";
import { bytes, clock, count, diskWords, groupName, linkWords, macWord, micros, phaseWord, place, rate, reuseWords, seconds, stageWord, stages, stateAlone, UNKNOWN, works } from "./words.js";

let shown = ""; // last drawn state: it is redrawn only on changes

export function showCluster({ now, connected }) {
  const alone = now.nodes.length === 1;
  by("desk").classList.toggle("old", !connected);
  by("desk").classList.toggle("alone", alone);
  by("links-card").hidden = alone;
  const width = by("picture").clientWidth;
  const key = JSON.stringify([now, connected, width]);
  if (key === shown || !width) return;
  shown = key;
  by("picture").replaceChildren(draw(now, width));
  define(by("facts"), facts(now));
  by("nodes").replaceChildren(...now.nodes.map((each) => node(each, now)));
  by("links").replaceChildren(...links(now));
  by("caches-card").hidden = !now.caches?.length;
  by("caches").replaceChildren(...(now.caches ?? []).map((each) => kept(each, now)));
  update(by("history"), now.history.length ? now.history.map(epoch) : [none("Nothing has started yet.")]);
}

const none = (words) => el("li", { class: "none" }, words);

/** Update a list by replacing only changed entries, since users may be reading the others. */
function update(list, items) {
  items.forEach((item, i) => {
    const present = list.children[i];
    if (!present) list.append(item);
    else if (!present.isEqualNode(item)) present.replaceWith(item);
  });
  while (list.childElementCount > items.length) list.lastElementChild.remove();
}

function facts(now) {
  const { requests, group, tokens_per_second: speed } = now;
  const queue = [
    requests.generating ? `${requests.generating} writing` : "",
    requests.first_token ? `${requests.first_token} reading the prompt` : "",
    requests.group ? `${requests.group} waiting for a restart` : "",
    requests.held_back ? `${requests.held_back} held back` : "",
  ];
  const shared = group?.world_size > 1;
  const found = [
    ["State", now.ready ? "Ready" : stateAlone(now)],
    ["Model", now.model ?? (now.desired?.model ? `${now.desired.model} (not ready)` : "none")],
    ["Context", now.context ? `${now.context.toLocaleString("en")} tokens` : ""],
    ["Runs", place(now)],
    ["Shared over", shared ? [group.kind || group.backend, stages(group)].filter(Boolean).join(", ") : ""],
    ["Sync", shared ? sync(group) : ""],
    ["Speed", !speed.value ? "idle" : rate(speed.value) + (speed.of === "here" ? " (for requests to this Mac)" : "")],
    ["Requests", requests.open ? queue.filter(Boolean).join(", ") || `${requests.open} open` : "none"],
    ["Problem", now.problem],
    ["Coordinator", now.cluster ? name(now, now.coordinator) ?? "none yet" : ""],
  ];
  return found.filter(([, value]) => value);
}

function sync({ fabric }) {
  if (!fabric) return UNKNOWN;
  return `${micros(fabric.collective_us)} for each exchange (${fabric.by === "bench" ? "measured by mlxtp bench" : "measured at the start"})`;
}

function node(each, now) {
  const roles = [
    each.self ? "this Mac" : macWord(each.state),
    each.coordinator ? "coordinator" : "",
    each.draining ? "about to stop" : "",
  ].filter(Boolean);
  const chip = each.chip ?? (now.cluster ? `chip ${UNKNOWN}` : "");
  const memoryWords = each.memory_bytes ? `${bytes(each.memory_bytes)} of memory` : `memory ${UNKNOWN}`;
  const trouble = [each.model_problem, ...each.notes].filter(Boolean);
  return el(
    "li",
    { "data-state": each.state },
    el("b", {}, each.name),
    ` · ${roles.join(", ")}`,
    el("span", { class: "about" }, [chip, memoryWords].filter(Boolean).join(", ")),
    works(each, now) ? el("span", { class: "about" }, works(each, now)) : null,
    ...memory(each, now),
    ...trouble.map((words) => el("span", { class: "trouble" }, words)),
  );
}

/** Return a Mac's memory that the model takes, and the phases of its processes. */
function memory(each, now) {
  const ranks = now.ranks.filter((rank) => rank.node === each.node_id);
  if (!ranks.length) return [];
  const sum = (field) => ranks.reduce((all, rank) => (all === null || rank[field] === null ? null : all + rank[field]), 0);
  const held = sum("memory_bytes");
  const phases = ranks.map((rank) => phaseWord(rank.phase ?? (now.ready ? "serving" : now.state)));
  const doing = [ranks.length > 1 ? count(ranks.length, "process", "processes") : "", [...new Set(phases)].join(" and "), busy(sum)];
  if (held === null) return [el("span", { class: "about" }, `${doing.filter(Boolean).join(", ")} · use of memory ${UNKNOWN} here`)];
  const kv = sum("kv_bytes");
  const parts = `weights ${bytes(sum("weight_bytes"))}${kv ? `, conversations ${bytes(kv)}` : ""}`;
  const label = "Memory that the model takes, of this Mac's";
  return [
    each.memory_bytes ? el("meter", { min: 0, max: each.memory_bytes, value: held, "aria-label": label }) : null,
    el("span", { class: "about" }, `Model: ${bytes(held)} (${parts})`),
    el("span", { class: "about" }, doing.filter(Boolean).join(", ")),
  ];
}

/** Return the part of the time with requests in which stages of a pipeline compute and do not wait. */
function busy(sum) {
  const [busy, all] = [sum("stage_busy_us"), sum("stage_busy_us") + sum("stage_waiting_us")];
  return busy ? `busy ${Math.round((100 * busy) / all)} % of the time` : "";
}

/** Return what one group keeps of earlier prompts, and how often that helped. */
function kept(each, now) {
  const { disk_bytes: held, disk_room_bytes: room } = each;
  const label = `Part of the room on disk that is in use, for ${groupName(each.group, now)}`;
  return el(
    "li",
    {},
    el("b", {}, groupName(each.group, now)),
    ` · ${reuseWords(each)}`,
    room ? el("meter", { min: 0, max: room, value: held, "aria-label": label }) : null,
    el("span", { class: "about" }, [`${bytes(each.kept_bytes)} in memory`, diskWords(each)].join(", ")),
  );
}

function links(now) {
  if (!now.links.length) return [none(`Their cables and networks are ${UNKNOWN}.`)];
  return now.links.map((link) =>
    el("li", {}, el("b", {}, `${name(now, link.a)} – ${name(now, link.b)}`), ` · ${linkWords(link)}`, el("span", { class: "about" }, latency(now, link))),
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

function epoch(story) {
  const running = story.lasted_s === null;
  const ready = story.ready_s === null ? (running ? "not ready yet" : "was never ready") : `ready after ${seconds(story.ready_s)}`;
  const stages = story.stages.map(([stage, took]) => `${stageWord(stage)} ${seconds(took)}`).join(", ");
  const lasted = running ? `since ${clock(story.began)}` : `${clock(story.began)}, lasted ${seconds(story.lasted_s)}`;
  const why = running ? "" : story.reason ?? `why it ended is ${UNKNOWN}`;
  const about = [story.model, story.world_size > 1 ? story.kind || count(story.world_size, "process", "processes") : "", stages];
  return el(
    "li",
    { "data-state": running ? "running" : "over" },
    el("b", {}, `Start ${story.epoch}`),
    ` · ${lasted}, ${ready}`,
    el("span", { class: "about" }, about.filter(Boolean).join(" · ")),
    why ? el("span", { class: story.code === "group_replanned" ? "about" : "trouble" }, story.code ? `${why} (${story.code})` : why) : null,
  );
}

const name = (now, id) => now.nodes.find((each) => each.node_id === id)?.name;
