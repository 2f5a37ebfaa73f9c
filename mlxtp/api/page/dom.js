// Elements, made by hand: no text of a model or of another Mac is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const by = (id) => document.getElementById(id);

/** An element with attributes, listeners (functions) and children (nodes or text). */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** One of the icons that `index.html` defines. */
export const icon = (name) => svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** Text of an element, changed only when it differs: a live region speaks of changes alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Fill a `dl` with pairs of a term and its value. */
export const define = (list, pairs) =>
  list.replaceChildren(...pairs.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));

/** A short word for those who listen rather than look. */
export function speak(text) {
  if (!text) return;
  const log = by("spoken");
  log.append(el("p", {}, text));
  while (log.childElementCount > 20) log.firstElementChild.remove();
}

/**
 * A question in a dialog. `field`: the label of what shall be typed, or nothing for yes or no.
 * Gives what was typed (or true), and null when it was left.
 */
export function question({ title, words = "", field = "", value = "", yes, secret = false }) {
  const dialog = by("asking");
  if (dialog.open) return Promise.resolve(null);
  say(by("asking-title"), title);
  say(by("asking-words"), words);
  say(by("asking-label"), field);
  say(by("asking-yes"), yes);
  by("asking-field").hidden = !field;
  const input = by("asking-value");
  input.type = secret ? "password" : "text";
  input.value = value;
  return new Promise((resolve) => {
    const done = new AbortController();
    const close = (answer) => {
      done.abort();
      dialog.close();
      resolve(answer);
    };
    const accept = () => close(field ? input.value.trim() : true);
    const listen = (target, what, act) => target.addEventListener(what, act, { signal: done.signal });
    listen(by("asking-yes"), "click", accept);
    listen(by("asking-no"), "click", () => close(null));
    listen(dialog, "cancel", (event) => {
      event.preventDefault();
      close(null);
    });
    listen(input, "keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        accept();
      }
    });
    dialog.showModal();
    if (field) input.select();
    else by("asking-no").focus();
  });
}
