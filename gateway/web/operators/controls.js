// Buttons and fields of this page.

import { el } from "../dom.js";
import { store } from "./store.js";

/** `label` is for screen readers, and names the object, because they do not read the row. */
export function button(text, onclick, { label, kind = "outlined small" } = {}) {
  return el("button", { type: "button", class: `button ${kind}`, "aria-label": label, onclick }, text);
}

/** A search field with a label only for screen readers. Input takes effect with the next frame. */
export function searchField(id, label) {
  const oninput = () => store.changed();
  const input = el("input", {
    class: "input", type: "search", id, placeholder: label, autocomplete: "off", spellcheck: "false", oninput,
  });
  return [el("label", { class: "aloud", for: id }, label), input];
}

export function select(label, options) {
  const onchange = () => store.changed();
  const made = options.map(([value, text]) => el("option", { value }, text));
  const chosen = el("select", { class: "input", onchange }, ...made);
  return [el("label", { class: "inline" }, `${label} `, chosen), chosen];
}

export function field(label, input, hint) {
  const said = hint ? el("span", { class: "hint" }, hint) : null;
  return el("label", { class: "field" }, el("span", { class: "label" }, label), input, said);
}
