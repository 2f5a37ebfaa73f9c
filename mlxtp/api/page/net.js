// Requests to this agent, and the server-sent events in its answers.

import { askForApiKey, authorization } from "./keys.js";

/** A failed request. The message is the agent's own, if it sent one. */
export class Refused extends Error {
  constructor(message, status = 0, code = "", state = "") {
    super(message);
    this.status = status;
    this.code = code;
    this.state = state; // of a cluster that is not ready
  }
}

/** Call `fetch` with the endpoint's key; prompt for one on 401. Throw Refused for any status but 2xx. */
export async function ask(path, options = {}) {
  for (;;) {
    try {
      return await askOnce(path, options);
    } catch (error) {
      if (error.status !== 401 || !(await askForApiKey(error.message))) throw error;
    }
  }
}

/** Do the same without a prompt. */
export async function askOnce(path, options = {}) {
  const response = await reach(path, { ...options, headers: { ...options.headers, ...authorization() } });
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Send an administration request with its own key. Return the JSON body. */
export async function administer(method, what, key, body) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const options = { method, headers, body: body ? JSON.stringify(body) : undefined };
  const response = await reach(`admin/${what}`, options);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

async function reach(path, options) {
  try {
    return await fetch(path, { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The agent cannot be reached.");
  }
}

async function refusal(response) {
  try {
    const { error } = await response.json();
    return new Refused(error.message ?? String(error), response.status, error.code ?? "", error.state ?? "");
  } catch {
    return new Refused(`The agent answered with status ${response.status}.`, response.status);
  }
}

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new Refused("the connection to the agent broke.");
}

/** Yield the data of each event; null for a comment, which shows that the agent is alive. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith(":")) yield null;
        else if (line.startsWith("data:")) data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
