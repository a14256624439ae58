// Pipelines as pictures: machines in the order of the layers that they hold, as wide as their share of them.

import { h, s } from "../../lib/dom.js";
import { count, percent } from "../../lib/format.js";
import { columnsOf } from "../../lib/planpicture.js";

const TALL = 92, NARROWEST = 118, GAP = 34, BESIDE = 8; // px
export const TONES = { up: "good", starting: "info", draining: "warn", drained: "warn", ejected: "bad", down: "bad" };

let measure = null;
function widthOf(text, bold = false) {
  measure ??= document.createElement("canvas").getContext("2d");
  measure.font = `${bold ? "600 " : ""}13px ${getComputedStyle(document.body).fontFamily}`;
  return measure.measureText(text).width;
}

/** Text that fits into a width (px), with an ellipsis where it was too long. */
function shorten(text, width, bold = false) {
  if (widthOf(text, bold) <= width) return text;
  const chars = Array.from(text.slice(0, 400));
  let low = 0, high = chars.length;
  while (low < high) {
    const mid = (low + high + 1) >> 1;
    if (widthOf(`${chars.slice(0, mid).join("")}…`, bold) <= width) low = mid;
    else high = mid - 1;
  }
  return `${chars.slice(0, low).join("")}…`;
}

/** [0, 40] of 64 as people count: layers 0–39. */
export const layerWords = (layers) => (layers ? (layers[1] - layers[0] === 1 ? `layer ${layers[0]}` : `layers ${layers[0]}–${layers[1] - 1}`) : "the whole model");

/** How busy a machine is, in words: "3 of 64 requests". */
export function loadWords(load) {
  const running = load?.running ?? null;
  if (running === null) return null;
  return load.capacity ? `${count(running)} of ${count(load.capacity)} requests` : `${count(running)} ${running === 1 ? "request" : "requests"}`;
}

/** Lay out boxes: beside each other where they fit into `width`, else below each other. */
function layOut(columns, total, width) {
  const n = columns.length;
  const shares = columns.map(([stage]) => Math.max(0, stage.layers[1] - stage.layers[0]) / (total || 1));
  const most = Math.max(1, ...columns.map((column) => column.length));
  if (n * NARROWEST + (n - 1) * GAP > width) {
    let y = 1;
    const boxes = columns.map((column) => {
      const tall = column.length * (TALL + BESIDE) - BESIDE;
      const box = { x: 1, y, w: width - 2, h: tall };
      y += tall + GAP;
      return box;
    });
    return { boxes, height: y - GAP + 1, down: true };
  }
  // Those that would be too narrow get the least; the others share what is left.
  const free = width - 2 - (n - 1) * GAP;
  const wide = Array(n).fill(0);
  let open = shares.map((_, at) => at);
  for (;;) {
    const left = free - wide.reduce((sum, w) => sum + w, 0);
    const sum = open.reduce((all, at) => all + shares[at], 0) || 1;
    const small = open.filter((at) => (shares[at] / sum) * left < NARROWEST);
    if (!small.length || small.length === open.length) {
      for (const at of open) wide[at] = small.length ? left / open.length : (shares[at] / sum) * left;
      break;
    }
    for (const at of small) wide[at] = NARROWEST;
    open = open.filter((at) => !small.includes(at));
  }
  let x = 1;
  const boxes = wide.map((w) => {
    const box = { x, y: 1, w, h: most * (TALL + BESIDE) - BESIDE };
    x += w + GAP;
    return box;
  });
  return { boxes, height: most * (TALL + BESIDE) - BESIDE + 2, down: false };
}

function arrow(from, down) {
  const d = down ? `M${from.w / 2} ${from.y + from.h + 5}v${GAP - 12}m-5 -6l5 6l5 -6` : `M${from.x + from.w + 5} ${from.y + from.h / 2}h${GAP - 12}m-6 -5l6 5l-6 5`;
  return s("path", { class: "pipe-arrow", d });
}

function box(stage, machine, place, total, open) {
  const name = machine?.name ?? stage.machine;
  const state = machine?.state ?? "gone";
  const load = loadWords(machine?.load);
  const busy = load && widthOf(load) > place.w - 24 ? load.replace(/ requests?$/, "") : load;
  const kv = machine?.load?.kv_share ?? null;
  const inner = place.w - 24;
  const layers = layerWords(stage.layers);
  const text = (words, y, style) => s("text", { x: place.x + 14, y: place.y + y, class: style, direction: "ltr" }, shorten(words, inner, style === "pipe-name"));
  const told = `${name}: ${layers} of ${total}, ${state}${load ? `, ${load}` : ""}${kv === null ? "" : `, ${percent(kv)} of its cache used`}`;
  const track = { x: place.x + 14, y: place.y + place.h - 14, width: inner, height: 5, rx: 2.5 };
  return s("g", { class: ["pipe-box", TONES[state] ?? ""], tabindex: machine ? "0" : null, role: machine ? "button" : "img", "aria-label": told, onclick: machine ? open : null,
    onkeydown: machine ? (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); } } : null },
    s("title", {}, told),
    s("rect", { class: "pipe-back", x: place.x, y: place.y, width: place.w, height: place.h, rx: 8 }),
    s("rect", { class: "pipe-edge", x: place.x, y: place.y, width: 5, height: place.h, rx: 2.5 }),
    text(name, 22, "pipe-name"), text(widthOf(`${layers} of ${total}`) <= inner ? `${layers} of ${total}` : layers, 40, "pipe-dim"), text(state === "up" ? busy ?? "up" : state, 58, state === "up" ? "pipe-dim" : "pipe-state"),
    kv === null ? null : [s("rect", { class: "pipe-track", ...track }), s("rect", { class: ["pipe-fill", kv >= 0.95 ? "bad" : kv >= 0.75 ? "warn" : "good"], ...track, width: Math.max(2, Math.min(1, kv) * inner) })]);
}

/** One pipeline as a picture of this width (px); `open(machine)` shows more of a machine. */
export function drawPipeline(pipeline, machines, width, open) {
  const stages = (pipeline.stages ?? []).filter((stage) => stage.layers);
  const total = pipeline.layers ?? Math.max(0, ...stages.map((stage) => stage.layers[1]));
  const columns = columnsOf(stages);
  const { boxes, height, down } = layOut(columns, total, width);
  // Machines with the same layers stand one below the other: they share the requests.
  const within = (place, column, at) => {
    const h = (place.h - (column.length - 1) * BESIDE) / column.length;
    return { ...place, y: place.y + at * (h + BESIDE), h };
  };
  return h("div", { class: "pipe" },
    h("h3", { class: "pipe-title" }, h("bdi", { class: "cut", title: pipeline.model }, pipeline.model), h("span", { class: "note" }, pipeline.instance ? ["as ", h("bdi", {}, pipeline.instance), " · "] : null, `${count(total)} layers on ${stages.length === 1 ? "1 machine" : `${stages.length} machines`}`)),
    s("svg", { class: "pipe-picture", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${pipeline.model}${pipeline.instance ? ` as ${pipeline.instance}` : ""}: machines in the order of their layers` },
      columns.map((column, at) => [at ? arrow(boxes[at - 1], down) : null, column.map((stage, beside) => box(stage, machines.get(stage.machine), within(boxes[at], column, beside), total, () => open(stage.machine)))])));
}
