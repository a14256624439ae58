// Keys: who may ask, and how much. Usage: what was asked, and its cost.

import { bars } from "../lib/charts.js";
import { h, icon, set } from "../lib/dom.js";
import { ago, count, DASH, day, moment, number, plural, usd } from "../lib/format.js";
import { follow, gatewayDown, noGateway } from "../lib/services.js";
import { ask, badge, button, empty, failed, field, figure, input, loading, meter, select, snippet, stateBadge, table, tabs } from "../lib/ui.js";

const DAY_S = 86400;
const name = (text) => h("bdi", {}, text);

// Keys: what they may do, in words

const RATES = [["requests_per_min", "requests/min"], ["tokens_per_min", "tokens/min"], ["concurrent", "at the same time"]];
const QUOTAS = [["Today", "today", "tokens_per_day"], ["Month", "month", "tokens_per_month"], ["In all", "total", "tokens_total"]];
const ROLES = [["member", "member: asks models, sees own keys"], ["operator", "operator: deploys models, runs machines"], ["viewer", "viewer: looks at everything, asks nothing"], ["admin", "admin: changes everything"]];

function policyText(policy) {
  const said = Object.entries(policy ?? {}).filter(([, value]) => value !== null && value !== false && value !== "" && !(Array.isArray(value) && !value.length));
  return said.map(([what, value]) => `${what.replaceAll("_", " ")}: ${Array.isArray(value) ? value.join(", ") : typeof value === "object" ? JSON.stringify(value) : value}`).join("; ");
}

function mayUse(key) {
  const policy = policyText(key.policy);
  return [key.models?.length ? key.models.map((model, at) => [at ? ", " : "", h("code", {}, name(model))]) : "all models", policy ? h("div", { class: "note" }, `only on ${policy}`) : null];
}

function limits(key) {
  const said = RATES.filter(([id]) => key[id]).map(([id, unit]) => h("div", {}, `${count(key[id])} ${unit}`));
  return said.length ? said : h("span", { class: "note" }, "none");
}

function quotas(key) {
  if (!key.used && !QUOTAS.some(([, , id]) => key[id])) return h("span", { class: "note" }, key.track === false ? "not written down" : DASH);
  return h("div", { class: "quotas" }, QUOTAS.map(([title, period, id]) => {
    const used = key.used?.[period]?.tokens ?? 0;
    if (key[id]) return meter(title, used / key[id], `${count(used)} of ${count(key[id])}`);
    return h("div", { class: "meter plain" }, h("span", { class: "meter-name" }, title), h("span", { class: "meter-text" }, `${count(used)} tokens`));
  }));
}

function expiry(key) {
  if (key.revoked_s) return h("span", { class: "note" }, `revoked ${day(key.revoked_s)}`);
  if (!key.expires_s) return h("span", { class: "note" }, "never");
  return h("span", { class: "date", title: moment(key.expires_s) }, day(key.expires_s), h("div", { class: "note" }, ago(key.expires_s)));
}

// Keys: the dialog that makes and changes them

