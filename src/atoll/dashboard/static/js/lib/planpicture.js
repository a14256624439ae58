// A plan as a picture: what is asked at the left, instances at the right, flows between, stages inside.

import { h, s } from "./dom.js";
import { number, percent, perHour, rate } from "./format.js";
import { badge } from "./ui.js";

const WIDTH = 860, LEFT = 210, RIGHT = 400, RIGHT_W = WIDTH - RIGHT, ROW = 58, STAGE = 24, GAP = 12, TOP = 6;
const MOST = 40;
const MOST_BESIDE = 4; // machines with the same layers, one below the other
/** How well an engine is known in a layout (docs/engines.md). */
const STANDINGS = { served: "good", tested: "info", written: "warn" };

function fit(text, most) {
  const plain = String(text ?? "");
  return plain.length > most ? `${plain.slice(0, most - 1)}…` : plain;
}

/** Instances of a plan that are the same but for their names, put together. */
export function group(instances) {
  const found = new Map();
  for (const one of instances) {
    const like = JSON.stringify([one.service, one.region, one.market, one.layout, one.stages]);
    const known = found.get(like);
    if (known) {
      known.ids.push(one.id);
      known.share += one.share ?? 0;
      known.usd_per_hour += one.usd_per_hour ?? 0;
      known.capacity_per_s += one.capacity_per_s ?? 0;
    } else {
      found.set(like, { ...one, ids: [one.id], share: one.share ?? 0, usd_per_hour: one.usd_per_hour ?? 0, capacity_per_s: one.capacity_per_s ?? 0 });
    }
  }
  return [...found.values()];
}

/** Stages in the order of their layers; each has the machines that hold the same ones, which share the requests. */
export function columnsOf(stages) {
  const found = new Map();
  for (const stage of stages) {
    const key = stage.layers ? stage.layers.join() : `part ${found.size}`;
    if (found.has(key)) found.get(key).push(stage);
    else found.set(key, [stage]);
  }
  return [...found.values()];
}

const besideOf = (one) => Math.min(MOST_BESIDE, Math.max(1, ...columnsOf(one.stages ?? []).map((column) => column.length)));
const rowHeight = (one) => ROW + (besideOf(one) - 1) * STAGE;
const layersOf = (stage) => (stage.layers ? stage.layers[1] - stage.layers[0] : 1);

const layerText = (stage) => (stage.layers ? ` · ${stage.layers[0]}–${stage.layers[1] - 1}` : "");
const gpuText = (stage) => (stage.gpu ? `${stage.gpus > 1 ? `${stage.gpus}× ` : ""}${stage.gpu}` : stage.node);

function stageBox(stage, x, y, w, layers) {
  const title = `${stage.host ? `${stage.host}: ` : ""}${stage.node ?? stage.gpu}${stage.layers ? `, layers ${stage.layers[0]} to ${stage.layers[1] - 1}` : ""}${stage.tp > 1 ? `, over ${stage.tp} GPUs` : ""}`;
  return s("g", {}, s("title", {}, title), s("rect", { class: "stage", x, y, width: w, height: 21, rx: 5 }),
    s("text", { class: "stage-name", x: x + 7, y: y + 15 }, fit(`${gpuText(stage)}${layers ? layerText(stage) : ""}`, Math.max(3, Math.floor(w / 7.3)))));
}

function instanceBox(one, y, tone) {
  const stages = one.stages?.length ? one.stages : [{ gpu: one.layout, gpus: 1, layers: null }];
  const columns = columnsOf(stages);
  const total = columns.reduce((sum, [stage]) => sum + Math.max(1, layersOf(stage)), 0);
  let x = RIGHT + 12;
  const wide = RIGHT_W - 24;
  const title = `${one.ids.length > 1 ? `${one.ids.length} × ` : ""}${one.service}${one.region ? ` · ${one.region}` : ""}`;
  return s("g", { class: `instance ${tone}` },
    s("title", {}, `${one.ids.join(", ")}: ${one.layout ?? ""}, ${perHour(one.usd_per_hour)}`),
    s("rect", { class: "box", x: RIGHT, y, width: RIGHT_W, height: rowHeight(one), rx: 8 }),
    s("text", { class: "name", x: RIGHT + 12, y: y + 19 }, fit(title, 44)),
    s("text", { class: "side", x: WIDTH - 12, y: y + 19, "text-anchor": "end" }, perHour(one.usd_per_hour)),
    columns.map((column) => {
      const w = Math.max(34, (wide * Math.max(1, layersOf(column[0]))) / total - 3);
      const hidden = column.length > MOST_BESIDE ? column.length - MOST_BESIDE + 1 : 0;
      const drawn = column.slice(0, column.length - hidden).map((stage, at) => stageBox(stage, x, y + 28 + at * STAGE, Math.max(8, Math.min(w, RIGHT + 12 + wide - x)), columns.length > 1));
      if (hidden) drawn.push(s("text", { class: "stage-name", x: x + 7, y: y + 43 + (MOST_BESIDE - 1) * STAGE }, `+ ${hidden} more`));
      x += w + 3;
      return drawn;
    }));
}

