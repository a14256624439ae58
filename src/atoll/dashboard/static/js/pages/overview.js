// What is served, whether promises are kept, what it costs, and what is wrong.

import { keptBar, sparkline } from "../lib/charts.js";
import { h, icon } from "../lib/dom.js";
import { DASH, moment, number, often, percent, perHour, plural, promiseText, seconds, usd } from "../lib/format.js";
import { patch } from "../lib/patch.js";
import { badge, card, copyButton, failed, figure, loading, snippet, stateBadge, table } from "../lib/ui.js";

const TRAIL = 150; // snapshots: five minutes
const GRACE_MS = 1500; // a page that has just been opened may not have heard of its gateway yet
const trail = { live: null, points: [] };

/** Keep the rates of the last minutes for as long as somebody is logged in, whichever page is shown. */
function follow(live) {
  if (trail.live === live) return;
  trail.live = live;
  trail.points = [];
  live.on("gateway", (snapshot) => {
    if (trail.live !== live) return;
    const models = snapshot.models ?? [];
    trail.points.push({ at_s: snapshot.time_s, requests: total(models, "requests_per_s"), tokens: tokensOf(models) });
    if (trail.points.length > TRAIL) trail.points.shift();
  });
}

const total = (models, name) => models.reduce((sum, model) => sum + (model[name] ?? 0), 0);
const tokensOf = (models) => total(models, "input_tokens_per_s") + total(models, "output_tokens_per_s");
const link = (path, name) => `${path}${encodeURIComponent(name)}`;
const name = (text) => h("bdi", {}, text);

// Promises

const targetOf = (model) => model.promise?.target ?? null;
/** Whether a model keeps its promise in a window; null where nothing was judged. */
function isKept(model, window) {
  const seen = model[window];
  if (!seen?.judged) return null;
  const target = targetOf(model);
  return target === null ? null : seen.kept / seen.judged >= target;
}

function promiseFigure(title, span, models, window) {
  const judged = models.filter((model) => model[window]?.judged);
  const asked = judged.reduce((sum, model) => sum + model[window].judged, 0);
  if (!asked) {
    const some = models.some((model) => model.promise);
    return figure(title, DASH, { note: some ? `no request was judged, ${span}` : "no model has a promise" });
  }
  const kept = judged.reduce((sum, model) => sum + model[window].kept, 0);
  const broken = judged.filter((model) => isKept(model, window) === false);
  const known = judged.some((model) => isKept(model, window) !== null);
  const targets = [...new Set(judged.map(targetOf).filter((target) => target !== null))].sort();
  const target = targets.length ? `target ${targets.length > 1 ? `${percent(targets[0])} to ${percent(targets.at(-1))}` : percent(targets[0])}, ` : "";
  const verdict = known ? badge(broken.length ? "broken" : "kept", broken.length ? "bad" : "good") : null;
  const who = broken.length ? h("div", { class: "figure-note" }, "below: ", broken.slice(0, 3).map((model, at) => [at ? ", " : "", name(model.name)]), broken.length > 3 ? `, ${broken.length - 3} more` : "") : null;
  return figure(title, [percent(kept / asked), " ", verdict], { tone: known ? (broken.length ? "bad" : "good") : null, note: `${target}${span}, ${plural(asked, "request")}`, extra: who });
}

// Figures

function costFigure(models) {
  const priced = models.filter((model) => Number.isFinite(model.usd_per_mtoken));
  const title = "Cost per million tokens";
  if (!priced.length) return figure(title, DASH, { note: "known once machines say a price and answer requests" });
  const prices = priced.map((model) => model.usd_per_mtoken);
  const low = Math.min(...prices), high = Math.max(...prices);
  const span = `${usd(low)} to ${usd(high)}`;
  const tokens = tokensOf(priced);
  if (low === high) return figure(title, usd(low), { note: "prompt and answer, last hour" });
  if (!tokens) return figure(title, span, { note: "by model, last hour" });
  const mean = priced.reduce((sum, model) => sum + model.usd_per_mtoken * tokensOf([model]), 0) / tokens;
  return figure(title, usd(mean), { note: `by model ${span}, last hour` });
}

