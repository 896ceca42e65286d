// Overview: current problems, load, and charts of the last hour.

import { el } from "../dom.js";
import { Chart } from "./chart.js";
import { store } from "./store.js";
import { isRefusedNow } from "./tenants.js";
import { troublesOf } from "./troubles.js";
import { KeyedList, setAttribute, setHidden, setText } from "./update.js";
import { duration, figure, moment } from "./words.js";

const perSecond = (fact) => (point, step) => (point[fact] ?? 0) / step;
const plain = (fact) => (point) => point[fact];
const orNone = (fact) => (point) => point[fact] ?? 0;

const CHARTS = [
  ["Tokens a second", "", [["tokens/s", perSecond("tokens")]], 1],
  ["First token", "ms", [["p50", plain("ttft_p50_ms")], ["p99", plain("ttft_p99_ms")]], 10],
  ["Waiting", "", [["waiting", orNone("queue")]], 4],
  ["Errors in 10 s", "", [["errors", orNone("errors")]], 4],
  ["Cold sends in 10 s", "", [["cold sends", orNone("cold_sends")]], 4],
  ["Requests in 10 s", "", [["requests", orNone("requests")]], 4],
];

const TILES = [
  ["under way", "requests", (state) => [state.in_flight ?? 0, state.places && `of ${figure(state.places)} slots`]],
  ["waiting", "requests", (state) => [(state.waiting ?? 0) + (state.waiting_to_begin ?? 0), waitingFor(state)]],
  ["replicas ready", "replicas", (state) => readyOf(Object.values(state.replicas ?? {}))],
  ["adapters", "adapters", (state) => [Object.keys(state.adapters ?? {}).length, heldOf(state)]],
  ["tenants", "tenants", (state) => [Object.keys(state.tenants ?? {}).length, refusedOf(state)]],
];

const waitingFor = (state) =>
  state.waiting_to_begin ? `${figure(state.waiting_to_begin)} of them for this gateway's own cores` : "for a slot";
const readyOf = (all) => [all.filter((it) => it.state === "ready" && !it.drain).length, `of ${figure(all.length)}`];

function refusedOf(state) {
  const refused = Object.values(state.tenants ?? {}).filter(isRefusedNow).length;
  return refused ? `${figure(refused)} refused lately` : "none refused lately";
}

function heldOf(state) {
  const replicas = Object.values(state.adapters ?? {}).flatMap((adapter) => Object.values(adapter.replicas ?? {}));
  return `${figure(replicas.filter((it) => it.state === "held").length)} held by engines`;
}

export class OverviewView {
  constructor(section) {
    this._facts = el("p", { class: "hint" });
    this._well = el("p", { class: "well" }, el("span", { class: "state", "data-state": "ready" }, "Nothing needs you."));
    this._list = el("ul", { class: "troubles", "aria-label": "What needs you" });
    this._troubles = new KeyedList(this._list, buildTrouble);
    this._tiles = TILES.map(([label, view]) => {
      const parts = { value: el("span", { class: "value" }), more: el("span", { class: "hint" }) };
      const node = el("a", { class: "tile", href: `#${view}` }, el("span", { class: "label" }, label), parts.value, parts.more);
      return { ...parts, node };
    });
    this._charts = CHARTS.map(([title, unit, lines, least]) => new Chart(title, unit, lines, least));
    section.append(
      this._well,
      this._list,
      el("div", { class: "tiles" }, ...this._tiles.map((tile) => tile.node)),
      el("div", { class: "charts" }, ...this._charts.map((chart) => chart.node)),
      this._facts,
    );
  }

  render(state) {
    const troubles = troublesOf(state, store.now);
    setHidden(this._well, troubles.length > 0);
    setHidden(this._list, troubles.length === 0);
    const rows = this._troubles.show(troubles.map((trouble) => trouble.key));
    for (const trouble of troubles) updateTrouble(rows.get(trouble.key), trouble);
    TILES.forEach(([, , facts], n) => {
      const [value, more] = facts(state);
      setText(this._tiles[n].value, figure(value));
      setText(this._tiles[n].more, more ?? "");
    });
    const { version, model, started, workers } = state.gateway ?? {};
    const runs = started ? `since ${moment(started)} (${duration(store.now - started)})` : "";
    setText(this._facts, [model, `gateway ${version ?? ""}`, runs, workers && `workers: ${workers}`].filter(Boolean).join(", "));
    this._draw(state.history ?? {});
  }

  // A new point arrives every few seconds: do not draw in between.
  _draw({ step = 10, points = {} }) {
    const times = Object.keys(points).map(Number).sort((a, b) => a - b);
    const last = times.at(-1);
    const seen = `${times.length} ${last} ${JSON.stringify(points[last] ?? 0)}`;
    if (seen === this._seen) return;
    this._seen = seen;
    const all = times.map((time) => [time, points[time]]);
    for (const chart of this._charts) chart.show(all, step, last ?? store.now);
  }
}

function buildTrouble() {
  const parts = { what: el("span", { class: "state" }), link: el("a", {}) };
  return { ...parts, node: el("li", {}, parts.what, parts.link) };
}

function updateTrouble(row, { what, state, view, name }) {
  setText(row.what, what);
  setAttribute(row.what, "data-state", state);
  setHidden(row.link, view === undefined);
  setAttribute(row.link, "href", name === undefined ? `#${view}` : `#${view}/${encodeURIComponent(name)}`);
  setText(row.link, name ? `Look at ${name}` : "Look");
}
