// Plan: what is in force as boxes and flows, how good it is, what binds, what was decided, what comes next.

import { h, set } from "../lib/dom.js";
import { firstFleet, fleetChoice } from "../lib/fleetchoice.js";
import { ago, DASH, moment, number, percent, perHour, perMillion, plural, rate, seconds, usd } from "../lib/format.js";
import { group, instanceColumns, planPicture } from "../lib/planpicture.js";
import { withPlanner } from "../lib/services.js";
import { badge, button, card, empty, failed, figure, load, loading, stateBadge, table } from "../lib/ui.js";

const url = (fleet, what) => `/atoll/v1/fleets/${encodeURIComponent(fleet)}/${what}`;
const KIND_TONES = { plan: "info", start: "good", drain: "warn", stop: "warn", failure: "bad", controller: "", reweight: "", note: "" };

function serviceTable(plan) {
  return table([
    { name: "Service", key: "name" },
    { name: "Model", key: "model" },
    { name: "Asked", right: true, value: (one) => rate(one.requests_per_s, "requests") },
    { name: "Promise", value: (one) => (one.ttft_s ? `first token ${seconds(one.ttft_s)}, then ${seconds(one.tpot_s)} each` : DASH) },
    { name: "Kept", cell: (one) => (one.kept === null || one.kept === undefined ? DASH : badge(`${percent(one.kept)}${one.target ? ` of ${percent(one.target)}` : ""}`, !one.target || one.kept >= one.target ? "good" : "bad")) },
    { name: "Cost", right: true, value: (one) => perHour(one.usd_per_hour) },
    { name: "Per million tokens", right: true, value: (one) => usd(one.usd_per_mtoken) },
  ], plan.services ?? [], { caption: "Services and their promises" });
}

function figures(plan) {
  const gap = plan.gap, proof = plan.proof ?? {};
  const tokens = (plan.services ?? []).reduce((sum, one) => sum + (one.requests_per_s ?? 0) * ((one.input_tokens ?? 0) + (one.output_tokens ?? 0)), 0);
  return h("div", { class: "figures" },
    figure("Cost", perHour(plan.usd_per_hour), { note: tokens && plan.usd_per_hour ? perMillion((plan.usd_per_hour / 3600 / tokens) * 1e6) : null }),
    figure("Gap to the bound", proof.gap ?? DASH, { note: proof.bound, tone: typeof gap === "number" && gap <= 0.01 ? "good" : null }),
    figure("Instances", number((plan.instances ?? []).length), { note: plural((plan.services ?? []).length, "service") }),
    figure("Found by", plan.solver ?? DASH, { note: proof.late ?? plan.status ?? null, tone: plan.cut_short ? "warn" : null }));
}

export function drawPlan(plan) {
  return [figures(plan),
    card("Who serves what", { note: "Left: what is asked. Right: instances, with the layers that each machine holds; machines with the same layers share the requests. Wider flows carry more." }, planPicture(plan), table(instanceColumns, group(plan.instances ?? []), { caption: "Instances of the plan" })),
    card("Services", {}, serviceTable(plan)),
    card("What limits it", { note: "What keeps the plan from being cheaper, and what one more machine would be worth." },
      plan.binds === null ? loading("Looking for what limits the plan…") : plan.binds?.length ? h("ul", { class: "bullets" }, plan.binds.map((one) => h("li", {}, one.what, one.price ? h("span", { class: "note" }, ` (${one.price})`) : null))) : h("p", { class: "note" }, "No machine and no budget limits it: demand and promises alone decide."))];
}

function changeLines(next) {
  const kinds = [["starts", "start", "good"], ["goes", "drain", "warn"], ["stops", "stop", "bad"]];
  return h("ul", { class: "change-list" },
    kinds.flatMap(([key, word, tone]) => (next[key] ?? []).map((one) => h("li", {}, badge(word, tone), h("span", {}, `${one.instance}: ${one.layout} on ${one.target}`), h("span", {}, perHour(one.usd_per_hour)), one.reason ? h("span", { class: "why" }, one.reason) : null))),
    next.stays?.length ? h("li", {}, badge("stay"), h("span", {}, next.stays.length > 6 ? plural(next.stays.length, "instance") : next.stays.join(", ")), null) : null);
}

