// Dialog that shows the request as code.

import { BASE } from "../api.js";
import { el, iconButton } from "../dom.js";
import { codeBlock } from "../markdown.js";
import { LANGUAGES, snippet } from "./snippets.js";

let language = "curl";

// `bodies`: the request of each pane, [{model, body}].
export function showCode(bodies) {
  let shown = bodies[0];
  const panel = el("div", { id: "code-panel", role: "tabpanel" });
  const tabs = Object.entries(LANGUAGES).map(([name, title]) =>
    el("button", { id: `code-${name}`, class: "button", type: "button", role: "tab", "aria-controls": "code-panel",
      onclick: () => choose(name) }, title));

  function choose(name) {
    language = name;
    for (const tab of tabs) {
      const isChosen = tab.id === `code-${name}`;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `code-${name}`);
    panel.replaceChildren(codeBlock(snippet(name, shown.body, BASE.href), LANGUAGES[name]));
  }

  function step(event) {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    const names = Object.keys(LANGUAGES);
    choose(names[(names.indexOf(language) + way + names.length) % names.length]);
    tabs[names.indexOf(language)].focus();
  }

  const pick = (event) => {
    shown = bodies[event.target.value];
    choose(language);
  };
  const models = el("select", { class: "input", "aria-label": "Model", onchange: pick },
    ...bodies.map(({ model }, n) => el("option", { value: n }, model)));
  const close = () => dialog.close();
  const dialog = el("dialog", { class: "wide-dialog", "aria-labelledby": "code-title" },
    el("header", {}, el("h2", { id: "code-title" }, "This request as code"), iconButton("close", "Close", close)),
    el("div", { class: "body" },
      el("div", { class: "code-head" },
        el("div", { class: "choice", role: "tablist", "aria-label": "Language", onkeydown: step }, ...tabs),
        bodies.length > 1 ? models : null),
      panel,
      el("p", { class: "hint" }, "The key is taken from the variable ", el("code", {}, "OPENAI_API_KEY"), ".")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  choose(language);
  dialog.showModal();
}
