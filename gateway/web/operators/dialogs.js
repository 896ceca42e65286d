// Questions before anything is done: each says what will happen, and stays until it has.

import { announce, el, iconButton } from "../dom.js";
import { ApiError, inWords } from "../api.js";
import { button } from "./controls.js";
import { setHidden, setText } from "./update.js";

const SEEN_MS = 8000;
let made = 0;

/** Says what was done to everybody: seen for a while, and heard. */
function tell(text) {
  const line = document.getElementById("told");
  setText(line, text);
  setHidden(line, false);
  clearTimeout(tell.timer);
  tell.timer = setTimeout(() => setHidden(line, true), SEEN_MS);
  announce(text);
}

// Whatever else fails, such as the way to the gateway, may fail behind what was done.
const wasRefused = (error) => error instanceof ApiError && error.status >= 400 && error.status < 500;

/** A modal dialog with a heading, around `body`; it leaves the document when it is closed. */
export function openDialog(title, body) {
  made += 1;
  const heading = el("h2", { id: `dialog-${made}` }, title);
  const close = iconButton("close", "Close", () => dialog.close());
  const dialog = el("dialog", { "aria-labelledby": heading.id }, el("header", {}, heading, close), body);
  const opener = document.activeElement;
  dialog.addEventListener("close", () => {
    dialog.remove();
    // The row of the button may have gone meanwhile.
    if (!opener?.isConnected) document.querySelector("#inside > section:not([hidden]) h2")?.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * Asks once. `does` is called when it is confirmed and may be slow; a failure is shown and the
 * question stays. What `done` says is then told.
 */
export function ask({ title, tells, fields = [], confirm, danger = false, does, done }) {
  const failure = el("p", { class: "notice bad", role: "alert", hidden: true });
  const yes = el("button", { type: "submit", class: `button ${danger ? "destructive" : "primary"}` }, confirm);
  const no = button("Cancel", () => dialog.close(), { kind: "" });
  const texts = tells.filter(Boolean).map((text) => el("p", {}, text));
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
      if (!dialog.open) tell(`${outcome}: ${inWords(error)}`); // closed while it was under way
      setText(failure, inWords(error));
      setHidden(failure, false);
      return;
    } finally {
      yes.disabled = false;
      dialog.removeAttribute("aria-busy");
    }
    dialog.close();
    tell(typeof done === "function" ? done(answer) : done);
  });
  return dialog;
}