/** The picture; a table of the same stands below it for those who cannot see it (the caller's `planTable`). */
export function planPicture(plan) {
  const services = plan.services ?? [];
  const groups = group(plan.instances ?? []);
  const shown = groups.slice(0, MOST);
  const order = new Map(services.map((one, at) => [one.name, at]));
  shown.sort((a, b) => (order.get(a.service) ?? 99) - (order.get(b.service) ?? 99));
  const tops = [TOP];
  for (const one of shown) tops.push(tops.at(-1) + rowHeight(one) + GAP);
  const height = Math.max(tops.at(-1), Math.max(services.length, 1) * (ROW + GAP) + TOP);
  const rowY = (at) => tops[at] ?? TOP + at * (ROW + GAP);
  const left = services.map((one, at) => {
    const mine = shown.map((g, i) => (g.service === one.name ? i : -1)).filter((i) => i >= 0);
    const middle = mine.length ? (rowY(mine[0]) + rowY(mine.at(-1))) / 2 : rowY(at);
    return { one, y: middle, mine };
  });
  const flows = left.flatMap(({ one, y, mine }, at) => {
    const sum = mine.reduce((total, i) => total + shown[i].share, 0) || 1;
    let used = 0;
    return mine.map((i) => {
      const part = shown[i].share / sum || 1 / mine.length;
      const thick = Math.max(2, part * 26);
      const from = y + ROW / 2 - 13 + used * 26 + thick / 2;
      used += part;
      const to = rowY(i) + ROW / 2;
      const bend = (LEFT + RIGHT) / 2;
      return s("path", { class: `flow tone-${at % 6}`, d: `M${LEFT} ${from}C${bend} ${from} ${bend} ${to} ${RIGHT} ${to}`, "stroke-width": thick }, s("title", {}, `${one.name} → ${shown[i].ids.join(", ")}: ${percent(part)}`));
    });
  });
  const words = `${services.length} services on ${(plan.instances ?? []).length} instances`;
  return h("div", { class: "picture-wrap", tabindex: "0", role: "region", "aria-label": "The plan as a picture" },
    s("svg", { class: "plan-picture", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words }, flows,
      left.map(({ one, y }, at) => s("g", { class: `service tone-${at % 6}` },
        s("title", {}, `${one.name}: ${one.model}`),
        s("rect", { class: "box", x: 0, y, width: LEFT, height: ROW, rx: 8 }),
        s("text", { class: "name", x: 12, y: y + 22 }, fit(one.name, 24)),
        s("text", { class: "side", x: 12, y: y + 43 }, fit(`${one.model ?? ""} · ${rate(one.requests_per_s)}`, 29)))),
      shown.map((one, at) => instanceBox(one, rowY(at), `tone-${(order.get(one.service) ?? at) % 6}`))),
    groups.length > MOST ? h("p", { class: "note" }, `and ${groups.length - MOST} kinds of instances more, in the table below`) : null);
}

/** Columns of the table of instances beside the picture. */
export const instanceColumns = [
  { name: "Instances", cell: (one) => (one.ids.length > 1 ? `${one.ids.length} × ${one.service}` : one.ids[0]), sort: (one) => one.service },
  { name: "Where", value: (one) => [one.region, one.market].filter(Boolean).join(", ") || "–" },
  { name: "Hardware and layers", value: (one) => columnsOf(one.stages ?? []).map((column, _at, all) => `${column.map(gpuText).join(" + ")}${all.length > 1 ? layerText(column[0]) : ""}`).join(" → ") || one.layout },
  { name: "Engine", cell: (one) => (one.engine ? [one.engine, one.standing ? [" ", badge(one.standing, STANDINGS[one.standing] ?? "")] : null] : "–") },
  { name: "Can serve", right: true, value: (one) => (one.capacity_per_s ? `${number(one.capacity_per_s)} requests/s` : "–") },
  { name: "Cost", right: true, value: (one) => perHour(one.usd_per_hour), sort: (one) => one.usd_per_hour },
];
