// Calls of what an admin may do.

import { ApiError, ask, BASE, setKey } from "../api.js";

let key = "";

/** For all calls of this page from now on; it is kept nowhere else. */
export function useKey(given) {
  key = given.trim();
  setKey(key);
}

/** The answer's JSON, null where there is none. Throws ApiError. */
export async function call(method, path, body) {
  const answer = await ask(path, { method, body });
  return JSON.parse((await answer.text()) || "null");
}

/** A name as a part of a path: an adapter's may have slashes, which stay. */
export const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");

/** Posts a form; `told(sent, all)` hears how much of it has gone out, which fetch does not tell. */
export function upload(path, form, request, told) {
  return new Promise((resolve, reject) => {
    request.open("POST", new URL(path, BASE));
    request.setRequestHeader("authorization", `Bearer ${key}`);
    request.upload.onprogress = (event) => told(event.loaded, event.total);
    request.onload = () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(refusal(request.status, request.responseText));
    };
    request.onerror = () => reject(new ApiError(0, { message: UNKNOWN }));
    request.send(form);
  });
}

const UNKNOWN = "The gateway does not answer. Whether it took this is not known: look again.";

function refusal(status, text) {
  try {
    return new ApiError(status, JSON.parse(text).error);
  } catch {
    return new ApiError(status, { message: text.slice(0, 300) || `Status ${status}.` });
  }
}
