// The open requests: how far each is, how fast, and how much of its prompt was cached.

import { bar, by, el, say, update } from "./dom.js";
import { mark } from "./marks.js";
import { senderOf } from "./usage.js";
import { shortName } from "./words.js";

const MOST = 64; // of those that the agent tells
const WINDOW_MS = 4000; // over which a speed is taken
const LEAST_MS = 900;
const PHASES = { waiting: "Waiting", restarting: "Waits for a restart", reading: "Reading", writing: "Writing" };

let seen = new Map(); // number of a request -> [[time in ms, tokens], ...]

export function showRequests(now) {
  measure(now.running);
  update(by("requests"), now.running.map(request));
  const more = Math.max(asked(now).open - now.running.length, 0);
  const others = now.running.length < MOST ? " at other Macs or of other keys" : "";
  say(by("requests-more"), more ? `${more}${now.running.length ? " more" : ""}${others}` : now.running.length ? "" : "None is open.");
}

/** Return the open requests of the whole cluster: of all groups, and those here that no group has. */
export function asked({ deployments, requests }) {
  const groups = (deployments ?? []).flatMap((each) => each.groups);
  const sum = (what) => groups.reduce((all, group) => all + group.requests[what], 0);
  const [writing, waiting] = [sum("running"), sum("waiting") + requests.group + requests.held_back];
  return { writing, waiting, open: Math.max(writing + waiting, requests.open) };
}

/** Keep the counts of the last seconds. */
export function measure(running, clock = performance.now()) {
  seen = new Map(
    running.map(({ number, tokens }) => {
      const before = (seen.get(number) ?? []).filter(([at]) => clock - at <= WINDOW_MS);
      return [number, [...before, [clock, tokens]]];
    }),
  );
}

/** Return the tokens per second that a request writes now; null while unknown. */
export function speedOf(number) {
  const counts = seen.get(number) ?? [];
  const [[from, before], [to, after]] = [counts[0] ?? [0, 0], counts.at(-1) ?? [0, 0]];
  return to - from >= LEAST_MS && after > before ? (1000 * (after - before)) / (to - from) : null;
}

const many = (tokens) => `${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`;

function request(each) {
  const { number, model, group, phase, prompt, read, cached, tokens } = each;
  const speed = phase === "writing" ? speedOf(number) : null;
  const sender = senderOf(number);
  const writes = phase === "writing" ? [many(tokens), speed ? `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s` : ""] : [];
  const reads = phase === "reading" ? [`${read.toLocaleString("en")} of ${prompt.toLocaleString("en")} tokens`] : [];
  const from = each.here ? [sender?.key, sender?.app].filter(Boolean).join(", ") : "from another Mac";
  const known = cached === null ? "" : cached ? `, ${Math.round((100 * cached) / prompt)} % of it cached` : ", none of it cached";
  return el(
    "li",
    { "data-phase": phase },
    el("b", {}, mark(group), PHASES[phase] ?? phase),
    el("span", { class: "figures" }, [...writes, ...reads].filter(Boolean).join(" · ")),
    el("span", { class: "about" }, [shortName(model), from, `prompt of ${many(prompt)}${known}`].filter(Boolean).join(" · ")),
    bar(prompt, [["cached", cached ?? 0], ["read", Math.max(read - (cached ?? 0), 0)]]),
  );
}
