// The openai package and the Vercel AI SDK, unchanged, against the gateway at GATEWAY_BASE_URL.
import assert from "node:assert/strict";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = process.env.GATEWAY_BASE_URL;
assert.ok(baseURL, "GATEWAY_BASE_URL is not set");

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const greedy = { model: "demo", temperature: 0 };
const capital = [{ role: "user", content: "What is the capital of France?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const description = "Get the weather in a city";
const tools = [{ type: "function", function: { name: "get_weather", description, parameters } }];
const forecast = '{"temperature": 21}';
const person = z.strictObject({ name: z.string().max(12), mood: z.enum(["happy", "sad"]) });

const compatible = createOpenAICompatible({
  name: "gateway",
  baseURL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const claude = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const message = { model: "demo", max_tokens: 100 };
const anthropic = createAnthropic({ baseURL, apiKey: "none" });
const responses = createOpenAI({ baseURL, apiKey: "none" });
const kept = { ...greedy, store: false };
const model = compatible("demo");
const settings = { model, temperature: 0, maxRetries: 0 };
const getWeather = tool({
  description,
  inputSchema: jsonSchema(parameters),
  execute: async () => ({ temperature: 21 }),
});

async function collect(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

const checks = {
  async "openai: chat"() {
    const answer = await client.chat.completions.create({ ...greedy, messages: capital });
    assert.match(answer.choices[0].message.content, /Paris/);
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.ok(answer.usage.completion_tokens > 0);
    assert.ok(answer._request_id);
  },

  async "openai: stream"() {
    const asked = { ...greedy, messages: capital };
    const whole = await client.chat.completions.create(asked);
    const options = { stream: true, stream_options: { include_usage: true } };
    const chunks = await collect(await client.chat.completions.create({ ...asked, ...options }));
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(chunks.at(-1).usage, whole.usage);
    const final = await client.chat.completions.stream(asked).finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
  },

  async "openai: a streamed call, handed back with its answer"() {
    const asked = { ...greedy, messages: weather, tools };
    const calls = [];
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
      for (const delta of chunk.choices[0]?.delta.tool_calls ?? []) {
        calls[delta.index] ??= { ...delta, function: { name: "", arguments: "" } };
        calls[delta.index].function.name += delta.function.name ?? "";
        calls[delta.index].function.arguments += delta.function.arguments ?? "";
      }
    }
    assert.equal(calls.length, 1);
    assert.equal(calls[0].function.name, "get_weather");
    assert.deepEqual(JSON.parse(calls[0].function.arguments), { city: "Paris" });
    const answer = await client.chat.completions.create({
      ...asked,
      messages: [
        ...weather,
        { role: "assistant", content: null, tool_calls: calls },
        { role: "tool", tool_call_id: calls[0].id, content: forecast },
      ],
    });
    assert.match(answer.choices[0].message.content, /21/);
  },

  async "openai: runTools, streamed and not"() {
    for (const stream of [true, false]) {
      const cities = [];
      const run = ({ city }) => {
        cities.push(city);
        return forecast;
      };
      const runner = client.chat.completions.runTools({
        ...greedy,
        stream,
        messages: weather,
        tools: [
          {
            type: "function",
            function: {
              name: "get_weather",
              description,
              parameters,
              parse: JSON.parse,
              function: run,
            },
          },
        ],
      });
      assert.match(await runner.finalContent(), /21/);
      assert.deepEqual(cities, ["Paris"]);
    }
  },

  async "openai: parse"() {
    const answer = await client.chat.completions.parse({
      model: "demo",
      seed: 3,
      messages: capital,
      response_format: zodResponseFormat(person, "person"),
    });
    assert.deepEqual(person.parse(answer.choices[0].message.parsed), answer.choices[0].message.parsed);
  },

  async "openai: errors"() {
    for (const stream of [true, false]) {
      const asked = client.chat.completions.create({ model: "nobody", messages: capital, stream });
      await assert.rejects(asked, (error) => {
        assert.ok(error instanceof OpenAI.NotFoundError);
        assert.equal(error.code, "model_not_found");
        assert.equal(error.param, "model");
        assert.ok(error.requestID);
        return true;
      });
    }
  },

  async "ai: generateText"() {
    const answer = await generateText({ ...settings, messages: capital });
    assert.match(answer.text, /Paris/);
    assert.equal(answer.finishReason, "stop");
    assert.ok(answer.usage.outputTokens > 0);
    assert.deepEqual(answer.warnings, []);
  },

  async "ai: streamText with usage"() {
    const whole = await generateText({ ...settings, messages: capital });
    const streamed = streamText({ ...settings, messages: capital });
    assert.equal((await collect(streamed.textStream)).join(""), whole.text);
    assert.equal(await streamed.finishReason, "stop");
    assert.deepEqual(await streamed.usage, whole.usage);
  },

  async "ai: a call, streamed and not, and its answer"() {
    const asked = {
      ...settings,
      messages: weather,
      tools: { get_weather: getWeather },
      stopWhen: stepCountIs(2),
    };
    const streamed = streamText(asked);
    await streamed.consumeStream();
    for (const answer of [await generateText(asked), streamed]) {
      const [call, last] = await answer.steps;
      assert.equal(call.finishReason, "tool-calls");
      assert.equal(call.toolCalls[0].toolName, "get_weather");
      assert.deepEqual(call.toolCalls[0].input, { city: "Paris" });
      assert.match(last.text, /21/);
      assert.equal(last.finishReason, "stop");
    }
  },

  async "ai: an object"() {
    const asked = { ...settings, messages: capital, output: Output.object({ schema: person }) };
    const { output } = await generateText(asked);
    assert.deepEqual(person.parse(output), output);
  },

  async "anthropic: whole, streamed, and errors"() {
    const whole = await claude.messages.create({ ...message, messages: capital });
    assert.match(whole.content[0].text, /Paris/);
    assert.equal(whole.stop_reason, "end_turn");
    const stream = claude.messages.stream({ ...message, messages: capital });
    assert.equal((await stream.finalMessage()).content[0].text, whole.content[0].text);
    const asked = claude.messages.create({ ...message, model: "nobody", messages: capital });
    await assert.rejects(asked, (error) => {
      assert.ok(error instanceof Anthropic.NotFoundError);
      assert.match(error.message, /nobody/);
      return true;
    });
  },

  async "anthropic: a streamed call, handed back with its answer"() {
    const named = [{ name: "get_weather", description, input_schema: parameters }];
    const asked = { ...message, tools: named, messages: weather };
    const called = await claude.messages.stream(asked).finalMessage();
    assert.equal(called.stop_reason, "tool_use");
    const [call] = called.content;
    assert.deepEqual(call.input, { city: "Paris" });
    const result = { type: "tool_result", tool_use_id: call.id, content: forecast };
    const turns = [
      { role: "assistant", content: called.content },
      { role: "user", content: [result] },
    ];
    const answer = await claude.messages.create({ ...asked, messages: [...weather, ...turns] });
    assert.match(answer.content[0].text, /21/);
  },

  async "ai: anthropic, with a call"() {
    const common = { model: anthropic("demo"), maxRetries: 0, tools: { get_weather: getWeather } };
    const asked = { ...common, messages: weather, stopWhen: stepCountIs(2) };
    assert.match((await generateText(asked)).text, /21/);
    const { text } = streamText(asked);
    assert.match(await text, /21/);
  },

  async "openai: responses, whole and streamed"() {
    const asked = { ...kept, input: capital };
    const whole = await client.responses.create(asked);
    assert.match(whole.output_text, /Paris/);
    const events = await collect(await client.responses.create({ ...asked, stream: true }));
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
    assert.equal(events.at(-1).type, "response.completed");
    assert.deepEqual(events.at(-1).response.usage, whole.usage);
    const final = await client.responses.stream(asked).finalResponse();
    assert.equal(final.output_text, whole.output_text);
  },

  async "openai: responses, a call, handed back with its output"() {
    const flat = [{ type: "function", name: "get_weather", description, parameters }];
    const asked = { ...kept, tools: flat };
    const called = await client.responses.stream({ ...asked, input: weather }).finalResponse();
    const [call] = called.output;
    assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
    const output = { type: "function_call_output", call_id: call.call_id, output: forecast };
    const input = [...weather, ...called.output, output];
    assert.match((await client.responses.create({ ...asked, input })).output_text, /21/);
  },

  async "openai: responses, parse and errors"() {
    const text = { format: zodTextFormat(person, "person") };
    const asked = { model: "demo", seed: 3, store: false, input: capital, text };
    const answer = await client.responses.parse(asked);
    assert.deepEqual(person.parse(answer.output_parsed), answer.output_parsed);
    for (const stream of [true, false]) {
      const refused = client.responses.create({ ...asked, temperature: 3, stream });
      await assert.rejects(refused, (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError);
        assert.equal(error.param, "temperature");
        return true;
      });
    }
  },

  async "ai: openai, with a call, whole and streamed"() {
    const common = {
      model: responses("demo"),
      temperature: 0,
      maxRetries: 0,
      providerOptions: { openai: { store: false } },
    };
    const asked = {
      ...common,
      messages: weather,
      tools: { get_weather: getWeather },
      stopWhen: stepCountIs(2),
    };
    const streamed = streamText(asked);
    await streamed.consumeStream();
    for (const answer of [await generateText(asked), streamed]) {
      const [call, last] = await answer.steps;
      assert.equal(call.finishReason, "tool-calls");
      assert.deepEqual(call.toolCalls[0].input, { city: "Paris" });
      assert.match(last.text, /21/);
      assert.equal(last.finishReason, "stop");
    }
  },

  async "ai: errors"() {
    const asked = generateText({
      model: compatible("nobody"),
      maxRetries: 0,
      messages: capital,
    });
    await assert.rejects(asked, (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 404);
      assert.match(error.message, /nobody/);
      return true;
    });
  },
};

for (const [name, check] of Object.entries(checks)) {
  const started = Date.now();
  try {
    await check();
    console.log(`ok ${name} (${Date.now() - started} ms)`);
  } catch (error) {
    process.exitCode = 1;
    console.error(`not ok ${name}\n`, error);
  }
}
