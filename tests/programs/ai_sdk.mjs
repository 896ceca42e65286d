// A loop of one tool with each provider of the AI SDK, streaming and not, and an object by a schema.
import { readFile } from "node:fs/promises";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model, note] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(options);
const models = [
  createOpenAICompatible({ name: "gateway", supportsStructuredOutputs: true, ...options })(model),
  openai.chat(model),
  openai.responses(model),
  createAnthropic(options)(model),
];
const read_note = tool({
  description: "Reads a note.",
  inputSchema: z.object({ name: z.string() }),
  execute: () => readFile(note, "utf-8"),
});
const [word] = (await readFile(note, "utf-8")).match(/word-[0-9a-f]+/);
// The schema allows one answer, which is thus the scripted engine's.
const schema = z.object({ answer: z.literal(`The notes say: ${word}.`), pages: z.number().int() });

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
  const object = { model: each, prompt: "Describe it.", output: Output.object({ schema }) };
  console.log((await generateText({ ...object, maxRetries: 0 })).output.answer);
}
