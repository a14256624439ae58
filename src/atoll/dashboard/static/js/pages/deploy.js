// Deploy: what a fleet serves, what another model or promise would cost, and its fleet file, which the controller follows.

import { h, set } from "../lib/dom.js";
import { firstFleet, fleetChoice } from "../lib/fleetchoice.js";
import { DASH, moment, perHour } from "../lib/format.js";
import { withPlanner } from "../lib/services.js";
import { button, card, confirmName, empty, load, loading, snippet, stateBadge, table } from "../lib/ui.js";
import { showPlan } from "./deploy/change.js";
import { openLog } from "./deploy/log.js";
import { serviceForm, textForm } from "./deploy/forms.js";
import { drawHistory, drawNext } from "./plan.js";

const base = (fleet) => `/atoll/v1/fleets/${encodeURIComponent(fleet)}`;
const quantity = (value) => (value === undefined || value === null ? DASH : typeof value === "object" ? JSON.stringify(value) : String(value));

function promise(entry) {
  const parts = [entry.ttft && `first token ${quantity(entry.ttft)}`, entry.tpot && `then ${quantity(entry.tpot)} each`].filter(Boolean);
  return parts.length ? `${parts.join(", ")}, for ${quantity(entry.attainment ?? "95%")}` : "none of its own";
}

const modelOf = (name, entry) => entry.model ?? (entry.models ? entry.models.map((one) => one.model).join(" or ") : name);

/** Services of a fleet file with what may be done about them. */
function serviceTable(file, doing) {
  const rows = Object.entries(file.services ?? {}).map(([name, entry]) => ({ name, entry: entry ?? {} }));
  return table([
    { name: "Name", key: "name" },
    { name: "Model", value: (one) => modelOf(one.name, one.entry) },
    { name: "Promise", value: (one) => promise(one.entry) },
    { name: "Demand", right: true, value: (one) => quantity(one.entry.rate) },
    { name: "Actions", cell: (one) => (doing ? h("div", { class: "actions" },
      button("Change", () => doing.change(one.name, one.entry), { kind: "small" }),
      button("Remove", () => doing.remove(one.name), { kind: "small", symbol: "trash", title: `Remove ${one.name}`, disabled: rows.length < 2 })) : null) },
  ], rows, { caption: "Services of the fleet file" });
}

