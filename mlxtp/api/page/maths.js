// Mathematics, as MathML by Temml, which is fetched with the first formula.

import { el } from "./dom.js";
import { soon } from "./slices.js";

const LONGEST = 5000; // characters of TeX; a longer formula stays text
const OPTIONS = { throwOnError: true, trust: false, strict: false, maxSize: [50, 500], maxExpand: 500 };

let temml = null;
let coming = null;

/** Return an element with the formula. It shows its source until Temml is here, and if Temml cannot read it. */
export function formula(tex, source, display) {
  const box = el("span", { class: display ? "math display" : "math" }, source);
  if (tex.length > LONGEST) return box;
  if (temml) typeset(box, tex, display);
  else fetchTemml().then(() => soon(() => typeset(box, tex, display)), () => {});
  return box;
}

function typeset(box, tex, display) {
  const made = el("div");
  try {
    temml.render(tex, made, { ...OPTIONS, displayMode: display });
  } catch {
    box.classList.add("unread"); // not TeX, or not all of it yet
    return;
  }
  for (const each of made.querySelectorAll("[id], [href]")) { // a label must not take an id of the page
    each.removeAttribute("id");
    each.removeAttribute("href");
  }
  box.replaceChildren(...made.childNodes);
}

function fetchTemml() {
  coming ??= Promise.all([import("./vendor/temml/temml.mjs"), styles()]).then(
    ([{ default: library }]) => (temml = library),
    (error) => {
      coming = null; // the next formula tries again
      throw error;
    },
  );
  return coming;
}

const styles = () =>
  new Promise((done, failed) => {
    const href = new URL("./vendor/temml/Temml-Local.css", import.meta.url).href;
    document.head.append(el("link", { rel: "stylesheet", href, load: done, error: failed }));
  });

// --- where formulas stand in Markdown ---------------------------------------------------------------------

const INLINE = 1000; // characters of a formula within a paragraph
const LINES = 60; // of a formula of its own
const MARKS = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
];

/** Add rules for formulas to a parser of markdown-it: `$…$`, `$$…$$`, `\(…\)` and `\[…\]`. */
export function addFormulas(parser) {
  parser.inline.ruler.before("escape", "formula", inlineRule);
  const alt = ["paragraph", "reference", "blockquote", "list"];
  parser.block.ruler.before("fence", "formula", blockRule, { alt });
}

function inlineRule(state, silent) {
  const { src, pos, posMax } = state;
  const first = src[pos];
  if (first !== "$" && first !== "\\") return false;
  const found = formulaAt(src.slice(pos, Math.min(posMax, pos + INLINE)), src[pos - 1] ?? "");
  if (!found) return false;
  if (!silent) Object.assign(state.push("formula", "", 0), { content: found.tex, markup: found.source, meta: { display: found.display } });
  state.pos += found.source.length;
  return true;
}

/** Return the formula at the beginning of a text, or null. `before` is the character before it. Pure. */
export function formulaAt(text, before) {
  for (const [open, close, display] of MARKS) {
    if (!text.startsWith(open)) continue;
    const end = text.indexOf(close, open.length);
    const tex = text.slice(open.length, end);
    if (end < 0 || !tex.trim()) return null;
    return { tex: tex.trim(), source: text.slice(0, end + close.length), display };
  }
  if (text[0] !== "$" || /[\p{L}\p{N}$\\]/u.test(before) || /^\$\s/.test(text)) return null;
  for (let end = text.indexOf("$", 1); end > 0; end = text.indexOf("$", end + 1)) {
    if (text[end - 1] === "\\") continue;
    const tex = text.slice(1, end);
    const next = text[end + 1] ?? "";
    const closes = !/\s$/.test(tex) && !/\p{N}/u.test(next) && (!/\p{L}/u.test(next) || /^.{1,3}$|[\\^_]/.test(tex)); // $n$th
    return closes && tex && !isPrice(tex) && !/\n\s*\n/.test(tex) ? { tex, source: text.slice(0, end + 1), display: false } : null;
  }
  return null;
}

/** Return true for what follows a sum of money: "5 or 10" between two dollar signs, but not "5x" or "5 + 3". Pure. */
export const isPrice = (tex) => /^\d[\d.,]*[kKmMbB]?[^\p{L}\d]*\s/u.test(tex) && !/[\\^_=+<>{}*]/.test(tex);

/**
 * Take lines from one that begins with `$$` or `\[` to one that ends with its counterpart.
 *
 * Where a growing text has no such line yet, all of it is an open formula, so that a line of it does not begin a list.
 */
function blockRule(state, from, to, silent) {
  const lineAt = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  const begin = lineAt(from);
  const mark = MARKS.find(([open, , display]) => display && begin.startsWith(open));
  if (!mark || state.sCount[from] - state.blkIndent >= 4) return false;
  const [open, close] = mark;
  const lines = [];
  const take = (line, meta) => {
    const content = lines.join("\n");
    if (!content.trim()) return false;
    if (silent) return true;
    const token = state.push("formula", "", 0);
    const markup = `${open}${content}${meta.open ? "" : close}`;
    Object.assign(token, { block: true, content: content.trim(), markup, meta, map: [from, line] });
    state.line = line;
    return true;
  };
  for (let line = from; line < Math.min(to, from + LINES); line += 1) {
    if (line > from && state.sCount[line] < state.blkIndent) return false;
    const text = (line === from ? begin.slice(open.length) : lineAt(line)).trimEnd();
    const end = text.indexOf(close);
    if (end >= 0 && end !== text.length - close.length) return false; // more follows: it is within a paragraph
    const more = state.env.growing && state.eMarks[line] === state.src.length; // the line may go on
    lines.push(end < 0 || more ? text : text.slice(0, end));
    if (end < 0 || more) continue;
    return take(line + 1, { display: true });
  }
  return Boolean(state.env.growing) && to - from < LINES && take(to, { open: true });
}
