// History: what models were asked, kept and cost, and how busy machines were, over an hour to a month.

import { lines } from "../lib/charts.js";
import { h, set } from "../lib/dom.js";
import { number, often, percent, perHour, plural, rate, seconds } from "../lib/format.js";
import { follow, gatewayDown, noGateway } from "../lib/services.js";
import { card, empty, failed, field, input, loading, select, table } from "../lib/ui.js";

const RANGES = [["3600", "Last hour"], ["21600", "Last 6 hours"], ["86400", "Last 24 hours"], ["604800", "Last 7 days"], ["2592000", "Last 30 days"]];
const AGAIN_MS = 30_000;
const MOST = 6; // curves of a chart: there are as many colours
const share = { format: percent, total: false, most: 1 };
const FIGURES = {
  models: [
    ["requests_per_s", "Requests", { format: often, axis: rate }],
    ["output_tokens_per_s", "Tokens of answers", { format: often, axis: rate }],
    ["input_tokens_per_s", "Tokens of prompts", { format: often, axis: rate }],
    ["first_token_s", "Time to the first token (TTFT)", { format: seconds, total: false }],
    ["token_s", "Time of each further token (TPOT)", { format: seconds, total: false }],
    ["kept", "Requests that kept their promise", share],
    ["usd_per_hour", "Cost", { format: perHour }],
  ],
  machines: [
    ["gpu_share", "GPU load", share],
    ["memory_share", "GPU memory in use", share],
    ["kv_share", "KV cache in use", share],
    ["load", "Requests, of the most that it takes", share],
    ["running", "Requests running", { format: number }],
  ],
};

const known = (values) => values.filter((v) => v !== null);
const mean = (values) => (values.length ? values.reduce((sum, v) => sum + v, 0) / values.length : null);

