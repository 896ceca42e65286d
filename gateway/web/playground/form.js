// Form for the parameters, in the right column.

import { $, el } from "../dom.js";
import { NUMBERS, checked } from "./parameters.js";

const SCHEMA = `{
  "type": "object",
  "properties": {
    "city": {"type": "string"}
  },
  "required": ["city"]
}`;
const TOOLS = `[{
  "type": "function",
  "function": {
    "name": "weather",
    "parameters": {
      "type": "object",
      "properties": {"city": {"type": "string"}},
      "required": ["city"]
    }
  }
}]`;

export class ParametersForm {
  // Calls `changed(system, values)` at every change.
  constructor(root, changed) {
    this.root = root;
    this.changed = changed;
    root.append(...this.groups());
    root.addEventListener("input", () => {
      this.refused = {};
      this.show();
      changed(this.system, this.values);
    });
    this.refused = {};
  }

  groups() {
    const numbers = (...names) => el("div", { class: "pairs" }, ...names.map((name) => numberField(name)));
    return [
      group("System prompt", areaField("system", "System prompt", { rows: 3, aloud: true,
        placeholder: "You are a helpful assistant." })),
      group("Sampling",
        numbers("temperature", "top_p", "top_k", "seed"),
        numbers("presence_penalty", "frequency_penalty", "repetition_penalty")),
      group("Length", numbers("max_tokens", "min_tokens"),
        areaField("stop", "Stop strings", { rows: 2, code: true, hint: "One a line; \\n is a line break" })),
      group("Form of the answer",
        selectField("form", "Form", { text: "Any text", json_object: "JSON", json_schema: "JSON by a schema" }),
        areaField("response_format", "JSON schema", { rows: 8, code: true, example: SCHEMA })),
      group("Tools",
        areaField("tools", "Functions that the model may call", { rows: 3, code: true, example: TOOLS }),
        selectField("tool_choice", "Calls",
          { "": "As the model decides", required: "At least one", none: "None" })),
      group("Log probabilities",
        el("label", { class: "check" }, el("input", { type: "checkbox", name: "logprobs" }),
          "Return each token's"),
        numbers("top_logprobs")),
    ];
  }

  get system() {
    return this.input("system").value;
  }

  get values() {
    const values = {};
    for (const input of this.root.querySelectorAll("[name]")) {
      const value = input.type === "checkbox" ? (input.checked ? "on" : "") : input.value;
      if (value !== "" && input.name !== "system") values[input.name] = value;
    }
    return values;
  }

  set(system, values) {
    for (const input of this.root.querySelectorAll("[name]")) {
      const value = input.name === "system" ? system : (values[input.name] ?? "");
      if (input.type === "checkbox") input.checked = value === "on";
      else if (input.name === "form") input.value = value || "text";
      else input.value = value;
    }
    this.refused = {};
    this.show();
  }

  // Shows errors at the fields. Returns the parameters to send, or null if there are errors.
  check() {
    const { body, wrong } = this.show();
    return Object.keys(wrong).length ? null : body;
  }

  show() {
    const values = this.values;
    const { body, wrong } = checked(values);
    const messages = { ...this.refused, ...wrong };
    for (const input of this.root.querySelectorAll("[name]")) {
      const message = messages[input.name] ?? "";
      const line = $(`#wrong-${input.name}`, this.root);
      if (line && line.textContent !== message) line.textContent = message;
      if (message) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
    this.field("response_format").hidden = values.form !== "json_schema";
    this.field("tool_choice").hidden = !values.tools;
    this.field("top_logprobs").hidden = values.logprobs !== "on";
    return { body, wrong };
  }

  // Shows the server's error at a field until the next change.
  refuse(name, message) {
    this.refused = { [name]: message };
    this.show();
  }

  focusWrong() {
    $("[aria-invalid]", this.root)?.focus();
  }

  input(name) {
    return $(`[name="${name}"]`, this.root);
  }

  field(name) {
    return this.input(name).closest(".field");
  }
}

function group(title, ...fields) {
  return el("section", { class: "group" }, el("h3", {}, title), ...fields);
}

function numberField(name) {
  const { label, least, most, step, unset } = NUMBERS[name];
  const settings = { type: "text", inputmode: least < 0 ? "text" : "decimal", placeholder: unset };
  const input = el("input", { id: `field-${name}`, name, class: "input", autocomplete: "off",
    "aria-describedby": `wrong-${name}`, ...settings });
  // Arrow keys change the value, as in a number field. A number field would hide invalid input.
  input.addEventListener("keydown", (event) => {
    const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const from = Number(input.value === "" ? Number(unset) || 0 : input.value) || 0;
    const value = Math.min(most, Math.max(least, from + way * (step ?? 1)));
    input.value = String(Number(value.toFixed(4)));
    input.dispatchEvent(new Event("input", { bubbles: true }));
  });
  return el("div", { class: "field" }, el("label", { for: `field-${name}` }, label), input, wrong(name));
}

function areaField(name, label, { rows, code, hint, placeholder, example, aloud }) {
  const input = el("textarea", { id: `field-${name}`, name, rows, placeholder, spellcheck: code ? "false" : null,
    class: code ? "input code" : "input", "aria-describedby": `wrong-${name}` });
  const use = () => {
    input.value = example;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    input.focus();
  };
  const head = el("div", { class: aloud ? "label-row aloud" : "label-row" },
    el("label", { for: `field-${name}` }, label),
    example ? el("button", { class: "button small", type: "button", onclick: use }, "Example") : null);
  return el("div", { class: "field" }, head, input,
    hint ? el("p", { class: "hint" }, hint) : null, wrong(name));
}

function selectField(name, label, options) {
  const all = Object.entries(options).map(([value, text]) => el("option", { value }, text));
  return el("div", { class: "field" }, el("label", { for: `field-${name}` }, label),
    el("select", { id: `field-${name}`, name, class: "input" }, ...all));
}

const wrong = (name) => el("p", { id: `wrong-${name}`, class: "wrong", role: "status" });
