// Calls of the admin API.

import { ApiError, ask, BASE, setKey } from "../api.js";

let key = "";

/** Sets the key for all further calls of this page. It is stored nowhere else. */
export function useKey(given) {
  key = given.trim();
  setKey(key);
}

/** Returns the response's JSON, or null if it has no body. Throws ApiError. */
export async function call(method, path, body) {
  const answer = await ask(path, { method, body });
  return JSON.parse((await answer.text()) || "null");
}

/** Encodes a name for a path. An adapter's name may have slashes, which are not encoded. */
export const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");

/** Posts a form. Calls `onProgress(sent, all)` with bytes. Uses XMLHttpRequest, as fetch has no upload progress. */
export function upload(path, form, request, onProgress) {
  return new Promise((resolve, reject) => {
    request.open("POST", new URL(path, BASE));
    request.setRequestHeader("authorization", `Bearer ${key}`);
    request.upload.onprogress = (event) => onProgress(event.loaded, event.total);
    request.onload = () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(refusal(request.status, request.responseText));
    };
    request.onerror = () => reject(new ApiError(0, { message: UNKNOWN }));
    request.send(form);
  });
}

const UNKNOWN = "The gateway does not answer. It may have applied this change: check before you repeat it.";

function refusal(status, text) {
  try {
    return new ApiError(status, JSON.parse(text).error);
  } catch {
    return new ApiError(status, { message: text.slice(0, 300) || `Status ${status}.` });
  }
}
