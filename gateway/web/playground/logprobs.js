// View of an answer as tokens, coloured by probability, with the alternatives of the selected token.

import { el } from "../dom.js";
import { randomId } from "./conversation.js";

// The most probable tokens have no colour: users look for the improbable ones.
const STEPS = [0.9, 0.7, 0.5, 0.3, 0.1];

const percent = (logprob) => {
  const part = Math.exp(logprob) * 100;
  return part >= 99.95 ? "100 %" : part < 0.05 ? "< 0.1 %" : `${part.toFixed(1)} %`;
};

const rounded = (logprob) => (logprob > -0.005 ? "0.00" : logprob.toFixed(2));

const step = (logprob) => STEPS.findLastIndex((least) => Math.exp(logprob) < least) + 1;

// Returns the token with visible characters for spaces and line breaks.
const visible = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (s) => "·".repeat(s.length));

export class Tokens {
  constructor() {
    this.tip = el("div", { id: `tip-${randomId()}`, class: "tip", role: "tooltip", hidden: true });
    this.row = el("div", { class: "tokens", role: "listbox", "aria-orientation": "horizontal",
      "aria-label": "Tokens by their log probability" });
    const scale = STEPS.map((_, n) => el("i", { class: `p${STEPS.length - n}` }));
    this.node = el("div", { class: "logprobs" }, this.row,
      el("p", { class: "scale hint" }, "unlikely", ...scale, "likely"), this.tip);
    this.shown = [];
    this.row.addEventListener("mouseover", (event) => this.point(event.target));
    this.row.addEventListener("mouseleave", () => this.hide());
    this.row.addEventListener("focusin", (event) => this.point(event.target));
    this.row.addEventListener("focusout", () => this.hide());
    this.row.addEventListener("keydown", (event) => this.key(event));
  }

  // `entries` must begin with those of the last call.
  update(entries) {
    for (const entry of entries.slice(this.shown.length)) this.append(entry);
  }

  append(entry) {
    const first = this.shown.length === 0;
    const token = el("span", { class: `token p${step(entry.logprob)}`, role: "option",
      tabindex: first ? "0" : "-1", "aria-selected": "false",
      "aria-label": `${entry.token}, ${percent(entry.logprob)}` }, visible(entry.token) || "∅");
    this.row.append(token);
    if (entry.token.includes("\n")) this.row.append(el("br"));
    this.shown.push({ token, entry });
  }

  key(event) {
    const at = this.shown.findIndex(({ token }) => token === document.activeElement);
    const last = this.shown.length - 1;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.hide();
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const next = this.shown[Math.min(last, Math.max(0, to))].token;
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  point(target) {
    const found = this.shown.find(({ token }) => token === target);
    if (!found) return;
    this.hide();
    const { token, entry } = found;
    token.setAttribute("aria-selected", "true");
    token.setAttribute("aria-describedby", this.tip.id);
    this.pointed = token;
    const others = entry.top_logprobs.filter((other) => other.token !== entry.token);
    const all = [entry, ...others].sort((a, b) => b.logprob - a.logprob);
    this.tip.replaceChildren(...all.map((one) => this.line(one, one === entry)));
    this.tip.hidden = false;
    this.place(token);
  }

  line({ token, logprob }, isChosen) {
    const bar = el("i", { class: "bar-of" });
    bar.style.width = `${Math.max(2, Math.exp(logprob) * 100)}%`;
    return el("p", { class: isChosen ? "chosen" : null },
      el("code", {}, visible(token) || "∅"), el("span", { class: "measure" }, bar),
      el("span", { class: "figure" }, percent(logprob)), el("span", { class: "figure" }, rounded(logprob)));
  }

  // Moves the tooltip below the token, within the answer.
  place(token) {
    const [outer, inner] = [this.node.getBoundingClientRect(), token.getBoundingClientRect()];
    const most = outer.width - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(inner.left - outer.left, most))}px`;
    this.tip.style.top = `${inner.bottom - outer.top + 6}px`;
  }

  hide() {
    this.tip.hidden = true;
    this.pointed?.setAttribute("aria-selected", "false");
    this.pointed?.removeAttribute("aria-describedby");
  }
}
