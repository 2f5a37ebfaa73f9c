// The messages of a conversation as elements. Long conversations are drawn from their end, a few messages a frame.

import { copyButton } from "./copy.js";
import { el, icon, say } from "./dom.js";
import { render } from "./markdown.js";
import { soon } from "./slices.js";
import { versions } from "./tree.js";
import { count, seconds, shortName } from "./words.js";

const AT_ONCE = 6; // messages at the end that are drawn before the next frame

/** The list of messages. `acts` has what its buttons do: regenerate(turn), edit(turn, text) and choose(turn). */
export class Turns {
  #list;
  #acts;
  #rows = new Map(); // turn -> its elements: its row, and the parts of it once they are drawn
  #versions = new Map(); // turn -> all versions of it

  constructor(list, acts) {
    this.#list = list;
    this.#acts = acts;
  }

  /** Show these turns of a conversation. Those that are shown already keep their elements. */
  show(talk, turns) {
    this.#versions = versions(talk);
    const before = [...this.#rows.keys()];
    let same = 0;
    while (same < turns.length && turns[same] === before[same]) same += 1;
    for (const turn of before.slice(same)) {
      this.#rows.get(turn).row.remove();
      this.#rows.delete(turn);
    }
    for (const turn of turns.slice(same)) this.#rows.set(turn, { row: el("li", { class: `turn ${turn.role}` }) });
    this.#list.append(...turns.slice(same).map((turn) => this.#rows.get(turn).row));
    for (const turn of turns.slice(0, same)) this.#frame(turn);
    for (const [i, turn] of turns.entries()) {
      if (i < same) continue;
      if (i >= turns.length - AT_ONCE) this.draw(turn);
      else soon(() => this.draw(turn));
    }
  }

  /** Draw a turn that has changed, if it is shown. */
  draw(turn) {
    const parts = this.#rows.get(turn);
    if (!parts) return;
    if (!parts.said) this.#furnish(turn, parts);
    if (turn.role === "user") say(parts.said, turn.content);
    else {
      const over = turn.phase === "over";
      render(parts.said, turn.content, over);
      if (turn.reasoning) render(parts.thoughts, turn.reasoning, over || Boolean(turn.content));
    }
    this.#frame(turn);
  }

  /** Return an answer as it is read, without marks. */
  textOf(turn) {
    return this.#rows.get(turn)?.said?.textContent || turn.content;
  }

  /** Have the user change a message of theirs. */
  edit(turn) {
    const { row, said, end } = this.#rows.get(turn);
    if (row.querySelector("form")) return;
    const field = el("textarea", { "aria-label": "Message", rows: 1 });
    field.value = turn.content;
    const close = () => {
      form.remove();
      row.classList.remove("edited");
      [said.hidden, end.hidden] = [false, false];
      end.querySelector(".edit").focus();
    };
    const submit = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      close();
      if (text && text !== turn.content) this.#acts.edit(turn, text);
    };
    const form = el(
      "form",
      { class: "editing", submit },
      field,
      el(
        "p",
        { class: "buttons" },
        el("button", { type: "submit" }, "Send"),
        el("button", { type: "button", click: close }, "Cancel"),
      ),
    );
    form.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && event.target === field) submit(event);
      if (event.key === "Escape") event.stopPropagation();
    });
    [said.hidden, end.hidden] = [true, true];
    row.classList.add("edited");
    row.append(form);
    field.focus();
  }

  /** Put all parts into the row of a turn. */
  #furnish(turn, parts) {
    const mine = turn.role === "user";
    const thoughts = el("div", { class: "said" });
    const inner = {
      who: el("h2", { class: mine ? "unseen" : "who" }, mine ? "You" : ""),
      thinking: el("details", { class: "thinking" }, el("summary", {}, "Thinking"), thoughts),
      said: el("div", { class: mine ? "said plain-text" : "said" }),
      calls: el("div", { class: "calls" }),
      waits: el("p", { class: "waits" }),
      problem: el("p", { class: "problem" }),
      retry: el("button", { type: "button", class: "retry", click: () => this.#acts.regenerate(turn) }, "Try again"),
      end: el("div", { class: "end" }, this.#steps(turn), el("p", { class: "numbers" }), this.#icons(turn, mine)),
    };
    parts.row.append(...Object.values(inner));
    Object.assign(parts, inner, { thoughts });
  }

  #icons(turn, mine) {
    const button = (name, face, label, act) =>
      el("button", { type: "button", class: `quiet ${name}`, "aria-label": label, title: label, click: act }, icon(face));
    const what = mine
      ? [copyButton(() => turn.content, "Copy the message"), button("edit", "rename", "Edit the message", () => this.edit(turn))]
      : [
          copyButton(() => turn.content, "Copy the answer"),
          button("again", "again", "Regenerate the answer", () => this.#acts.regenerate(turn)),
        ];
    return el("p", { class: "icons" }, ...what);
  }

  #steps(turn) {
    const step = (by, label, face) => {
      const go = () => {
        const all = this.#versions.get(turn);
        const next = all[all.indexOf(turn) + by];
        if (next) this.#acts.choose(next);
        this.#rows.get(next)?.end.querySelector(`[aria-label="${label}"]`).focus({ preventScroll: true });
      };
      return el("button", { type: "button", class: "quiet", "aria-label": label, title: label, click: go }, face);
    };
    return el("span", { class: "versions", role: "group" }, step(-1, "Earlier version", "‹"), el("span"), step(1, "Later version", "›"));
  }

  /** Draw what is around the text of a turn. */
  #frame(turn) {
    const parts = this.#rows.get(turn);
    if (!parts.said) return; // it is drawn later
    if (turn.role !== "user") {
      say(parts.who, turn.model ? shortName(turn.model) : "Model");
      parts.who.title = turn.model ?? "";
    }
    parts.thinking.hidden = !turn.reasoning;
    const calls = turn.calls ?? [];
    if (calls.length) parts.calls.replaceChildren(...calls.filter(Boolean).map(call));
    parts.calls.hidden = !calls.length;
    say(parts.waits, waitWords(turn));
    parts.waits.hidden = !parts.waits.textContent;
    say(parts.problem, turn.problem ?? "");
    parts.problem.hidden = parts.retry.hidden = !turn.problem;
    const [between, numbers, icons] = parts.end.children;
    say(numbers, turn.numbers ? numberWords(turn) : "");
    numbers.hidden = !numbers.textContent;
    parts.end.hidden = parts.row.classList.contains("edited") || (turn.role !== "user" && turn.phase !== "over");
    icons.firstElementChild.hidden = !turn.content;
    icons.lastElementChild.hidden = Boolean(turn.problem); // it has a button of its own
    this.#countVersions(between, turn);
  }

  #countVersions(between, turn) {
    const all = this.#versions.get(turn);
    const index = all.indexOf(turn);
    const [earlier, place, later] = between.children;
    between.hidden = all.length < 2;
    between.ariaLabel = `Version ${index + 1} of ${all.length}`;
    say(place, `${index + 1} / ${all.length}`);
    earlier.ariaDisabled = String(index === 0);
    later.ariaDisabled = String(index === all.length - 1);
  }
}

