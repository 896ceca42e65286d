// The gateway's last reported state. Viewers are called at most once per frame, for any number of changes.

import { merged } from "./merge_patch.js";

const TICK_MS = 1000; // ages must be updated even without changes

class Store {
  constructor() {
    this.state = null;
    /** `kind`: `idle`, `live`, `connecting` or `broken`; `why`: the error; `retry`: time of the next attempt. */
    this.link = { kind: "idle" };
    this.updated = 0;
    this._ahead = 0;
    this._viewers = new Set();
    this._frame = 0;
    setInterval(() => this.link.kind !== "idle" && this.changed(), TICK_MS);
  }

  /** The current time of the gateway's clock in seconds, because this machine's clock may be wrong. */
  get now() {
    return Date.now() / 1000 + this._ahead;
  }

  replace(state) {
    this.state = merged(undefined, state);
    this._arrived();
  }

  patch(change) {
    if (this.state === null) return;
    this.state = merged(this.state, change);
    this._arrived();
  }

  setLink(link) {
    this.link = link;
    this.changed();
  }

  forget() {
    this.state = null;
    this.changed();
  }

  /** Calls `viewer` before the next frame, and then before the next frame after each change. */
  watch(viewer) {
    this._viewers.add(viewer);
    this.changed();
    return () => this._viewers.delete(viewer);
  }

  changed() {
    if (this._frame) return;
    this._frame = requestAnimationFrame(() => {
      this._frame = 0;
      for (const viewer of this._viewers) viewer();
    });
  }

  _arrived() {
    this.updated = Date.now() / 1000;
    if (typeof this.state.time === "number") this._ahead = this.state.time - this.updated;
    this.changed();
  }
}

export const store = new Store();
