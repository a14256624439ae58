// A change of a fleet file: its plan with cost, promises, engines and their standing, and then the change itself.

import { h, set } from "../../lib/dom.js";
import { DASH, percent, perHour, plural, rate, seconds, sentence, usd } from "../../lib/format.js";
import { group, instanceColumns, planPicture } from "../../lib/planpicture.js";
import { badge, button, failed, figure, table } from "../../lib/ui.js";
import { download } from "../whatif.js";

function keptBadge(one, share) {
  return share === null || share === undefined ? DASH : badge(`${percent(share)} of ${percent(one.target ?? 0.95)}`, share >= (one.target ?? 0.95) ? "good" : "bad");
}

/** What a plan of the changed file says: cost, promises, engines and their standing. */
function drawPlanned(found) {
  const { now, then, diff = {} } = found;
  const more = then.usd_per_hour - now.usd_per_hour;
  const plan = then.plan;
  return [h("p", { class: "verdict", role: "status" }, sentence(found.verdict), h("span", { class: "note" }, ` Planned and simulated in ${seconds(found.seconds)}.`)),
    h("div", { class: "figures" },
      figure("Cost then", perHour(then.usd_per_hour), { note: Math.abs(more) < 0.005 ? "as now" : `${more > 0 ? "+" : ""}${usd(more)} an hour`, tone: more > 0.005 ? "warn" : "good" }),
      figure("Demand served", percent(then.served), { tone: then.served >= 0.9995 ? "good" : "bad" }),
      figure("Instances", String((plan.instances ?? []).length), { note: `${plural((diff.starts ?? []).length, "start")}, ${(diff.goes ?? []).length} end, ${diff.stays ?? 0} stay` })),
    table([
      { name: "Service", key: "name" },
      { name: "Model", key: "model" },
      { name: "Asked", right: true, value: (one) => rate(one.requests_per_s, "requests") },
      { name: "Promise", value: (one) => (one.ttft_s ? `first token ${seconds(one.ttft_s)}, then ${seconds(one.tpot_s)} each` : DASH) },
      { name: "Kept", cell: (one) => keptBadge(one, then.kept?.[one.name]) },
      { name: "Cost", right: true, value: (one) => perHour(one.usd_per_hour) },
    ], plan.services ?? [], { caption: "Services with the change" }),
    planPicture(plan),
    table(instanceColumns, group(plan.instances ?? []), { caption: "Instances with the change" }),
    h("details", {}, h("summary", {}, "What starts and what ends"), diff.text?.length ? h("ul", { class: "bullets" }, diff.text.map((text) => h("li", {}, text))) : h("p", { class: "note" }, "Nothing.")),
    (found.notes ?? []).map((text) => h("p", { class: "note" }, sentence(text)))];
}

/**
 * Plan a change at the end of `place`, and make it when somebody says so. ask: what is sent to whatif; text: the file, where
 * that is not the one the planner writes; version(): that of the file it is based on; complain(error) says whether a form shows
 * it. Returns {abort, done}.
 */
export function showPlan(ctx, { place, ask, word, text = null, complain, fleet, fileName, version, mayApply, why, cancel, applied }) {
  const mine = new AbortController();
  const bar = h("progress", { max: 1, "aria-label": "Planning" }), words = h("p", {}, "Planning…");
  const result = h("section", { id: "planned", class: "card", "aria-label": "The plan with this change", "aria-busy": "true" }, h("div", { class: "state" }, bar, words));
  place.append(result);
  result.scrollIntoView({ block: "nearest" });

  async function run() {
    try {
      const found = await ctx.api.job("/atoll/v1/whatif", ask, { signal: mine.signal, onProgress: (told) => {
        if (told.share !== undefined && told.share !== null) bar.value = told.share;
        set(words, told.text ?? "Planning…");
      } });
      const written = text ?? found.fleet_file;
      const use = button(word, () => apply(written, use), { kind: "primary", symbol: "check", id: "apply" });
      set(result, h("h2", {}, "The plan with this change"), drawPlanned(found),
        h("details", {}, h("summary", {}, "The fleet file with this change"), h("pre", { class: "file", tabindex: "0" }, h("code", {}, written))),
        h("div", { class: "row" }, mayApply ? use : null, button("Download the file", () => download(fileName, written), { symbol: "download" }), button("Cancel", cancel)),
        mayApply ? null : h("p", { class: "note" }, why));
    } catch (error) {
      if (error.name === "AbortError") return;
      if (complain?.(error)) result.remove();
      else set(result, failed(error, () => { set(result, h("div", { class: "state" }, bar, words)); run(); }));
    } finally {
      result.removeAttribute("aria-busy");
    }
  }

  async function apply(written, pressed) {
    pressed.disabled = true;
    try {
      const told = await ctx.api.put(`/atoll/v1/fleets/${encodeURIComponent(fleet)}/file`, { file: written, version: version() });
      ctx.toast(`The fleet file is replaced: ${told.changed}`);
      applied(told);
    } catch (error) {
      pressed.disabled = false;
      ctx.toast(error.message, "bad");
    }
  }

  return { abort: () => mine.abort(), done: run() };
}
