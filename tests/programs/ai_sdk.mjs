// A loop of one tool with each provider of the AI SDK, streaming and not.
import { readFile } from "node:fs/promises";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model, note] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(options);
const models = [
  createOpenAICompatible({ name: "gateway", ...options })(model),
  openai.chat(model),
  openai.responses(model),
  createAnthropic(options)(model),
];
const read_note = tool({
  description: "Reads a note.",
  inputSchema: z.object({ name: z.string() }),
  execute: () => readFile(note, "utf-8"),
});

for (const each of models) {
  const request = {
    model: each,
    prompt: "Read the note.",
    tools: { read_note },
    stopWhen: stepCountIs(3),
    maxRetries: 0,
  };
  console.log((await generateText(request)).text.trim());
  console.log((await streamText(request).text).trim());
}
