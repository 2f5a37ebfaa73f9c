// Conversations as files: Markdown for people; JSON with all versions, which can be read back.

import { begin, titleOf, turnsOf, words } from "./talks.js";
import { shownTurns } from "./tree.js";
import { shortName } from "./words.js";

const FORMAT = "mlxtp conversation 2";
const FORMATS = ["mlxtp conversation 1", FORMAT];
export const LARGEST_BYTES = 4_000_000; // of a file that is read back; the browser's storage has about 5 MB

export const toJson = (talk) => JSON.stringify({ format: FORMAT, ...talk }, null, 2);

/** Return what is shown of a conversation, without thoughts. Pure. */
export function toMarkdown(talk) {
  const turns = shownTurns(talk).map(({ role, model, content, problem }) => {
    const who = role === "user" ? "You" : model ? shortName(model) : "Model";
    return [`## ${who}`, content.trim(), problem ? `*${problem}*` : ""].filter(Boolean).join("\n\n");
  });
  return `${[`# ${talk.title}`, ...turns].join("\n\n")}\n`;
}

/** Return the conversation of an exported file, as a new one. Throws an Error with the reason if it is none. */
export function fromJson(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON.");
  }
  if (!FORMATS.includes(found?.format) || !Array.isArray(found.turns)) throw new Error("it is not an exported conversation.");
  const turns = turnsOf(found);
  if (!turns?.length) throw new Error("it has no messages, or ones that cannot be read.");
  const title = typeof found.title === "string" && found.title.trim() ? found.title.slice(0, 200) : titleOf(turns[0].content);
  const shown = Object.fromEntries(Object.entries(found.shown ?? {}).filter(([, index]) => Number.isInteger(index)));
  return { ...begin(), title, named: true, model: words(found.model), turns, shown };
}

/** Have the browser store a text as a file. */
export function download(text, type, title, ending) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
  const link = document.createElement("a");
  Object.assign(link, { href: url, download: `${name}.${ending}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