/** "100k", "1.5M", "2,000" as a whole number; null for nothing, NaN for what is no number. */
export function readCount(text) {
  const clean = text.trim().replace(/[\s,_']/g, "");
  if (!clean) return null;
  const found = /^(\d+(?:\.\d+)?)([kmgt]?)$/i.exec(clean);
  if (!found) return NaN;
  const value = Math.round(Number(found[1]) * { "": 1, k: 1e3, m: 1e6, g: 1e9, t: 1e12 }[found[2].toLowerCase()]);
  return value >= 1 ? value : NaN;
}

const NUMBERS = [
  ["requests_per_min", "Requests a minute"],
  ["tokens_per_min", "Tokens a minute"],
  ["tokens_per_day", "Tokens a day"],
  ["tokens_per_month", "Tokens a month"],
  ["tokens_total", "Tokens in all"],
  ["concurrent", "Requests at the same time"],
];
const EXPIRIES = [["", "never"], ["7", "in 7 days"], ["30", "in 30 days"], ["90", "in 90 days"], ["365", "in a year"], ["date", "on a day…"]];

/** A form of a key's fields; `read()` returns them or null and says what is wrong, `complain(error)` shows what the gateway says. */
function keyForm(key = null) {
  const lines = new Map();
  const line = (id, title, control, options) => {
    const made = field(title, control, options);
    made.control = control;
    lines.set(id, made);
    return made;
  };
  const until = key?.expires_s ? day(key.expires_s) : "";
  const when = input({ type: "date", value: until, min: day(Date.now() / 1000) });
  const date = field("Last day (UTC)", when);
  const span = select(EXPIRIES, { value: until ? "date" : "", onchange: () => { date.hidden = span.value !== "date"; } });
  date.hidden = !until;
  const track = h("input", { type: "checkbox", checked: key?.track !== false, id: "key-track" });
  const wrong = h("p", { class: "field-error", role: "alert" });
  const owner = input({ value: key?.owner ?? "", maxlength: 120, placeholder: "ada@lab.example" });
  const content = h("div", { class: "key-form" },
    line("name", "Name", input({ value: key?.name ?? "", required: true, maxlength: 120, placeholder: "what it is for" })),
    line("owner", "Owner", owner, { note: "Whoever logs in with a key of this owner sees all keys of this owner." }),
    line("role", "Role", select(ROLES, { value: key?.role ?? "member" })),
    line("models", "Models", input({ value: (key?.models ?? []).join(", "), placeholder: "all" }), { note: "Names or patterns with commas between: qwen3-*, smollm2" }),
    h("fieldset", {}, h("legend", {}, "Limits (empty: none; 100k and 1M are understood)"), h("div", { class: "numbers" }, NUMBERS.map(([id, title]) => line(id, title, input({ value: key?.[id] ?? "", inputmode: "decimal", placeholder: "no limit" }))))),
    h("div", { class: "numbers" }, line("expires_s", "Expires", span), date),
    h("div", { class: "check" }, track, h("label", { for: "key-track" }, "Write down its requests (for usage and cost; never what was said)")),
    wrong);
  function expires() {
    if (!span.value) return null;
    if (span.value !== "date") return Math.floor(Date.now() / 1000) + Number(span.value) * DAY_S;
    if (key?.expires_s && when.value === until) return key.expires_s;
    const end = Date.parse(`${when.value}T23:59:59Z`) / 1000;
    return end > Date.now() / 1000 ? end : NaN;
  }
  function read() {
    set(wrong);
    for (const made of lines.values()) made.complain("");
    date.complain("");
    const value = (id) => lines.get(id).control.value.trim();
    const told = { name: value("name"), owner: value("owner"), role: value("role"), models: value("models").split(",").map((each) => each.trim()).filter(Boolean), track: track.checked, expires_s: expires() };
    let bad = null;
    const complain = (made, text, control = made.control) => { made.complain(text); bad ??= control; };
    if (!told.name) complain(lines.get("name"), "It needs a name");
    for (const [id] of NUMBERS) {
      told[id] = readCount(value(id));
      if (Number.isNaN(told[id])) complain(lines.get(id), "A number like 500, 100k or 1M");
    }
    if (Number.isNaN(told.expires_s)) complain(date, "A day to come", when);
    bad?.focus();
    return bad ? null : told;
  }
  function complain(error) {
    const made = lines.get(error.param);
    if (made) { made.complain(error.message); made.control.focus(); }
    else set(wrong, error.message);
  }
  return { content, read, complain };
}

/** Ask for a key's fields and send them with `send(fields)`; the dialog stays until the gateway has said yes. */
async function askForKey(title, ok, key, send) {
  const form = keyForm(key);
  let answer = null;
  const done = await ask(title, form.content, { ok, check: async () => {
    const told = form.read();
    if (!told) return false;
    try {
      answer = await send(told);
      return true;
    } catch (error) {
      form.complain(error);
      return false;
    }
  } });
  return done ? answer : null;
}

const showOnce = (made) => ask("Your new key", [
  h("p", { class: "once" }, icon("alert"), h("span", {}, h("b", {}, "Copy it now: it is shown this once."), " Only a hash of it is kept; nobody can show it again.")),
  snippet(made.key, "Copy key"),
  h("p", { class: "note" }, "Programs take it from the environment:"),
  snippet(`export ATOLL_API_KEY=${made.key}`),
], { ok: "I have kept it", cancel: null });

/** What of a key was changed. */
function changes(key, told) {
  const before = (id) => (id === "models" ? key.models ?? [] : id === "owner" ? key.owner ?? "" : id === "track" ? key.track !== false : key[id] ?? null);
  return Object.fromEntries(Object.entries(told).filter(([id, value]) => JSON.stringify(before(id)) !== JSON.stringify(value)));
}

// Usage

const midnight = (at) => Date.UTC(at.getUTCFullYear(), at.getUTCMonth(), at.getUTCDate()) / 1000;
const PERIODS = {
  7: ["Last 7 days", (now) => [midnight(now) - 6 * DAY_S, null]],
  30: ["Last 30 days", (now) => [midnight(now) - 29 * DAY_S, null]],
  90: ["Last 90 days", (now) => [midnight(now) - 89 * DAY_S, null]],
  month: ["This month", (now) => [Date.UTC(now.getUTCFullYear(), now.getUTCMonth()) / 1000, null]],
  before: ["Last month", (now) => [Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - 1) / 1000, Date.UTC(now.getUTCFullYear(), now.getUTCMonth()) / 1000]],
};

const sum = (rows, id) => rows.reduce((all, row) => all + (row[id] ?? 0), 0);
const tokensOf = (row) => (row.prompt_tokens ?? 0) + (row.completion_tokens ?? 0);
const MEASURES = { tokens: ["Tokens", tokensOf, (v) => count(v)], cost: ["Cost", (row) => row.cost_usd ?? 0, (v) => usd(v)], requests: ["Requests", (row) => row.requests ?? 0, (v) => count(v)] };
const SERIES = 5;

/** Bars by day: the five that used most, and all others as one. */
function chart(rows, by, span, titleOf, [title, measure, format]) {
  const totals = new Map();
  for (const row of rows) totals.set(titleOf(row), (totals.get(titleOf(row)) ?? 0) + measure(row));
  const order = [...totals].filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]).map(([each]) => each);
  if (!order.length) return h("p", { class: "note" }, "Nothing to draw in this period.");
  const names = order.length > SERIES + 1 ? order.slice(0, SERIES) : order;
  const others = `${order.length - names.length} others`;
  const days = new Map();
  const end = Math.min(span[1] ?? Infinity, Date.now() / 1000);
  for (let at = span[0]; at < end; at += DAY_S) days.set(day(at), {});
  for (const row of rows) {
    const parts = days.get(row.day);
    if (!parts) continue;
    const each = names.includes(titleOf(row)) ? titleOf(row) : others;
    parts[each] = (parts[each] ?? 0) + measure(row);
  }
  const shown = [...days].map(([date, parts]) => ({ name: date.slice(5), parts }));
  return bars(shown, order.length > names.length ? [...names, others] : names, { label: `${title} by day and ${by}, ${shown[0].name} to ${shown.at(-1).name}`, format });
}

