// Tokens as they are written: one dot for each, along the band of its group. Nothing moves while none is written.

import { svg } from "./dom.js";
import { colourOf, groupsOf } from "./marks.js";
import { ways } from "./picture.js";

const MOST = 24; // dots of one group at a time
const PX_PER_S = 190;
const still = matchMedia("(prefers-reduced-motion: reduce)");

let before = new Map(); // number of a request -> its tokens
let lookedAt = 0;

/** Return how many tokens each group has written since the last call: exactly where this agent sees each of them. */
export function written(now, clock = performance.now()) {
  const passed = lookedAt ? Math.min((clock - lookedAt) / 1000, 2) : 0;
  const found = new Map();
  const seen = new Map();
  for (const { number, group, tokens, phase } of now.running) {
    if (!before.has(number) && passed === 0) continue;
    found.set(group, (found.get(group) ?? 0) + Math.max(tokens - (before.get(number) ?? 0), 0));
    if (phase === "writing") seen.set(group, (seen.get(group) ?? 0) + 1);
  }
  for (const { id, tokens_per_second: rate, requests } of groupsOf(now)) {
    if (rate && requests.running > (seen.get(id) ?? 0)) found.set(id, Math.max(found.get(id) ?? 0, Math.round(rate * passed)));
  }
  before = new Map(now.running.map(({ number, tokens }) => [number, tokens]));
  lookedAt = clock;
  return found;
}

/** Let dots pass along the bands. */
export function flow(layer, made, tokens) {
  if (still.matches || document.hidden) return;
  for (const [id, number] of tokens) {
    const way = ways(made, id);
    if (!way.length) continue;
    for (let i = 0; i < Math.min(number, MOST); i += 1) dot(layer, way, id, (500 * i) / Math.min(number, MOST));
  }
}

function dot(layer, way, id, delay) {
  const length = way.reduce((sum, [from, to]) => sum + Math.hypot(to.x - from.x, to.y - from.y), 0);
  let gone = 0;
  const frames = way.flatMap(([from, to]) => {
    const begin = gone / length;
    gone += Math.hypot(to.x - from.x, to.y - from.y);
    return [
      { transform: `translate(${from.x}px, ${from.y}px)`, offset: begin },
      { transform: `translate(${to.x}px, ${to.y}px)`, offset: Math.min(gone / length, 1) },
    ];
  });
  const made = svg("circle", { r: 3.5, class: "token", "data-mark": colourOf(id) });
  layer.append(made);
  made.animate(frames, { duration: (1000 * length) / PX_PER_S, delay, fill: "backwards" }).finished.then(
    () => made.remove(),
    () => made.remove(),
  );
}
