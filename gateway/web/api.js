// The gateway's API, as both pages ask it. The key is a variable of this page and nothing else:
// it is in no storage, no address and no cookie, and is gone when the page is.

export const BASE = new URL("v1/", document.baseURI);

let key = "";
let askForKey = null;
let asking = null;

export const hasKey = () => key !== "";
export const setKey = (given) => (key = given.trim());

// `ask(reason)` resolves to a key, or to null where none is given.
export const whenKeyIsMissing = (ask) => (askForKey = ask);

// What the API, or the way to it, has refused.
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null, retryAfter = null }) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

// The answer to a request, whatever its form, with `sentAt`. Raises ApiError, and AbortError where `signal` says so.
export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  for (;;) {
    const used = key;
    const response = await sent(path, { method, body, headers, signal });
    if (response.ok) return response;
    const error = await refusal(response);
    if (response.status !== 401) throw error;
    if (!used) error.message = "This server needs a key; whoever runs it gives you one.";
    if (!askForKey) throw error;
    // Another request may have been given one meanwhile.
    if (key === used && !(await keyFor(error))) throw error;
  }
}

export const askJson = async (path, options) => (await ask(path, options)).json();

async function sent(path, { method, body, headers, signal }) {
  const all = new Headers(headers);
  if (key) all.set("authorization", `Bearer ${key}`);
  const isForm = body instanceof FormData;
  if (body !== undefined && !isForm) all.set("content-type", "application/json");
  const settings = { method, headers: all, signal, credentials: "omit", cache: "no-store" };
  if (body !== undefined) settings.body = isForm ? body : JSON.stringify(body);
  const sentAt = performance.now();
  try {
    return Object.assign(await fetch(new URL(path, BASE), settings), { sentAt });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The gateway does not answer. Is it running?" });
  }
}

// One question at a time, however many requests wait for it.
async function keyFor(error) {
  asking ??= askForKey(error.message).finally(() => (asking = null));
  const given = await asking;
  if (given) setKey(given);
  return Boolean(given);
}

async function refusal(response) {
  const retry = Number(response.headers.get("retry-after")) || null;
  const text = await response.text();
  try {
    return new ApiError(response.status, { ...JSON.parse(text).error, retryAfter: retry });
  } catch {
    // Something between the gateway and here has answered.
    return new ApiError(response.status, { message: text.slice(0, 300) || response.statusText });
  }
}

export const lost = () => new ApiError(0, { message: "The connection was lost before the end." });

// The events of a stream, each with its name (or "message") and its data as text.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : lost();
      });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = { event: "message", data: "" };
        for (const line of part.split("\n")) {
          const [, name, text] = /^(event|data|id): ?(.*)$/s.exec(line) ?? [];
          if (name) event[name] = text;
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// An error in plain words: what happened, and what may be done.
export function inWords(error) {
  if (!(error instanceof ApiError)) return `Something went wrong in this page: ${error.message}`;
  const said = error.message;
  const told = /try again in/i.test(said); // refusals by a limit say it themselves
  const wait = error.retryAfter && !told ? ` Try again in ${error.retryAfter} s.` : "";
  if (error.status === 401) return `${said} Give a key under Key, at the top.`;
  if (error.status === 429) return `A limit of this key is reached. ${said}${wait}`;
  if (error.status === 503) return `The server cannot take this now. ${said}${wait}`;
  if (error.status === 504) return `This took too long. ${said}`;
  return said;
}
