// The AI SDK by each of its providers: stream, tool loop, objects, objects beside tools.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { CALL, JSON_, MODEL, PART, SAY, URL_, check } from "./checks.mjs";

const options = { baseURL: `${URL_}/v1`, apiKey: "none", name: "mlxtp", supportsStructuredOutputs: true };
const model = {
  compatible: () => createOpenAICompatible(options)(MODEL),
  chat: () => createOpenAI(options).chat(MODEL),
  responses: () => createOpenAI(options).responses(MODEL),
  anthropic: () => createAnthropic(options)(MODEL),
}[PART]();
const asked = { model, maxRetries: 0, onError() {} };
const output = Output.object({ schema: z.object({ answer: z.number().int(), word: z.string() }) });
const look_up = tool({ inputSchema: z.object({ n: z.number().int() }), execute: ({ n }) => `FALCON-${n}` });
// Anthropic's provider takes the object from a call of its own tool named "json".
const both = `DO call json {"answer": 9, "word": "nine"} ${JSON_}`;
const looped = { tools: { look_up }, stopWhen: stepCountIs(4) };

await check("stream", async () => await streamText({ ...asked, prompt: SAY }).text, "blue");
await check("tool loop", async () => (await generateText({ ...asked, ...looped, prompt: CALL })).text, "FALCON-5", true);
await check("streamed tool loop", async () => await streamText({ ...asked, ...looped, prompt: CALL }).text, "FALCON-5", true);
await check("object", async () => (await generateText({ ...asked, output, prompt: both })).output, "nine");
await check("object beside tools",
  async () => (await generateText({ ...asked, ...looped, output, prompt: `${CALL} ${both}` })).output, "nine", true);
