// What if: turn demand, promises, prices, machines or a budget, and see the plan beside the one of now.

import { h, set } from "../lib/dom.js";
import { firstFleet, fleetChoice } from "../lib/fleetchoice.js";
import { DASH, number, percent, perHour, rate, seconds, sentence, usd } from "../lib/format.js";
import { group, instanceColumns, planPicture } from "../lib/planpicture.js";
import { withPlanner } from "../lib/services.js";
import { badge, button, card, copyButton, empty, failed, field, figure, input, load, loading, snippet, table } from "../lib/ui.js";

const WAIT_MS = 500;

/** A slider of factors, from a tenth to ten times, the same distance for the same ratio. */
function factorDial(name, describe, onturn, { most = 4, least = 0.25, zero = false } = {}) {
  const low = Math.log(least), high = Math.log(most);
  const shown = h("output", {});
  const control = h("input", { type: "range", min: 0, max: 100, step: 1, "aria-label": name });
  const read = () => {
    const at = Number(control.value);
    if (zero && at === 0) return 0;
    const factor = Math.exp(low + ((high - low) * at) / 100);
    const rounded = factor >= 10 ? Math.round(factor) : Math.round(factor * 20) / 20;
    return rounded;
  };
  const place = (factor) => { control.value = factor <= 0 ? 0 : Math.round(((Math.log(factor) - low) / (high - low)) * 100); };
  const paint = () => { set(shown, describe(read())); control.setAttribute("aria-valuetext", describe(read())); };
  control.addEventListener("input", () => { paint(); onturn(); });
  place(1);
  paint();
  const made = h("div", { class: "dial" }, h("div", { class: "dial-head" }, h("span", {}, name), shown), control);
  made.read = read;
  made.reset = () => { place(1); paint(); };
  return made;
}

function numberField(name, value, unit, onturn) {
  const control = input({ type: "number", min: 0, step: "any", inputmode: "decimal", value: value ?? "" });
  control.addEventListener("input", onturn);
  const made = field(`${name}${unit ? ` (${unit})` : ""}`, control);
  made.read = () => (control.value === "" ? null : Number(control.value));
  made.reset = () => { control.value = value ?? ""; };
  return made;
}

function buildDials(dials, onturn) {
  const services = dials.services.map((one) => ({
    one,
    demand: factorDial(`Demand of ${one.name}`, (f) => `${rate(one.requests_per_s * f, "requests")} (${number(f)}×)`, onturn, { most: 8, least: 0.125 }),
    ttft: numberField("First token within", one.ttft_s * 1000, "ms", onturn),
    tpot: numberField("Each further token", one.tpot_s * 1000, "ms", onturn),
    target: numberField("Kept by", (one.target ?? 0.95) * 100, "%", onturn),
  }));
  const gpus = dials.gpus.map((one) => ({
    one,
    price: one.usd_per_gpu_hour === null || one.usd_per_gpu_hour === undefined ? null : factorDial(`Price of ${one.gpu}`, (f) => `${usd(one.usd_per_gpu_hour * f)} per GPU and hour (${number(f)}×)`, onturn),
    available: factorDial(`Machines with ${one.gpu}`, (f) => `${number(Math.round(one.nodes * f))} (${number(f)}×)`, onturn, { zero: true }),
  }));
  const budget = numberField("At most", null, "US dollars an hour", onturn);
  const all = [...services.flatMap((one) => [one.demand, one.ttft, one.tpot, one.target]), ...gpus.flatMap((one) => [one.price, one.available]), budget].filter(Boolean);
  return {
    node: h("div", { class: "stack" },
      services.map((each) => h("fieldset", { class: "dials" }, h("legend", {}, `${each.one.name} (${each.one.model})`), each.demand, h("div", { class: "promise" }, each.ttft, each.tpot, each.target))),
      h("details", { class: "dials", open: true }, h("summary", {}, "Prices and machines"), h("div", { class: "stack" }, gpus.map((each) => h("div", { class: "pair" }, each.price, each.available)))),
      h("fieldset", { class: "dials" }, h("legend", {}, "Budget"), budget, h("p", { class: "note" }, "If it does not pay for everything, the plan serves the same share of every service’s demand, as large as possible."))),
    reset: () => all.forEach((one) => one.reset()),
    read() {
      const asked = { demand: {}, promises: {}, prices: {}, available: {} };
      for (const { one, demand, ttft, tpot, target } of services) {
        if (demand.read() !== 1) asked.demand[one.name] = demand.read();
        const promise = {};
        const near = (a, b) => Math.abs(a - b) < 1e-9;
        if (ttft.read() && !near(ttft.read() / 1000, one.ttft_s)) promise.ttft_s = ttft.read() / 1000;
        if (tpot.read() && !near(tpot.read() / 1000, one.tpot_s)) promise.tpot_s = tpot.read() / 1000;
        if (target.read() && !near(target.read() / 100, one.target ?? 0.95)) promise.target = target.read() / 100;
        if (Object.keys(promise).length) asked.promises[one.name] = promise;
      }
      for (const { one, price, available } of gpus) {
        if (price && price.read() !== 1) asked.prices[one.gpu] = price.read();
        if (available.read() !== 1) asked.available[one.gpu] = available.read();
      }
      if (budget.read() !== null) asked.budget_usd_per_hour = budget.read();
      return asked;
    },
  };
}

