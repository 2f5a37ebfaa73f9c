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

/**
 * Return a bar: parts of a whole, each `[class, amount]`, beside each other. `words` are its text equivalent; without
 * them the text beside it says the same.
 */
export function bar(whole, parts, words = "") {
  let x = 0;
  const rects = parts.map(([name, amount]) => {
    const width = whole > 0 ? Math.min((100 * amount) / whole, 100 - x) : 0;
    const made = svg("rect", { class: name, x: `${x}%`, width: `${Math.max(width, 0)}%`, height: "100%" });
    x += Math.max(width, 0);
    return made;
  });
  return svg("svg", { class: "bar-of", ...(words ? { role: "img", "aria-label": words } : { "aria-hidden": "true" }) }, ...rects);
}

/**
 * Bring a list to these items by changing only what differs: users may be reading, or have the focus there. Listeners of
 * an item stay, so those of one entry have to fit any state of it; `data-key` tells entries apart.
 */
export function update(list, items) {
  items.forEach((item, i) => {
    const present = list.childNodes[i];
    if (!present) list.append(item);
    else if (!present.isEqualNode(item)) become(present, item);
  });
  while (list.childNodes.length > items.length) list.lastChild.remove();
}

function become(present, item) {
  const same = present.nodeName === item.nodeName && present.dataset?.key === item.dataset?.key;
  if (!same) present.replaceWith(item);
  else if (present.nodeType === Node.TEXT_NODE) present.data = item.data;
  else {
    for (const { name } of [...present.attributes]) if (!item.hasAttribute(name)) present.removeAttribute(name);
    for (const { name, value } of item.attributes) if (present.getAttribute(name) !== value) present.setAttribute(name, value);
    update(present, [...item.childNodes]);
  }
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
