// Table of adapters and replicas: which engine holds which adapter, sizes, and actions.

import { el } from "../dom.js";
import { askRollback } from "./adapter_actions.js";
import { MARKS, passes, SORTS, SHOWN } from "./adapter_choice.js";
import { openVersions } from "./adapter_versions.js";
import { button, searchField, select } from "./controls.js";
import { store } from "./store.js";
import { setAttribute, setText } from "./update.js";
import { askUpload } from "./upload.js";
import { tableRow, VirtualTable } from "./virtual_table.js";
import { bytes, figure, foundOf, NONE, replicasOf } from "./words.js";

const NAMED = 4; // maximum number of replicas whose addresses fit the table
const MOST_SHOWN = 99;

export class AdaptersView {
  constructor(section) {
    const [label, search] = searchField("find-adapter", "Find by name or version");
    const [shown, filter] = select("Show", SHOWN);
    const [order, sort] = select("Order", SORTS.map(([name, text]) => [name, text]));
    this.search = search;
    this._filter = filter;
    this._sort = sort;
    this._found = el("p", { class: "found", role: "status" });
    this._endpoints = null;
    this._table = new VirtualTable(
      "Adapters by replica",
      () => this._build(),
      (row) => this._update(row),
    );
    this._table.node.classList.add("matrix");
    const legend = MARKS.map((state) => el("span", { class: "key" }, el("span", { class: "mark", "data-state": state }), state));
    section.append(
      el("div", { class: "tools" }, label, search, shown, order, button("Add an adapter…", () => askUpload(""), { kind: "primary" })),
      el("div", { class: "legend" }, this._found, ...legend, el("span", { class: "key" }, el("sup", {}, "2"), "times evicted")),
      this._table.node,
    );
  }

  /** Called for a link from another view: searches for `name`. */
  find(name) {
    this.search.value = name;
    this._filter.value = "all";
  }

  render(state) {
    const endpoints = replicasOf(state);
    if (endpoints.join() !== this._endpoints?.join()) this._columnsFor(endpoints);
    const all = state.adapters ?? {};
    const wanted = this.search.value.trim().toLowerCase();
    const names = Object.keys(all).filter((name) => passes(this._filter.value, wanted, name, all[name]));
    const [, , order] = SORTS.find(([name]) => name === this._sort.value);
    names.sort(order(all));
    const total = Object.keys(all).length;
    setText(this._found, foundOf(names.length, total, "adapter", state.left_out?.adapters));
    this._table.show(names);
  }

  _columnsFor(endpoints) {
    this._endpoints = endpoints;
    const named = (this._named = endpoints.length <= NAMED);
    setAttribute(this._table.node, "data-named", named);
    this._table.node.style.setProperty("--replicas", Math.max(1, endpoints.length));
    const heads = endpoints.map((endpoint, n) => {
      const address = el("span", { class: named ? "endpoint" : "aloud" }, ` ${endpoint}`);
      return { class: "place", head: el("span", { title: endpoint }, el("b", {}, n + 1), address) };
    });
    this._columns = [
      { head: "Adapter", class: "name" },
      { head: "Served", class: "version" },
      { head: "Requests/min", class: "number" },
      { head: "Size", class: "number" },
      { head: "Held by", class: "number" },
      ...heads,
      { head: "Actions", class: "actions" },
    ];
    this._table.setColumns(this._columns);
  }

  _build() {
    const row = { key: "" };
    const there = (does) => () => store.state?.adapters?.[row.key] && does(row.key);
    row.name = el("span", { class: "adapter" });
    row.version = el("code");
    row.perMinute = el("div", { class: "number" });
    row.size = el("div", { class: "number" });
    row.held = el("div", { class: "number" });
    row.marks = this._endpoints.map(() => ({ node: el("div", { class: "place mark" }) }));
    row.rollback = button("Roll back…", there(askRollback));
    row.versions = button("Versions…", there(openVersions));
    row.node = tableRow(this._columns, [
      row.name,
      row.version,
      row.perMinute,
      row.size,
      row.held,
      ...row.marks.map((mark) => mark.node),
      el("span", { class: "buttons" }, row.rollback, row.versions),
    ]);
    return row;
  }

  _update(row) {
    const name = row.key;
    const adapter = store.state.adapters[name];
    if (row.shown !== name) this._rename(row, name);
    const replicas = adapter.replicas ?? {};
    setText(row.version, adapter.served ?? NONE);
    setText(row.perMinute, figure(adapter.requests_per_minute ?? 0));
    setText(row.size, bytes(adapter.versions?.[adapter.served]?.bytes));
    let held = 0;
    this._endpoints.forEach((endpoint, n) => {
      const { state = "cold", evicted = 0, why = "" } = replicas[endpoint] ?? {};
      if (state === "held") held += 1;
      this._mark(row.marks[n], endpoint, state, evicted, why);
    });
    setText(row.held, `${held} of ${this._endpoints.length}`);
    const only = Object.keys(adapter.versions ?? {}).length < 2;
    if (row.rollback.disabled !== only) row.rollback.disabled = only;
  }

  _rename(row, name) {
    row.shown = name;
    setText(row.name, name);
    row.name.title = name;
    setAttribute(row.rollback, "aria-label", `Roll back ${name}…`);
    setAttribute(row.versions, "aria-label", `Versions of ${name}…`);
  }

  _mark(mark, endpoint, state, evicted, why) {
    if (mark.state === state && mark.evicted === evicted && mark.why === why) return;
    Object.assign(mark, { state, evicted, why });
    const said = evicted ? `${state}, evicted ${figure(evicted)}×` : state;
    setAttribute(mark.node, "data-state", state);
    setAttribute(mark.node, "data-evicted", evicted > 0 && (evicted > MOST_SHOWN ? `${MOST_SHOWN}+` : evicted));
    setAttribute(mark.node, "title", `${endpoint}: ${said}${why && `: ${why}`}`);
    // With many replicas, the text does not fit: only screen readers get it.
    if (this._named) setText(mark.node, said);
    else setAttribute(mark.node, "aria-label", said);
  }
}
