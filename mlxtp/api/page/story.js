// The history in words: what failed, what was done about it, and how long that took.

import { el } from "./dom.js";
import { clock, count, groupName, seconds, shortName, stageWord, UNKNOWN } from "./words.js";

const WISHED = /( was unloaded|wanted no longer)$/; // as agents say it
const MOVED = "group_replanned"; // it made room for another spread of the model: no failure

/** Return the entries, the newest first: `{ at, kind, what, why, then }`. `kind`: "failed", "moved", "ended", "began", "coming". */
export function story(now) {
  const groups = new Map();
  for (const each of now.history) groups.set(each.group, [...(groups.get(each.group) ?? []), each]);
  const found = [...groups].flatMap(([id, epochs]) => epochs.flatMap((epoch, i) => entries(name(id, epoch, now), epoch, epochs[i - 1], epochs[i + 1])));
  return found.sort((a, b) => b.at - a.at);
}

const name = (id, epoch, now) => {
  const found = groupName(id, now);
  return found === id && epoch.model ? shortName(epoch.model) : shortName(found.replace(/#0$/, ""));
};

/** Return an epoch's end, if it has ended, and its beginning, if no end of the one before tells of it. */
function entries(model, epoch, next, before) {
  const found = [];
  if (epoch.lasted_s !== null) found.push(end(model, epoch, next));
  if (!before || before.lasted_s === null || wished(before)) found.push(beginning(model, epoch));
  return found;
}

/** Return true if it ended because it was to end: the next one, if any, is no answer to that. */
const wished = ({ code, reason }) => code === "shutting_down" || WISHED.test(reason ?? "");

function end(model, epoch, next) {
  const at = epoch.began + epoch.lasted_s;
  const wanted = wished(epoch);
  const kind = wanted || !epoch.reason ? "ended" : epoch.code === MOVED ? "moved" : "failed";
  const what = { moved: `${model} was moved`, ended: `${model} ended`, failed: `${model} failed` }[kind];
  const why = epoch.reason ?? `why is ${UNKNOWN} here`;
  const lasted = epoch.ready_s === null ? "it had never been ready" : `it had run for ${seconds(epoch.lasted_s)}`;
  return { at, kind, what, why, code: epoch.code, then: [wanted ? "" : again(at, epoch, next), lasted].filter(Boolean).join("; ") };
}

/** Return what was done after an end. */
function again(at, epoch, next) {
  if (!next) return "";
  const changed = next.world_size === epoch.world_size ? "" : `, ${size(next) || "in one part"}`;
  if (next.ready_s !== null) return `served again after ${seconds(Math.max(next.began + next.ready_s - at, 0))}${changed}`;
  return next.lasted_s === null ? `it starts again${changed}` : "the next start failed, too";
}

function beginning(model, epoch) {
  const stages = epoch.stages.map(([stage, took]) => `${stageWord(stage)} ${seconds(took)}`).join(", ");
  const ready = epoch.ready_s !== null;
  const what = ready ? `${model} was loaded ${size(epoch)}`.trim() : epoch.lasted_s === null ? `${model} is starting` : `${model} was started`;
  const took = ready ? `ready after ${seconds(epoch.ready_s)}` : "";
  return { at: epoch.began, kind: ready ? "began" : "coming", what, why: "", code: null, then: [took, stages].filter(Boolean).join(": ") };
}

const size = (epoch) => (epoch.world_size > 1 ? `in ${count(epoch.world_size, "part")}${epoch.kind ? ` (${epoch.kind})` : ""}` : "");

/** Return an entry as an item of a list. */
export const told = ({ at, kind, what, why, code, then }) =>
  el(
    "li",
    { "data-kind": kind },
    el("time", { datetime: new Date(at * 1000).toISOString() }, clock(at)),
    el("b", {}, what),
    why ? el("span", { class: kind === "failed" ? "trouble" : "about" }, why, kind === "failed" && code ? el("code", {}, code) : null) : null,
    then ? el("span", { class: "about" }, `${then[0].toUpperCase()}${then.slice(1)}.`) : null,
  );
