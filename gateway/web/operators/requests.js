// Running requests, and the results of the last ones. Prompts and answers are not shown.

import { el } from "../dom.js";
import { searchField } from "./controls.js";
import { endedTable, runningTable } from "./request_rows.js";
import { setHidden, setText } from "./update.js";
import { foundOf } from "./words.js";

export class RequestsView {
  constructor(section) {
    const [label, search] = searchField("find-request", "Find by id, tenant, model or replica");
    this.search = search;
    this._found = el("p", { class: "found", role: "status" });
    this._idle = el("p", { class: "nothing" });
    this._none = el("p", { class: "nothing" }, "None.");
    this._running = runningTable();
    this._ended = endedTable();
    const took = "“Stop took”: time from the client's disconnect, or the stop, until the engine ended the request.";
    section.append(
      el("div", { class: "tools" }, label, search, this._found),
      this._idle,
      this._running.node,
      el("h3", {}, "Ended"),
      el("p", { class: "hint" }, took),
      this._none,
      this._ended.node,
    );
  }

  find(name) {
    this.search.value = name;
  }

  render(state) {
    const wanted = this.search.value.trim().toLowerCase();
    const running = found(state.requests ?? {}, wanted, (it) => it.started);
    const total = Object.keys(state.requests ?? {}).length;
    const under = foundOf(running.length, total, "request", state.left_out?.requests);
    setText(this._found, `${under} under way`);
    setText(this._idle, total ? "None under way fits that." : "Nothing is under way.");
    show(this._running, running, this._idle);
    show(this._ended, found(state.ended ?? {}, wanted, (it) => -it.ended), this._none);
  }
}

function show(table, ids, none) {
  setHidden(table.node, ids.length === 0);
  setHidden(none, ids.length > 0);
  table.show(ids);
}

function found(all, wanted, order) {
  const has = (fact) => fact !== undefined && fact.toLowerCase().includes(wanted);
  const facts = ["request_id", "tenant", "model", "replica"];
  const fits = (id) => has(id) || facts.some((fact) => has(all[id][fact]));
  const ids = Object.keys(all).filter(fits);
  return ids.sort((a, b) => order(all[a]) - order(all[b]) || (a < b ? -1 : 1));
}
