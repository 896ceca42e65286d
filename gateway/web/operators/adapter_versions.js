// Dialog with one adapter's versions and their actions. It is updated while it is open.

import { el } from "../dom.js";
import { askRemove, askRollback, askVerify, versionsOf } from "./adapter_actions.js";
import { button } from "./controls.js";
import { openDialog } from "./dialogs.js";
import { store } from "./store.js";
import { KeyedList, setHidden, setText } from "./update.js";
import { askUpload } from "./upload.js";
import { bytes, moment, NONE } from "./words.js";

const HEADS = ["Version", "Rank", "Size", "Added", "From", "By"];

export function openVersions(name) {
  const body = el("tbody");
  const gone = el("p", { class: "notice warn", hidden: true }, "This adapter has been removed.");
  const there = (does) => () => store.state?.adapters?.[name] && does();
  const heads = HEADS.map((head) => el("th", { scope: "col" }, head));
  const table = el("table", { class: "versions" }, el("thead", {}, el("tr", {}, ...heads, el("td"))), body);
  const remove = there(() => askRemove(name, () => dialog.close()));
  const dialog = openDialog(
    `Versions of ${name}`,
    el(
      "div",
      { class: "body" },
      gone,
      el("div", { class: "sideways", tabindex: "0", role: "region", "aria-label": "Versions" }, table),
      el(
        "div",
        { class: "actions" },
        button("Remove…", remove, { kind: "danger" }),
        button("Verify…", there(() => askVerify(name)), { kind: "" }),
        button("Add a version…", there(() => askUpload(name)), { kind: "outlined" }),
        button("Done", () => dialog.close(), { kind: "primary" }),
      ),
    ),
  );
  dialog.classList.add("large");
  const list = new KeyedList(body, (digest) => build(digest, there(() => askRollback(name, digest))));
  const unwatch = store.watch(() => {
    const adapter = store.state?.adapters?.[name];
    setHidden(gone, adapter !== undefined);
    if (adapter === undefined) return;
    const versions = versionsOf(adapter);
    const rows = list.show(versions.map(([digest]) => digest));
    for (const [digest, version] of versions) update(rows.get(digest), version, digest === adapter.served);
  });
  dialog.addEventListener("close", unwatch);
}

function build(digest, serves) {
  const facts = HEADS.slice(1).map((head) => el("td", { "data-label": head }));
  const served = el("span", { class: "state", "data-state": "ready" }, "served");
  const serve = button("Serve this…", serves, { label: `Serve ${digest}…` });
  const head = el("th", { scope: "row" }, el("code", {}, digest));
  return { facts, served, serve, node: el("tr", {}, head, ...facts, el("td", {}, served, serve)) };
}

function update(row, version, isServed) {
  const { rank, bytes: size, created, source, added_by: by } = version;
  const facts = [rank ?? NONE, bytes(size), moment(created), source ?? NONE, by ?? NONE];
  facts.forEach((fact, n) => setText(row.facts[n], fact));
  setHidden(row.served, !isServed);
  setHidden(row.serve, isServed);
}
