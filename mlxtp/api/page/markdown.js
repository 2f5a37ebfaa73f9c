// Conversion of models' Markdown to elements, from the tokens of markdown-it. HTML stays text.
//
// A text grows while it arrives. Blocks before the last one are finished, since no further text can change them: they are
// kept, and only the rest is parsed again.

import { codeBlock, languageOf, setCode } from "./code.js";
import { el } from "./dom.js";
import { addFormulas, formula } from "./maths.js";
import markdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";

const LONGEST = 200_000; // characters of a text; a longer one stays plain
const LONGEST_MS = 500; // for one text; what is not made by then stays plain
const LONGEST_BLOCK = 30_000; // characters of one paragraph, cell or heading that are searched for marks
const DEEPEST = 60; // levels of quotes, lists and their items within each other
const LINKS = /^(?:https?:\/\/|mailto:)/i;

const parser = markdownIt({ html: false, linkify: true, maxNesting: DEEPEST });
parser.validateLink = (address) => LINKS.test(address);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.core.ruler.before("inline", "bound", ({ tokens }) => {
  for (const token of tokens) if (token.type === "inline" && token.content.length > LONGEST_BLOCK) token.type = "plain";
});
addFormulas(parser);

const shown = new WeakMap(); // container -> what it shows
let until = 0; // performance.now() at the end of the time for the present text
const late = () => performance.now() > until;

/** Show a text in `container`, which has no other content. `over`: no more of it will come. */
export function render(container, written, over = true) {
  const text = written.includes("\r") ? written.replace(/\r\n?/g, "\n") : written;
  let known = shown.get(container);
  if (known && known.text === text && known.over === over) return;
  const fresh = !known || !text.startsWith(known.text) || text.length > LONGEST;
  if (fresh || (over && known.linked)) {
    known = { offset: 0, rest: [], references: {}, linked: false };
    container.replaceChildren();
    shown.set(container, known);
  }
  Object.assign(known, { text, over });
  if (text.length > LONGEST) container.replaceChildren(plain(text));
  else update(container, known);
}

function update(container, known) {
  const rest = known.text.slice(known.offset);
  const text = known.over ? rest : withoutBeginning(rest);
  const environment = { references: { ...known.references }, growing: !known.over };
  until = performance.now() + LONGEST_MS;
  const blocks = split(text, parser.parse(text, environment));
  const nodes = blocks.map((block, i) => made(block, known.rest[i]));
  for (const [i, node] of nodes.entries()) {
    const there = known.rest[i]?.node;
    if (!there) container.append(node);
    else if (there !== node) there.replaceWith(node);
  }
  for (const { node } of known.rest.slice(nodes.length)) node.remove();
  known.linked = Object.keys(environment.references).length > 0; // definitions also apply to blocks before them
  const last = blocks.at(-1)?.tokens[0].meta?.open ? 2 : 1; // an open formula may turn out to belong to the block before it
  const done = Math.max(blocks.length - last, 0);
  known.rest = blocks.map((block, i) => ({ ...block, node: nodes[i] })).slice(done);
  if (!done) return;
  known.offset += blocks[done].from;
  known.references = environment.references;
}

/**
 * Return a text that grows without its last line, if that is only the beginning of one: a mark that may become a list,
 * a rule or a heading, or the first rows of a table. Else they would flicker. Pure.
 */
