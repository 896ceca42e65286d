// The list of kept conversations: to open, rename and delete.

import { $, el, iconButton } from "../dom.js";

export class ConversationList {
  // `does`: {open(id), rename(id, title), remove(id)}
  constructor(root, does) {
    Object.assign(this, { root, does });
  }

  draw(kept, currentId) {
    // An answer may end while a name is written; what comes of it is drawn. A field may go without a word.
    if (this.naming && this.naming === document.activeElement) return;
    const hadFocus = this.root.contains(document.activeElement);
    this.root.replaceChildren(...kept.map((one) => this.entry(one, one.id === currentId)));
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
      event.preventDefault(); // else it would press what has the focus next
      event.stopPropagation();
      end(event.key === "Enter" ? input.value : "");
    });
    input.addEventListener("blur", () => end(input.value));
    this.naming = input;
    entry.replaceChildren(input);
    input.select();
  }
}
