// Actions on tenants' keys. A new key is shown once, and this page never stores it.

import { copyText, el } from "../dom.js";
import { call } from "./calls.js";
import { button, field } from "./controls.js";
import { ask, openDialog } from "./dialogs.js";
import { store } from "./store.js";
import { setText } from "./update.js";
import { ago } from "./words.js";

const DAY = 86_400;
const LIVES = [["", "Until it is revoked"], [DAY, "1 day"], [30 * DAY, "30 days"], [90 * DAY, "90 days"], [365 * DAY, "1 year"]];

export function askNewKey(tenant) {
  const note = el("input", { class: "input", name: "note", maxlength: "256", autocomplete: "off" });
  const options = LIVES.map(([seconds, text]) => el("option", { value: seconds }, text));
  const life = el("select", { class: "input", name: "life" }, ...options);
  ask({
    title: `Make a key for ${tenant}?`,
    effects: [
      `Clients with this key act as ${tenant}, within its limits, at once and on all gateways. ` +
        "It is shown once: the gateway stores only its hash.",
    ],
    fields: [field("Note", note, "For whom, or for what. Admins see it."), field("Valid", life)],
    confirm: "Make the key",
    does: async () => {
      const body = { tenant, note: note.value };
      if (life.value) body.expires_in = Number(life.value);
      return call("POST", "keys", body);
    },
    done: (made) => {
      showOnce(made);
      return `A key for ${tenant} was made.`;
    },
  });
}

function showOnce(made) {
  const label = `The key for ${made.tenant}`;
  const value = el("input", { class: "input code", readonly: "", value: made.value, "aria-label": label });
  const copied = el("p", { class: "hint", role: "status" });
  const copy = button("Copy", () => copyKey(value, copy, copied), { kind: "primary" });
  const dialog = openDialog(
    label,
    el(
      "div",
      { class: "body" },
      el("p", {}, "Copy it now: it is not shown again."),
      el("div", { class: "once" }, value, copy),
      copied,
      el("p", { class: "hint" }, "Its id, by which it is revoked: ", el("code", {}, made.id)),
      el("div", { class: "actions" }, button("Done", () => dialog.close(), { kind: "" })),
    ),
  );
  dialog.addEventListener("close", () => (value.value = ""));
  copy.focus();
}

async function copyKey(value, copy, copied) {
  value.select();
  try {
    await copyText(value.value, copy);
    setText(copied, "Copied.");
  } catch {
    // Pages that were loaded over plain HTTP from another machine have no clipboard API.
    setText(copied, "This browser does not let the page copy. It is selected: copy it by hand.");
  }
}

export function askRevoke(tenant, id) {
  const key = store.state?.tenants?.[tenant]?.keys?.[id];
  if (key === undefined) return; // already removed; the next frame shows it
  const note = key.note ? `, “${key.note}”` : "";
  ask({
    title: `Revoke the key ${id}?`,
    effects: [
      `It is a key of ${tenant}${note}, last used ${ago(key.last_used, store.now)}.`,
      "It ends at once and for good, on all gateways: its next request is answered with 401. Its running requests finish.",
    ],
    confirm: "Revoke",
    danger: true,
    does: () => call("DELETE", `keys/${encodeURIComponent(id)}`),
    done: `The key ${id} is revoked.`,
  });
}
