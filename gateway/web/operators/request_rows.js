// Table rows of requests, with a button to stop a request.

import { el } from "../dom.js";
import { call } from "./calls.js";
import { button } from "./controls.js";
import { ask } from "./dialogs.js";
import { store } from "./store.js";
import { setAttribute, setText } from "./update.js";
import { tableRow, VirtualTable } from "./virtual_table.js";
import { clock, count, duration, figure, milliseconds, NONE, replicasOf } from "./words.js";

const RUNNING = [
  { head: "Request", class: "id" },
  { head: "Tenant", class: "of" },
  { head: "Model", class: "model" },
  { head: "State", class: "state-cell" },
  { head: "Replica", class: "at" },
  { head: "Age", class: "number age" },
  { head: "Prompt", class: "number prompt" },
  { head: "Tokens", class: "number tokens" },
  { head: "Actions", class: "actions" },
];
const ENDED = [
  { head: "Request", class: "id" },
  { head: "Ended", class: "time" },
  { head: "Tenant", class: "of" },
  { head: "Model", class: "model" },
  { head: "Status", class: "status" },
  { head: "End", class: "finish" },
  { head: "Tokens", class: "number tokens" },
  { head: "Stop took", class: "number stop" },
];
const STOPS = {
  __proto__: null,
  cancelled: "stopped by an operator",
  disconnect: "client left",
  moved: "moved to another replica",
  shutdown: "the gateway ended",
  timeout: "timeout",
};
const LEFT = 499;
const FAILED = 500;

export function runningTable() {
  return table("Requests under way", "running", RUNNING, buildRunning, updateRunning);
}

export function endedTable() {
  return table("Requests that have ended", "ended", ENDED, buildEnded, updateEnded);
}

function table(label, name, columns, build, update) {
  const made = new VirtualTable(label, build, update);
  made.node.classList.add(name);
  made.setColumns(columns);
  return made;
}

const short = (id) => (id.length > 14 ? `${id.slice(0, 12)}…` : id);
const words = (name) => name.replace(/(?<=[a-z])(?=[A-Z])/g, " ").toLowerCase();

function rowOf(...names) {
  const row = { key: "", id: el("code") };
  for (const name of names) row[name] = el("span");
  return row;
}

/** Updates the cells of both tables. `request.model` includes the version of an adapter. */
function updateBoth(row, request) {
  setText(row.id, short(row.key));
  setAttribute(row.id, "title", row.key);
  setText(row.tenant, request.tenant || NONE);
  setText(row.model, request.model || NONE);
  setText(row.tokens, figure(request.completion_tokens ?? 0));
}

function buildRunning() {
  const row = rowOf("tenant", "model", "replica", "age", "prompt", "tokens");
  row.state = el("span", { class: "state" });
  const there = () => store.state?.requests?.[row.key] && askStop(row.key, store.state.requests[row.key]);
  row.stop = button("Stop…", there, { kind: "outlined small danger" });
  const { id, tenant, model, state, replica, age, prompt, tokens, stop } = row;
  row.node = tableRow(RUNNING, [id, tenant, model, state, replica, age, prompt, tokens, stop]);
  return row;
}

function updateRunning(row) {
  const request = store.state.requests[row.key];
  updateBoth(row, request);
  setAttribute(row.state, "data-state", request.state);
  setText(row.state, request.state);
  setText(row.replica, request.replica ? placeOf(request.replica) : NONE);
  setText(row.age, duration(store.now - request.started));
  setText(row.prompt, figure(request.prompt_tokens));
  setAttribute(row.stop, "aria-label", `Stop ${row.key}…`);
  const stopping = request.state === "stopping";
  if (row.stop.disabled !== stopping) row.stop.disabled = stopping;
}

function placeOf(endpoint) {
  const number = replicasOf(store.state).indexOf(endpoint) + 1;
  return number ? `${number} · ${endpoint}` : endpoint;
}

function buildEnded() {
  const row = rowOf("time", "tenant", "model", "finish", "tokens", "stop");
  row.status = el("span", { class: "state" });
  const { id, time, tenant, model, status, finish, tokens, stop } = row;
  row.node = tableRow(ENDED, [id, time, tenant, model, status, finish, tokens, stop]);
  return row;
}

function updateEnded(row) {
  const request = store.state.ended[row.key];
  updateBoth(row, request);
  setText(row.time, clock(request.ended));
  setText(row.status, request.status === LEFT ? `${LEFT} left` : (request.status ?? NONE));
  setAttribute(row.status, "data-state", statusState(request));
  setText(row.finish, endOf(request));
  setText(row.stop, request.stop_ms === undefined ? NONE : milliseconds(request.stop_ms));
}

function endOf({ finish = [], error, stop }) {
  if (stop in STOPS) return STOPS[stop];
  if (error) return words(error);
  return finish.join(", ") || NONE;
}

function statusState({ status, stop }) {
  if (status === undefined) return "none";
  if (status === LEFT || stop === "cancelled") return "stopping";
  if (status >= FAILED) return "failing";
  return status >= 400 ? "draining" : "ready";
}

function askStop(id, request) {
  const where = request.replica ? ` on ${request.replica}` : "";
  const age = duration(store.now - request.started);
  ask({
    title: `Stop this request${request.tenant ? ` of ${request.tenant}` : ""}?`,
    effects: [
      `${request.model ?? "A model"}${where}, for ${age}, with ${count(request.completion_tokens ?? 0, "token")} so far. Its id is ${id}.`,
      "The engine is asked to stop at once; then the slot is free for others. The client gets an error that an operator stopped the request; generated tokens are charged.",
    ],
    confirm: "Stop it",
    danger: true,
    does: () => call("POST", `admin/requests/${encodeURIComponent(id)}/cancel`),
    done: "The request is being stopped.",
  });
}
