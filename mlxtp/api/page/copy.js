// A button that copies a text.

import { el, icon } from "./dom.js";

const SHOWN_MS = 2000; // of the outcome

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
    setTimeout(() => face("copy", "Copy"), SHOWN_MS);
  });
  return button;
}