export function drawNext(next, ctx, fleet, again) {
  if (!next) return empty("Everything stays as it is", "The next change will be shown here before it is applied.");
  async function decide(approve) {
    try {
      await ctx.api.post(url(fleet, "next"), { id: next.id, approve });
      ctx.toast(approve ? "Approved: the controller goes ahead" : "Refused: everything stays");
      again();
    } catch (error) {
      ctx.toast(error.message, "bad");
    }
  }
  const words = { waiting: "waits for approval here", asked: "asked in the controller's terminal", applying: "being applied", refused: "refused" };
  return h("div", { class: "stack" },
    h("div", { class: "row" }, badge(words[next.state] ?? next.state, next.state === "refused" ? "bad" : next.state === "applying" ? "info" : "warn"), h("span", { class: "note" }, ago(next.at_s))),
    h("div", { class: "figures" }, figure("Cost now", perHour(next.usd_before)), figure("Cost then", perHour(next.usd_after), { tone: next.usd_after <= next.usd_before ? "good" : "warn", note: `${next.usd_after >= next.usd_before ? "+" : ""}${usd(next.usd_after - next.usd_before)} an hour` }), figure("Short of capacity", next.dips?.length ? String(next.dips.length) : "none", { tone: next.dips?.length ? "warn" : "good" })),
    changeLines(next),
    [["Short of capacity while it changes", next.dips], ["Why", next.reasons], ["Waits for", next.waits]].map(([name, rows]) => (rows?.length ? h("div", {}, h("h3", {}, name), h("ul", { class: "bullets" }, rows.map((text) => h("li", {}, text)))) : null)),
    next.state === "waiting" ? (ctx.can("operator") ? h("div", { class: "row" }, button("Apply this change", () => decide(true), { kind: "primary", symbol: "check" }), button("Refuse", () => decide(false), { kind: "danger" })) : h("p", { class: "note" }, "An operator can apply or refuse it here.")) : null);
}

export function drawHistory(events) {
  if (!events.length) return empty("Nothing was decided yet", "Every plan, start, drain and stop will be listed here with its reason.");
  return h("ol", { class: "history", tabindex: "0", "aria-label": "Decisions, the newest first" }, [...events].reverse().map((one) => h("li", {}, h("time", { datetime: new Date(one.at_s * 1000).toISOString() }, moment(one.at_s)), h("span", {}, badge(one.kind, KIND_TONES[one.kind] ?? "")), h("span", { class: "what" }, one.instance ? `${one.instance}: ` : "", one.text, one.usd_per_hour === null || one.usd_per_hour === undefined ? null : h("span", { class: "note" }, ` (${perHour(one.usd_per_hour)} from then on)`)))));
}

export const page = {
  mount(root, ctx) {
    const place = h("div", { class: "stack" });
    root.append(place);
    let stopLive = null;
    let fleets = [];

    async function planNow(fleet, where) {
      const note = h("p", { class: "note" }, "Planning…");
      set(where, h("div", { class: "state" }, h("span", { class: "spinner" }), note));
      try {
        const found = await ctx.api.job("/atoll/v1/whatif", { fleet }, { onProgress: (told) => set(note, told.text ?? "Planning…") });
        set(where, drawPlan(found.now.plan));
      } catch (error) {
        set(where, failed(error, () => planNow(fleet, where)));
      }
    }

    function show(fleet) {
      history.replaceState(null, "", `/plan?fleet=${encodeURIComponent(fleet)}`);
      const find = () => fleets.find((one) => one.name === fleet);
      const operated = find()?.kind === "operated";
      const plan = h("div", { class: "stack" });
      const next = h("div"), past = h("div"), state = h("div", { class: "row" }), troubles = h("div", { class: "stack" });
      function paintState() {
        const known = find();
        set(state, operated ? stateBadge(known?.up ? "up" : "down") : null);
        set(troubles, operated && !known?.controller ? h("p", { class: "notice" }, "Nobody operates this fleet now: ", h("code", {}, `atoll operate ${fleet}`), " keeps it as its file says.") : null,
          known?.errors?.length ? h("ul", { class: "bullets bad" }, known.errors.map((text) => h("li", {}, text))) : null);
      }
      paintState();
      set(place, h("div", { class: "row" }, fleetChoice(fleets, fleet, show), state), troubles,
        operated ? card("What comes next", {}, next) : null, plan, operated ? card("Decisions", { note: "What was done and why, the newest first." }, past) : null);
      const reload = [load(plan, () => ctx.api.get(url(fleet, "plan")), (told) => {
        if (told.plan) return drawPlan(told.plan);
        const here = h("div", { class: "stack" });
        set(here, card("Plan", {}, empty("No plan yet", "This fleet was not planned here so far.", ctx.can("member") ? button("Plan it now", () => planNow(fleet, here), { kind: "primary", symbol: "play" }) : null)));
        return here;
      })];
      if (operated) {
        const again = load(next, () => ctx.api.get(url(fleet, "next")), (told) => drawNext(told.next, ctx, fleet, () => again()));
        reload.push(again, load(past, () => ctx.api.get(url(fleet, "history?last=200")), (told) => drawHistory(told.events)));
      }
      stopLive?.();
      let first = true;
      stopLive = ctx.live.on("fleets", (told) => {
        fleets = told.fleets ?? fleets;
        paintState();
        if (!first && operated) for (const one of reload) one();
        first = false;
      });
    }

    set(place, loading());
    const stop = withPlanner(ctx, place, () => load(place, () => ctx.api.get("/atoll/v1/fleets"), (told) => {
      fleets = told.fleets;
      const fleet = firstFleet(fleets, ctx.params);
      if (!fleet) return empty("No fleet yet", "A fleet file says which models are promised what, and which machines there are.", h("pre", {}, "atoll init\natoll up fleet.yaml"));
      queueMicrotask(() => show(fleet));
      return loading();
    }));
    return () => { stop(); stopLive?.(); };
  },
};
