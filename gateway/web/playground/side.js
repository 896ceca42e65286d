// Side column: beside the conversation, or over it on a narrow screen.

import { $ } from "../dom.js";

const narrow = matchMedia("(max-width: 900px)");

export class Side {
  constructor(column, button) {
    Object.assign(this, { column, button });
    button.addEventListener("click", () => (column.hidden ? this.open() : this.close()));
    $(".close", column).addEventListener("click", () => this.close());
    column.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    narrow.addEventListener("change", () => this.settle());
  }

  get isOver() {
    return narrow.matches && !this.column.hidden;
  }

  open() {
    this.column.hidden = false;
    this.settle();
    $("button, input, textarea", this.column).focus();
  }

  close() {
    this.column.hidden = true;
    this.settle();
    this.button.focus();
  }

  closeIfOver() {
    if (this.isOver) this.close();
  }

  // While the column covers the page, the rest is inert.
  settle() {
    this.button.setAttribute("aria-expanded", String(!this.column.hidden));
    for (const other of this.column.parentElement.children) {
      if (other !== this.column) other.inert = this.isOver;
    }
  }
}