const isChanged = (asked) => Object.values(asked).some((part) => (typeof part === "object" ? Object.keys(part).length : part !== null));

export function side(name, which, other) {
  const dearer = other ? which.usd_per_hour - other.usd_per_hour : 0;
  const kept = which.plan.services ?? [];
  return card(name, {},
    h("div", { class: "figures" },
      figure("Cost", perHour(which.usd_per_hour), { note: !other ? null : Math.abs(dearer) < 0.005 ? "the same" : `${dearer > 0 ? "+" : ""}${usd(dearer)} an hour`, tone: !other ? null : dearer > 0.005 ? "warn" : "good" }),
      figure("Served", percent(which.served), { tone: which.served >= 0.9995 ? "good" : "bad", note: "of demand" }),
      figure("Instances", number((which.plan.instances ?? []).length), { note: which.plan.proof?.gap ? `${which.plan.proof.gap} from the bound` : null })),
    table([
      { name: "Service", key: "name" },
      { name: "Asked", right: true, value: (one) => rate(one.requests_per_s) },
      { name: "Kept", cell: (one) => {
        const share = which.kept?.[one.name] ?? null;
        return share === null ? DASH : badge(percent(share), share >= (one.target ?? 0.95) ? "good" : "bad");
      } },
      { name: "Cost", right: true, value: (one) => perHour(one.usd_per_hour) },
    ], kept, { caption: `${name}: services` }),
    which.plan.proof?.late ? h("p", { class: "note" }, which.plan.proof.late) : null,
    h("details", {}, h("summary", {}, "Machines"), planPicture(which.plan), table(instanceColumns, group(which.plan.instances ?? []), { caption: `${name}: instances` })));
}

