// Buttons and fields as this page has them.

import { el } from "../dom.js";
import { store } from "./store.js";

/** `label` says what it is about, where the row that it stands in is not heard. */
export function button(text, onclick, { label, kind = "outlined small" } = {}) {
  return el("button", { type: "button", class: `button ${kind}`, "aria-label": label, onclick }, text);
}

/** A label that is heard, and a field that is seen; what is typed shows with the next frame. */
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
