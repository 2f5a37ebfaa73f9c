// The view of the cluster: the picture, and the same in words.

import { by, el, say } from "./dom.js";
import { draw } from "./picture.js";
import { bytes, clock, count, linkWords, micros, rate, seconds, stateAlone, UNKNOWN } from "./words.js";

let shown = ""; // what was drawn last: where nothing changes, nothing is made anew

export function showCluster({ now, connected }) {
  const width = by("picture").clientWidth;
  const key = JSON.stringify([now, connected, width]);
  if (key === shown) return;
  shown = key;
  by("picture").replaceChildren(draw(now, width));
  by("cluster").classList.toggle("old", !connected);
  by("facts").replaceChildren(...facts(now).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  by("ranks").replaceChildren(...(now.ranks.length ? now.ranks.map((each) => rank(each, now)) : [none("There is no group.")]));
  by("nodes").replaceChildren(...now.nodes.map((each) => node(each, now)));
  by("links").replaceChildren(...links(now));
  update(by("history"), now.history.length ? now.history.map(epoch) : [none("No epoch has begun.")]);
}

const none = (words) => el("li", { class: "none" }, words);

/** A list of which people may be reading an entry: only what differs is exchanged. */
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
    `${requests.open} open`,
    `${requests.generating} generating`,
    `${requests.first_token} before their first token`,
    requests.group ? `${requests.group} waiting for a group` : "",
    requests.held_back ? `${requests.held_back} held back` : "",
  ];
  const found = [
    ["State", stateAlone(now)],
    ["Model", now.model ?? (now.desired?.model ? `${now.desired.model} is wanted` : "none")],
    ["Epoch", String(now.epoch)],
    ["Ranks", group ? `${group.world_size}` : "none"],
    ["Joined by", group ? [group.kind, `backend ${group.backend}`].filter(Boolean).join(", ") : UNKNOWN],
    ["One small collective", collective(group)],
    ["Speed", rate(speed.value) + (speed.of === "here" ? " (of what was asked on this Mac)" : "")],
    ["Requests", queue.filter(Boolean).join(", ")],
  ];
  if (now.problem) found.push(["Problem", now.problem]);
  if (now.cluster) found.push(["Coordinator", name(now, now.coordinator) ?? "nobody yet"]);
  return found;
}

function collective(group) {
  if (!group?.fabric) return group && group.world_size === 1 ? "none, one rank is alone" : UNKNOWN;
  const by = group.fabric.by === "bench" ? "measured by mlxtp bench" : "at the last proof";
  return `${micros(group.fabric.collective_us)} (${by})`;
}

function rank(each, now) {
  const { weight_bytes: weights, kv_bytes: kv, memory_bytes: memory } = each;
  const about =
    memory === null
      ? `its figures are ${UNKNOWN} here`
      : `${bytes(memory)} of memory: weights ${bytes(weights)}, KV caches ${bytes(kv)}`;
  const step = each.step_us ? `, a step in ${micros(each.step_us)}` : "";
  return el(
    "li",
    {},
    el("b", {}, `Rank ${each.rank}`),
    ` on ${name(now, each.node) ?? UNKNOWN} · ${each.phase ?? `phase ${UNKNOWN}`}`,
    el("span", { class: "about" }, about + step),
    memory ? bar(weights, kv, memory) : null,
  );
}

/** Weights, KV caches and the rest, as shares of what the rank holds. */
function bar(weights, kv, memory) {
  const share = (part) => Math.min(100, (100 * part) / Math.max(memory, weights + kv, 1));
  return el("meter", { min: 0, max: 100, value: share(weights + kv).toFixed(1), "aria-label": "Weights and KV caches, as a share of its memory" });
}

function node(each, now) {
  const roles = [
    each.self ? "this Mac" : "",
    each.coordinator ? "coordinator" : "",
    each.draining ? "about to stop" : "",
  ].filter(Boolean);
  const machine = [each.chip ?? `chip ${UNKNOWN}`, `memory ${bytes(each.memory_bytes)}`];
  const trouble = [each.model_problem, ...each.notes].filter(Boolean);
  return el(
    "li",
    { "data-state": each.state },
    el("b", {}, each.name),
    ` · ${[each.state, ...roles].join(", ")}`,
    el("span", { class: "about" }, machine.join(", ")),
    ...trouble.map((words) => el("span", { class: "trouble" }, words)),
  );
}

function links(now) {
  if (!now.links.length) {
    const alone = now.nodes.length === 1;
    const words = alone && now.ranks.length > 1 ? "The ranks are joined within this machine." : alone ? "There is one Mac." : `How the Macs are joined is ${UNKNOWN}.`;
    return [none(words)];
  }
  return now.links.map((link) =>
    el("li", {}, el("b", {}, `${name(now, link.a)} – ${name(now, link.b)}`), ` · ${linkWords(link)}`, el("span", { class: "about" }, `latency ${latency(now, link)}`)),
  );
}

/** Only of a group of two is what a collective takes what its one link takes. */
function latency(now, link) {
  const ends = new Set(now.ranks.map((each) => each.node));
  const alone = now.ranks.length === 2 && ends.has(link.a) && ends.has(link.b);
  const took = alone ? now.group?.fabric?.collective_us : null;
  const measured = [took ? `${micros(took)} for a small sum` : "", link.trip_us ? `${micros(link.trip_us)} between the agents and back` : ""];
  return measured.filter(Boolean).join(", ") || UNKNOWN;
}

function epoch(story) {
  const running = story.lasted_s === null;
  const ready = story.ready_s === null ? (running ? "not ready yet" : "was never ready") : `ready after ${seconds(story.ready_s)}`;
  const stages = story.stages.map(([stage, took]) => `${stage} ${seconds(took)}`).join(", ");
  const ended = running ? "runs" : `ended after ${seconds(story.lasted_s)}`;
  const why = running ? "" : story.reason ?? `why it ended is ${UNKNOWN}`;
  return el(
    "li",
    { "data-state": running ? "running" : "over" },
    el("b", {}, `Epoch ${story.epoch}`),
    ` · ${ended}, ${ready} · began at ${clock(story.began)}`,
    el("span", { class: "about" }, [count(story.world_size, "rank"), story.kind || story.backend, story.model, stages].filter(Boolean).join(" · ")),
    why ? el("span", { class: story.code === "group_replanned" ? "about" : "trouble" }, story.code ? `${why} (${story.code})` : why) : null,
  );
}

const name = (now, id) => now.nodes.find((each) => each.node_id === id)?.name;
