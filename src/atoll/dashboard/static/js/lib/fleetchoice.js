// Which fleet a page is about: one that is operated, a file, or an example.

import { field, select } from "./ui.js";

const KINDS = { operated: "Operated", served: "Served here", file: "Files", example: "Examples" };

/** Fleets in the order in which they are offered. */
export function sortFleets(fleets) {
  const kinds = Object.keys(KINDS);
  // The example that is planned in seconds comes first of its kind.
  const rank = (one) => kinds.indexOf(one.kind) * 2 - (one.name === "quickstart" ? 1 : 0);
  return [...fleets].sort((a, b) => rank(a) - rank(b));
}

/** A field to choose a fleet with; `onchange` gets its name. */
export function fleetChoice(fleets, chosen, onchange) {
  const options = sortFleets(fleets).map((one) => [one.name, `${one.name} (${(KINDS[one.kind] ?? one.kind).toLowerCase().replace(/s$/, "")})`]);
  const control = select(options, { value: chosen, onchange: () => onchange(control.value) });
  return field("Fleet", control);
}

/** The fleet to begin with: the one in the address, the first that stands, or the first of all. */
export function firstFleet(fleets, params) {
  const named = params.get("fleet");
  if (named && fleets.some((one) => one.name === named)) return named;
  const sorted = sortFleets(fleets);
  return (sorted.find((one) => one.up) ?? sorted[0])?.name ?? null;
}
