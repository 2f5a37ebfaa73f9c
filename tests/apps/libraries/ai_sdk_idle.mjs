// The AI SDK with its limit on the silence between two parts of a stream, below the prefill.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createAnthropic } from "@ai-sdk/anthropic";
import { streamText } from "ai";
import { MODEL, SAY, URL_, check } from "./checks.mjs";

const options = { baseURL: `${URL_}/v1`, apiKey: "none", name: "mlxtp", includeUsage: true };
const models = {
  compatible: createOpenAICompatible(options)(MODEL),
  chat: createOpenAI(options).chat(MODEL),
  responses: createOpenAI(options).responses(MODEL),
  anthropic: createAnthropic(options)(MODEL),
};
for (const [name, model] of Object.entries(models)) {
  // Without raw chunks the SDK passes no event on that has no content, and counts none.
  const asked = { model, prompt: SAY, maxRetries: 0, timeout: { chunkMs: 4500 }, includeRawChunks: true, onError() {} };
  await check(name, async () => await streamText(asked).text, "blue");
}
