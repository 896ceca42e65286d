// Formats figures, times and the gateway's names for operators.

const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clockTime = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const dateAndTime = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });
const byNumber = new Intl.Collator("en", { numeric: true });

export const NONE = "–";

/** Formats small numbers with one decimal, large ones in thousands and millions. */
export function figure(value) {
  if (typeof value !== "number") return NONE;
  if (Math.abs(value) >= 100_000) return compact.format(value);
  return (Math.abs(value) >= 100 || Number.isInteger(value) ? integer : tenth).format(value);
}

export function bytes(value) {
  if (typeof value !== "number") return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${tenth.format(value)} ${units[at]}`;
}

export function milliseconds(value) {
  if (typeof value !== "number") return NONE;
  return value < 10_000 ? `${figure(value)} ms` : `${tenth.format(value / 1000)} s`;
}

export function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86_400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86_400)} d ${Math.floor((s % 86_400) / 3600)} h`;
}

/** From one minute on without seconds, so that the text does not change each second. */
export function ago(time, now) {
  if (typeof time !== "number") return "never";
  const s = Math.max(0, now - time);
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 172_800) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86_400)} days ago`;
}

export const clock = (time) => clockTime.format(time * 1000);
export const moment = (time) => (typeof time === "number" ? dateAndTime.format(time * 1000) : NONE);
export const count = (n, one, many = `${one}s`) => `${figure(n)} ${n === 1 ? one : many}`;

/** "3 of 40 adapters"; `leftOut` is the number of those that the gateway has but does not report. */
export function foundOf(found, total, what, leftOut = 0) {
  const more = leftOut ? `; ${figure(leftOut)} more are not shown` : "";
  return `${found === total ? "" : `${figure(found)} of `}${count(total, what)}${more}`;
}

export const sorted = (names) => [...names].sort(byNumber.compare);
export const compare = byNumber.compare;

/** Returns the endpoints of replicas, in the order of their numbers on this page. */
export const replicasOf = (state) => sorted(Object.keys(state.replicas ?? {}));

const LIMITS = {
  __proto__: null,
  requests_per_minute: "requests a minute",
  tokens_per_minute: "tokens a minute",
  concurrent_requests: "requests at once",
  tokens_per_day: "tokens a day",
  tokens_per_month: "tokens a month",
};
const REFUSALS = {
  __proto__: null,
  queue_full: "the queue was full",
  queue_timeout: "no slot became free in time",
  expected_wait: "no slot was expected to become free in time",
  too_late: "the first token would have come too late",
  core_busy: "the gateway's own cores were busy",
};

const plain = (name) => name.replaceAll("_", " ");
export const limitName = (name) => LIMITS[name] ?? plain(name);

/** Describes why a tenant was refused. `why` is `rate_limited:LIMIT`, a limit's name, or a cause of the queue. */
export function refusalName(why) {
  const limit = why.startsWith("rate_limited:") ? why.slice("rate_limited:".length) : why;
  return REFUSALS[limit] ?? (limit in LIMITS ? `limit of ${LIMITS[limit]}` : plain(limit));
}

export const REPLICA_STATES = {
  __proto__: null,
  ready: "ready",
  draining: "draining",
  failing: "failing (left alone)",
  leaving: "leaving",
  away: "away",
};