export function withoutBeginning(text) {
  const whole = text.endsWith("\n");
  const last = text.lastIndexOf("\n", text.length - (whole ? 2 : 1)) + 1;
  const line = text.slice(last);
  if (!whole && /^[ \t>]*(?:[-=*+_#]+|\d+[.)]?|`+|~+)?[ \t]*$/.test(line)) return text.slice(0, last);
  if (!line.startsWith("|")) return text;
  const isFirst = (at) => at === 0 || text.startsWith("\n\n", at - 2);
  const before = last && text.lastIndexOf("\n", last - 2) + 1;
  if (isFirst(last)) return text.slice(0, last);
  if (whole) return text;
  return text.slice(0, text[before] === "|" && isFirst(before) ? before : last);
}

/** Return the top blocks of a parsed text: their tokens, sources, where these begin, and whether they are too deep. Pure. */
export function split(text, tokens) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  const blocks = [];
  let level = 0;
  for (const token of tokens) {
    if (level === 0) {
      const [first, end] = token.map;
      blocks.push({ tokens: [], from: starts[first], source: text.slice(starts[first], starts[end] ?? text.length) });
    }
    const block = blocks.at(-1);
    block.tokens.push(token);
    block.deep ||= token.level >= DEEPEST - 1; // the parser has left out what is deeper
    level += token.nesting;
  }
  return blocks;
}

function made({ source, tokens, deep }, before) {
  if (before?.source === source && !before.tokens[0].meta?.open) return before.node;
  if (deep || late()) return plain(source);
  const [token] = tokens;
  if (token.type === "fence" && before && languageOf(before.node) === language(token)) {
    setCode(before.node, token.content);
    return before.node;
  }
  const box = el("div");
  fill(box, tokens);
  return box.firstElementChild;
}

// --- tokens -----------------------------------------------------------------------------------------------

const plain = (text) => el("p", { class: "plain-text" }, text);
const language = ({ info }) => info.trim().split(/\s+/)[0].slice(0, 30);
const tagged = ({ tag }) => el(tag);
const side = (token) => /center|right/.exec(token.attrGet("style") ?? "")?.[0] ?? "left";
const cell = (token) => el(token.tag, { class: side(token) });

/** Each returns the element that an opening token begins. */
const OPEN = {
  heading_open: ({ tag }) => el(`h${Math.min(Number(tag[1]) + 2, 6)}`), // below the headings of the page
  ordered_list_open: (token) => el("ol", { start: token.attrGet("start") }),
  th_open: cell,
  td_open: cell,
  link_open: (token) => anchor(token.attrGet("href")),
};

/** Each returns a node for a token without content of its own kind, or a text. */
const ALONE = {
  text: ({ content }) => content,
  plain: ({ content }) => el("span", { class: "plain-text" }, content),
  softbreak: () => "\n",
  hardbreak: () => el("br"),
  hr: () => el("hr"),
  code_inline: ({ content }) => el("code", {}, content),
  fence: (token) => (late() ? plain(token.content) : codeBlock(token.content, language(token))),
  code_block: (token) => (late() ? plain(token.content) : codeBlock(token.content, "")),
  formula: ({ content, markup, meta }) => {
    if (meta.open) return plain(markup);
    return late() ? markup : formula(content, markup, meta.display);
  },
  image: picture,
};

/** Append what tokens stand for. */
function fill(parent, tokens) {
  const open = [parent];
  for (const [i, token] of tokens.entries()) {
    const top = open.at(-1);
    if (token.type === "inline") {
      if (tokens[i - 2]?.type === "list_item_open") task(top, token);
      fill(top, token.children);
    } else if (token.nesting > 0) {
      const node = token.hidden ? top : (OPEN[token.type] ?? tagged)(token);
      if (node !== top) top.append(token.type === "table_open" ? scrolled(node) : node);
      open.push(node);
    } else if (token.nesting < 0) open.pop();
    else top.append((ALONE[token.type] ?? ALONE.text)(token, top));
  }
}

/** Show the box of a task as a character. */
function task(parent, { children }) {
  const [first] = children;
  const box = first?.type === "text" && /^\[([ xX])\] /.exec(first.content);
  if (!box) return;
  first.content = `${box[1] === " " ? "☐" : "☑"} ${first.content.slice(box[0].length)}`;
  parent.closest("li").classList.add("task");
}

const scrolled = (table) => el("div", { class: "table", role: "region", "aria-label": "Table", tabindex: 0 }, table);

const anchor = (address) => el("a", { href: address, rel: "noopener noreferrer", target: "_blank" });

/** Return a link to a picture: none is ever fetched from elsewhere. */
function picture(token, parent) {
  const address = token.attrGet("src");
  const words = `image: ${token.content || address || "without an address"}`;
  if (!LINKS.test(address) || parent.closest("a")) return words;
  const link = anchor(address);
  link.append(words);
  return link;
}
