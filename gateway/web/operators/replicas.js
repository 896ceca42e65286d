// Table of replicas: load, last failure, weight and draining.

import { el } from "../dom.js";
import { bar, setBar } from "./bars.js";
import { button } from "./controls.js";
import { askDrain, askRelease, askWeight } from "./replica_actions.js";
import { store } from "./store.js";
import { KeyedList, setAttribute, setHidden, setText } from "./update.js";
import { ago, figure, NONE, REPLICA_STATES, replicasOf } from "./words.js";

const COLUMNS = [
  ["#", "ordinal"],
  ["Replica", "name"],
  ["State", "state-cell"],
  ["Under way", "bars"],
  ["Requests", "number"],
  ["Weight", "number"],
  ["Last failure", "said"],
  ["Actions", "actions"],
];
const NAME = 1;

export class ReplicasView {
  constructor(section) {
    const body = el("tbody");
    this._list = new KeyedList(body, build);
    this._none = el("p", { class: "nothing" }, "No replica is known yet.");
    const heads = COLUMNS.map(([text, name]) => el("th", { scope: "col", class: name }, text));
    this._table = el(
      "table",
      { class: "replicas" },
      el("caption", { class: "aloud" }, "Replicas"),
      el("thead", {}, el("tr", {}, ...heads)),
      body,
    );
    section.append(el("div", { class: "sideways" }, this._table), this._none);
  }

  render(state) {
    const endpoints = replicasOf(state);
    setHidden(this._table, endpoints.length === 0);
    setHidden(this._none, endpoints.length > 0);
    const rows = this._list.show(endpoints);
    endpoints.forEach((endpoint, n) => update(rows.get(endpoint), state.replicas[endpoint], endpoint, n + 1));
  }
}

function build(endpoint) {
  const there = (does) => () => {
    const replica = store.state?.replicas?.[endpoint];
    if (replica) does(endpoint, replica);
  };
  const parts = {
    ordinal: el("span"),
    kind: el("span", { class: "hint" }),
    state: el("span", { class: "state" }),
    override: el("span", { class: "hint" }, "set here, not in the file"),
    flight: bar(),
    requests: el("span"),
    weight: el("span"),
    failure: el("span"),
    when: el("span", { class: "hint" }),
    weigh: button("Weight…", there(askWeight), { label: `Weight of ${endpoint}…` }),
    drain: button("Drain…", there(askDrain)),
    release: button("Give back…", there(askRelease), { label: `Give ${endpoint} back to the file…` }),
  };
  const contents = [
    [parts.ordinal],
    [el("span", { class: "endpoint" }, endpoint), parts.kind],
    [parts.state, parts.override],
    [parts.flight.node],
    [parts.requests],
    [parts.weight],
    [parts.failure, parts.when],
    [el("span", { class: "buttons" }, parts.weigh, parts.drain, parts.release)],
  ];
  const cells = contents.map((content, n) => {
    const [head, name] = COLUMNS[n];
    if (n === NAME) return el("th", { class: name, scope: "row" }, ...content);
    return el("td", { class: name, "data-label": head }, ...content);
  });
  return { ...parts, node: el("tr", {}, ...cells) };
}

function update(row, replica, endpoint, ordinal) {
  setText(row.ordinal, ordinal);
  setText(row.kind, [replica.model, replica.mode].filter(Boolean).join(", "));
  setAttribute(row.state, "data-state", replica.state);
  setText(row.state, REPLICA_STATES[replica.state] ?? replica.state);
  setHidden(row.override, replica.override === undefined);
  setBar(row.flight, replica.in_flight ?? 0, replica.places, false);
  setText(row.requests, figure(replica.requests));
  setText(row.weight, figure(replica.weight));
  setText(row.failure, replica.why ?? replica.last_failure?.message ?? NONE);
  setText(row.when, replica.last_failure ? ago(replica.last_failure.time, store.now) : "");
  const word = replica.drain ? "Use again…" : "Drain…";
  setText(row.drain, word);
  setAttribute(row.drain, "aria-label", `${word} ${endpoint}, replica ${ordinal}`);
  setHidden(row.release, replica.override === undefined);
}
