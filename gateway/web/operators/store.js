// The gateway's state as it was last told. Who shows it is called once a frame, however much changes.

import { merged } from "./merge_patch.js";

const TICK_MS = 1000; // ages go on while nothing changes

class Store {
  constructor() {
    this.state = null;
    /** `live`, `connecting`, `broken`; what went wrong, and when it is tried again. */
    this.link = { kind: "idle" };
    this.told = 0;
    this._ahead = 0;
    this._viewers = new Set();
    this._frame = 0;
    setInterval(() => this.link.kind !== "idle" && this.changed(), TICK_MS);
  }

  /** The gateway's time in seconds: this machine's clock may be wrong. */
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

  /** `viewer` is called before the next frame, and before each one after a change. */
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
    this.told = Date.now() / 1000;
    if (typeof this.state.time === "number") this._ahead = this.state.time - this.told;
    this.changed();
  }
}

export const store = new Store();
