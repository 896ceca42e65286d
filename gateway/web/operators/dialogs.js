// Confirmation dialogs. Each describes the effects of an action, and stays open until the action succeeds.

import { announce, el, iconButton } from "../dom.js";
import { ApiError, inWords } from "../api.js";
import { button } from "./controls.js";
import { setHidden, setText } from "./update.js";

const SEEN_MS = 8000;
let made = 0;

/** Shows the result of an action for a while, and announces it to screen readers. */
function notify(text) {
  const line = document.getElementById("told");
  setText(line, text);
  setHidden(line, false);
  clearTimeout(notify.timer);
  notify.timer = setTimeout(() => setHidden(line, true), SEEN_MS);
  announce(text);
}

// After any other error, such as a lost connection, the action may have been done.
const wasRefused = (error) => error instanceof ApiError && error.status >= 400 && error.status < 500;

/** Opens a modal dialog with a heading and `body`. It is removed when it is closed. */
export function openDialog(title, body) {
  made += 1;
  const heading = el("h2", { id: `dialog-${made}` }, title);
  const close = iconButton("close", "Close", () => dialog.close());
  const dialog = el("dialog", { "aria-labelledby": heading.id }, el("header", {}, heading, close), body);
  const opener = document.activeElement;
  dialog.addEventListener("close", () => {
    dialog.remove();
    // The table row with the button may have been removed meanwhile.
    if (!opener?.isConnected) document.querySelector("#inside > section:not([hidden]) h2")?.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * Asks for confirmation. Then calls `does`, which may be slow. If it fails, shows the error, and the
 * dialog stays open. If it succeeds, shows the text of `done`. `effects` are the texts above the fields.
 */
export function ask({ title, effects, fields = [], confirm, danger = false, does, done }) {
  const failure = el("p", { class: "notice bad", role: "alert", hidden: true });
  const yes = el("button", { type: "submit", class: `button ${danger ? "destructive" : "primary"}` }, confirm);
  const no = button("Cancel", () => dialog.close(), { kind: "" });
  const texts = effects.filter(Boolean).map((text) => el("p", {}, text));
  const form = el("form", { class: "body" }, ...texts, ...fields, failure, el("div", { class: "actions" }, no, yes));
  const dialog = openDialog(title, form);
  (form.querySelector("input, select") ?? yes).focus();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (yes.disabled) return;
    yes.disabled = true;
    setHidden(failure, true);
    dialog.setAttribute("aria-busy", "true");
    let answer;
    try {
      answer = await does(dialog);
    } catch (error) {
      const outcome = wasRefused(error) ? "Not done" : "It may not be done";
      if (!dialog.open) notify(`${outcome}: ${inWords(error)}`); // closed while the action ran
      setText(failure, inWords(error));
      setHidden(failure, false);
      return;
    } finally {
      yes.disabled = false;
      dialog.removeAttribute("aria-busy");
    }
    dialog.close();
    notify(typeof done === "function" ? done(answer) : done);
  });
  return dialog;
}
