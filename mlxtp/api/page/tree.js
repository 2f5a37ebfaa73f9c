// The versions of a conversation. All are in `talk.turns`, in the order in which they were made. Each turn follows its
// `parent`, the index of an earlier one, or -1; a turn without one follows the turn before it. `talk.shown` has the chosen
// follower of each index; without a choice it is the last one.

function parentOf(turns, index) {
  const { parent } = turns[index];
  return Number.isInteger(parent) && parent >= -1 && parent < index ? parent : index - 1;
}

/** Return the indices that follow each index. */
function followers({ turns }) {
  const found = new Map();
  for (const index of turns.keys()) {
    const parent = parentOf(turns, index);
    found.set(parent, [...(found.get(parent) ?? []), index]);
  }
  return found;
}

/** Return the shown turns from the first to the last. Pure, as all but `add` and `choose`. */
export function shownTurns(talk) {
  const after = followers(talk);
  const found = [];
  for (let at = -1; after.has(at); ) {
    const all = after.get(at);
    at = all.includes(talk.shown?.[at]) ? talk.shown[at] : all.at(-1);
    found.push(talk.turns[at]);
  }
  return found;
}

/** Return all versions of each turn, itself among them. */
export function versions(talk) {
  const groups = [...followers(talk).values()].map((indices) => indices.map((index) => talk.turns[index]));
  return new Map(groups.flatMap((group) => group.map((turn) => [turn, group])));
}

/** Return the turn that a turn follows; undefined for a first one. */
export const before = (talk, turn) => talk.turns[parentOf(talk.turns, talk.turns.indexOf(turn))];

/** Add a turn after another one, or as a first one, and show it. */
export function add(talk, turn, after) {
  turn.parent = after ? talk.turns.indexOf(after) : -1;
  talk.turns.push(turn);
  choose(talk, turn);
}

/** Show a version of a turn, with what follows it. */
export function choose(talk, turn) {
  const index = talk.turns.indexOf(turn);
  talk.shown = { ...talk.shown, [parentOf(talk.turns, index)]: index };
}