function usageTable(first, rows, caption, down) {
  const columns = [first,
    { name: "Requests", right: true, value: (r) => number(r.requests), sort: (r) => r.requests },
    { name: "Prompt tokens", right: true, value: (r) => number(r.prompt_tokens), sort: (r) => r.prompt_tokens },
    { name: "Answer tokens", right: true, value: (r) => number(r.completion_tokens), sort: (r) => r.completion_tokens }];
  if (rows.some((r) => r.audio_seconds || r.speech_seconds)) columns.push({ name: "Sound", right: true, value: (r) => `${number((r.audio_seconds ?? 0) + (r.speech_seconds ?? 0))} s`, sort: (r) => (r.audio_seconds ?? 0) + (r.speech_seconds ?? 0) });
  if (rows.some((r) => r.image_pixels)) columns.push({ name: "Pictures", right: true, value: (r) => `${count(r.image_pixels)} pixels`, sort: (r) => r.image_pixels });
  columns.push({ name: "Cost", right: true, value: (r) => usd(r.cost_usd), sort: (r) => r.cost_usd });
  return table(columns, rows, { caption, sort: down === "first" ? 0 : columns.length - 1, down: true, none: "Nothing was used in this period." });
}

// The page

const noAccounts = () => h("section", { class: "card", "aria-label": "No keys" }, empty("This gateway has no keys", "It answers whoever reaches it and counts nobody. A gateway with a database has keys, limits and usage (pip install 'atoll[accounts]'):",
  h("div", { class: "how-keys stack" }, snippet("atoll gateway --fabric @gateway.token --db accounts.db"), h("p", {}, "Make the first key there; more can then be made on this page:"), snippet("atoll keys create alice --role admin --db accounts.db")),
  h("p", { class: "note" }, "With --open the gateway counts usage but asks for no key. More in docs/guides/keys.md.")));

