// LangChain's agent with one tool, over chat completions, Responses and Messages, streaming and not,
// and an object by a schema.
import { readFile } from "node:fs/promises";
import { ChatAnthropic } from "@langchain/anthropic";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";

const [url, model, note] = process.argv.slice(2);
const openai = { model, apiKey: "none", maxRetries: 0, configuration: { baseURL: `${url}/v1` } };
const models = [
  new ChatOpenAI(openai),
  new ChatOpenAI({ ...openai, useResponsesApi: true }),
  new ChatAnthropic({ model, apiKey: "none", maxRetries: 0, anthropicApiUrl: url, maxTokens: 500 }),
];
const read_note = tool(() => readFile(note, "utf-8"), {
  name: "read_note",
  description: "Reads a note.",
  schema: z.object({ name: z.string() }),
});

const [word] = (await readFile(note, "utf-8")).match(/word-[0-9a-f]+/);
// The schema allows one answer, which is thus the scripted engine's.
const schema = z.object({ answer: z.literal(`The notes say: ${word}.`), pages: z.number().int() });
const input = { messages: [{ role: "user", content: "Read the note." }] };

for (const each of models) {
  const agent = createAgent({ model: each, tools: [read_note] });
  const { messages } = await agent.invoke(input);
  console.log(messages.at(-1).text.trim());
  let streamed = "";
  for await (const [chunk] of await agent.stream(input, { streamMode: "messages" })) {
    if (chunk.getType() === "ai") streamed += chunk.text;
  }
  console.log(streamed.trim());
  console.log((await each.withStructuredOutput(schema).invoke("Describe it.")).answer);
}
