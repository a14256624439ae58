// Requests: the last ones, and the way that one of them took, as a waterfall.

import { h, set } from "../lib/dom.js";
import { ago, DASH, moment, number, plural, seconds } from "../lib/format.js";
import { follow, gatewayDown, noGateway } from "../lib/services.js";
import { badge, button, card, copyButton, empty, failed, field, figure, input, loading, select, table } from "../lib/ui.js";

const AGAIN_MS = 5000;
const KINDS = { gateway: "Gateway", wait: "Waiting", prefill: "Prefill", decode: "Decode", attempt: "Machine", first: "First token", tokens: "Tokens", intake: "Input", executor: "Executor" };
const INSIDE = new Set(["first", "tokens", "intake", "executor"]);
const OUTCOMES = { ok: "good", cancelled: "warn", truncated: "bad", error: "bad" };
const outcome = (one) => badge(one.outcome === "ok" ? "answered" : one.outcome === "cancelled" ? "client left" : one.outcome, OUTCOMES[one.outcome] ?? "");

/** The spans as bars over the time of the request; it is a table, so that it reads without the bars, too. */
function waterfall(told) {
  const total = Math.max(told.seconds, ...told.spans.map((span) => span.start_s + span.seconds), 1e-9);
  const bar = (span) => {
    const made = h("span", { class: ["span-bar", span.kind, span.failed && "failed"], title: `${seconds(span.start_s)} to ${seconds(span.start_s + span.seconds)}` });
    made.style.setProperty("--from", `${(span.start_s / total) * 100}%`);
    made.style.setProperty("--wide", `${Math.max(0.3, (span.seconds / total) * 100)}%`);
    return h("span", { class: "span-track", "aria-hidden": "true" }, made);
  };
  const notes = (span) => [span.failed ? "failed" : null, span.batch > 1 ? `with ${span.batch - 1} more in a batch` : null, span.waited_s > 0.001 ? `waited ${seconds(span.waited_s)} for its turn` : null].filter(Boolean).join(", ");
  return h("div", { class: "table-wrap waterfall", tabindex: "0", role: "region", "aria-label": "The way of the request" }, h("table", {}, h("caption", { class: "unseen" }, "Where the time of the request went"),
    h("thead", {}, h("tr", {}, ["Step", "From", "Took", "Time"].map((name, at) => h("th", { scope: "col", class: at === 1 || at === 2 ? "right" : null }, name)))),
    h("tbody", {}, told.spans.map((span) => h("tr", { class: INSIDE.has(span.kind) ? "inside" : null },
      h("th", { scope: "row" }, h("span", { class: "span-kind" }, KINDS[span.kind] ?? span.kind), " ", h("bdi", {}, span.name), notes(span) ? h("div", { class: "note" }, notes(span)) : null),
      h("td", { class: "right", "data-name": "From" }, seconds(span.start_s)), h("td", { class: "right", "data-name": "Took" }, seconds(span.seconds)), h("td", { class: "span-cell", "data-name": "Time" }, bar(span)))))));
}

function drawRequest(told) {
  const tokens = told.completion_tokens;
  const rest = told.first_token_s === null || tokens < 2 ? null : (told.seconds - told.first_token_s) / (tokens - 1);
  return h("div", { class: "stack" },
    h("div", { class: "row" }, outcome(told), h("span", { class: "note" }, `${moment(told.started_s)} · status ${told.status}`)),
    h("div", { class: "figures" },
      figure("Took", seconds(told.seconds)), figure("First token", seconds(told.first_token_s)), figure("Each further token", seconds(rest)),
      figure("Tokens", `${number(told.prompt_tokens)} + ${number(tokens)}`, { note: "prompt and answer" }), figure("Model", told.model, { note: told.endpoint })),
    waterfall(told),
    h("p", { class: "note" }, "Trace ", h("code", {}, told.trace), " (OpenTelemetry has the same id)"));
}

