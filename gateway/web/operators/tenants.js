// Tenants: use of their limits, queued requests, and refusals with their causes.

import { el } from "../dom.js";
import { bar, setBar } from "./bars.js";
import { button, searchField, select } from "./controls.js";
import { askNewKey } from "./key_actions.js";
import { KeyTable } from "./keys.js";
import { store } from "./store.js";
import { KeyedList, setAttribute, setHidden, setText } from "./update.js";
import { ago, count, figure, foundOf, limitName, refusalName, sorted } from "./words.js";

const MOST = 200; // to find others, the user types a name
const RECENT_S = 300;
const SHOWN = [
  ["all", "all"],
  ["refused", "refused lately"],
];
const FIGURES = [
  ["running", "running"],
  ["waiting", "waiting"],
  ["requests_per_minute", "requests/min"],
  ["tokens_per_minute", "tokens/min"],
];

export class TenantsView {
  constructor(section) {
    const [label, search] = searchField("find-tenant", "Find by name, or by a key's note or id");
    const [shown, filter] = select("Show", SHOWN);
    this.search = search;
    this._filter = filter;
    this._found = el("p", { class: "found", role: "status" });
    this._none = el("p", { class: "nothing" });
    const list = el("ul", { class: "tenants" });
    this._rows = new KeyedList(list, build);
    section.append(el("div", { class: "tools" }, label, search, shown, this._found), this._none, list);
  }

  /** Called for a link from another view: searches for `name`. Without a name, shows refused tenants. */
  find(name) {
    this.search.value = name;
    this._filter.value = name ? "all" : "refused";
  }

  render(state) {
    const all = state.tenants ?? {};
    const total = Object.keys(all).length;
    const wanted = this.search.value.trim().toLowerCase();
    const lately = this._filter.value === "refused";
    const passes = (name) => (!lately || isRefusedNow(all[name])) && fits(name, all[name], wanted);
    const found = sorted(Object.keys(all).filter(passes));
    const shown = found.slice(0, MOST);
    const none = "No tenants are configured: all clients that can reach this gateway may use all its models.";
    setText(this._none, total ? "None fits that." : none);
    setHidden(this._none, found.length > 0);
    const more = found.length > MOST ? `; the first ${MOST} are shown` : "";
    setText(this._found, `${foundOf(found.length, total, "tenant", state.left_out?.tenants)}${more}`);
    const rows = this._rows.show(shown);
    for (const name of shown) update(rows.get(name), all[name]);
  }
}

function fits(name, tenant, wanted) {
  if (name.toLowerCase().includes(wanted)) return true;
  const keys = Object.entries(tenant.keys ?? {});
  return keys.some(([id, key]) => id.includes(wanted) || (key.note ?? "").toLowerCase().includes(wanted));
}

function build(name) {
  const figures = FIGURES.map(() => el("dd"));
  const limits = el("ul", { class: "limits", "aria-label": `Limits of ${name}` });
  const keys = new KeyTable(name);
  const parts = {
    figures,
    limits: new KeyedList(limits, buildLimit),
    why: el("p", { class: "why" }),
    causes: el("p", { class: "hint" }),
    summary: el("summary"),
    keys,
  };
  const terms = FIGURES.map(([, label], n) => el("div", {}, el("dt", {}, label), figures[n]));
  const make = button("Make a key…", () => askNewKey(name), { label: `Make a key for ${name}…` });
  const node = el(
    "li",
    { class: "tenant" },
    el("div", { class: "who" }, el("h3", {}, name), el("dl", { class: "facts" }, ...terms)),
    limits,
    el("div", { class: "refused" }, parts.why, parts.causes),
    el("details", {}, parts.summary, el("div", { class: "opened" }, keys.node, make)),
  );
  return { ...parts, node };
}

function buildLimit(limit) {
  const it = bar();
  return { it, node: el("li", {}, el("span", { class: "hint" }, limitName(limit)), it.node) };
}

function update(row, tenant) {
  FIGURES.forEach(([fact], n) => setText(row.figures[n], figure(tenant[fact] ?? 0)));
  const limits = tenant.limits ?? {};
  const bars = row.limits.show(Object.keys(limits));
  for (const [limit, { used, limit: most }] of Object.entries(limits)) setBar(bars.get(limit).it, used, most);
  setText(row.why, whyRefused(tenant));
  setAttribute(row.why, "data-state", isRefusedNow(tenant) && "failing");
  setText(row.causes, causesOf(tenant));
  const keys = tenant.keys ?? {};
  setText(row.summary, count(Object.keys(keys).length, "key"));
  row.keys.render(keys);
}

/** Returns true if a recent request was refused, except for a mistake of the client. */
export const isRefusedNow = ({ last_refusal: last }) =>
  last !== undefined && !last.mistake && store.now - last.time < RECENT_S;

/** Describes the tenant's last refusal, its cause, and the current use of that limit. */
export function whyRefused({ last_refusal: last, limits }) {
  if (last === undefined) return "Not refused since this gateway started.";
  const limit = limits?.[last.why.replace(/^rate_limited:/, "")];
  const stands = limit ? ` (${figure(limit.used)} of ${figure(limit.limit)} used now)` : "";
  return `Refused ${ago(last.time, store.now)}: ${refusalName(last.why)}${stands}.`;
}

function causesOf(tenant) {
  const causes = Object.entries(tenant.refused ?? {}).sort((a, b) => b[1] - a[1]);
  return causes.map(([why, times]) => `${figure(times)} × ${refusalName(why)}`).join(", ");
}
