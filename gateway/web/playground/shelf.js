// Where conversations are kept: this browser's local storage, an entry for each. Never a key.

import { keptForm, titleOf } from "./conversation.js";

const PREFIX = "gateway.conversation.";

function entries() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return []; // a browser that keeps nothing
  }
}

export function load(id) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + id));
  } catch {
    return null;
  }
}

// The newest first: [{id, title, changed}].
export function list() {
  const found = entries().map((name) => load(name.slice(PREFIX.length))).filter(Boolean);
  found.sort((a, b) => b.changed - a.changed);
  return found.map((kept) => ({ id: kept.id, title: titleOf(kept), changed: kept.changed }));
}

// Whether it could be kept: the store may be full, or off.
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(keptForm(conversation)));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

export function clear() {
  for (const name of entries()) localStorage.removeItem(name);
}

// Another tab of this browser has changed them: `run(id)` of one, without it of all.
export function whenChangedElsewhere(run) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) run(event.key?.slice(PREFIX.length));
  });
}