export const page = {
  mount(root, ctx) {
    let id = ctx.params.get("id") ?? "";
    let model = ctx.params.get("model") ?? "";
    let turn = 0;
    let gone = false;
    let opened = false;
    const wanted = input({ value: id, placeholder: "x-request-id of the answer, or a trace id", maxlength: 128 });
    const models = select([["", "All models"]], { onchange: () => { model = models.value; keep(); loadList(); } });
    const one = h("div"), list = h("div", {}, loading());
    const form = h("form", { class: "toolbar", onsubmit: (event) => { event.preventDefault(); open(wanted.value.trim()); } }, field("Request", wanted), button("Show", null, { kind: "primary", type: "submit" }));

    function keep() {
      const query = new URLSearchParams(Object.entries({ id, model }).filter(([, value]) => value)).toString();
      history.replaceState(null, "", query ? `/requests?${query}` : "/requests");
    }

    async function open(next) {
      id = wanted.value = next;
      keep();
      const mine = ++turn;
      if (!id) return set(one);
      set(one, loading());
      try {
        const told = await ctx.api.get(`/atoll/v1/requests/${encodeURIComponent(id)}`);
        if (gone || mine !== turn) return;
        set(one, card(`Request ${told.id}`, { actions: [copyButton(told.id, "Copy id")] }, drawRequest(told)));
      } catch (error) {
        if (gone || mine !== turn) return;
        if (error.status === 404) set(one, card("Request", {}, empty("It is not kept", "The gateway keeps the last 1,000 requests that have ended, until it is started anew.")));
        else set(one, card("Request", {}, failed(error, () => open(id))));
      }
      one.scrollIntoView({ block: "nearest" });
    }

    async function loadList(quiet = false) {
      try {
        const told = await ctx.api.get(`/atoll/v1/requests?last=100${model ? `&model=${encodeURIComponent(model)}` : ""}`);
        if (gone) return;
        const names = [...new Set([model, ...(ctx.live.last("gateway")?.models ?? []).map((each) => each.name), ...told.requests.map((each) => each.model)])].filter(Boolean).sort();
        if (models.options.length !== names.length + 1) set(models, h("option", { value: "" }, "All models"), names.map((each) => h("option", { value: each, selected: each === model }, each)));
        if (list.contains(document.activeElement)) return; // not under somebody's hand
        set(list, table([
          { name: "When", cell: (r) => h("time", { title: moment(r.started_s) }, ago(r.started_s)), sort: (r) => r.started_s },
          { name: "Request", cell: (r) => h("a", { href: `/requests?id=${encodeURIComponent(r.id)}`, onclick: (event) => { event.preventDefault(); open(r.id); } }, h("bdi", { class: "mono" }, r.id)) },
          { name: "Model", cell: (r) => h("bdi", {}, r.model) },
          { name: "Ended", cell: outcome },
          { name: "Machine", cell: (r) => [h("bdi", {}, r.backend ?? DASH), r.attempts > 1 ? h("div", { class: "note" }, plural(r.attempts, "attempt")) : null] },
          { name: "First token", right: true, value: (r) => seconds(r.first_token_s), sort: (r) => r.first_token_s },
          { name: "Took", right: true, value: (r) => seconds(r.seconds), sort: (r) => r.seconds },
          { name: "Tokens", right: true, value: (r) => `${number(r.prompt_tokens)} + ${number(r.completion_tokens)}`, sort: (r) => r.completion_tokens },
        ], told.requests, { caption: "The last requests", none: "No request has ended yet." }));
      } catch (error) {
        if (!gone && !quiet) set(list, failed(error, loadList));
      }
    }

    set(root, loading());
    const stop = follow(ctx, "gateway", (state, why) => {
      if (opened) return;
      if (state === "none") return set(root, noGateway("Requests are known to a gateway. Start one, and this page finds it:"));
      if (state === "down") return set(root, gatewayDown(why));
      opened = true;
      set(root, h("div", { class: "stack" }, form, one, card("Last requests", { note: "Those that have ended, the newest first: times and counts only, nothing of what was said." }, h("div", { class: "toolbar" }, field("Model", models)), list)));
      loadList();
      if (id) open(id);
    });
    const timer = setInterval(() => { if (opened && document.visibilityState === "visible") loadList(true); }, AGAIN_MS);
    return () => { gone = true; stop(); clearInterval(timer); };
  },
};
