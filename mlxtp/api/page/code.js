// Blocks of code, with the colours of highlight.js, which is fetched with the first block of a language that it knows.
//
// Its output has a fixed form: `<span class="…">`, `</span>` and escaped text. `pieces` reads it; HTML is never made of it.

import { copyButton } from "./copy.js";
import { el, say } from "./dom.js";

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

const blocks = new WeakMap(); // figure -> { text, language, code, pieces, waits }
const coming = new Map(); // name of a grammar -> the promise of it
const ready = new Set(); // names of grammars that the library has
let library = null;

/** Return a block of code as a figure. `language` is what its author wrote. */
export function codeBlock(text, language) {
  const code = el("code", {});
  const said = language || "text";
  const figure = el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, said), copyButton(() => blocks.get(figure).text, "Copy the code")),
    el("pre", { tabindex: 0, "aria-label": `Code, ${said}` }, code),
  );
  blocks.set(figure, { text: "", language, code, pieces: [] });
  setCode(figure, text);
  return figure;
}

/** Show another text in a figure of `codeBlock`. What is the same as before stays, and with it a selection. */
export function setCode(figure, text) {
  const block = blocks.get(figure);
  block.text = text;
  const grammar = text.length > LONGEST ? undefined : GRAMMARS.get(block.language.toLowerCase());
  if (grammar && ready.has(grammar)) {
    const { value } = library.highlight(text, { language: grammar, ignoreIllegals: true });
    return show(block, pieces(value));
  }
  show(block, [{ text, kind: "" }]);
  if (!grammar || block.waits) return;
  block.waits = true;
  fetchGrammar(grammar).then(
    () => setCode(figure, block.text),
    () => (block.waits = false), // without it the code stays plain
  );
}

export const languageOf = (figure) => blocks.get(figure)?.language;

function show(block, wanted) {
  const { code, pieces: before } = block;
  let same = 0;
  while (same < wanted.length && wanted[same].kind === before[same]?.kind && wanted[same].text === before[same].text) same += 1;
  const next = code.childNodes[same];
  if (same === wanted.length - 1 && same === before.length - 1 && wanted[same].kind === before[same].kind) {
    if (next.nodeType === Node.TEXT_NODE) next.data = wanted[same].text;
    else say(next, wanted[same].text);
  } else {
    while (code.childNodes.length > same) code.lastChild.remove();
    code.append(...wanted.slice(same).map(({ text, kind }) => (kind ? el("span", { class: kind }, text) : text)));
  }
  block.pieces = wanted;
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
