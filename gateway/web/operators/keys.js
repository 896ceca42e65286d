// Table of a tenant's keys. Keys of the configuration file are shown, but can be changed only in the file.

import { el } from "../dom.js";
import { button } from "./controls.js";
import { askRevoke } from "./key_actions.js";
import { store } from "./store.js";
import { KeyedList, setHidden, setText } from "./update.js";
import { ago, moment } from "./words.js";

const HEADS = ["Key", "Note", "Last used", "Expires"];

export class KeyTable {
  constructor(tenant) {
    const body = el("tbody");
    this._rows = new KeyedList(body, (id) => build(tenant, id));
    const heads = HEADS.map((head) => el("th", { scope: "col" }, head));
    const table = el(
      "table",
      { class: "keys" },
      el("caption", { class: "aloud" }, `Keys of ${tenant}`),
      el("thead", {}, el("tr", {}, ...heads, el("td"))),
      body,
    );
    this.node = el("div", { class: "sideways" }, table);
  }

  render(keys) {
    const ids = Object.keys(keys);
    setHidden(this.node, ids.length === 0);
    const rows = this._rows.show(ids);
    for (const id of ids) update(rows.get(id), keys[id]);
  }
}

function build(tenant, id) {
  const [note, used, expires] = HEADS.slice(1).map((head) => el("td", { "data-label": head }));
  const revoke = button("Revoke…", () => askRevoke(tenant, id), { label: `Revoke ${id}…`, kind: "small danger" });
  const fixed = el("span", { class: "hint" }, "in the file");
  const head = el("th", { scope: "row" }, el("code", {}, id));
  const node = el("tr", {}, head, note, used, expires, el("td", {}, revoke, fixed));
  return { note, used, expires, revoke, fixed, node };
}

function update(row, key) {
  const ofFile = key.from === "file";
  setText(row.note, key.note ?? "");
  setText(row.used, ofFile && key.last_used === undefined ? "not recorded" : ago(key.last_used, store.now));
  const over = key.expires !== undefined && key.expires <= store.now;
  setText(row.expires, key.expires === undefined ? "never" : `${over ? "expired " : ""}${moment(key.expires)}`);
  setHidden(row.revoke, ofFile);
  setHidden(row.fixed, !ofFile);
}
