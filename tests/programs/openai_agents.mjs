// An agent of openai-agents with one tool, over chat completions and Responses, streaming and not.
import { readFile } from "node:fs/promises";
import { Agent, OpenAIProvider, Runner, tool } from "@openai/agents";
import { z } from "zod";

const [url, model, note] = process.argv.slice(2);
const read_note = tool({
  name: "read_note",
  description: "Reads a note.",
  parameters: z.object({ name: z.string() }),
  execute: () => readFile(note, "utf-8"),
});
const agent = new Agent({ name: "reader", model, tools: [read_note] });

for (const useResponses of [false, true]) {
  const options = { baseURL: `${url}/v1`, apiKey: "none", useResponses };
  const modelProvider = new OpenAIProvider(options);
  const runner = new Runner({ modelProvider, tracingDisabled: true });
  console.log((await runner.run(agent, "Read the note.")).finalOutput.trim());
  const streamed = await runner.run(agent, "Read the note.", { stream: true });
  await streamed.completed;
  console.log(streamed.finalOutput.trim());
}
