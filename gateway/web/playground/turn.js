// View of one turn: the prompt, and below it one answer per pane.

import { el, icon, iconButton, sendOnEnter } from "../dom.js";
import { AnswerView } from "./answer.js";
import { randomId } from "./conversation.js";

export class TurnView {
  // `does`: {edited(prompt), isLast(), forPane(pane) -> actions of an answer's buttons}
  constructor(turn, panes, does) {
    Object.assign(this, { turn, panes, does });
    this.views = new Map();
    this.answers = el("div", { class: "answers columns" });
    this.dropped = el("span", {}, " The turns after this one are dropped.");
    this.node = el("section", { class: "turn", "aria-label": "Turn" });
    if (turn.prompt !== null) this.node.append(this.prompt());
    this.node.append(this.answers);
    this.draw();
  }

  draw() {
    const [focused] = [...this.views].find(([, view]) => view.hasFocus) ?? [];
    this.views.clear();
    this.answers.replaceChildren(...this.panes.map((pane) => this.column(pane)));
    this.views.get(focused)?.focus();
    this.dropped.hidden = this.does.isLast(); // turns may be added while the prompt is being edited
  }

  column(pane) {
    const answer = this.turn.answers[pane.id];
    if (answer) {
      const view = new AnswerView(answer, this.does.forPane(pane));
      this.views.set(pane.id, view);
      return view.node;
    }
    const ask = this.does.forPane(pane).again;
    return el("div", { class: "answer empty" }, ask && this.turn.prompt !== null
      ? el("button", { class: "button outlined", type: "button", onclick: ask }, `Ask ${pane.model} too`)
      : null);
  }

  prompt() {
    const shown = el("p", { class: "prompt-text" }, this.turn.prompt);
    const edit = iconButton("edit", "Edit the prompt", () => this.edit(card));
    const card = el("article", { class: "prompt-card", "aria-label": "Prompt" }, shown, edit);
    return card;
  }

  edit(card) {
    const hint = el("p", { class: "hint", id: `hint-${randomId()}` }, "Enter sends, Shift+Enter begins a line.", this.dropped);
    const area = el("textarea", { class: "input", rows: 3, "aria-label": "Prompt", "aria-describedby": hint.id,
      value: this.turn.prompt });
    sendOnEnter(area);
    const back = () => {
      form.replaceWith(card);
      card.querySelector("button").focus();
    };
    const form = el("form", { class: "prompt-card editing" }, area,
      hint,
      el("div", { class: "actions-row" },
        el("button", { class: "button", type: "button", onclick: back }, "Cancel"),
        el("button", { class: "button primary", type: "submit" }, icon("send"), "Send")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.does.edited(area.value);
    });
    form.addEventListener("keydown", (event) => event.key === "Escape" && !event.isComposing && back());
    card.replaceWith(form);
    area.focus();
  }
}