function figures(snapshot) {
  const models = snapshot.models ?? [];
  const points = trail.points;
  const spark = (key, words) => sparkline(points.map((point) => point[key]), { label: points.length > 1 ? `${words} of the last ${seconds(points.at(-1).at_s - points[0].at_s)}` : words });
  return h("div", { class: "figures" },
    promiseFigure("Promises now", "last 5 min", models, "now"),
    promiseFigure("Promises today", "last 24 h", models, "day"),
    figure("Requests", often(total(models, "requests_per_s")), { note: `${plural(snapshot.running ?? 0, "request")} running`, extra: spark("requests", "Requests per second") }),
    figure("Tokens", often(tokensOf(models)), { note: `${often(total(models, "output_tokens_per_s"))} of answers`, extra: spark("tokens", "Tokens per second") }),
    figure("Cost per hour", perHour(snapshot.usd_per_hour), { note: snapshot.usd_per_hour === null || snapshot.usd_per_hour === undefined ? "no machine says a price (atoll join --price)" : `${usd(snapshot.usd_per_hour * 24)} a day` }),
    costFigure(models));
}

// Alarms

const COMMAND = /`([^`]+)`|\b(?:GET|POST|PUT|PATCH|DELETE) \/[^\s,;]+|(?:^|(?<=: |\bwith |\brun ))(?:atoll|curl|kubectl|python|sbatch|scancel|systemctl) [^;]+/g;

/** Text in which commands can be copied. */
function advice(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(COMMAND)) {
    const command = (found[1] ?? found[0]).trim();
    parts.push(text.slice(from, found.index), h("span", { class: "command" }, h("code", {}, command), copyButton(command)));
    from = found.index + found[0].length;
  }
  return [...parts, text.slice(from)];
}

const LEVELS = { error: ["problem", "bad"], critical: ["problem", "bad"], warning: ["warning", "warn"], warn: ["warning", "warn"], info: ["note", "info"] };
const rank = (alarm) => ["bad", "warn", "info"].indexOf((LEVELS[alarm.level] ?? LEVELS.info)[1]);

function alarms(list) {
  if (!list.length) return null;
  const sorted = [...list].sort((a, b) => rank(a) - rank(b));
  const worst = (LEVELS[sorted[0].level] ?? LEVELS.info)[1];
  return h("section", { class: ["card", "alarms", worst], "aria-label": "Alarms", dataset: { key: "alarms" } },
    h("header", { class: "card-head" }, h("h2", {}, "Needs attention"), badge(plural(list.length, "alarm"), worst)),
    h("ul", { class: "alarm-list" }, sorted.map((alarm) => {
      const [word, tone] = LEVELS[alarm.level] ?? LEVELS.info;
      return h("li", { class: ["alarm", tone], dataset: { key: `${alarm.id} ${alarm.fix}` } },
        h("div", { class: "alarm-what" }, icon(tone === "info" ? "info" : "alert"), h("span", {}, badge(word, tone), " ", h("bdi", {}, alarm.what))),
        alarm.fix ? h("div", { class: "alarm-fix" }, h("b", {}, "What to do: "), advice(alarm.fix)) : null,
        alarm.since_s ? h("div", { class: "note", title: moment(alarm.since_s) }, `for ${seconds(Math.max(1, Math.round(Date.now() / 1000 - alarm.since_s)))}`) : null);
    })));
}

// Models

function state(model) {
  const all = model.backends ?? 0, up = model.up ?? 0;
  if (!up) return badge("down", "bad");
  return up < all ? badge(`${up} of ${all} up`, "warn") : badge(all > 1 ? `${all} up` : "up", "good");
}

function keptCell(model, window, words) {
  const seen = model[window];
  if (!seen?.judged) return h("span", { class: "note" }, model.promise ? "not asked" : DASH);
  const share = seen.kept / seen.judged;
  const good = isKept(model, window);
  return h("div", { class: "kept-cell" }, h("span", {}, percent(share), " ", good === null ? null : badge(good ? "kept" : "broken", good ? "good" : "bad")),
    keptBar(seen.kept, seen.judged, targetOf(model), `${percent(share)} kept ${words}${targetOf(model) ? `, target ${percent(targetOf(model))}` : ""}`));
}

function modelTable(models, ctx) {
  const columns = [
    { name: "Model", cell: (m) => [h("a", { href: link("/models?q=", m.name) }, name(m.name)), h("div", { class: "note" }, promiseText(m.promise))] },
    { name: "State", cell: state },
    { name: "Kept now", cell: (m) => keptCell(m, "now", "in the last 5 minutes") },
    { name: "Kept today", cell: (m) => keptCell(m, "day", "in the last 24 hours") },
    { name: "Requests", right: true, value: (m) => often(m.requests_per_s) },
    { name: "Tokens", right: true, value: (m) => often(tokensOf([m])) },
    { name: "First token", right: true, value: (m) => seconds(m.first_token_s) },
    { name: "$/M tokens", right: true, value: (m) => usd(m.usd_per_mtoken) },
  ];
  if (ctx.can("member")) columns.push({ name: "Try", cell: (m) => h("a", { class: "button small", href: link("/chat?model=", m.name), "aria-label": `Chat with ${m.name}` }, icon("chat"), "Chat") });
  return card("Models", { actions: [h("a", { class: "button small", href: "/models" }, "How to use them")] }, table(columns, models, { caption: "Models with their promises, traffic and cost" }));
}

// Fleets

function fleetCard(told) {
  const operated = (told?.fleets ?? []).filter((fleet) => fleet.kind === "operated");
  if (!operated.length) return null;
  const columns = [
    { name: "Fleet", cell: (f) => h("a", { href: link("/plan?fleet=", f.name) }, name(f.name)) },
    { name: "State", cell: (f) => (f.up ? stateBadge("up") : badge("no controller", "bad")) },
    { name: "Run by", cell: (f) => [h("bdi", {}, f.controller ?? DASH), f.since_s ? h("div", { class: "note" }, `since ${moment(f.since_s)}`) : null] },
    { name: "Cost", right: true, value: (f) => perHour(f.usd_per_hour) },
    { name: "Errors", cell: (f) => (f.errors?.length ? h("ul", { class: "errors" }, f.errors.map((text) => h("li", {}, h("bdi", {}, text)))) : h("span", { class: "note" }, "none")) },
  ];
  const section = card("Operated fleets", { actions: [h("a", { class: "button small", href: "/plan" }, "Plans and history")] }, table(columns, operated, { caption: "Fleets that a controller keeps right" }));
  section.dataset.key = "fleets";
  return section;
}

// Nothing there yet

const step = (title, text, ...commands) => h("li", {}, h("h3", {}, title), text ? h("p", { class: "note" }, text) : null, commands.map((command) => snippet(command)));

function join(...args) {
  const made = step(...args);
  made.classList.add("all");
  return made;
}

function startHere(title, text, steps) {
  return h("section", { class: "card start", "aria-label": title, dataset: { key: title, keep: "" } }, h("header", { class: "card-head" }, h("h2", {}, title)), h("p", {}, text), h("ul", { class: "steps" }, steps));
}

const noGateway = () => startHere("Nothing is served yet", "This page shows a gateway, and none runs here. Any of these starts one; this page finds it by itself.", [
  step("Try it on this machine", "A small real model, cut over four processes. No GPU is needed.", "atoll serve examples/demo-local.yaml"),
  step("Serve a plan of your own", "Write down models, promises and GPUs, have it planned, and bring it up.", "atoll init fleet.yaml\natoll plan fleet.yaml -o plan.json\natoll serve plan.json"),
  join("Join machines from anywhere", "One machine that all can reach is the hub; engines on other machines join it.", "atoll fabric init --name lab --hub hub.example.org:7447\natoll hub @fabric/hub-h0.token", "atoll fabric issue gateway --provider \"My lab\" --role gateway --out gateway.token\natoll gateway --fabric @gateway.token", "atoll fabric issue cluster --provider \"My lab\" --out cluster.token\natoll join --fabric @cluster.token -- vllm serve MODEL"),
]);

const noModels = () => startHere("The gateway serves no model yet", "It runs and waits for machines. They appear here as soon as they answer.", [
  step("Join a machine with an engine", "On any machine that reaches the hub; without root, without an open port.", "atoll join --fabric @cluster.token -- vllm serve MODEL", "atoll join --fabric @cluster.token --url http://127.0.0.1:8000"),
  step("See who is in the fabric", null, "atoll nodes --fabric fabric"),
  step("Or try a small real model on this machine", null, "atoll serve examples/demo-local.yaml"),
]);

const upText = (up, all) => (up === all ? `${plural(all, "machine")} up` : `${number(up)} of ${plural(all, "machine")} up`);

function headline(snapshot) {
  const parts = [`up for ${seconds(snapshot.uptime_s)}`, upText(snapshot.machines_up ?? snapshot.backends_up ?? 0, snapshot.machines ?? snapshot.backends ?? 0), plural(snapshot.connections ?? 0, "connection")];
  return h("p", { class: "headline" }, stateBadge(snapshot.status), h("span", { class: "note" }, parts.join(" · ")));
}

export const page = {
  mount(root, ctx) {
    follow(ctx.live);
    const opened = Date.now();
    const heard = h("p", { class: "unseen", role: "status" });
    const body = h("div", { class: "stack" });
    root.append(heard, body);
    let alarmed = 0;

    function content() {
      const snapshot = ctx.live.last("gateway");
      const health = ctx.live.last("health") ?? {};
      const fleets = fleetCard(ctx.live.last("fleets"));
      if (health.gateway === "none" || (!snapshot && health.gateway !== "down")) {
        return health.gateway === "none" && Date.now() - opened > GRACE_MS ? [fleets, noGateway()] : [loading("Asking the gateway…"), fleets];
      }
      if (!snapshot) return [h("section", { class: "card silent", "aria-label": "The gateway does not answer", dataset: { key: `silent ${health.why ?? ""}`, keep: "" } }, failed(new Error(`The gateway does not answer${health.why ? ` (${health.why})` : ""}. This page goes on by itself once it does.`)), h("p", { class: "note" }, "On its machine, this shows what runs:"), snippet("atoll status")), fleets];
      const stale = health.gateway === "down" ? h("p", { class: "notice", role: "status" }, `The gateway does not answer. What you see is of ${moment(snapshot.time_s)}.`) : null;
      const models = snapshot.models ?? [];
      const first = [stale, alarms(snapshot.alarms ?? [])];
      if (!models.length) return [...first, headline(snapshot), noModels(), fleets];
      return [...first, headline(snapshot), figures(snapshot), modelTable(models, ctx), fleets];
    }

    function draw() {
      patch(body, content());
      const alarmsNow = ctx.live.last("gateway")?.alarms?.length ?? 0;
      if (alarmsNow !== alarmed) heard.textContent = alarmsNow ? `${plural(alarmsNow, "alarm")} on this page` : "No alarm any more";
      alarmed = alarmsNow;
    }
    const stops = ["gateway", "health", "fleets"].map((topic) => ctx.live.on(topic, draw));
    const late = setTimeout(draw, GRACE_MS + 50);
    draw();
    return () => { stops.forEach((stop) => stop()); clearTimeout(late); };
  },
};