export function download(name, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "application/yaml" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function drawResult(found, fleet, planExactly) {
  const diff = found.diff ?? {};
  const name = `${fleet.replace(/[^A-Za-z0-9_-]+/g, "-").replace(/-ya?ml$/, "")}-whatif.yaml`;
  return [h("p", { class: "verdict", role: "status" }, sentence(found.verdict), h("span", { class: "note" }, ` ${found.exact ? "Planned exactly" : "Planned quickly"} and simulated in ${seconds(found.seconds)}.`)),
    found.exact || !planExactly ? null : h("div", { class: "row" }, button("Plan exactly", planExactly, { symbol: "check", id: "plan-exactly" }), h("span", { class: "note" }, "Searches for the best plan and proves how good it is; takes up to some minutes.")),
    (found.notes ?? []).map((text) => h("p", { class: "note" }, sentence(text))),
    h("div", { class: "sides" }, side("Now", found.now, null), side("With these changes", found.then, found.now)),
    card("What changes", {}, diff.text?.length ? h("ul", { class: "bullets" }, diff.text.map((text) => h("li", {}, text))) : h("p", { class: "note" }, "Nothing: today’s plan is still the best.")),
    card("Fleet file", { note: "The fleet file with these changes: plan it, review it, bring it up.", actions: [button("Download", () => download(name, found.fleet_file), { symbol: "download" }), copyButton(found.fleet_file)] }, h("pre", { class: "file", tabindex: "0" }, h("code", {}, found.fleet_file)))];
}

export const page = {
  mount(root, ctx) {
    const place = h("div", { class: "stack" });
    root.append(place);
    let running = null;
    let waiting = null;
    let fleets = [];

    function show(fleet) {
      history.replaceState(null, "", `/whatif?fleet=${encodeURIComponent(fleet)}`);
      const dialsPlace = h("div"), result = h("div", { class: "stack", id: "result" });
      set(place, h("p", { class: "lead" }, "Change demand, promises, prices or machines and see the cheapest plan for them beside today’s. Nothing is applied."),
        h("div", { class: "whatif" }, h("div", { class: "stack" }, card("Change", { actions: [] }, fleetChoice(fleets, fleet, show), dialsPlace)), result));
      load(dialsPlace, () => ctx.api.get(`/atoll/v1/fleets/${encodeURIComponent(fleet)}/dials`), (dials) => {
        const state = h("span", { class: "note", role: "status" });
        const go = button("Plan", () => run(), { kind: "primary", symbol: "play", id: "plan-now" });
        const made = buildDials(dials, () => { clearTimeout(waiting); waiting = setTimeout(() => run(), WAIT_MS); });
        async function run(exact = false) {
          clearTimeout(waiting);
          running?.abort();
          const mine = (running = new AbortController());
          const bar = h("progress", { max: 1, "aria-label": "Planning" });
          const words = h("p", {}, "Planning…");
          if (exact || !result.querySelector(".verdict")) set(result, h("div", { class: "state" }, bar, words));
          result.setAttribute("aria-busy", "true");
          set(state, "Planning…");
          try {
            const found = await ctx.api.job("/atoll/v1/whatif", { fleet, ...made.read(), ...(exact ? { exact } : {}) }, { signal: mine.signal, onProgress: (told) => {
              if (told.share !== undefined && told.share !== null) bar.value = told.share;
              set(words, told.text ?? "Planning…");
              set(state, told.text ?? "Planning…");
            } });
            if (running !== mine) return;
            set(result, drawResult(found, fleet, ctx.can("member") ? () => run(true) : null));
            set(state, isChanged(made.read()) ? "" : "Nothing is changed yet.");
          } catch (error) {
            if (error.name === "AbortError" || running !== mine) return;
            set(result, card("No plan", {}, failed(error, () => run(exact))));
            set(state, "");
          } finally {
            if (running === mine) result.removeAttribute("aria-busy");
          }
        }
        if (ctx.can("member")) run();
        else set(result, card("Result", {}, empty("Viewers look only", "Planning takes the computer some seconds: ask for a key of role member.")));
        return h("div", { class: "stack" }, made.node, h("div", { class: "row" }, go, button("Reset", () => { made.reset(); run(); }), state));
      });
    }

    set(place, loading());
    const stop = withPlanner(ctx, place, () => load(place, () => ctx.api.get("/atoll/v1/fleets"), (told) => {
      fleets = told.fleets;
      const fleet = firstFleet(fleets, ctx.params);
      if (!fleet) return empty("No fleet to plan", "Give the dashboard a fleet file:", snippet("atoll dashboard --fleet fleet.yaml"));
      queueMicrotask(() => show(fleet));
      return loading();
    }));
    return () => { stop(); clearTimeout(waiting); running?.abort(); };
  },
};
