// One answer, from the request to its last event: its content, its speed, and the reason for a wait.

import { ask, events, Refused } from "./net.js";
import { forming } from "./watch.js";
import { COMING } from "./words.js";

const AGAIN_MS = 1000; // between retries while a model is loading
const LOOK_MS = 200; // between checks for a group that serves
const MEASURED_MS = 100; // shortest time for a rate; below it, the wait for the first token counts too
const FRESH_MS = 700; // a group that has just sent a token serves, even if the last snapshot differs

/**
 * Request an answer. `turn` is filled as it arrives, `changed` is called each time; `signal` stops it.
 *
 * turn.phase    "asking", "first token", "group", "generating", then "over"
 * turn.progress how far the model or the prompt is, in words, before the first token
 * turn.calls    the calls of tools, each with its name and arguments
 * turn.problem  the reason that it is incomplete, as text
 * turn.stopped  true if the user stopped it
 */
export async function answer(body, turn, changed, signal) {
  const meter = new Meter();
  const watching = setInterval(() => {
    if (setPhase(turn, meter)) changed();
  }, LOOK_MS);
  try {
    await stream(body, turn, meter, changed, signal);
  } catch (error) {
    const what = turn.content || turn.reasoning ? "The answer is incomplete" : "There is no answer";
    if (signal.aborted) turn.stopped = true;
    else turn.problem = `${what}: ${error.message}`;
  } finally {
    clearInterval(watching);
    turn.phase = "over";
    turn.numbers = meter.numbers();
    changed();
  }
}

async function stream(body, turn, meter, changed, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await whenStarted(() =>
    ask("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(asked),
      signal,
    }),
  );
  meter.answered = true;
  for await (const data of events(response)) {
    if (data === null) {
      if (setPhase(turn, meter)) changed();
      continue;
    }
    if (data === "[DONE]") {
      if (!turn.finish) throw new Refused("it ended without a reason.");
      return;
    }
    take(JSON.parse(data), turn, meter);
    setPhase(turn, meter);
    changed();
  }
  throw new Refused("the connection to the agent ended.");
}

/** Return the response of `send`. Retry while a model is loading. */
async function whenStarted(send) {
  for (;;) {
    try {
      return await send();
    } catch (error) {
      if (!COMING.includes(error.state)) throw error;
    }
    await new Promise((go) => setTimeout(go, AGAIN_MS));
  }
}

function take(chunk, turn, meter) {
  if (chunk.error) throw new Refused(chunk.error.message ?? String(chunk.error));
  if (chunk.usage) meter.usage = chunk.usage;
  turn.progress = progressWords(chunk);
  turn.model = chunk.model ?? turn.model;
  const [choice] = chunk.choices ?? [];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (content || reasoning || calls) meter.token();
  for (const call of calls ?? []) takeCall(call, (turn.calls ??= []));
  turn.content += content ?? "";
  turn.reasoning += reasoning ?? "";
  if (choice.finish_reason) turn.finish = choice.finish_reason;
}

function takeCall({ index = 0, function: { name, arguments: given } = {} }, calls) {
  calls[index] ??= { name: "", arguments: "" };
  calls[index].name += name ?? "";
  calls[index].arguments += given ?? "";
}

/** Return what the agent tells before the first token: the state of the model, or how much of the prompt is read. Pure. */
export function progressWords({ state, prompt_progress: read }) {
  if (!read) return state ? `The model: ${state}` : "";
  return `Reading the prompt: ${read.processed.toLocaleString("en")} of ${read.total.toLocaleString("en")} tokens`;
}

/** Update the phase. Return true if it has changed. */
function setPhase(turn, meter) {
  if (turn.phase === "over") return false;
  const phase = meter.look() ? "group" : !meter.answered ? "asking" : meter.first === null ? "first token" : "generating";
  const other = phase !== turn.phase;
  turn.phase = phase;
  return other;
}

/** Timing of one answer, in milliseconds. Waits for a group are counted separately. */
class Meter {
  began = performance.now();
  answered = false; // the agent has accepted the request
  first = null;
  last = null;
  usage = null;
  pieces = 0; // a stopped answer has no usage; the engine sends about one token in each
  waited = 0;
  #waits = null;
  #before = 0; // wait for a group before the first token

  token() {
    this.last = performance.now();
    this.pieces += 1;
    this.look();
    if (this.first === null) {
      this.first = this.last;
      this.#before = this.waited;
    }
  }

  /** Return true while it waits for a group. */
  look() {
    const now = performance.now();
    const waits = forming() && !(this.last !== null && now - this.last < FRESH_MS);
    if (waits) this.#waits ??= now;
    else if (this.#waits !== null) {
      this.waited += now - this.#waits;
      this.#waits = null;
    }
    return waits;
  }

  numbers() {
    this.look();
    const { usage, first, last } = this;
    const tokens = usage?.completion_tokens ?? null;
    const made = tokens ?? this.pieces;
    const took = last - first - (this.waited - this.#before);
    const measured = made > 1 && took >= MEASURED_MS;
    const overall = last - this.began - this.waited;
    return {
      first_token_s: first === null ? null : (first - this.began) / 1000,
      tokens_per_second: first === null ? null : measured ? (made - 1) / (took / 1000) : made / (overall / 1000),
      speed_of: [tokens === null ? "about" : "", measured ? "" : "overall"],
      tokens,
      prompt_tokens: usage?.prompt_tokens ?? null,
      cached_tokens: usage?.prompt_tokens_details?.cached_tokens ?? null,
      waited_s: this.waited > 0 ? this.waited / 1000 : null,
    };
  }
}
