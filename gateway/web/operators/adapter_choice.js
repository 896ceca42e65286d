// Filters and sort orders of the adapters.

import { compare } from "./words.js";

/** States of an adapter at a replica. */
export const MARKS = ["held", "loading", "cold", "lacking"];

export const SHOWN = [
  ["all", "all"],
  ["held", "held somewhere"],
  ["nowhere", "held nowhere"],
  ["loading", "loading"],
  ["lacking", "lacking somewhere"],
  ["evicted", "evicted"],
];

const FITS = {
  all: () => true,
  held: (replicas) => replicas.some(({ state }) => state === "held"),
  nowhere: (replicas) => !replicas.some(({ state }) => state === "held"),
  loading: (replicas) => replicas.some(({ state }) => state === "loading"),
  lacking: (replicas) => replicas.some(({ state }) => state === "lacking"),
  evicted: (replicas) => replicas.some(({ evicted }) => evicted > 0),
};

/** Returns true if an adapter passes the filter `shown`, and its name contains `wanted` or a version starts with it. */
export function passes(shown, wanted, name, adapter) {
  if (shown !== "all" && !FITS[shown](Object.values(adapter.replicas ?? {}))) return false;
  if (name.toLowerCase().includes(wanted)) return true;
  return Object.keys(adapter.versions ?? {}).some((version) => version.startsWith(wanted));
}

const sizeOf = (adapter) => adapter.versions?.[adapter.served]?.bytes ?? 0;
const falling = (fact) => (all) => (a, b) => fact(all[b]) - fact(all[a]) || compare(a, b);

export const SORTS = [
  ["name", "by name", () => compare],
  ["busy", "busiest first", falling((adapter) => adapter.requests_per_minute ?? 0)],
  ["size", "largest first", falling(sizeOf)],
];
