// Problems in the gateway's state that an operator should look at, the worst first.

import { isRefusedNow, whyRefused } from "./tenants.js";
import { count, REPLICA_STATES, replicasOf, sorted } from "./words.js";

const MOST_TENANTS = 5; // if an engine is unavailable, all tenants may be refused: do not hide other problems
const LEVELS = { __proto__: null, critical: [0, "away"], error: [1, "failing"], warning: [2, "draining"] };
// View for each of the gateway's problems, by the first part of its name.
const VIEWS = {
  __proto__: null,
  adapter_caches: "adapters",
  budgets: "tenants",
  configured_adapters: "adapters",
  declared_adapters: "adapters",
  disks: "adapters",
  engine_files: "replicas",
  engines: "replicas",
  hidden_adapters: "adapters",
  keys: "tenants",
  limits: "tenants",
  unknown_models: "adapters",
};
const RANKS = { __proto__: null, away: 0, failing: 0, draining: 2, leaving: 2 };

/**
 * Returns a list of {key, what, state, view, name, of}. `view` has the details, if any; `name` is what to search
 * for there; `of` is the number of problems that the entry summarizes.
 */
export function troublesOf(state) {
  const found = [...ofGateway(state), ...ofReplicas(state), ...ofTenants(state)];
  return found.sort((a, b) => a.rank - b.rank);
}

function* ofGateway({ gateway: { ready, workers, answering } = {}, troubles = {} }) {
  if (ready === false) {
    yield { rank: 0, key: "ready", what: "This gateway is not ready.", state: "away", view: "replicas" };
  }
  for (const [name, { level, text, times, last }] of Object.entries(troubles)) {
    const [rank, state] = LEVELS[level];
    const often = times ? ` (${count(times, "time")}, the last: ${last})` : "";
    const what = `${level[0].toUpperCase()}${level.slice(1)}: ${text.replace(/\.$/, "")}${often}.`;
    yield { rank, key: `trouble ${name}`, what, state, view: VIEWS[name.split(" ", 1)[0]] };
  }
  if (answering < workers) {
    const what = `${answering} of ${workers} workers answer: the figures are theirs alone.`;
    yield { rank: 1, key: "workers", what, state: "draining", view: "requests" };
  }
}

function* ofReplicas(state) {
  for (const [n, endpoint] of replicasOf(state).entries()) {
    const replica = state.replicas[endpoint];
    const rank = RANKS[replica.state];
    if (rank === undefined) continue;
    const why = rank === 0 ? (replica.why ?? replica.last_failure?.message) : undefined;
    const what = `Replica ${n + 1}, ${endpoint}, is ${REPLICA_STATES[replica.state]}${why ? `: ${why}` : "."}`;
    yield { rank, key: `replica ${endpoint}`, what, state: replica.state, view: "replicas" };
  }
}

function* ofTenants({ tenants = {} }) {
  const refused = sorted(Object.keys(tenants).filter((name) => isRefusedNow(tenants[name])));
  for (const name of refused.slice(0, MOST_TENANTS)) {
    yield { rank: 1, key: `tenant ${name}`, what: `${name}. ${whyRefused(tenants[name])}`, state: "failing", view: "tenants", name };
  }
  const of = refused.length - MOST_TENANTS;
  if (of > 0) {
    const what = `${count(of, "more tenant was", "more tenants were")} refused lately.`;
    yield { rank: 1, key: "tenants", what, state: "failing", view: "tenants", name: "", of };
  }
}
