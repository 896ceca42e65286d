// Run of one answer: the request, its stream, and its stop.

import { ApiError, ask, askJson, eventsOf, inWords, lost } from "../api.js";
import { randomId } from "./conversation.js";

// Milliseconds between polls of a stopped request: the engine usually stops within one step.
const POLL_INTERVALS_MS = [40, 60, 100, 200, 400, 800, 1600, 3200];

export class Run {
  // Calls `changed()` whenever `answer` has changed.
  constructor(answer, body, changed) {
    Object.assign(this, { answer, body, changed });
    this.aborting = new AbortController();
    this.ended = new Promise((resolve) => (this.end = resolve));
    answer.requestId = randomId();
    this.pieces = 0;
  }

  // Resolves after the last change of the answer, including the time at which a stopped engine was free.
  // `ended` resolves when the answer has ended.
  async finished() {
    const { answer } = this;
    this.started = performance.now();
    try {
      await this.stream();
    } catch (error) {
      if (error.name === "AbortError") answer.stopped = { afterMs: performance.now() - this.started };
      // If the connection is lost after the finish reason, the answer is complete.
      else if (error.status !== 0 || !answer.finish) answer.error = { message: inWords(error), param: error.param ?? null, status: error.status };
    }
    answer.running = false;
    this.rate();
    this.changed();
    this.end();
    if (answer.stopped) await this.waitUntilFreed();
  }

  stop() {
    this.aborting.abort();
  }

  async stream() {
    const { answer } = this;
    const response = await ask("chat/completions", {
      method: "POST",
      body: { ...this.body, stream: true, stream_options: { include_usage: true } },
      // Set the request id here, so that it is known even if the request is stopped before the response.
      headers: { "x-request-id": answer.requestId },
      signal: this.aborting.signal,
    });
    this.started = response.sentAt;
    answer.version = response.headers.get("x-adapter-version");
    answer.ignored = response.headers.get("x-ignored-parameters");
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error);
      this.take(chunk);
      this.changed();
    }
    if (!answer.finish) throw lost();
  }

  take({ choices, usage }) {
    const { answer } = this;
    if (usage) answer.usage = usage;
    const [choice] = choices ?? [];
    if (!choice) return;
    const { delta, finish_reason: finish, logprobs } = choice;
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      const now = performance.now();
      answer.firstMs ??= now - this.started;
      this.first ??= now;
      if (now - (this.last ?? 0) > 1) this.pieces += 1;
      this.last = now;
    }
    answer.text += delta.content ?? "";
    answer.thoughts += delta.reasoning_content ?? "";
    for (const { index, id, function: named } of delta.tool_calls ?? []) {
      const call = (answer.calls[index] ??= { id: "", name: "", arguments: "" });
      call.id ||= id ?? "";
      call.name += named?.name ?? "";
      call.arguments += named?.arguments ?? "";
    }
    if (logprobs?.content) (answer.logprobs ??= []).push(...logprobs.content);
    if (finish) answer.finish = finish;
  }

  // Computes tokens per second, from the first token to the last. The time to the first token is shown
  // separately. One or two pieces would only measure the network.
  rate() {
    if (this.pieces < 3) return;
    const between = this.answer.usage?.completion_tokens - 1;
    if (between > 0 && this.last > this.first) this.answer.rate = (between / (this.last - this.first)) * 1000;
  }

  // The request was aborted. The engine stops a moment later; the gateway reports when.
  async waitUntilFreed() {
    for (const pause of POLL_INTERVALS_MS) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      try {
        const found = await askJson(`requests/${this.answer.requestId}`);
        if (found.state !== "ended") continue;
        this.answer.stopped.freedMs = found.stop_ms ?? null;
        this.changed();
        return;
      } catch {
        return; // the gateway does not know the request, or does not report its end
      }
    }
  }
}