export const page = {
  mount(root, ctx) {
    const shown = { tab: "keys", period: "30", by: "model", measure: "tokens", state: "active" };
    for (const id of Object.keys(shown)) shown[id] = ctx.params.get(id) ?? shown[id];
    if (!PERIODS[shown.period]) shown.period = "30";
    if (!MEASURES[shown.measure]) shown.measure = "tokens";
    if (!["key", "owner"].includes(shown.by)) shown.by = "model";
    let keys = null;
    let words = "";
    let gone = false;
    let turn = 0;
    const isAdmin = ctx.can("admin");
    const isMember = ctx.session.role === "member";

    function choose(id, value) {
      shown[id] = value;
      const query = new URLSearchParams(Object.entries(shown).filter(([each, text]) => text !== { tab: "keys", period: "30", by: "model", measure: "tokens", state: "active" }[each])).toString();
      history.replaceState(null, "", query ? `/keys?${query}` : "/keys");
    }

    // Keys

    const keyPlace = h("div", {}, loading());
    const make = isAdmin ? button("Make a key", makeKey, { kind: "primary", symbol: "plus" }) : null;
    const search = input({ type: "search", placeholder: "name, owner, model", oninput: () => { words = search.value; drawKeys(); } });
    const states = select([["active", "active"], ["expired", "expired"], ["revoked", "revoked"], ["all", "all"]], { value: shown.state, onchange: () => { choose("state", states.value); drawKeys(); } });
    const found = h("p", { class: "note", role: "status" });
    const keyPane = h("section", { class: "card", "aria-label": "Keys" }, h("div", { class: "toolbar" }, field("Find", search), field("State", states), make),
      isAdmin ? null : h("p", { class: "note" }, isMember ? "These are your own keys. You may revoke them; an admin makes new ones and changes limits." : "You are logged in as viewer: you see all keys and change none."), found, keyPlace);

    function drawKeys(focus = null) {
      if (!keys) return;
      const terms = words.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = keys.filter((key) => (shown.state === "all" || key.state === shown.state) && terms.every((term) => [key.name, key.owner, key.id, key.role, ...(key.models ?? [])].join("\n").toLowerCase().includes(term)));
      set(found, rows.length === keys.length ? plural(keys.length, "key") : `${rows.length} of ${plural(keys.length, "key")}`);
      const columns = [
        { name: "Key", cell: (k) => [name(k.name), k.own ? [" ", badge("yours", "info")] : null, h("div", { class: "note" }, k.owner ? [name(k.owner), " · "] : null, h("span", { class: "mono" }, k.id))], sort: (k) => (k.name ?? "").toLowerCase() },
        { name: "State", cell: (k) => [stateBadge(k.state), h("div", { class: "note" }, k.role ?? "member")] },
        { name: "May use", cell: mayUse },
        { name: "Limits", cell: limits },
        { name: "Tokens used", cell: quotas },
        { name: "Expires", cell: expiry, sort: (k) => k.expires_s },
      ];
      if (isAdmin || isMember) columns.push({ name: "Change", cell: actions });
      const none = keys.length ? "No key fits." : isAdmin ? "There is no key yet. “Make a key” makes the first one." : isMember ? "You have no keys. An admin makes them." : "There is no key yet.";
      set(keyPlace, table(columns, rows, { caption: "API keys", sort: 0, none }));
      if (focus) (keyPlace.querySelector(`[id="${CSS.escape(focus)}"]`) ?? make ?? search).focus();
    }

    function actions(key) {
      if (key.state === "revoked" || (!isAdmin && !key.own)) return null;
      return h("div", { class: "actions" }, isAdmin ? button("Edit", () => editKey(key), { kind: "small", id: `edit-${key.id}`, title: `Edit ${key.name}` }) : null, button("Revoke", () => revokeKey(key), { kind: "small danger", id: `revoke-${key.id}`, title: `Revoke ${key.name}` }));
    }

    async function makeKey() {
      const made = await askForKey("Make a key", "Make it", null, (told) => ctx.api.post("/atoll/v1/keys", told));
      if (!made) return;
      await showOnce(made);
      await loadKeys();
      drawKeys(`edit-${made.id}`);
    }

    async function editKey(key) {
      const made = await askForKey(`Edit ${key.name}`, "Save", key, (told) => {
        const some = changes(key, told);
        return Object.keys(some).length ? ctx.api.patch(`/atoll/v1/keys/${encodeURIComponent(key.id)}`, some) : {};
      });
      if (!made) return;
      if (Object.keys(made).length) ctx.toast("Saved: it counts within about a second");
      await loadKeys();
      drawKeys(`edit-${key.id}`);
    }

    async function revokeKey(key) {
      const wrong = h("p", { class: "field-error", role: "alert" });
      const done = await ask("Revoke this key?", [h("p", {}, "Key ", h("b", {}, name(key.name)), key.owner ? [" of ", name(key.owner)] : null, " stops working within about a second, for good. What runs is finished."), h("p", { class: "note" }, "What it used stays in the books."), wrong], { ok: "Revoke", kind: "danger", cancel: "Keep it", check: async () => {
        try {
          await ctx.api.del(`/atoll/v1/keys/${encodeURIComponent(key.id)}`);
          return true;
        } catch (error) {
          set(wrong, error.message);
          return false;
        }
      } });
      if (!done) return;
      ctx.toast("Revoked");
      await loadKeys();
      drawKeys("none");
    }

    async function loadKeys() {
      try {
        const answer = await ctx.api.get("/atoll/v1/keys");
        if (gone) return;
        keys = answer.keys ?? [];
        drawKeys();
        drawFigures();
      } catch (error) {
        if (!gone) refuse(error, keyPlace, loadKeys);
      }
    }

    // Usage

    let usage = null;
    const figurePlace = h("div", { class: "figures" });
    const usagePlace = h("div", {}, loading());
    const csv = h("a", { class: "button", download: "", href: "#" }, icon("download"), "Download CSV");
    const period = select(Object.entries(PERIODS).map(([id, [title]]) => [id, title]), { value: shown.period, onchange: () => { choose("period", period.value); loadUsage(); } });
    const by = select([["model", "by model"], ["key", "by key"], ["owner", "by team (owner)"]], { value: shown.by, onchange: () => { choose("by", by.value); loadUsage(); } });
    const measure = select(Object.entries(MEASURES).map(([id, [title]]) => [id, title]), { value: shown.measure, onchange: () => { choose("measure", measure.value); drawUsage(); } });
    const budgetPlace = h("div");
    const usagePane = h("div", { class: "stack" }, budgetPlace, h("section", { class: "card", "aria-label": "Usage by day" }, h("div", { class: "toolbar" }, field("Show", measure), field("Stacked", by), csv), usagePlace));
    const tablePlace = h("div");
    usagePane.append(tablePlace);

    const titles = () => new Map((keys ?? []).map((key) => [key.id, key.name]));
    const keyTitle = (row, known) => row.name || known.get(row.key) || row.key || "no key";

    function span() { return PERIODS[shown.period][1](new Date()); }
    function query(groups) {
      const [since, until] = span();
      return `/atoll/v1/usage?by=${groups}&since_s=${since}${until ? `&until_s=${until}` : ""}`;
    }

    async function loadUsage() {
      const mine = ++turn;
      csv.setAttribute("href", `${query(`day,${shown.by}`)}&format=csv`);
      csv.setAttribute("download", `usage-${shown.period}-${shown.by}.csv`);
      if (!usage) set(figurePlace, ["Cost", "Requests", "Tokens", "Active keys"].map((title) => figure(title, "…")));
      try {
        const [days, models, byKey, drawn, owners] = await Promise.all(["day", "model", "key", `day,${shown.by}`, "owner"].map((groups) => ctx.api.get(query(groups))));
        if (gone || mine !== turn) return;
        usage = { days: days.rows ?? [], models: models.rows ?? [], byKey: byKey.rows ?? [], owners: owners.rows ?? [], drawn: drawn.rows ?? [], cut: Boolean(drawn.truncated || byKey.truncated || models.truncated), by: shown.by, span: span(), title: PERIODS[shown.period][0] };
        drawFigures();
        drawUsage();
      } catch (error) {
        if (gone || mine !== turn) return;
        usage = null;
        set(figurePlace);
        set(tablePlace);
        refuse(error, usagePlace, loadUsage);
      }
    }

    /** Budgets of this month, the fullest first; nothing where none is set. */
    async function loadBudgets() {
      const { budgets } = await ctx.api.get("/atoll/v1/budgets").catch(() => ({ budgets: [] }));
      if (gone || !(budgets?.length || ctx.can("admin"))) return set(budgetPlace);
      const share = (one) => one.spent_usd / one.usd_per_month;
      const title = (one) => (one.owner ? `${one.owner} (team)` : one.key ? one.name ?? one.key : "All requests");
      const id = (one) => (one.key ? `key ${one.key}` : one.owner ? `owner ${one.owner}` : "all");
      const remove = (one) => (ctx.can("admin") && !one.in_settings ? button("Remove", () => change(() => ctx.api.del(`/atoll/v1/budgets/${encodeURIComponent(id(one))}`)), { kind: "small", title: `Remove the budget of ${title(one)}` }) : null);
      set(budgetPlace, h("section", { class: "card", "aria-label": "Budgets" }, h("h2", {}, "Budgets of this month"), h("p", { class: "note" }, "Beyond a budget there is an alarm; limits of keys refuse requests."),
        budgets?.length ? h("div", { class: "budgets" }, [...budgets].sort((a, b) => share(b) - share(a)).map((one) => h("div", { class: "row" }, meter(title(one), share(one), `${usd(one.spent_usd)} of ${usd(one.usd_per_month)}`), remove(one)))) : null,
        ctx.can("admin") ? budgetForm(change) : null));
      async function change(make) {
        try {
          await make();
          loadBudgets();
        } catch (error) {
          ctx.toast(error.message, "bad");
        }
      }
    }

    /** Set what a team, a key or everybody may spend a month before it is an alarm. */
    function budgetForm(change) {
      const owners = [...new Set((keys ?? []).map((key) => key.owner).filter(Boolean))].sort();
      const whose = select([["", "All requests"], ...owners.map((owner) => [`owner ${owner}`, `${owner} (team)`]), ...(keys ?? []).filter((key) => key.state === "active").map((key) => [`key ${key.id}`, `key ${key.name}`])]);
      const most = input({ type: "number", min: 0.01, step: 0.01, required: true, placeholder: "50" });
      const warn = input({ type: "number", min: 1, max: 100, value: 80, required: true });
      return h("form", { class: "row", onsubmit: (event) => {
        event.preventDefault();
        const [kind, ...name_] = whose.value.split(" ");
        change(() => ctx.api.put("/atoll/v1/budgets", { ...(kind ? { [kind]: name_.join(" ") } : {}), usd_per_month: Number(most.value), warn_at: Number(warn.value) / 100 }));
      } }, field("Budget of", whose), field("Dollars a month", most), field("Alarm from, in per cent", warn), button("Set budget", null, { type: "submit" }));
    }

    function drawFigures() {
      if (!usage) return;
      const rows = usage.days;
      const cost = sum(rows, "cost_usd"), tokens = sum(rows, "prompt_tokens") + sum(rows, "completion_tokens");
      const whose = isMember ? "your keys" : "all keys";
      set(figurePlace,
        figure(`Cost, ${usage.title.toLowerCase()}`, usd(cost), { note: tokens && cost ? `${usd((cost / tokens) * 1e6)}/M tokens, ${whose}` : cost ? whose : "nodes that say no price count as $0" }),
        figure("Requests", count(sum(rows, "requests")), { note: usage.title.toLowerCase() }),
        figure("Tokens", count(tokens), { note: `${count(sum(rows, "prompt_tokens"))} prompt, ${count(sum(rows, "completion_tokens"))} answer` }),
        keys ? figure("Active keys", number(keys.filter((key) => key.state === "active").length), { note: `of ${plural(keys.length, "key")}${isMember ? ", your own" : ""}` }) : null);
    }

    function drawUsage() {
      if (!usage) return;
      const known = titles();
      const titleOf = { key: (row) => keyTitle(row, known), owner: (row) => row.owner || "no owner", model: (row) => row.model || "no model" }[usage.by];
      set(usagePlace, usage.drawn.length ? chart(usage.drawn, usage.by, usage.span, titleOf, MEASURES[shown.measure]) : empty("Nothing was used in this period", "Requests appear here about a second after they ended."),
        usage.cut ? h("p", { class: "note" }, "These are more rows than a page shows: choose a shorter period, or take the CSV.") : null);
      set(tablePlace, h("section", { class: "card", "aria-label": "Usage in figures" }, h("h2", {}, usage.title), tabs("Usage in figures", [
        { name: "By key", draw: () => usageTable({ name: "Key", cell: (r) => [name(keyTitle(r, known)), r.key ? h("div", { class: "note mono" }, r.key) : null], sort: (r) => keyTitle(r, known) }, usage.byKey, "Usage by key") },
        { name: "By team", draw: () => usageTable({ name: "Team (owner)", cell: (r) => name(r.owner || "no owner"), sort: (r) => r.owner }, usage.owners, "Usage by team") },
        { name: "By model", draw: () => usageTable({ name: "Model", cell: (r) => name(r.model || "no model"), sort: (r) => r.model }, usage.models, "Usage by model") },
        { name: "By day", draw: () => usageTable({ name: "Day (UTC)", value: (r) => r.day, sort: (r) => r.day }, usage.days, "Usage by day", "first") },
      ], { start: ["key", "owner", "model"].indexOf(usage.by) })));
    }

    // Together

    function refuse(error, place, again) {
      if (error.code === "no_accounts") return set(root, noAccounts());
      return set(place, failed(error, () => { set(place, loading()); again(); }));
    }

    const items = [["keys", "Keys", keyPane], ["usage", "Usage", usagePane]];
    const parts = [h("div", { class: "toolbar" }, field("Period (days are UTC)", period)), figurePlace,
      tabs("Keys and usage", items.map(([id, title, pane]) => ({ name: title, draw: () => { choose("tab", id); return pane; } })), { start: shown.tab === "usage" ? 1 : 0 })];
    let opened = false;
    set(root, loading());
    const stop = follow(ctx, "gateway", (state, why) => {
      if (opened) return;
      if (state === "none") return set(root, noGateway("Keys and usage belong to a gateway. Start one to try it, or one with a database, which has keys:", snippet("atoll gateway --fabric @gateway.token --db accounts.db")));
      if (state === "down") return set(root, gatewayDown(why));
      opened = true;
      if (ctx.session.accounts === false) return set(root, noAccounts());
      set(root, parts);
      // Budgets are set for keys and owners that there are.
      loadKeys().then(loadBudgets);
      loadUsage();
    });
    return () => { gone = true; stop(); };
  },
};
