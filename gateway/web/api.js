// Client of the gateway's API, for both pages. The key is only in a variable of this page: never in
// browser storage, a URL or a cookie. It is lost when the page is closed or reloaded.

export const BASE = new URL("v1/", document.baseURI);

let key = "";
let askForKey = null;
let asking = null;

export const hasKey = () => key !== "";
export const setKey = (given) => (key = given.trim());

// `ask(reason)` resolves to a key, or to null if the user enters none.
export const whenKeyIsMissing = (ask) => (askForKey = ask);

// An error response of the API, or of a proxy before it. Status 0: no response, or an incomplete one.
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null, retryAfter = null }) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

// Returns the Response to a request, with the time `sentAt`. Throws ApiError, or AbortError after `signal`.
export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  for (;;) {
    const used = key;
    const response = await sent(path, { method, body, headers, signal });
    if (response.ok) return response;
    const error = await refusal(response);
    if (response.status !== 401) throw error;
    if (!used) error.message = "This server needs a key; its operator can give you one.";
    if (!askForKey) throw error;
    // Another request may have asked for a key meanwhile.
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

// Asks for a key once, even if several requests need one.
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
    // Not the gateway's format: a proxy has answered.
    return new ApiError(response.status, { message: text.slice(0, 300) || response.statusText });
  }
}

export const lost = () => new ApiError(0, { message: "The connection was lost before the end." });

// Yields the events of a stream, each with its name ("message" by default) and its data as text.
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

// Describes an error for the user: what happened, and what to do.
export function inWords(error) {
  if (!(error instanceof ApiError)) return `Something went wrong in this page: ${error.message}`;
  const said = error.message;
  const hasWait = /try again in/i.test(said); // errors about limits name the time already
  const wait = error.retryAfter && !hasWait ? ` Try again in ${error.retryAfter} s.` : "";
  if (error.status === 401) return `${said} Give a key under Key, at the top.`;
  if (error.status === 429) return `A limit of this key is reached. ${said}${wait}`;
  if (error.status === 503) return `The server cannot take this now. ${said}${wait}`;
  if (error.status === 504) return `This took too long. ${said}`;
  return said;
}
