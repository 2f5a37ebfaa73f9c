// Blocks of code, with the colours of highlight.js, which is fetched with the first block of a language that it knows.
//
// Its output has a fixed form: `<span class="…">`, `</span>` and escaped text. `pieces` reads it; HTML is never made of it.

import { copyButton } from "./copy.js";
import { el } from "./dom.js";
import { soon } from "./slices.js";

const LONGEST = 30_000; // characters; longer code stays plain
const NAMES = {
  bash: "bash sh shell zsh console terminal",
  c: "c h",
  cpp: "cpp c++ cc cxx hpp hh",
  css: "css",
  diff: "diff patch",
  go: "go golang",
  java: "java",
  javascript: "javascript js jsx mjs cjs node",
  json: "json jsonc json5 jsonl",
  markdown: "markdown md",
  python: "python py python3 pycon",
  rust: "rust rs",
  sql: "sql sqlite mysql postgresql postgres",
  swift: "swift",
  typescript: "typescript ts tsx mts",
  xml: "xml html xhtml svg vue plist",
  yaml: "yaml yml",
};
const GRAMMARS = new Map(Object.entries(NAMES).flatMap(([file, names]) => names.split(" ").map((name) => [name, file])));
const WITHIN = { xml: ["css", "javascript"], markdown: ["xml"] }; // languages inside others
const ESCAPES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };

const blocks = new WeakMap(); // figure -> what it shows
const coming = new Map(); // name of a grammar -> the promise of it
const ready = new Set(); // names of grammars that the library has
let library = null;

/** Return a block of code as a figure. Whole lines of `content` end with a line break; `language` is what its author wrote. */
export function codeBlock(content, language) {
  const code = el("code", {});
  const said = language || "text";
  const figure = el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, said), copyButton(() => blocks.get(figure).content.replace(/\n$/, ""), "Copy the code")),
    el("pre", { tabindex: 0, "aria-label": `Code, ${said}` }, code),
  );
  blocks.set(figure, { content: "", language, code, shown: [], lines: null, coloured: [], waits: false });
  setCode(figure, content);
  return figure;
}

/**
 * Show another content in a figure of `codeBlock`.
 *
 * What is the same as before stays, and with it a selection. A line gets its colours when it is whole.
 */
export function setCode(figure, content) {
  const block = blocks.get(figure);
  block.content = content;
  const grammar = content.length > LONGEST ? undefined : GRAMMARS.get(block.language.toLowerCase());
  if (!grammar || !ready.has(grammar)) {
    show(block, [], content.replace(/\n$/, ""));
    if (grammar && !block.waits) colourLater(figure, grammar);
    return;
  }
  const end = content.lastIndexOf("\n");
  const lines = content.slice(0, Math.max(end, 0));
  if (block.lines !== lines) {
    block.lines = lines;
    block.coloured = pieces(library.highlight(lines, { language: grammar, ignoreIllegals: true }).value);
  }
  show(block, block.coloured, end === content.length - 1 ? "" : content.slice(Math.max(end, 0)));
}

function colourLater(figure, grammar) {
  const block = blocks.get(figure);
  block.waits = true;
  fetchGrammar(grammar).then(
    () => soon(() => setCode(figure, block.content)),
    () => (block.waits = false), // without it the code stays plain
  );
}

export const languageOf = (figure) => blocks.get(figure)?.language;

/** Show coloured pieces, and the rest of a text after them. */
function show(block, coloured, rest) {
  const wanted = rest ? [...coloured, { text: rest, kind: "" }] : coloured;
  const { code, shown } = block;
  let same = 0;
  while (same < wanted.length && wanted[same].kind === shown[same]?.kind && wanted[same].text === shown[same].text) same += 1;
  while (code.childNodes.length > same) code.lastChild.remove();
  code.append(...wanted.slice(same).map(({ text, kind }) => (kind ? el("span", { class: kind }, text) : text)));
  block.shown = wanted;
}

/** Return highlight.js's output as pieces: a text, and the classes of the innermost span around it. Pure. */
export function pieces(html) {
  const found = [];
  const kinds = [""];
  for (const [all, kind] of html.matchAll(/<span class="([^"]*)">|<\/span>|[^<]+/g)) {
    if (kind !== undefined) kinds.push(kind);
    else if (all === "</span>") kinds.pop();
    else found.push({ text: all.replace(/&(?:amp|lt|gt|quot|#x27);/g, (each) => ESCAPES[each]), kind: kinds.at(-1) });
  }
  return found;
}

/** Fetch the library and one grammar, with those inside it. */
function fetchGrammar(name) {
  if (!coming.has(name)) {
    const names = [name, ...(WITHIN[name] ?? [])];
    const files = ["core", ...names].map((each) => import(`./vendor/highlight/${each}.min.js`));
    const all = Promise.all(files).then(([core, ...grammars]) => {
      library = core.default;
      grammars.forEach((grammar, i) => library.registerLanguage(names[i], grammar.default));
      ready.add(name);
    });
    coming.set(name, all);
    all.catch(() => coming.delete(name)); // the next block tries again
  }
  return coming.get(name);
}
