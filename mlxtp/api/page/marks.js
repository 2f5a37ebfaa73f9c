// A letter and a colour for each group, so that the picture and the lists mean the same one. A letter stays with
// its group until the group is gone.

import { el, svg } from "./dom.js";

const COLOURS = 6;
const given = new Map(); // id of a group -> its number

/** Return the groups that run or are on their way, in the order of their deployments: `{ id, deployment, ...group }`. */
export function groupsOf(now) {
  const all = (now.deployments ?? []).flatMap((deployment) =>
    deployment.groups
      .filter((group) => group.members.length || (group.owner && group.state !== "idle"))
      .map((group, i) => ({
        ...group,
        deployment,
        number: deployment.groups.length > 1 ? i + 1 : 0,
        macs: group.members.length ? group.members.map((each) => each.node_id) : [group.owner],
      })),
  );
  const present = new Set(all.map(({ id }) => id));
  for (const id of given.keys()) if (!present.has(id)) given.delete(id);
  for (const { id } of all) if (!given.has(id)) given.set(id, free());
  return all;
}

function free() {
  const taken = new Set(given.values());
  let number = 0;
  while (taken.has(number)) number += 1;
  return number;
}

export const colourOf = (id) => (given.has(id) ? (given.get(id) % COLOURS) + 1 : 0);

/** Return the letter of a group: A to Z, then AA and so on; empty for one that is gone. */
export function letterOf(id) {
  let [number, letters] = [given.has(id) ? given.get(id) : -1, ""];
  for (; number >= 0; number = Math.floor(number / 26) - 1) letters = String.fromCharCode(65 + (number % 26)) + letters;
  return letters;
}

/** Return a group's mark for a list. */
export const mark = (id) =>
  letterOf(id) ? el("span", { class: "mark", "data-mark": colourOf(id), title: "the group's letter in the picture" }, letterOf(id)) : null;

/** Return a group's mark for the picture, with its upper left corner at these places. */
export function svgMark(id, x, y) {
  const width = letterOf(id).length * 8 + 8;
  return svg(
    "g",
    { class: "mark", "data-mark": colourOf(id) },
    svg("rect", { x, y, width, height: 16, rx: 4 }),
    svg("text", { x: x + width / 2, y: y + 12 }, letterOf(id)),
  );
}
