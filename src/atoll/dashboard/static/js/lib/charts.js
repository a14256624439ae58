// Small pictures in SVG that scale with their place. Each says in words what it shows.

import { h, s } from "./dom.js";

const line = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** The last values of something, as a line of 120 x 32. */
export function sparkline(values, { label = "", tone = "" } = {}) {
  const w = 120, hgt = 32;
  const shown = values.filter((v) => Number.isFinite(v));
  const most = Math.max(...shown, 1e-9);
  const points = shown.map((v, at) => [shown.length > 1 ? (at / (shown.length - 1)) * w : w, hgt - 2 - (v / most) * (hgt - 4)]);
  return s("svg", { class: ["sparkline", tone], viewBox: `0 0 ${w} ${hgt}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    points.length > 1 ? [s("path", { class: "area", d: `${line(points)}L${w} ${hgt}L0 ${hgt}Z` }), s("path", { class: "stroke", d: line(points), "vector-effect": "non-scaling-stroke" })] : null);
}

const nice = (most) => {
  const size = 10 ** Math.floor(Math.log10(most || 1));
  return [1, 2, 2.5, 5, 10].map((m) => m * size).find((v) => v >= most) ?? most;
};

/** Points as lines, one for each stretch without a gap; a point alone is a short dash. */
function strokes(points, x, y) {
  const parts = [[]];
  for (const [a, b] of points) {
    if (b === null || !Number.isFinite(b)) parts.push([]);
    else parts.at(-1).push([x(a), y(b)]);
  }
  return parts.filter((part) => part.length).map((part) => line(part.length > 1 ? part : [[part[0][0] - 1.5, part[0][1]], [part[0][0] + 1.5, part[0][1]]])).join("");
}

/**
 * Lines over time. series: [{name, points: [[x, y]]}], where y is null for a gap; format(y), formatX(x) write the axes,
 * marks: [[x, text]] are moments to be marked, span: [from, to] is what is shown if it is more than the points.
 */
export function lines(series, { label, format = String, formatX = String, height = 180, limit = null, marks = [], span = null } = {}) {
  const w = 640, left = 56, right = 8, top = 10, bottom = 24;
  const all = series.flatMap((one) => one.points.filter((p) => p[1] !== null));
  if (!all.length) return h("p", { class: "note" }, "No data yet.");
  const xs = all.map((p) => p[0]);
  const [low, high] = span ?? [Math.min(...xs), Math.max(...xs)];
  const most = nice(Math.max(...all.map((p) => p[1]), limit ?? 0) || 1);
  const x = (v) => left + ((v - low) / (high - low || 1)) * (w - left - right);
  const y = (v) => top + (1 - v / most) * (height - top - bottom);
  return h("figure", { class: "chart" },
    s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": label },
      [0, 0.5, 1].map((f) => [s("line", { class: "grid", x1: left, x2: w - right, y1: y(most * f), y2: y(most * f) }), s("text", { class: "tick", x: left - 6, y: y(most * f) + 4, "text-anchor": "end" }, format(most * f))]),
      [low, (low + high) / 2, high].map((v, at) => s("text", { class: "tick", x: x(v), y: height - 6, "text-anchor": ["start", "middle", "end"][at] }, formatX(v))),
      marks.filter(([at]) => at >= low && at <= high).map(([at, text]) => s("g", { class: "mark" }, s("title", {}, text), s("line", { x1: x(at), x2: x(at), y1: top, y2: height - bottom }), s("path", { d: `M${x(at) - 4} ${top}h8l-4 6z` }))),
      limit === null ? null : s("line", { class: "limit", x1: left, x2: w - right, y1: y(limit), y2: y(limit) }),
      series.map((one, at) => s("path", { class: ["stroke", `tone-${at % 6}`], d: strokes(one.points, x, y), "vector-effect": "non-scaling-stroke" }))),
    series.length > 1 ? legend(series.map((one) => one.name)) : null);
}

/**
 * Stacked bars. rows: [{name, parts: {series: value}}]; names: order of the series.
 */
export function bars(rows, names, { label, format = String, height = 200 } = {}) {
  const w = 640, left = 56, right = 8, top = 10, bottom = 24;
  if (!rows.length) return h("p", { class: "note" }, "No data yet.");
  const sums = rows.map((row) => names.reduce((sum, name) => sum + (row.parts[name] ?? 0), 0));
  const most = nice(Math.max(...sums) || 1);
  const step = (w - left - right) / rows.length;
  const wide = Math.min(48, step * 0.75);
  const y = (v) => top + (1 - v / most) * (height - top - bottom);
  const every = Math.ceil(rows.length / 7);
  return h("figure", { class: "chart" },
    s("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": label },
      [0, 0.5, 1].map((f) => [s("line", { class: "grid", x1: left, x2: w - right, y1: y(most * f), y2: y(most * f) }), s("text", { class: "tick", x: left - 6, y: y(most * f) + 4, "text-anchor": "end" }, format(most * f))]),
      rows.map((row, at) => {
        let base = 0;
        const x = left + step * at + (step - wide) / 2;
        return [names.map((name, series) => {
          const value = row.parts[name] ?? 0;
          if (!value) return null;
          const box = s("rect", { class: `fill tone-${series % 6}`, x, width: wide, y: y(base + value), height: Math.max(0, y(base) - y(base + value)) }, s("title", {}, `${row.name}, ${name}: ${format(value)}`));
          base += value;
          return box;
        }), at % every === 0 ? s("text", { class: "tick", x: x + wide / 2, y: height - 6, "text-anchor": "middle" }, row.name) : null];
      })),
    names.length > 1 ? legend(names) : null);
}

export function legend(names) {
  return h("figcaption", { class: "legend" }, names.map((name, at) => h("span", {}, h("i", { class: `dot tone-${at % 6}`, "aria-hidden": "true" }), name)));
}

/** A share of promises kept, as a bar with a mark at the target. */
export function keptBar(kept, judged, target, label) {
  if (!judged) return h("span", { class: "kept none" }, "no request judged");
  const share = kept / judged;
  const good = target === null || target === undefined || share >= target;
  const w = 100;
  // From 80 % on: what is below is a full failure anyway.
  const at = (v) => Math.max(0, Math.min(1, (v - 0.8) / 0.2)) * w;
  return h("span", { class: ["kept", good ? "good" : "bad"] },
    s("svg", { viewBox: `0 0 ${w} 8`, preserveAspectRatio: "none", role: "img", "aria-label": label ?? "" },
      s("rect", { class: "track", width: w, height: 8, rx: 4 }), s("rect", { class: "bar", width: Math.max(2, at(share)), height: 8, rx: 4 }),
      target ? s("rect", { class: "mark", x: Math.min(w - 1, at(target)), width: 1.4, height: 8 }) : null));
}
