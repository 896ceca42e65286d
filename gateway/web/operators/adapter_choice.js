// Which adapters are shown, and in which order.

import { compare } from "./words.js";

/** Where an adapter may stand at a replica. */
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
  held: (places) => places.some((place) => place.state === "held"),
  nowhere: (places) => !places.some((place) => place.state === "held"),
  loading: (places) => places.some((place) => place.state === "loading"),
  lacking: (places) => places.some((place) => place.state === "lacking"),
  evicted: (places) => places.some((place) => place.evicted > 0),
};

/** Whether an adapter is one of `shown`, and `wanted` is in its name or begins a version of it. */
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
