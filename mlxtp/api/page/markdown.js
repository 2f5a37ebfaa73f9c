// Conversion of models' Markdown to elements. HTML stays text; only http and https become links.
//
// Text comes in pieces, so it is cut into blocks first, and only changed blocks are rebuilt.

import { el, icon } from "./dom.js";

const DEEPEST = 6;
const LONGEST = 50_000; // characters of one paragraph that are searched for marks

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const shown = new WeakMap(); // container -> the sources of its blocks

/** Show `text` in `container`, which has no other content. */
export function render(container, text) {
  const found = split(text);
  const before = shown.get(container) ?? [];
  let same = 0;
  while (same < found.length && found[same] === before[same]) same += 1;
  while (container.children.length > same) container.lastElementChild.remove();
  container.append(...found.slice(same).map((source) => block(source, 0)));
  shown.set(container, found);
}

// --- blocks -----------------------------------------------------------------------------------------------

/** Return the sources of a text's blocks. Each becomes one element. */
export function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOfBlock(lines, at);
    found.push(lines.slice(at, end).join("\n").trimEnd());
    at = end;
  }
  return found;
}

function endOfBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return endOfFence(lines, at, fence[1]);
  if (HEADING.test(line) || RULE.test(line)) return at + 1;
  if (QUOTE.test(line)) return runOf(lines, at, (each) => QUOTE.test(each));
  if (isTable(lines, at)) return runOf(lines, at, (each) => each.includes("|"));
  if (ITEM.test(line)) return endOfList(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return end;
}

function endOfFence(lines, at, mark) {
  for (let end = at + 1; end < lines.length; end += 1) {
    const line = lines[end].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) return end + 1;
  }
  return lines.length;
}

function endOfList(lines, at) {
  const base = indentOf(lines[at]);
  const ordered = isOrdered(lines[at]);
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines.slice(end).find((each) => each.trim());
      if (next === undefined || (indentOf(next) <= base && !ITEM.test(next))) return end;
    } else if (indentOf(line) <= base) {
      if (ITEM.test(line) ? isOrdered(line) !== ordered || RULE.test(line) : interrupts(lines, end)) return end;
    }
    end += 1;
  }
  return end;
}

function runOf(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && belongs(lines[end])) end += 1;
  return end;
}

const isTable = (lines, at) => lines[at].includes("|") && DELIMITERS.test(lines[at + 1] ?? "");
const isOrdered = (line) => /^\s*\d/.test(line);
const indentOf = (line) => line.length - line.trimStart().length;

/** Return true for a line that ends the paragraph before it. */
function interrupts(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  return (
    FENCE.test(line) ||
    HEADING.test(line) ||
    RULE.test(line) ||
    QUOTE.test(line) ||
    isTable(lines, at) ||
    Boolean(item && item[3] && (!isOrdered(line) || /^1[.)]$/.test(item[2])))
  );
}

function block(source, depth) {
  const lines = source.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(lines[0]);
  if (heading) return marked(el(`h${Math.min(heading[1].length + 2, 6)}`), heading[2]);
  if (RULE.test(lines[0])) return el("hr");
  if (depth < DEEPEST) {
    if (QUOTE.test(lines[0])) {
      const inner = split(lines.map((line) => line.replace(QUOTE, "")).join("\n"));
      return el("blockquote", {}, ...inner.map((each) => block(each, depth + 1)));
    }
    if (isTable(lines, 0)) return table(lines);
    if (ITEM.test(lines[0])) return list(lines, depth);
  }
  return marked(el("p"), source);
}

function code(lines, fence) {
  const last = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]) ? -1 : undefined;
  const text = lines.slice(1, last).join("\n");
  const language = fence[2].trim().split(/\s+/)[0].slice(0, 30);
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), copyButton(() => text, "Copy the code")),
    el("pre", { tabindex: 0, "aria-label": `Code, ${language || "text"}` }, el("code", {}, text)),
  );
}