const call = ({ name, arguments: given }) =>
  el("details", { class: "call" }, el("summary", {}, `Call of ${name}`), el("pre", { tabindex: 0 }, el("code", {}, given)));

/** Return what an answer waits for. Pure. */
export function waitWords({ phase, progress }) {
  switch (phase) {
    case "asking":
      return "Sending…";
    case "first token":
      return progress ? `${progress}…` : "Reading the prompt…";
    case "group":
      return "Waiting for the model to start again. The answer goes on then…";
    default:
      return "";
  }
}

/** Return the figures of a finished answer. Pure. */
function numberWords({ numbers, finish, stopped }) {
  const { first_token_s: first, tokens_per_second: speed, tokens, prompt_tokens: prompt, cached_tokens: cached } = numbers;
  const [about, overall] = numbers.speed_of ?? [];
  const known = (value, words) => (Number.isFinite(value) ? words(value) : "");
  return [
    stopped ? "stopped" : "",
    finish === "length" ? "cut off at the token limit" : "",
    known(speed, (value) => [about, value.toFixed(1), "tokens/s", overall].filter(Boolean).join(" ")),
    known(tokens, (value) => count(value, "token")),
    known(first, (value) => `${seconds(value)} to first token`),
    known(prompt, (value) => `prompt ${value}${cached ? ` (${cached} cached)` : ""}`),
    known(numbers.waited_s, (value) => `paused ${seconds(value)} for a restart`),
  ]
    .filter(Boolean)
    .join(" · ");
}
