// A table of any length. Only visible rows are in the document, positioned by `transform`. CSS defines
// the height of rows (`--row`) and the width of columns (`--columns`). Rows that are scrolled out of
// view are reused: creating new ones took 1.5 times as long.

import { el } from "../dom.js";
import { setAttribute } from "./update.js";

const OVERSCAN_ROWS = 6; // above and below the visible rows, for the next turn of a wheel and for Tab
const RESTS_MS = 150;

// The row with the focus is not moved in the document, because it would lose the focus.
const hasFocus = (row) => row.node.contains(document.activeElement);

export class VirtualTable {
  /** `build()` returns a row: {node, ...}. `update(row)` shows the object that `row.key` names. */
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
    // In the next frame, after the store's viewers: until then, rows may be shown that the state has no more.
    this.node.addEventListener("scroll", () => requestAnimationFrame(() => this._draw()), { passive: true });
    this.node.addEventListener("keydown", () => this._order());
    new ResizeObserver(() => this._measure()).observe(this.node);
  }

  /** Sets the columns, each {head, class}, and builds all rows again. */
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
    const first = Math.max(0, Math.floor(top / this._height) - OVERSCAN_ROWS);
    const last = Math.ceil((top + this._seen) / this._height) + OVERSCAN_ROWS;
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

  // Sorts the rows in the document, for screen readers and Tab. Moved rows cause layout, so this runs
  // only when scrolling pauses, and before a key is handled.
  _order() {
    let next = this._body.firstElementChild;
    for (const row of [...this._rows.values()].sort((a, b) => a.index - b.index)) {
      if (row.node === next) next = next.nextElementSibling;
      else if (!hasFocus(row)) this._body.insertBefore(row.node, next);
    }
  }
}

/** Builds a row of `cells`, in the order of the columns. The first cell is the row header. A DIV is used as the cell itself. */
export function tableRow(columns, cells) {
  const nodes = cells.map((cell, n) => {
    const role = n ? "cell" : "rowheader";
    if (cell.tagName !== "DIV") return el("div", { role, class: columns[n].class }, cell);
    cell.setAttribute("role", role);
    return cell;
  });
  return el("div", { role: "row", class: "row" }, ...nodes);
}