/** Return a button that copies the return value of `text`, and shows the outcome. */
export function copyButton(text, label) {
  const face = (name, words) => button.replaceChildren(icon(name), el("span", {}, words));
  const button = el("button", { type: "button", class: "quiet", "aria-label": label, title: label });
  face("copy", "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      face("done", "Copied");
    } catch {
      face("copy", "Not allowed");
    }
    setTimeout(() => face("copy", "Copy"), 2000);
  });
  return button;
}

function table(lines) {
  const [head, marks, ...rows] = lines.map(cells);
  const sides = marks.map((mark) => {
    const [left, right] = [mark.startsWith(":"), mark.endsWith(":")];
    return right ? (left ? "centre" : "right") : "left";
  });
  const row = (kind, texts) =>
    el("tr", {}, ...head.map((_, i) => marked(el(kind, { class: sides[i] ?? "left" }), texts[i] ?? "")));
  return el(
    "div",
    { class: "table", role: "region", "aria-label": "Table", tabindex: 0 },
    el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, ...rows.map((each) => row("td", each)))),
  );
}

function cells(line) {
  const found = [];
  let cell = "";
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  for (let i = 0; i < inner.length; i += 1) {
    if (inner[i] === "\\" && inner[i + 1] === "|") {
      cell += "|";
      i += 1;
    } else if (inner[i] === "|") {
      found.push(cell.trim());
      cell = "";
    } else cell += inner[i];
  }
  return [...found, cell.trim()];
}

function list(lines, depth) {
  const base = indentOf(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= base + 1) items.push({ offset: item[0].length, lines: [line.slice(item[0].length)] });
    else items.at(-1).lines.push(line.slice(Math.min(indentOf(line), items.at(-1).offset)));
  }
  const first = parseInt(lines[0].trim(), 10);
  const ordered = isOrdered(lines[0]);
  const made = el(ordered ? "ol" : "ul", ordered && first !== 1 ? { start: first } : {});
  for (const item of items) made.append(entry(item.lines.join("\n"), depth));
  return made;
}

function entry(text, depth) {
  const made = el("li");
  const task = /^\[([ xX])\]\s+/.exec(text);
  const [first = "", ...rest] = split(task ? text.slice(task[0].length) : text);
  if (task) made.append(task[1] === " " ? "☐ " : "☑ ");
  const paragraph = block(first, depth + 1);
  if (paragraph.tagName === "P") made.append(...paragraph.childNodes);
  else if (first) made.append(paragraph);
  made.append(...rest.map((each) => block(each, depth + 1)));
  return made;
}

// --- within a line ----------------------------------------------------------------------------------------

function marked(element, text) {
  inline(element, text, 0);
  return element;
}

const TAGS = { "***": ["strong", "em"], "**": ["strong"], __: ["strong"], "*": ["em"], _: ["em"], "~~": ["del"] };

function inline(parent, text, depth) {
  if (depth > DEEPEST || text.length > LONGEST) {
    parent.append(text);
    return;
  }
  const missing = new Set(); // marks without a closing one
  let plain = "";
  const put = (...nodes) => {
    if (plain) parent.append(plain);
    plain = "";
    parent.append(...nodes);
  };
  let at = 0;
  while (at < text.length) {
    const found = special(text, at, depth, missing);
    if (!found) {
      plain += text[at];
      at += 1;
    } else {
      if (found.text !== undefined) plain += found.text;
      else put(found.node);
      at = found.end;
    }
  }
  put();
}

