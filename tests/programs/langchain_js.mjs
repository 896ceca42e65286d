// LangChain's agent with one tool, over chat completions, Responses and Messages, streaming and not.
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
}
