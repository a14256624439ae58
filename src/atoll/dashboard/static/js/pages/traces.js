// Traces: pick or upload one, run it through a plan, see what its users would have seen.

import { h, icon, set } from "../lib/dom.js";
import { lines } from "../lib/charts.js";
import { firstFleet, fleetChoice } from "../lib/fleetchoice.js";
import { count, DASH, number, percent, perHour, rate, seconds } from "../lib/format.js";
import { withPlanner } from "../lib/services.js";
import { badge, button, card, empty, failed, field, figure, iconButton, input, load, loading, select, snippet, table, toast } from "../lib/ui.js";

const MOST_BYTES = 64 * 2 ** 20;

function drawStats(trace) {
  if (trace.kind === "builtin") return h("p", { class: "note" }, trace.text ?? "");
  return h("div", { class: "stack" },
    h("div", { class: "figures" }, figure("Requests", count(trace.requests)), figure("Lasts", seconds(trace.seconds)), figure("Rate", rate(trace.requests_per_s, "requests")), figure("Prompts", `${number(trace.input_mean)} tokens`, { note: "on average" }), figure("Answers", `${number(trace.output_mean)} tokens`, { note: "on average" })),
    trace.timeline?.length > 1 ? lines([{ name: "requests/s", points: trace.timeline }], { label: "Requests a second over the trace", format: (v) => `${number(v)}/s`, formatX: seconds, height: 140 }) : null);
}

function drawReport(found) {
  const spread = (told) => (told ? `${seconds(told.p50)} / ${seconds(told.p95)} / ${seconds(told.p99)}` : DASH);
  const shares = Object.values(found.kept ?? {}).filter((v) => v !== null);
  const worst = shares.length ? Math.min(...shares) : null;
  const time = found.timeline ?? {};
  return h("div", { class: "stack" },
    h("div", { class: "figures" },
      figure("Promises kept", percent(worst), { note: shares.length > 1 ? "by the service that keeps the fewest" : null, tone: worst === null ? null : worst >= 0.95 ? "good" : "bad" }),
      figure("Requests", count(found.requests)), figure("Cost", perHour(found.usd_per_hour)), figure("Took", seconds(found.seconds), { note: "to simulate" })),
    table([
      { name: "Service", key: "name" },
      { name: "Requests", right: true, value: (one) => count(one.requests) },
      { name: "Kept", cell: (one) => (one.kept === null || one.kept === undefined ? DASH : badge(percent(one.kept), one.kept >= 0.95 ? "good" : "bad")) },
      { name: "First token: median / 95 % / 99 %", right: true, value: (one) => spread(one.ttft_s) },
      { name: "Further tokens: median / 95 % / 99 %", right: true, value: (one) => spread(one.tpot_s) },
      { name: "Tokens", right: true, value: (one) => rate(one.tokens_per_s) },
    ], found.services ?? [], { caption: "What was seen, by service" }),
    time.t_s?.length > 1 ? lines([{ name: "running", points: time.t_s.map((t, at) => [t, time.running[at]]) }], { label: "Requests that run, over time", format: number, formatX: seconds, height: 140 }) : null,
    found.report ? h("div", { class: "row" }, h("a", { class: "button", href: `/atoll/v1/reports/${encodeURIComponent(found.report)}`, target: "_blank", rel: "noopener" }, icon("arrow"), h("span", {}, "The whole report"))) : null);
}

