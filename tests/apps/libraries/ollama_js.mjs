// Ollama's own library for JavaScript.
import { Ollama } from "ollama";
import { z } from "zod";
import { CALL, JSON_, MODEL, SAY, URL_, check } from "./checks.mjs";

const client = new Ollama({ host: URL_ }), user = (content) => [{ role: "user", content }];
const Answer = z.object({ answer: z.number().int(), word: z.string() });
const look_up = {
  type: "function",
  function: { name: "look_up", description: "", parameters: { type: "object", properties: { n: { type: "integer" } } } },
};

await check("list and show", async () => (await client.list()).models.length && (await client.show({ model: MODEL })).details);
await check("chat", async () => (await client.chat({ model: MODEL, messages: user(SAY) })).message.content, "blue");
await check("stream", async () => {
  let text = "";
  for await (const part of await client.chat({ model: MODEL, messages: user(SAY), stream: true })) text += part.message.content;
  return text;
}, "blue");
await check("tool loop", async () => {
  const asked = { model: MODEL, tools: [look_up] };
  const { message } = await client.chat({ ...asked, messages: user(CALL) });
  const content = `FALCON-${message.tool_calls[0].function.arguments.n}`;
  const told = [...user(CALL), message, { role: "tool", tool_name: "look_up", content }];
  return (await client.chat({ ...asked, messages: told })).message.content;
}, "FALCON-5", true);
await check("format", async () => {
  const found = await client.chat({ model: MODEL, messages: user(JSON_), format: z.toJSONSchema(Answer, { io: "input" }) });
  return Answer.parse(JSON.parse(found.message.content));
}, "nine");
