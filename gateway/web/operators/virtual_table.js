// A table of any length, of which only the rows that are seen are in the document. Rows lie where
// they belong by `transform`; CSS says how high they are (`--row`) and how wide columns (`--columns`).
// A row that is not seen any more becomes another's: to make new ones took half as much again.

import { el } from "../dom.js";
import { setAttribute } from "./update.js";

const BEYOND = 6; // rows above and below what is seen, for the next turn of a wheel and for Tab
const RESTS_MS = 150;

// What has the focus stays where it is, as it would lose it.
const hasFocus = (row) => row.node.contains(document.activeElement);

export class VirtualTable {
  /** `build()` gives a row: {node, ...}. `update(row)` has it show what `row.key` names. */
  constructor(label, build, update) {
    this._build = build;
    this._update = update;
    this._keys = [];
    this._rows = new Map();
    this._head = el("div", { role: "row", class: "head" });
    this._body = el("div", { role: "rowgroup", class: "rows" });
    this._table = el(
      "div",
      { role: "table", "aria-label": label, class: "grid" },
      el("div", { role: "rowgroup", class: "heads" }, this._head),
      this._body,
    );
    this.node = el(
      "div",
      { class: "scroller", tabindex: "0", role: "region", "aria-label": `${label}, scrolls` },
      this._table,
    );
    // With the frame, and behind the store's viewers: the state may have rows no more that are still here.
    this.node.addEventListener("scroll", () => requestAnimationFrame(() => this._draw()), { passive: true });
    this.node.addEventListener("keydown", () => this._order());
    new ResizeObserver(() => this._measure()).observe(this.node);
  }

  /** Each: {head, class}. Rows are built anew. */
  setColumns(columns) {
    const heads = columns.map(({ head, class: name }) => el("div", { role: "columnheader", class: name }, head));
    this._head.replaceChildren(...heads);
    setAttribute(this._table, "aria-colcount", columns.length);
    this._clear();
  }

  show(keys) {
    this._keys = keys;
    setAttribute(this._table, "aria-rowcount", keys.length + 1);
    this._place();
    this._draw();
  }

  _clear() {
    for (const row of this._rows.values()) row.node.remove();
    this._rows.clear();
  }

  _measure() {
    const height = parseFloat(getComputedStyle(this.node).getPropertyValue("--row"));
    this._seen = this.node.clientHeight;
    if (height !== this._height) {
      this._height = height;
      this._clear();
    }
    this._place();
    this._draw();
  }

  _place() {
    if (!this._height) return; // not shown yet
    const all = `${this._keys.length * this._height}px`;
    if (this._body.style.height !== all) this._body.style.height = all;
  }

  _draw() {
    if (!this._height) return;
    const top = this.node.scrollTop;
    const first = Math.max(0, Math.floor(top / this._height) - BEYOND);
    const last = Math.ceil((top + this._seen) / this._height) + BEYOND;
    const wanted = new Map(this._keys.slice(first, last).map((key, n) => [key, first + n]));
    const free = [];
    for (const [key, row] of this._rows) {
      if (wanted.has(key)) continue;
      const at = hasFocus(row) ? this._keys.indexOf(key) : -1;
      if (at >= 0) wanted.set(key, at);
      else {
        free.push(row);
        this._rows.delete(key);
      }
    }
    for (const [key, index] of wanted) {
      this._putAt(this._rows.get(key) ?? this._rowFor(key, free), index);
    }
    for (const row of free) row.node.remove();
    clearTimeout(this._resting);
    this._resting = setTimeout(() => this._order(), RESTS_MS);
  }

  _rowFor(key, free) {
    const row = free.pop() ?? this._build();
    row.key = key;
    this._rows.set(key, row);
    if (!row.node.isConnected) this._body.append(row.node);
    return row;
  }

  _putAt(row, index) {
    if (row.index !== index) {
      row.index = index;
      row.node.style.transform = `translateY(${index * this._height}px)`;
      row.node.setAttribute("aria-rowindex", index + 2);
    }
    this._update(row);
  }

  // The order in the document is that of reading and of Tab. It is mended when scrolling rests, and
  // before a key is heard: what is moved in the document is laid out anew.
  _order() {
    let place = this._body.firstElementChild;
    for (const row of [...this._rows.values()].sort((a, b) => a.index - b.index)) {
      if (row.node === place) place = place.nextElementSibling;
      else if (!hasFocus(row)) this._body.insertBefore(row.node, place);
    }
  }
}

/** A row of `cells`, in the order of the columns; the first one names it. A cell may be its own node. */
export function tableRow(columns, cells) {
  const nodes = cells.map((cell, n) => {
    const role = n ? "cell" : "rowheader";
    if (cell.tagName !== "DIV") return el("div", { role, class: columns[n].class }, cell);
    cell.setAttribute("role", role);
    return cell;
  });
  return el("div", { role: "row", class: "row" }, ...nodes);
}