export const page = {
  mount(root, ctx) {
    const place = h("div", { class: "stack" });
    root.append(place);
    let fleets = [];
    let stopLive = null;
    let running = null;
    let log = null;

    function show(fleet) {
      history.replaceState(null, "", `/deploy?fleet=${encodeURIComponent(fleet)}`);
      running?.abort();
      log?.close();
      const known = () => fleets.find((one) => one.name === fleet);
      const operated = known()?.kind === "operated";
      const state = h("div"), notices = h("div", { class: "stack" }), services = h("div"), editor = h("div", { class: "stack", id: "editor" }), runs = h("div", { class: "stack" }), next = h("div"), past = h("div"), earlier = h("div");
      const mayApply = operated && ctx.can("operator");
      let file = null;

      const paintNotices = () => set(state, operated ? stateBadge(known()?.up ? "up" : "down") : null) && set(notices,
        operated ? null : h("p", { class: "notice" }, "Nobody operates this fleet: changes are planned here, and the file is yours to download. ", h("code", {}, "atoll operate FILE"), " brings it up."),
        operated && !known()?.controller ? h("p", { class: "notice" }, "No controller follows this fleet's file now: ", h("code", {}, `atoll operate ${fleet}`), " does.") : null,
        known()?.errors?.length ? h("ul", { class: "bullets bad" }, known().errors.map((text) => h("li", {}, text))) : null);
      paintNotices();

      const reloadFile = load(services, () => ctx.api.get(`${base(fleet)}/file`), (told) => {
        file = told;
        set(earlier, drawEarlier());
        const doing = ctx.can("member") && told.services ? { change: openService, remove } : null;
        return h("div", { class: "stack" }, told.services ? serviceTable(told, doing) : empty("This fleet has no file to edit", "It was brought up from a problem.json."),
          doing ? null : h("p", { class: "note" }, "You are logged in as a viewer: members plan changes, operators make them."));
      });

      function openService(name, entry) {
        set(editor, card(name ? `Change ${name}` : "Deploy a model", {}, serviceForm(ctx, { name, entry, taken: Object.keys(file.services) }, {
          plan: (edit, complain) => plan({ fleet, edit }, complain, name ? `Change ${name}` : "Deploy"),
          cancel: close,
        })));
        editor.scrollIntoView({ block: "nearest" });
        editor.querySelector("input, select")?.focus();
      }

      function openText(text = file.file) {
        set(editor, card("The fleet file as text", { note: "All that a fleet file can say. Comments stay." }, textForm(text, { plan: (changed, complain) => plan({ fleet, edit: { text: changed } }, complain, "Use this file", changed), cancel: close })));
        editor.querySelector("textarea")?.focus();
      }

      async function remove(name) {
        const typed = await confirmName(`Remove ${name}?`, "Its instances are drained and end once the change is made. You see the plan first.", name, "Show the plan");
        if (!typed) return;
        set(editor, card(`Remove ${name}`, {}));
        await plan({ fleet, edit: { services: { [name]: null } } }, null, `Remove ${name}`);
      }

      function close() {
        running?.abort();
        set(editor);
      }

      /** Plan what is asked; what becomes of it stands below the form. */
      async function plan(ask, complain, word, text = null) {
        running?.abort();
        editor.querySelector("#planned")?.remove();
        running = showPlan(ctx, { place: editor, ask, word, text, complain, fleet, fileName: fileName(), version: () => file.version, mayApply, cancel: close,
          why: operated ? "An operator can make this change." : "Nobody operates this fleet: download the file and bring it up.",
          applied(told) {
            set(editor, h("p", { class: "notice", role: "status" }, `The fleet file is replaced: ${told.changed}. ${known()?.controller ? "The controller follows it within seconds; what it does is shown below." : "It is followed as soon as a controller operates this fleet."}`));
            reloadFile();
            refresh();
          } });
        await running.done;
      }

      const fileName = () => `${fleet.replace(/\.(ya?ml|json)$/, "").replace(/[^A-Za-z0-9_-]+/g, "-")}.yaml`;

      function drawEarlier() {
        const rows = file?.earlier ?? [];
        if (!rows.length) return h("p", { class: "note" }, "The file was not replaced from here yet.");
        return table([
          { name: "Replaced", cell: (one) => h("time", { datetime: new Date(one.replaced_s * 1000).toISOString() }, moment(one.replaced_s)) },
          { name: "Version", cell: (one) => h("code", {}, one.version) },
          { name: "Actions", cell: (one) => h("div", { class: "actions" }, ctx.can("member") ? button("Look and go back", async () => {
            try {
              openText((await ctx.api.get(`${base(fleet)}/file?version=${encodeURIComponent(one.version)}`)).file);
              editor.scrollIntoView({ block: "start" });
            } catch (error) {
              ctx.toast(error.message, "bad");
            }
          }, { kind: "small" }) : null) },
        ], rows, { caption: "Earlier versions of the fleet file" });
      }

      const logPlace = h("div", { id: "log" });
      const look = (name) => { log?.close(); log = openLog(ctx, `${base(fleet)}/logs/${encodeURIComponent(name)}`, name, logPlace); };
      const drawInstances = (told) => table([
        { name: "Instance", key: "instance" },
        { name: "Service", key: "service" },
        { name: "State", cell: (one) => stateBadge(one.state) },
        { name: "Where", value: (one) => [one.target, ...(one.hosts ?? [])].join(", ") },
        { name: "Cost", right: true, value: (one) => perHour(one.usd_per_hour) },
        { name: "Why", value: (one) => one.reason || DASH, hide: "narrow" },
        { name: "Actions", cell: (one) => (ctx.can("operator") ? button("Log", () => look(one.instance), { kind: "small", title: `Log of ${one.instance}` }) : null) },
      ], (told.instances ?? []).filter((one) => one.state !== "gone"), { caption: "Instances of the fleet", none: "No instance stands yet.", id: "instances" });

      const reloads = operated ? [
        load(next, () => ctx.api.get(`${base(fleet)}/next`), (told) => drawNext(told.next, ctx, fleet, refresh)),
        load(past, () => ctx.api.get(`${base(fleet)}/history?last=30`), (told) => drawHistory(told.events)),
      ] : [];
      const instances = h("div");
      const reloadRuns = load(instances, () => ctx.api.get(base(fleet)), drawInstances);
      const refresh = () => { for (const one of reloads) one(); reloadRuns(); };
      // A log that is open stays open while instances come and go.
      if (operated) set(runs, instances, ctx.can("operator") ? h("div", { class: "row" }, button("Log of the gateway", () => look("gateway"), { kind: "small" }), button("Log of the hub", () => look("hub"), { kind: "small" })) : null, logPlace);

      set(place, h("div", { class: "row" }, fleetChoice(fleets, fleet, show), state), notices,
        card("What it serves", { actions: [
          ctx.can("member") ? button("Deploy a model", () => file?.services && openService(null, {}), { kind: "primary", symbol: "plus" }) : null,
          ctx.can("member") ? button("Edit as text", () => file && openText()) : null,
          h("a", { class: "button", href: `${base(fleet)}/file?format=yaml`, download: fileName() }, "Download the file")].filter(Boolean) }, services),
        editor,
        operated ? card("What comes next", {}, next) : null,
        operated ? card("What runs", {}, runs) : null,
        operated ? card("Decisions", { note: "What was done and why, the newest first." }, past) : null,
        operated ? card("Earlier versions", {}, earlier) : null);
      stopLive?.();
      let version = known()?.version;
      stopLive = ctx.live.on("fleets", (told) => {
        fleets = told.fleets ?? fleets;
        paintNotices();
        if (known()?.version !== version) refresh();
        version = known()?.version;
      });
    }

    set(place, loading());
    const stop = withPlanner(ctx, place, () => load(place, () => ctx.api.get("/atoll/v1/fleets"), (told) => {
      fleets = told.fleets;
      const fleet = firstFleet(fleets, ctx.params);
      if (!fleet) return empty("No fleet yet", "A fleet file says which models are promised what, and which machines there are.", snippet("atoll init\natoll operate fleet.yaml --dashboard --ask page"));
      queueMicrotask(() => show(fleet));
      return loading();
    }));
    return () => { stop(); stopLive?.(); running?.abort(); log?.close(); };
  },
};
