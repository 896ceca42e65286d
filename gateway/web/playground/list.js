// The list of kept conversations: to open, rename and delete.

import { $, el, iconButton } from "../dom.js";

export class ConversationList {
  // `does`: {open(id), rename(id, title), remove(id)}
  constructor(root, does) {
    Object.assign(this, { root, does });
  }

  draw(kept, currentId) {
    this.root.replaceChildren(...kept.map((one) => this.entry(one, one.id === currentId)));
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
      this.does.rename(id, name.trim() || title);
      $(`[title="${CSS.escape(name)}"]`, this.root)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(input.value);
      if (event.key === "Escape") end(title);
    });
    input.addEventListener("blur", () => end(input.value));
    entry.replaceChildren(input);
    input.select();
  }
}