/** Return markup that begins here, as a node or other text, and its end; null for plain text. */
function special(text, at, depth, missing) {
  switch (text[at]) {
    case "\\":
      if (text[at + 1] === "\n") return { node: el("br"), end: at + 2 };
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { text: text[at + 1], end: at + 2 } : null;
    case " ":
      return text.startsWith("  \n", at) ? { node: el("br"), end: at + 3 } : null;
    case "`":
      return codeSpan(text, at, missing);
    case "!":
      return text[at + 1] === "[" ? link(text, at + 1, depth, "image: ") : null;
    case "[":
      return link(text, at, depth);
    case "<":
      return depth < DEEPEST && /^<https?:\/\/[^\s<>]+>/.test(text.slice(at, at + 2000)) ? bare(text, at + 1, 1) : null;
    case "h":
      return depth < DEEPEST && /(^|[\s(])$/.test(text.slice(Math.max(at - 1, 0), at)) ? bare(text, at, 0) : null;
    case "*":
    case "_":
    case "~":
      return emphasis(text, at, depth, missing);
    default:
      return null;
  }
}

function codeSpan(text, at, missing) {
  const mark = /^`+/.exec(text.slice(at, at + 100))[0];
  let end = missing.has(mark) ? -1 : at + mark.length;
  while (end >= 0) {
    end = text.indexOf(mark, end);
    if (end < 0) break;
    let after = end + mark.length;
    if (text[after] !== "`") {
      const inner = text.slice(at + mark.length, end).replace(/\n/g, " ");
      const padded = /^ .*[^ ].* $/.test(inner);
      return { node: el("code", {}, padded ? inner.slice(1, -1) : inner), end: after };
    }
    while (text[after] === "`") after += 1;
    end = after;
  }
  missing.add(mark);
  return { text: mark, end: at + mark.length };
}

function link(text, at, depth, before = "") {
  if (depth >= DEEPEST) return null;
  let open = 0;
  let close = -1;
  for (let i = at; i < Math.min(text.length, at + 2000) && close < 0; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "[") open += 1;
    else if (text[i] === "]" && (open -= 1) === 0) close = i;
  }
  if (close < 0 || text[close + 1] !== "(") return null;
  const target = /^\(\s*<?((?:[^\s()<>]|\([^\s()]*\))*)>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(
    text.slice(close + 1, close + 3000),
  );
  if (!target) return null;
  const words = text.slice(at + 1, close);
  const made = anchor(target[1]);
  if (!made) return null;
  made.append(before);
  inline(made, words || target[1], Math.max(depth + 1, DEEPEST)); // no link within a link
  return { node: made, end: close + 1 + target[0].length };
}

function bare(text, at, closing) {
  const found = /^https?:\/\/[^\s<>"]+/.exec(text.slice(at, at + 2000));
  if (!found) return null;
  let url = found[0];
  if (!closing) {
    url = url.replace(/[.,;:!?'*_~]+$/, "");
    if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
  }
  const made = closing && text[at + url.length] !== ">" ? null : anchor(url);
  if (!made) return null;
  made.append(url);
  return { node: made, end: at + url.length + closing };
}

/** Return a link to another page; null for other schemes: `javascript:` and the like stay text. */
function anchor(url) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return null;
  }
  if (parsed.protocol !== "http:" && parsed.protocol !== "https:") return null;
  return el("a", { href: parsed.href, rel: "noopener noreferrer", target: "_blank" });
}

function emphasis(text, at, depth, missing) {
  const run = /^(\*{1,3}|_{1,2}|~~)/.exec(text.slice(at, at + 3))?.[0];
  if (!run || !TAGS[run] || /[\s]|^$/.test(text[at + run.length] ?? "")) return null;
  if (run[0] === "_" && /\w/.test(text[at - 1] ?? "")) return null;
  const end = missing.has(run) ? -1 : closing(text, at + run.length, run);
  if (end < 0) {
    missing.add(run);
    return { text: run, end: at + run.length };
  }
  const [outer, inner] = TAGS[run].map((name) => el(name));
  if (inner) outer.append(inner);
  inline(inner ?? outer, text.slice(at + run.length, end), depth + 1);
  return { node: outer, end: end + run.length };
}

/** Return the place of the closing mark: as many of the same, not after a space; -1 for none. */
function closing(text, from, run) {
  let i = from;
  while (i < text.length) {
    if (text[i] === "\\") i += 2;
    else if (text[i] === "`") i = Math.max(text.indexOf("`", i + 1), i) + 1;
    else if (text[i] === run[0]) {
      let end = i;
      while (text[end] === run[0]) end += 1;
      const fits = end - i === run.length || (run.length < 3 && end - i === 3);
      const word = run[0] === "_" && /\w/.test(text[end] ?? "");
      if (fits && i > from && !/\s/.test(text[i - 1]) && !word) return i + (end - i - run.length);
      i = end;
    } else i += 1;
  }
  return -1;
}
