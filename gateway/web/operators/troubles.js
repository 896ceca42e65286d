// What of the state wants somebody to look, the worst first.

import { isRefusedNow, whyRefused } from "./tenants.js";
import { count, REPLICA_STATES, replicasOf, sorted } from "./words.js";

const MOST_TENANTS = 5; // when an engine is away all may be refused, and the rest is to be seen
const RANKS = { __proto__: null, away: 0, failing: 0, draining: 2, leaving: 2 };

/** Each: {key, what, state, view, name, of}; `name` is what the view is to show, `of` how many this stands for. */
export function troublesOf(state) {
  const found = [...ofGateway(state), ...ofReplicas(state), ...ofTenants(state)];
  return found.sort((a, b) => a.rank - b.rank);
}

function* ofGateway({ gateway: { ready, redis, workers, answering } = {} }) {
  if (ready === false) {
    yield { rank: 0, key: "ready", what: "This gateway is not ready.", state: "away", view: "replicas" };
  }
  if (redis === "down") {
    const what = "Redis is away: limits and changes are this gateway's alone.";
    yield { rank: 1, key: "redis", what, state: "failing", view: "tenants" };
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
