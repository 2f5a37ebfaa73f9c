// Construction of elements. Text of a model or of another Mac is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const by = (id) => document.getElementById(id);

/** Return an element with attributes, listeners (functions) and children (nodes or text). */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Return an SVG element, likewise. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Return one of the icons of `index.html`. */
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

/** Set an element's text if it differs, since a live region announces each change. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Fill a `dl` with pairs of a term and its value. */
export const define = (list, pairs) =>
  list.replaceChildren(...pairs.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));

/** Announce a short text to users of a screen reader. */
export function speak(text) {
  if (!text) return;
  const log = by("spoken");
  log.append(el("p", {}, text));
  while (log.childElementCount > 20) log.firstElementChild.remove();
}

/**
 * Ask the user in a dialog. `field`: the label of a text field; empty for a yes/no question.
 * Return the entered text (or true), and null when the user cancels.
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
