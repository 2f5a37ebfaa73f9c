// The use of API keys, in the view of models: for those who have a key that may see it.

import { by, el } from "./dom.js";
import * as keys from "./keys.js";
import { administer } from "./net.js";
import { count } from "./words.js";

const AGAIN_MS = 5000;
let lookedAt = -Infinity;
let refused = false;
let senders = new Map(); // number of an open request -> its key and program
let shown = ""; // the last rows, which are redrawn only on changes
let onSenders = () => {};

/** Begin. `changed` is called when the senders of open requests have been read. */
export function startUsage(changed) {
  onSenders = changed;
  keys.onKeys(() => {
    lookedAt = -Infinity;
    refused = false;
    senders = new Map();
    show([]);
  });
}

/** Return the name of the key and the program of an open request, where the key of this page may see them. */
export const senderOf = (number) => senders.get(number);

export async function showUsage() {
  const key = keys.admin();
  if (!key || refused || performance.now() - lookedAt < AGAIN_MS) return;
  lookedAt = performance.now();
  try {
    const used = await administer("GET", "keys", key);
    if (key !== keys.admin()) return;
    show(used.keys ?? []);
    senders = new Map((used.requests ?? []).map((each) => [each.number, each]));
    onSenders();
  } catch (error) {
    if (key === keys.admin()) refused = error.status === 401 || error.status === 403;
  }
}

function show(rows) {
  const key = JSON.stringify(rows);
  if (key === shown) return;
  shown = key;
  by("usage-card").hidden = !rows.length;
  by("usage").replaceChildren(...rows.map(row));
}

const number = (value) => value.toLocaleString("en");

function row(each) {
  const { name, tokens_per_day: most, tokens_today: today } = each;
  const over = each.expires && each.expires * 1000 <= Date.now();
  const tokens = each.prompt_tokens + each.generated_tokens;
  const words = [
    `${number(today)}${most ? ` of ${number(most)}` : ""} tokens today`,
    `${count(each.requests, "request")} and ${number(tokens)} tokens in all`,
    each.open ? `${number(each.open)} open` : "",
    each.refused ? `${number(each.refused)} refused` : "",
  ];
  const label = `${name}: share of the tokens of today`;
  return el(
    "li",
    {},
    el("b", {}, name),
    el(
      "span",
      {},
      el("span", { class: "about" }, words.filter(Boolean).join(", ")),
      over ? el("span", { class: "trouble" }, "It has expired.") : null,
      most ? el("meter", { min: 0, max: most, value: Math.min(today, most), "aria-label": label }) : null,
    ),
  );
}
