// View of one answer: its growing text, its figures, and its buttons.

import { $, copyText, el, icon } from "../dom.js";
import { Markdown, codeBlock } from "../markdown.js";
import { Tokens } from "./logprobs.js";

// After a slow draw, pause this many times its duration.
const PAUSE = 4;

const FINISHES = {
  stop: ["stop", "The answer is complete, or a stop string came."],
  length: ["length", "Cut: the most tokens are reached, or the context is full."],
  tool_calls: ["calls", "The model asks for results of tools."],
};

export class AnswerView {
  // `does`: {stop, again, sendResults, written, drawn}. Actions that are null are not available.
  // `written()` is called at every change of a call's result.
  constructor(answer, does) {
    Object.assign(this, { answer, does });
    this.thoughts = new Markdown(el("div"));
    this.text = new Markdown(el("div"));
    this.thinking = el("details", { class: "thoughts", hidden: true },
      el("summary", {}, "Thoughts"), this.thoughts.root);
    this.calls = el("div", { class: "calls" });
    this.notes = el("div", { class: "notes" });
    this.facts = el("ul", { class: "facts", "aria-label": "About this answer" });
    this.actions = el("div", { class: "actions-row" });
    this.who = el("h3", { class: "who" });
    this.node = el("article", { class: "answer" }, this.who, this.thinking, this.text.root, this.calls, this.notes,
      el("footer", {}, this.facts, this.actions));
    this.draw();
  }

  changed() {
    if (this.due) return;
    this.due = true;
    const soon = () => requestAnimationFrame(() => {
      this.due = false;
      this.draw();
      this.does.drawn?.();
    });
    if (this.took > 8) setTimeout(soon, this.took * PAUSE);
    else soon();
  }

  draw() {
    const { answer } = this;
    const started = performance.now();
    this.node.setAttribute("aria-busy", String(Boolean(answer.running)));
    this.node.classList.toggle("running", Boolean(answer.running));
    // Thoughts open when they start. If the user closes them, they stay closed.
    if (this.thinking.hidden && answer.thoughts) this.thinking.open = answer.running && !answer.text;
    this.thinking.hidden = !answer.thoughts;
    this.thoughts.update(answer.thoughts);
    this.text.update(answer.text);
    if (this.tokens) this.tokens.update(answer.logprobs);
    if (this.wasRunning !== Boolean(answer.running)) this.settle();
    // The time at which the engine was free arrives later. Do not replace the buttons: one may have the focus.
    else if (!answer.running) this.notes.replaceChildren(...notesOf(answer));
    this.wasRunning = Boolean(answer.running);
    this.took = performance.now() - started;
  }

  // Updates the parts that change only when the answer starts or ends.
  settle() {
    const { answer } = this;
    this.node.setAttribute("aria-label", `Answer of ${answer.model}`);
    this.who.textContent = answer.model;
    this.calls.replaceChildren(...answer.calls.map((call) => this.call(call)), ...this.results());
    this.notes.replaceChildren(...notesOf(answer));
    this.facts.replaceChildren(...factsOf(answer));
    const { hasFocus } = this;
    this.actions.replaceChildren(...this.buttons());
    if (hasFocus) this.focus();
  }

  // True if a keyboard user has focused a button. Buttons are replaced when the answer starts or ends.
  get hasFocus() {
    return Boolean($(":focus-visible", this.actions));
  }

  focus() {
    this.actions.lastElementChild?.focus();
  }

  call(call) {
    let shown = call.arguments;
    try {
      shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
    } catch {
      // Incomplete or no JSON: show it unformatted.
    }
    const write = () => {
      call.result = result.value;
      this.does.written();
    };
    const result = el("textarea", { class: "input code", rows: 2, "aria-label": `Result of ${call.name}`,
      placeholder: "Its result", value: call.result ?? "", oninput: write });
    const given = call.result ? el("p", { class: "given" }, el("span", { class: "hint" }, "Result "), call.result) : null;
    return el("div", { class: "call" }, codeBlock(shown, `calls ${call.name}`),
      this.does.sendResults && !this.answer.running ? result : given);
  }

  results() {
    if (!this.answer.calls.length || this.answer.running || !this.does.sendResults) return [];
    return [el("button", { class: "button outlined", type: "button", onclick: this.does.sendResults },
      icon("send"), "Send results")];
  }

  buttons() {
    const { answer, does } = this;
    const button = (name, label, run) =>
      el("button", { type: "button", class: "button small", onclick: run }, icon(name), label);
    if (answer.running) return [button("stop", "Stop", does.stop)];
    const copy = button("copy", "Copy", () => copyText(answer.text, copy));
    const made = answer.text ? [copy] : [];
    if (answer.logprobs?.length) made.push(this.tokensButton());
    if (does.again) made.push(button("retry", "Again", does.again));
    return made;
  }

  tokensButton() {
    const button = el("button", { type: "button", class: "button small", "aria-pressed": String(Boolean(this.tokens)) },
      icon("tokens"), "Tokens");
    button.addEventListener("click", () => {
      if (this.tokens) {
        this.tokens.node.replaceWith(this.text.root);
        this.tokens = null;
      } else {
        this.tokens = new Tokens();
        this.tokens.update(this.answer.logprobs);
        this.text.root.replaceWith(this.tokens.node);
      }
      button.setAttribute("aria-pressed", String(Boolean(this.tokens)));
    });
    return button;
  }
}

export const shortTime = (ms) =>
  ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;

function notesOf({ running, text, calls, finish, error, stopped, ignored, isFormer }) {
  const notes = [];
  const isCut = !running && !text && !calls.length && !finish && !error && !stopped; // the page was closed
  if (isCut) notes.push(el("p", { class: "notice" }, "Not answered."));
  if (error) {
    const param = error.param ? el("span", { class: "badge bad" }, error.param) : null;
    notes.push(el("p", { class: "notice bad" }, error.message, param ? " " : null, param));
  }
  if (stopped) {
    const freed = stopped.freedMs == null ? "" : ` The engine was free ${shortTime(stopped.freedMs)} later.`;
    notes.push(el("p", { class: "notice stopped" }, `Stopped after ${shortTime(stopped.afterMs)}.${freed}`));
  }
  if (isFormer) notes.push(el("p", { class: "notice" }, "This is the answer from before."));
  if (ignored) notes.push(el("p", { class: "notice warn" }, `Without effect here: ${ignored}.`));
  return notes;
}

function factsOf({ firstMs, rate, usage, finish, version }) {
  const facts = [];
  const fact = (name, text, title) => facts.push(el("li", { title, "data-fact": name }, text));
  if (firstMs !== undefined) fact("first", `${shortTime(firstMs)} to first token`, "From the request to its first token, as seen here.");
  if (rate) fact("rate", `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`, "Between the first token and the last.");
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const more = cached ? `; ${cached} of the prompt were in the engine's cache` : "";
    fact("usage", `${usage.prompt_tokens} + ${usage.completion_tokens} tokens`, `Of the prompt and of the answer${more}.`);
  }
  if (finish) fact("finish", ...(FINISHES[finish] ?? [finish, ""]));
  // NAME@DIGEST: show only the digest, because the name is shown above.
  if (version) fact("version", version.slice(version.lastIndexOf("@")).slice(0, 13), `Adapter version ${version}`);
  return facts;
}
