// Updates of existing elements. Unchanged values are not written, so they cause no layout.

export function setText(node, value) {
  const text = String(value);
  const first = node.firstChild;
  if (first === null) {
    if (text) node.append(text);
  } else if (first.nodeType === Node.TEXT_NODE && first.nextSibling === null) {
    if (first.data !== text) first.data = text;
  } else node.textContent = text;
}

/** `undefined` and false remove the attribute. */
export function setAttribute(node, name, value) {
  if (value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (node.getAttribute(name) !== text) node.setAttribute(name, text);
  }
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/** Children of `parent`, one for each key, in the order of the keys. Existing children are not changed. */
export class KeyedList {
  /** `build(key)` returns a row: an object with `node`, and fields for its updates. */
  constructor(parent, build) {
    this._parent = parent;
    this._build = build;
    this.rows = new Map();
  }

  show(keys) {
    const wanted = new Set(keys);
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      row.node.remove();
      this.rows.delete(key);
    }
    let next = this._parent.firstElementChild;
    for (const key of keys) {
      let row = this.rows.get(key);
      if (row === undefined) this.rows.set(key, (row = this._build(key)));
      if (row.node === next) next = next.nextElementSibling;
      else this._parent.insertBefore(row.node, next);
    }
    return this.rows;
  }
}