export const page = {
  mount(root, ctx) {
    const list = h("div"), stats = h("div"), form = h("div"), result = h("div");
    let chosen = ctx.params.get("trace");
    let traces = [];
    let fleets = [];
    let fleet = null;
    let running = null;

    const file = h("input", { type: "file", accept: ".csv,.jsonl,.json,.gz,.parquet,text/csv,application/json", class: "unseen", tabindex: "-1", "aria-label": "Trace file", onchange: () => upload(file.files[0]) });
    const drop = h("div", { class: "drop", ondragover: (event) => { event.preventDefault(); drop.classList.add("over"); }, ondragleave: () => drop.classList.remove("over"), ondrop: (event) => { event.preventDefault(); drop.classList.remove("over"); upload(event.dataTransfer.files[0]); } },
      h("p", {}, "Drop a trace here, or"), button("Choose a file", () => file.click(), { symbol: "upload" }), file,
      h("p", { class: "note" }, "CSV or JSON lines with times and lengths of requests (Azure's, BurstGPT's, Mooncake's, ServeGen's columns are known), at most 64 MiB. Only times and lengths are kept, never text."));

    async function upload(picked) {
      if (!picked) return;
      if (picked.size > MOST_BYTES) { toast("The file is larger than 64 MiB: cut it with `atoll trace`", "bad"); return; }
      drop.setAttribute("aria-busy", "true");
      try {
        const made = await ctx.api.send("POST", "/atoll/v1/traces", { body: picked, headers: { "content-type": "application/octet-stream", "x-atoll-filename": encodeURIComponent(picked.name) } }).then((answer) => answer.json());
        chosen = (made.trace ?? made).id;
        toast(`${picked.name} is here`);
        await refresh();
      } catch (error) {
        toast(error.message, "bad");
      } finally {
        drop.removeAttribute("aria-busy");
        file.value = "";
      }
    }

    async function remove(trace) {
      try {
        await ctx.api.del(`/atoll/v1/traces/${encodeURIComponent(trace.id)}`);
        if (chosen === trace.id) chosen = null;
        await refresh();
      } catch (error) {
        toast(error.message, "bad");
      }
    }

    function pick(id) {
      chosen = id;
      set(list, drawList());
      const trace = traces.find((one) => one.id === id);
      set(stats, trace ? drawStats(trace) : null);
    }

    function drawList() {
      return h("ul", { class: "trace-list" }, traces.map((one) => h("li", { class: one.id === chosen && "chosen" },
        h("label", {}, h("input", { type: "radio", name: "trace", value: one.id, checked: one.id === chosen, onchange: () => pick(one.id) }), h("span", { class: "trace-name" }, one.name), badge(one.kind === "builtin" ? "built in" : "uploaded", one.kind === "builtin" ? "" : "info")),
        one.kind === "uploaded" && ctx.can("member") ? iconButton(`Remove ${one.name}`, "trash", () => remove(one)) : null)));
    }

    async function refresh() {
      traces = (await ctx.api.get("/atoll/v1/traces")).traces;
      if (!traces.some((one) => one.id === chosen)) chosen = traces[0]?.id ?? null;
      pick(chosen);
    }

    function drawForm() {
      const speed = input({ type: "number", min: 0.01, max: 100, step: "any", value: 1, inputmode: "decimal" });
      const lasts = select([["120", "2 minutes"], ["600", "10 minutes"], ["3600", "1 hour"], ["86400", "1 day"]], { value: "600" });
      const seed = input({ type: "number", min: 0, step: 1, value: 0, inputmode: "numeric" });
      const service = input({ placeholder: "all" });
      const go = button("Simulate", run, { kind: "primary", symbol: "play", id: "simulate", disabled: !ctx.can("member") });
      const stop = button("Stop", () => running?.abort(), { symbol: "stop", disabled: true });
      async function run() {
        running?.abort();
        const mine = (running = new AbortController());
        const bar = h("progress", { max: 1, "aria-label": "Simulating" });
        const words = h("p", { role: "status" }, "Simulating…");
        go.disabled = true;
        stop.disabled = false;
        set(result, card("Result", {}, h("div", { class: "state" }, bar, words)));
        try {
          const asked = { fleet, trace: chosen, service: service.value.trim() || null, speed: Number(speed.value) || 1, duration_s: Number(lasts.value), seed: Number(seed.value) || 0 };
          const found = await ctx.api.job("/atoll/v1/simulate", asked, { signal: mine.signal, onProgress: (told) => {
            if (told.share !== undefined && told.share !== null) bar.value = told.share;
            set(words, told.text ?? "Simulating…");
          } });
          set(result, card("Result", {}, drawReport(found)));
        } catch (error) {
          if (error.name === "AbortError") set(result);
          else set(result, card("Result", {}, failed(error, run)));
        } finally {
          go.disabled = !ctx.can("member");
          stop.disabled = true;
        }
      }
      return h("div", { class: "stack" }, fleetChoice(fleets, fleet, (name) => { fleet = name; }), h("div", { class: "trace-form" },
        field("Speed", speed, { note: "2: twice as many requests a second" }), field("At most", lasts), field("Service", service, { note: "whose requests these are; all: by what each is asked" }), field("Seed", seed)),
      h("div", { class: "row" }, go, stop, ctx.can("member") ? null : h("span", { class: "note" }, "Viewers look only: ask for a key of role member.")));
    }

    const columns = h("div", { class: "columns" }, card("Trace", {}, list, stats, ctx.can("member") ? drop : null), card("Run it through a plan", {}, form));
    set(root, loading());
    const stop = withPlanner(ctx, root, () => {
      set(root, columns, result);
      load(form, async () => {
        const [told] = await Promise.all([ctx.api.get("/atoll/v1/fleets"), refresh()]);
        return told;
      }, (told) => {
        fleets = told.fleets;
        fleet = firstFleet(fleets, ctx.params);
        if (!fleet) return empty("No fleet to simulate", "Give the dashboard a fleet file:", snippet("atoll dashboard --fleet fleet.yaml"));
        return drawForm();
      });
    });
    return () => { stop(); running?.abort(); };
  },
};
