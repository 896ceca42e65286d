// One answer, from the request to its last token, or to the stop that ends it.

import { ApiError, ask, askJson, eventsOf, inWords, lost } from "../api.js";
import { randomId } from "./conversation.js";

// Milliseconds between looks at a stopped request: the engine is mostly free within one step.
const LOOKS = [40, 60, 100, 200, 400, 800, 1600, 3200];

export class Run {
  // `changed()` is called whenever `answer` has more to show.
  constructor(answer, body, changed) {
    Object.assign(this, { answer, body, changed });
    this.aborting = new AbortController();
    this.ended = new Promise((resolve) => (this.end = resolve));
    answer.requestId = randomId();
    this.pieces = 0;
  }

  // Resolves when nothing more will be known of it; `ended` does when the answer has ended.
  async finished() {
    const { answer } = this;
    this.begun = performance.now();
    try {
      await this.stream();
    } catch (error) {
      if (error.name === "AbortError") answer.stopped = { afterMs: performance.now() - this.begun };
      // Lost behind its end, it is whole.
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
      // The request's name, so that it can be asked for even if it is stopped before an answer.
      headers: { "x-request-id": answer.requestId },
      signal: this.aborting.signal,
    });
    this.begun = response.sentAt;
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
      answer.firstMs ??= now - this.begun;
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

  // Tokens a second, from the first to the last; the first one's wait is told apart. What came in
  // a piece or two, whatever its frames, tells of the network alone.
  rate() {
    if (this.pieces < 3) return;
    const between = this.answer.usage?.completion_tokens - 1;
    if (between > 0 && this.last > this.first) this.answer.rate = (between / (this.last - this.first)) * 1000;
  }

  // The client has gone; the engine lets go a moment later, and the gateway knows when.
  async waitUntilFreed() {
    for (const pause of LOOKS) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      try {
        const found = await askJson(`requests/${this.answer.requestId}`);
        if (found.state !== "ended") continue;
        this.answer.stopped.freedMs = found.stop_ms ?? null;
        this.changed();
        return;
      } catch {
        return; // it is known no more, or its end is not told here
      }
    }
  }
}
