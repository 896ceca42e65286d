// Reads GET /v1/admin/events with fetch, because EventSource cannot send a key.

import { ApiError, ask, eventsOf } from "../api.js";
import { store } from "./store.js";

const PATH = "admin/events";
const SILENT_MS = 25_000; // the gateway sends a comment every 10 s
const FIRST_MS = 1_000;
const LONGEST_MS = 30_000;
const REFUSED = new Set([401, 403, 404]);

let running = null;
let wake = () => {};

/** Updates the store until `stop`. Calls `refused(error)` if the gateway refuses the key. */
export function start(refused) {
  stop();
  running = new AbortController();
  void follow(running.signal, refused);
}

export function stop() {
  running?.abort();
  running = null;
}

/** Starts the next attempt at once. */
export const tryNow = () => wake();

async function follow(stopped, refused) {
  let wait = FIRST_MS;
  while (!stopped.aborted) {
    if (store.link.kind !== "broken") store.setLink({ kind: "connecting" });
    let why = "The gateway closed the stream.";
    try {
      await read(stopped, () => (wait = FIRST_MS));
    } catch (error) {
      if (stopped.aborted) return;
      if (error instanceof ApiError && REFUSED.has(error.status)) {
        store.setLink({ kind: "idle" });
        refused(error);
        return;
      }
      why = error instanceof ApiError ? error.message : "The gateway sends no more data.";
    }
    if (stopped.aborted) return;
    const pause = wait * (0.75 + Math.random() / 2); // random, so that not all pages reconnect at once
    store.setLink({ kind: "broken", why, retry: Date.now() + pause });
    await pauseOf(pause, stopped);
    wait = Math.min(wait * 2, LONGEST_MS);
  }
}

function pauseOf(milliseconds, stopped) {
  return new Promise((resolve) => {
    wake = resolve;
    setTimeout(resolve, milliseconds);
    stopped.addEventListener("abort", resolve, { once: true });
  });
}

async function read(stopped, arrived) {
  const silence = new AbortController();
  const signal = AbortSignal.any([stopped, silence.signal]);
  let timer;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENT_MS);
  };
  heard();
  try {
    const answer = await ask(PATH, { signal });
    for await (const { event, data } of eventsOf(overheard(answer, heard))) {
      if (event === "state") store.replace(JSON.parse(data));
      else if (event === "change") store.patch(JSON.parse(data));
      else continue;
      arrived();
      if (store.link.kind !== "live") store.setLink({ kind: "live" });
    }
  } finally {
    clearTimeout(timer);
  }
}

// Calls `heard` for each chunk: comments are no events, but they show that the stream is alive.
function overheard(answer, heard) {
  const transform = (chunk, to) => {
    heard();
    to.enqueue(chunk);
  };
  return new Response(answer.body.pipeThrough(new TransformStream({ transform })));
}