function clock(span_s) {
  const options = span_s <= 86400 ? { hour: "2-digit", minute: "2-digit" } : span_s <= 604800 ? { weekday: "short", hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" };
  return (at_s) => new Date(at_s * 1000).toLocaleString("en-GB", options);
}

function chartOf(told, [figure, title, { format, axis = format, total = true }], shown, marks, span) {
  const having = shown.filter((one) => known(one[figure] ?? []).length);
  // Machines that say no price cost nothing known.
  if (!having.length || (figure === "usd_per_hour" && !having.some((one) => one[figure].some(Boolean)))) return null;
  const size = (one) => mean(known(one[figure])) ?? 0;
  const drawn = [...having].sort((a, b) => size(b) - size(a)).slice(0, MOST);
  const rows = drawn.map((one) => ({ name: one.name, mean: mean(known(one[figure])), most: Math.max(...known(one[figure])), last: known(one[figure]).at(-1) }));
  const label = `${title} ${clock(span[1] - span[0])(span[0])} to ${clock(span[1] - span[0])(span[1])}: ${rows.map((row) => `${row.name} ${format(row.mean)} on average`).join(", ")}`;
  return card(title, {},
    lines(drawn.map((one) => ({ name: one.name, points: told.at_s.map((at, i) => [at + told.step_s / 2, one[figure][i]]) })), { label, format: axis, formatX: clock(span[1] - span[0]), marks, span }),
    having.length > drawn.length ? h("p", { class: "note" }, `The ${MOST} largest of ${having.length}; narrow the list to see others.`) : null,
    h("details", {}, h("summary", {}, "In figures"), table([
      { name: told.of === "models" ? "Model" : "Machine", cell: (row) => h("bdi", {}, row.name) },
      { name: "Mean", right: true, value: (row) => format(row.mean), sort: (row) => row.mean },
      { name: "Most", right: true, value: (row) => format(row.most), sort: (row) => row.most },
      { name: "Last", right: true, value: (row) => format(row.last), sort: (row) => row.last },
    ], total && drawn.length > 1 ? [...rows, { name: "together", mean: rows.reduce((sum, row) => sum + row.mean, 0), most: null, last: rows.reduce((sum, row) => sum + row.last, 0) }] : rows, { caption: `${title} in figures` })));
}

/** Decisions of controllers, which know why a plan is another one; nothing where nobody operates a fleet. */
async function decisions(ctx) {
  if (!ctx.session?.planner) return [];
  try {
    const { fleets } = await ctx.api.get("/atoll/v1/fleets");
    const up = fleets.filter((one) => one.kind === "operated" && one.up);
    const told = await Promise.all(up.map((one) => ctx.api.get(`/atoll/v1/fleets/${encodeURIComponent(one.name)}/history?last=500`)));
    return told.flatMap(({ events }) => events.filter((one) => one.kind === "plan").map((one) => ({ at_s: one.at_s, text: one.text })));
  } catch {
    return []; // the curves are worth having without
  }
}

export const page = {
  mount(root, ctx) {
    const chosen = { range: "86400", of: "models", find: "" };
    for (const id of Object.keys(chosen)) chosen[id] = ctx.params.get(id) ?? chosen[id];
    if (!RANGES.some(([id]) => id === chosen.range)) chosen.range = "86400";
    if (!FIGURES[chosen.of]) chosen.of = "models";
    let told = null;
    let turn = 0;
    let gone = false;
    let opened = false;

    const range = select(RANGES, { value: chosen.range, onchange: () => choose("range", range.value) });
    const of = select([["models", "Models"], ["machines", "Machines"]], { value: chosen.of, onchange: () => choose("of", of.value) });
    const find = input({ type: "search", value: chosen.find, placeholder: "all", oninput: () => { chosen.find = find.value; keep(); draw(); } });
    const state = h("p", { class: "note", role: "status" });
    const place = h("div", { class: "charts" });

    function keep() {
      const query = new URLSearchParams(Object.entries(chosen).filter(([id, value]) => value !== { range: "86400", of: "models", find: "" }[id])).toString();
      history.replaceState(null, "", query ? `/history?${query}` : "/history");
    }

    function choose(id, value) {
      chosen[id] = value;
      keep();
      told = null;
      load();
    }

    async function load() {
      const mine = ++turn;
      if (!told) set(place, loading());
      const until_s = Math.ceil(Date.now() / 1000);
      const since_s = until_s - Number(chosen.range);
      try {
        const [found, plans] = await Promise.all([ctx.api.get(`/atoll/v1/history?of=${chosen.of}&since_s=${since_s}&until_s=${until_s}`), decisions(ctx)]);
        if (gone || mine !== turn) return;
        told = { ...found, span: [since_s, until_s], changes: [...(found.changes ?? []), ...plans.filter((one) => one.at_s >= since_s)].sort((a, b) => a.at_s - b.at_s) };
        draw();
      } catch (error) {
        if (gone || mine !== turn || told) return;
        if (error.code === "no_history") set(place, h("section", { class: "card", "aria-label": "No history" }, empty("This gateway keeps no history", "Its settings say history: \"\". Leave that out, and it keeps a month in a small file; or name a Prometheus that reads its metrics.")));
        else set(place, failed(error, load));
      }
    }

    function draw() {
      if (!told) return;
      const words = chosen.find.trim().toLowerCase();
      const shown = told.series.filter((one) => one.name.toLowerCase().includes(words));
      const marks = told.changes.map((one) => [one.at_s, `${new Date(one.at_s * 1000).toLocaleString("sv-SE")}: ${one.text}`]);
      const charts = FIGURES[told.of].map((each) => chartOf(told, each, shown, marks, told.span)).filter(Boolean);
      set(state, `${plural(shown.length, told.of.slice(0, -1))}, a point every ${seconds(told.step_s)}. Triangles mark changes of plan and machines.`);
      if (!charts.length) set(place, h("section", { class: "card", "aria-label": "Nothing yet" }, empty(told.series.length ? "Nothing fits" : "Nothing was recorded in this time", told.series.length ? "No name has these letters." : "A gateway begins to record ten seconds after it has started.")));
      else set(place, charts, told.changes.length ? card("Changes", { note: "What happened to plan and machines, the newest first." }, h("ol", { class: "changes", tabindex: "0", "aria-label": "Changes, the newest first" }, [...told.changes].reverse().slice(0, 100).map((one) => h("li", {}, h("time", { datetime: new Date(one.at_s * 1000).toISOString() }, new Date(one.at_s * 1000).toLocaleString("sv-SE")), h("span", {}, one.text))))) : null);
    }

    set(root, loading());
    const stop = follow(ctx, "gateway", (how, why) => {
      if (opened) return;
      if (how === "none") return set(root, noGateway("A gateway records what it is asked. Start one, and its history is shown here:"));
      if (how === "down") return set(root, gatewayDown(why));
      opened = true;
      set(root, h("div", { class: "stack" }, h("div", { class: "toolbar" }, field("Time", range), field("Of", of), field("Find", find)), state, place));
      load();
    });
    const timer = setInterval(() => { if (opened && document.visibilityState === "visible" && !place.contains(document.activeElement)) load(); }, AGAIN_MS);
    return () => { gone = true; stop(); clearInterval(timer); };
  },
};
