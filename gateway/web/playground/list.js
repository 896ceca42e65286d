// List of stored conversations, to open, rename and delete them.

import { $, el, iconButton } from "../dom.js";

export class ConversationList {
  // `does`: {open(id), rename(id, title), remove(id)}
  constructor(root, does) {
    Object.assign(this, { root, does });
  }

  draw(stored, currentId) {
    // An answer may end while the user types a name: do not replace the field. It is drawn after the renaming.
    if (this.naming && this.naming === document.activeElement) return;
    const hadFocus = this.root.contains(document.activeElement);
    this.root.replaceChildren(...stored.map((one) => this.entry(one, one.id === currentId)));
    if (hadFocus) ($(".current .open", this.root) ?? $(".open", this.root) ?? $("#new")).focus();
  }

  entry({ id, title }, isCurrent) {
    const open = el("button", { class: "open", type: "button", title, "aria-current": isCurrent ? "true" : null,
      onclick: () => this.does.open(id) }, title);
    const entry = el("li", { class: isCurrent ? "current" : null }, open,
      iconButton("edit", `Rename ${title}`, () => this.rename(entry, id, title)),
      iconButton("trash", `Delete ${title}`, () => this.does.remove(id)));
    return entry;
  }

  rename(entry, id, title) {
    const input = el("input", { class: "input", value: title, "aria-label": "Name" });
    let isOver = false;
    const end = (name) => {
      if (isOver) return;
      isOver = true;
      this.naming = null;
      const named = name.trim();
      this.does.rename(id, named === title ? "" : named);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault(); // otherwise it would press the element that gets the focus
      event.stopPropagation();
      end(event.key === "Enter" ? input.value : "");
    });
    input.addEventListener("blur", () => end(input.value));
    this.naming = input;
    entry.replaceChildren(input);
    input.select();
  }
}
