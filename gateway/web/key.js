// The dialog that asks for a key.

import { hasKey, setKey, whenKeyIsMissing } from "./api.js";
import { el, iconButton } from "./dom.js";

// Characters that are allowed in a header.
const FITS = /^[\x21-\x7e]+$/;

let opened = null;

// Resolves to the entered key, or to null.
export function askKey(reason = "") {
  opened ??= show(reason).finally(() => (opened = null));
  return opened;
}

function show(reason) {
  const input = el("input", {
    id: "key-input", class: "input code", type: "password", autocomplete: "off", spellcheck: "false",
    required: "", placeholder: hasKey() ? "A key is set; write another" : "sk-...",
    "aria-describedby": "key-hint key-wrong",
  });
  const wrong = el("p", { id: "key-wrong", class: "wrong", role: "status" });
  const close = () => dialog.close("");
  const form = el("form", { class: "body", novalidate: "" },
    el("p", { class: "notice warn", hidden: !reason }, reason),
    el("div", { class: "field" },
      el("label", { for: "key-input" }, "Your key"), input,
      el("p", { id: "key-hint", class: "hint" },
        "Stored only in this page's memory: a reload forgets it."), wrong),
    el("div", { class: "actions" },
      hasKey() ? el("button", { class: "button danger", type: "button", onclick: forget }, "Forget it") : null,
      el("button", { class: "button", type: "button", onclick: close }, "Cancel"),
      el("button", { class: "button primary", type: "submit" }, "Use this key")));
  const dialog = el("dialog", { "aria-labelledby": "key-title" },
    el("header", {}, el("h2", { id: "key-title" }, "Key"), iconButton("close", "Close", close)), form);

  function forget() {
    setKey("");
    close();
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const key = input.value.trim();
    wrong.textContent = FITS.test(key) ? "" : "A key has no spaces, and no letters with accents or of other alphabets.";
    if (FITS.test(key)) dialog.close(key);
    else input.setAttribute("aria-invalid", "true");
  });
  document.body.append(dialog);
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue || null);
    });
  });
}

// Opens this dialog for requests that are refused because they have no valid key, and for `button`.
// If the user enters a key after pressing `button`, calls `given()`.
export function useKeys(button, given) {
  whenKeyIsMissing(askKey);
  button.addEventListener("click", async () => {
    const key = await askKey();
    if (!key) return;
    setKey(key);
    given?.();
  });
}
