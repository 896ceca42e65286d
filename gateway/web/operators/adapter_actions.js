// Actions of an admin on an adapter. Each asks for confirmation.

import { el } from "../dom.js";
import { call, inPath } from "./calls.js";
import { ask } from "./dialogs.js";
import { store } from "./store.js";
import { bytes, count, moment } from "./words.js";

const path = (name) => `adapters/${inPath(name)}`;
const adapterOf = (name) => store.state.adapters[name];
const load = (adapter) => `${count(adapter.requests_per_minute ?? 0, "request")} a minute`;

/** Newest first. */
export const versionsOf = (adapter) =>
  Object.entries(adapter.versions ?? {}).sort((a, b) => (b[1].created ?? 0) - (a[1].created ?? 0));

export function askRollback(name, preset) {
  const adapter = adapterOf(name);
  const others = versionsOf(adapter).filter(([digest]) => digest !== adapter.served);
  // Preselect the version that was served before, else the newest other one.
  const chosen = preset ?? adapter.before ?? others[0]?.[0];
  const choices = others.map(([digest, version]) => {
    const input = el("input", { type: "radio", name: "version", value: digest, checked: digest === chosen });
    const note = `added ${moment(version.created)}, ${bytes(version.bytes)}`;
    return el("label", { class: "check" }, input, el("code", {}, digest), el("span", { class: "hint" }, note));
  });
  ask({
    title: `Serve another version of ${name}?`,
    effects: [
      `Served now: ${adapter.served}, with ${load(adapter)}.`,
      "The next request gets the version that you choose, on all gateways; running requests finish with their version. The first request on each replica uploads the weights. No version is lost.",
    ],
    fields: [el("fieldset", {}, el("legend", {}, "Serve from now on"), ...choices)],
    confirm: "Roll back",
    does: (dialog) => {
      const version = dialog.querySelector("input[name=version]:checked").value;
      return call("POST", `${path(name)}/rollback`, { version });
    },
    done: (answer) => `${name} is now served as ${answer.served}.`,
  });
}

export function askVerify(name) {
  const versions = versionsOf(adapterOf(name));
  const all = versions.reduce((sum, [, version]) => sum + (version.bytes ?? 0), 0);
  ask({
    title: `Verify ${name}?`,
    effects: [
      `Reads ${count(versions.length, "version")} (${bytes(all)}) and compares each byte with its checksum. Requests are served meanwhile.`,
      "A damaged copy is moved away, and replaced where there is a good one.",
    ],
    confirm: "Verify",
    does: () => call("POST", `${path(name)}/verify`),
    done: `All versions of ${name} are as they were added.`,
  });
}

export function askRemove(name, removed) {
  const adapter = adapterOf(name);
  ask({
    title: `Remove ${name}?`,
    effects: [
      `It has ${load(adapter)}. The next one is answered with 404, on all gateways; running requests finish.`,
      `${count(versionsOf(adapter).length, "version")} will be deleted with the name. To serve it again, add its files again.`,
    ],
    confirm: `Remove ${name}`,
    danger: true,
    does: () => call("DELETE", path(name)),
    done: () => {
      removed();
      return `${name} is removed.`;
    },
  });
}
