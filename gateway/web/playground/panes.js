// Row of model pickers above the conversation, one for each pane.

import { $, el, iconButton } from "../dom.js";
import { MOST_PANES, randomId } from "./conversation.js";
import { Picker } from "./picker.js";

export class Panes {
  // Calls `changed()` after a pane was added or removed, or has another model, and `goes(pane)` before
  // a pane is removed with its answers.
  constructor({ list, add, models, changed, goes }) {
    Object.assign(this, { list, add, models, changed, goes });
    add.addEventListener("click", () => this.another());
  }

  show(conversation) {
    this.conversation = conversation;
    this.draw();
  }

  draw() {
    const { panes } = this.conversation;
    this.pickers = new Map();
    this.list.replaceChildren(...panes.map((pane, n) => this.pane(pane, n)));
    this.add.hidden = panes.length >= MOST_PANES;
    document.body.classList.toggle("several", panes.length > 1);
  }

  // Called when the models have been loaded: panes without a model get the first one.
  fill() {
    for (const [pane, picker] of this.pickers) {
      if (pane.model || !this.models().length) continue;
      pane.model = this.models()[0].id;
      picker.offer(pane.model);
    }
  }

  pane(pane, n) {
    const { panes } = this.conversation;
    const label = panes.length > 1 ? `Model ${n + 1}` : "Model";
    const picker = new Picker({
      label,
      models: this.models,
      picked: (name) => {
        pane.model = name;
        this.changed();
      },
    });
    picker.value = pane.model;
    this.pickers.set(pane, picker);
    const remove = () => this.remove(pane);
    return el("li", { class: "pane" }, picker.node,
      panes.length > 1 ? iconButton("close", `Remove ${label.toLowerCase()}`, remove) : null);
  }

  another() {
    const { panes } = this.conversation;
    const used = new Set(panes.map((pane) => pane.model));
    const next = this.models().find((model) => !used.has(model.id)) ?? this.models()[0];
    panes.push({ id: randomId(), model: next?.id ?? panes[0].model });
    this.draw();
    this.changed();
    $("input", this.list.lastElementChild).focus();
  }

  remove(pane) {
    const { panes, turns } = this.conversation;
    this.goes(pane);
    panes.splice(panes.indexOf(pane), 1);
    for (const turn of turns) delete turn.answers[pane.id];
    this.draw();
    this.changed();
    $("input", this.list).focus();
  }
}
