// Storage of conversations: one entry each in this browser's local storage. API keys are never stored.

import { storedForm, titleOf } from "./conversation.js";

const PREFIX = "gateway.conversation.";

function entries() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return []; // storage is disabled
  }
}

export function load(id) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + id));
  } catch {
    return null;
  }
}

// Returns [{id, title, changed}], the newest first.
export function list() {
  const found = entries().map((name) => load(name.slice(PREFIX.length))).filter(Boolean);
  found.sort((a, b) => b.changed - a.changed);
  return found.map((stored) => ({ id: stored.id, title: titleOf(stored), changed: stored.changed }));
}

// Returns false if it could not be stored: the storage may be full or disabled.
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(storedForm(conversation)));
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

// Calls `run(id)` when another tab has changed a conversation, and `run()` when it has cleared all.
export function whenChangedElsewhere(run) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) run(event.key?.slice(PREFIX.length));
  });
}
