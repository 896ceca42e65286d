// The operators' page: its views, one of which is shown, and the form for the key.

import { $, drawIcons } from "../dom.js";
import { AdaptersView } from "./adapters.js";
import { useKey } from "./calls.js";
import { OverviewView } from "./overview.js";
import { ReplicasView } from "./replicas.js";
import { RequestsView } from "./requests.js";
import { store } from "./store.js";
import { start, stop, tryNow } from "./stream.js";
import { TenantsView } from "./tenants.js";
import { troublesOf } from "./troubles.js";
import { setAttribute, setHidden, setText } from "./update.js";
import { clock, figure } from "./words.js";

const VIEWS = {
  __proto__: null,
  overview: OverviewView,
  replicas: ReplicasView,
  adapters: AdaptersView,
  tenants: TenantsView,
  requests: RequestsView,
};
const made = new Map();
let shown = "overview";

function viewOf(name) {
  if (!made.has(name)) made.set(name, new VIEWS[name]($(`#${name}`)));
  return made.get(name);
}

/** Shows the view that the hash names: `#tenants/acme` is the view of tenants, with a search for acme. */
function go(focus) {
  const [name, looked] = location.hash.slice(1).split("/", 2).map(decodeURIComponent);
  shown = name in VIEWS ? name : "overview";
  for (const one of Object.keys(VIEWS)) {
    setHidden($(`#${one}`), one !== shown);
    setAttribute($(`nav a[href="#${one}"]`), "aria-current", one === shown && "page");
  }
  const view = viewOf(shown);
  if (looked !== undefined) view.find?.(looked);
  if (focus && !$("#gate:not([hidden])")) {
    // Focus the search field, so that the user can type at once, but not on a phone: the keyboard would open.
    const search = matchMedia("(pointer: fine)").matches ? view.search : undefined;
    (search ?? $(`#${shown} h2`)).focus({ preventScroll: true });
    $("#main").scrollTop = 0;
  }
  store.changed();
}

function render() {
  renderLink();
  const state = store.state;
  if (state === null) return;
  for (const [name, facts] of Object.entries(COUNTS)) setText($(`nav a[href="#${name}"] .count`), facts(state));
  const troubles = troublesOf(state).reduce((sum, { of = 1 }) => sum + of, 0);
  setText($(`nav a[href="#overview"] .count`), troubles || "");
  const title = `${troubles ? `(${troubles}) ` : ""}Operators · ${state.gateway?.model ?? ""}`;
  if (document.title !== title) document.title = title;
  viewOf(shown).render(state);
}

const size = (all) => figure(Object.keys(all ?? {}).length);
const COUNTS = {
  replicas: (state) => size(state.replicas),
  adapters: (state) => size(state.adapters),
  tenants: (state) => size(state.tenants),
  requests: (state) => size(state.requests),
};

const WORDS = { live: "Live", connecting: "Connecting…", broken: "Not live", idle: "" };

function renderLink() {
  const { kind, why, retry } = store.link;
  const link = $("#link");
  setAttribute(link, "data-link", kind);
  setText(link, WORDS[kind]);
  const broken = kind === "broken" && store.state !== null;
  setHidden($("#broken"), kind !== "broken");
  setAttribute(document.body, "data-stale", broken);
  if (kind !== "broken") return;
  const since = store.state ? ` The data shown is from ${clock(store.updated)}.` : "";
  setText($("#broken-why"), `Not live: ${why}${since}`);
  const left = Math.max(0, Math.ceil((retry - Date.now()) / 1000));
  setText($("#broken-when"), left ? `Next attempt in ${left} s.` : "Trying again…");
}

function showInside(inside) {
  setHidden($("#gate"), inside);
  for (const part of ["#views", "#inside", "#leave"]) setHidden($(part), !inside);
}

function open(key) {
  useKey(key);
  showInside(true);
  start(close);
  go(true);
}

/** Asks for a key again, and removes all data that was loaded with the last key. */
function close(refusal) {
  stop();
  useKey("");
  store.forget();
  for (const name of made.keys()) $(`#${name}`).replaceChildren($(`#${name} h2`));
  made.clear();
  setText($("#gate-wrong"), refusal?.message ?? "");
  showInside(false);
  $("#gate-key").focus();
}

drawIcons();
$("#gate").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("#gate-key").value;
  $("#gate-key").value = "";
  open(given);
});
$("#leave").addEventListener("click", () => close());
$("#try").addEventListener("click", tryNow);
// The URL's hash names the view, so the link must not change it.
$(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("#main").focus();
});
addEventListener("hashchange", () => go(true));
store.watch(render);
close();
