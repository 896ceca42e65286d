// Field to find a model by typing: an ARIA combobox with a list.

import { el, icon } from "../dom.js";
import { randomId } from "./conversation.js";

const MOST_SHOWN = 60;

export class Picker {
  // `models()` returns the available models. Calls `picked(name)` with the chosen or typed name.
  constructor({ label, models, picked }) {
    Object.assign(this, { models, picked });
    const id = `options-${randomId()}`;
    this.input = el("input", { class: "input", role: "combobox", "aria-label": label, autocomplete: "off",
      spellcheck: "false", "aria-expanded": "false", "aria-autocomplete": "list", "aria-controls": id,
      placeholder: "Model or adapter" });
    this.list = el("ul", { id, class: "options", role: "listbox", "aria-label": label, hidden: true });
    this.node = el("div", { class: "picker" }, this.input, icon("chevron"), this.list);
    this.at = -1;
    this.input.addEventListener("input", () => this.open(this.input.value));
    this.input.addEventListener("mousedown", () => this.open(""));
    this.input.addEventListener("focus", () => this.input.select());
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.input.addEventListener("blur", () => this.take(this.input.value));
    // Otherwise the field would lose the focus, and the list would close, before the click.
    this.list.addEventListener("mousedown", (event) => event.preventDefault());
  }

  get value() {
    return this.input.value.trim();
  }

  set value(name) {
    this.input.value = this.before = name;
    this.input.title = name;
  }

  // Sets the name until the user chooses another. If the user is typing, shows the matching models.
  offer(name) {
    const typed = document.activeElement === this.input ? this.value : "";
    if (!typed) {
      this.value = name;
      if (document.activeElement === this.input) this.input.select(); // so that typing replaces it
    }
    this.before = name;
    if (typed) this.open(typed);
  }

  open(typed) {
    const words = typed.toLowerCase().split(/\s+/);
    const fits = ({ id, root }) => {
      const text = `${id} ${root ?? ""}`.toLowerCase();
      return words.every((word) => text.includes(word));
    };
    this.found = this.models().filter(fits).slice(0, MOST_SHOWN);
    this.list.replaceChildren(...this.found.map((model, n) => this.option(model, n)));
    this.show(this.found.length > 0);
    // A typed version, NAME@DIGEST, is used unchanged.
    this.move(typed ? (typed.includes("@") ? -1 : 0) : this.found.findIndex((model) => model.id === this.value));
  }

  option({ id, root, parent }, n) {
    const about = parent ? (root && root !== id ? root : `adapter of ${parent}`) : "base model";
    return el("li", { id: `${this.list.id}-${n}`, role: "option", "aria-selected": "false",
      onclick: () => this.take(id, true) }, id, el("small", {}, about));
  }

  show(isOpen) {
    this.list.hidden = !isOpen;
    this.input.setAttribute("aria-expanded", String(isOpen));
    if (!isOpen) this.input.removeAttribute("aria-activedescendant");
  }

  move(to) {
    this.at = to;
    for (const [n, option] of [...this.list.children].entries()) {
      option.setAttribute("aria-selected", String(n === to));
      if (n !== to) continue;
      option.scrollIntoView({ block: "nearest" });
      this.input.setAttribute("aria-activedescendant", option.id);
    }
  }

  key(event) {
    const isOpen = !this.list.hidden;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      if (!isOpen) this.open("");
      else this.move((this.at + step + this.found.length) % this.found.length);
    } else if (event.key === "Enter") {
      this.take(isOpen && this.at >= 0 ? this.found[this.at].id : this.value, true);
    } else if (event.key === "Escape" && isOpen) {
      this.take(this.before, true);
    } else return;
    event.preventDefault();
  }

  // The server checks names that are not in the list, such as NAME@DIGEST of an older version.
  take(name, stays = false) {
    this.show(false);
    const chosen = name.trim() || this.before || "";
    const isNew = chosen !== this.before;
    this.value = chosen;
    if (stays) this.input.select();
    if (isNew) this.picked(chosen);
  }
}
