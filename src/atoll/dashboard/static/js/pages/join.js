// Add a machine: a line to type there, waiting for it, what it is and how fast, and the plan with it.

import { h, set } from "../lib/dom.js";
import { firstFleet, fleetChoice } from "../lib/fleetchoice.js";
import { bytes, count, day, DASH, number, plural } from "../lib/format.js";
import { withPlanner } from "../lib/services.js";
import { badge, button, card, empty, field, input, load, loading, snippet, stateBadge, table } from "../lib/ui.js";
import { showPlan } from "./deploy/change.js";

const EVERY_MS = 2000;
const base = (fleet) => `/atoll/v1/fleets/${encodeURIComponent(fleet)}`;
const gpusOf = (machine) => (machine.gpus?.length ? machine.gpus.map((one) => `${one.count}× ${one.type}${one.memory_bytes ? ` (${bytes(one.memory_bytes)})` : ""}`).join(", ") : "none");

/** What `atoll join --measure` found, in words. */
function describeMeasured(measured) {
  if (!measured) return null;
  if (measured.kind === "operators") return `${plural(Object.keys(measured.operators ?? {}).length, "kind")} of operators measured on ${measured.gpu}: plans use these times for it.`;
  const profile = measured.profile ?? {};
  const [size, perLayer] = profile.prefill_s_per_layer?.at(-1) ?? [0, 0];
  const speed = perLayer ? size / ((profile.step_s ?? 0) + perLayer * (profile.max_layers ?? 1)) : null;
  return `${measured.model} on its cores: ${speed ? `${number(speed)} prompt tokens/s over all of its ${profile.max_layers} layers.` : "measured."}`;
}

export const page = {
  mount(root, ctx) {
    const place = h("div", { class: "stack" });
    root.append(place);
    let timer = null;
    let running = null;
    let fleets = [];

    function show(fleet) {
      history.replaceState(null, "", `/join?fleet=${encodeURIComponent(fleet)}`);
      clearTimeout(timer);
      running?.abort();
      const step = h("div", { class: "stack", id: "joining" }), listed = h("div");
      const known = () => fleets.find((one) => one.name === fleet);
      let file = null, region = null;

      const reload = load(listed, () => ctx.api.get(`${base(fleet)}/invitations`), (told) => (region = told.region ?? null, table([
        { name: "Machine", key: "name" },
        { name: "Asked", value: (one) => day(one.made_s) },
        { name: "Good until", value: (one) => day(one.expires_s) },
        { name: "Token", cell: (one) => stateBadge(one.state === "good" ? "active" : one.state) },
        { name: "Actions", cell: (one) => (one.state === "good" && ctx.can("operator") ? button("Take back", () => revoke(one.name), { kind: "small", title: `Take back the token of ${one.name}` }) : DASH) },
      ], told.invitations, { caption: "Machines and their tokens", none: "No machine was asked to come from here." })));

      async function revoke(name) {
        try {
          await ctx.api.del(`${base(fleet)}/invitations/${encodeURIComponent(name)}`);
          ctx.toast(`${name} may join no more`);
          reload();
        } catch (error) {
          ctx.toast(error.message, "bad");
        }
      }

      function askName() {
        clearTimeout(timer);
        running?.abort();
        const name = input({ required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*", placeholder: "gpu7" });
        const days = input({ type: "number", min: 1, max: 3650, value: 30, required: true });
        const measure = h("input", { type: "checkbox" });
        const nameLine = field("Name of the machine", name, { note: "Letters, digits, dots and dashes." });
        const submit = button("Make the line to type there", null, { kind: "primary", type: "submit", symbol: "plus" });
        set(step, card("1. Ask a machine to come", {}, h("form", { class: "stack", onsubmit: async (event) => {
          event.preventDefault();
          nameLine.complain("");
          submit.disabled = true;
          try {
            await wait(await ctx.api.post(`${base(fleet)}/invitations`, { name: name.value.trim(), days: Number(days.value), measure: measure.checked }));
          } catch (error) {
            nameLine.complain(error.message);
            submit.disabled = false;
          }
        } }, h("div", { class: "fields" }, nameLine, field("Its token is good for, in days", days, { note: "A machine leaves when its token has expired." })),
          h("label", { class: "check" }, measure, h("span", {}, "Measure it before it joins (a few minutes; nothing else should run there)")), h("div", { class: "row" }, submit))));
      }

      async function wait(invitation) {
        reload();
        const found = h("div", { role: "status" }, h("div", { class: "state" }, h("span", { class: "spinner", "aria-hidden": "true" }), h("p", {}, `Waiting for ${invitation.name}… This page goes on by itself.`)));
        set(step, card("2. Type this line on the machine", { note: `Atoll must be installed there (pip install 'atoll[fabric,serve]'). The line is shown this once, and its token is good until ${day(invitation.expires_s)}.` },
          snippet(invitation.line),
          invitation.only_here ? h("p", { class: "notice" }, "The hub of this fleet listens on this machine only: others reach it where the fleet is operated with ", h("code", {}, "--address ADDRESS"), ".") : null),
          card("3. It comes", { actions: [button("Another machine", askName, { kind: "small" })] }, found));
        look(invitation, found);
      }

      async function look(invitation, found, ready = () => true) {
        try {
          const told = await ctx.api.get("/atoll/v1/machines");
          const machine = told.machines.find((one) => one.provider !== null && (one.name === invitation.name || one.name.split("/")[0] === invitation.name || one.name.endsWith(`/${invitation.name}`)));
          if (machine && ready(machine)) {
            arrived(machine, found);
            return;
          }
        } catch {
          // The gateway may be starting: asked again.
        }
        if (step.contains(found)) timer = setTimeout(() => look(invitation, found, ready), EVERY_MS);
      }

      function arrived(machine, found) {
        const measured = describeMeasured(machine.measured);
        const again = region && !measured ? button("Measure it now", async () => {
          again.disabled = true;
          try {
            await ctx.api.post(`${base(fleet)}/machines/${encodeURIComponent(machine.name)}/measure`, {});
            step.lastChild.remove();
            set(found, h("div", { class: "state" }, h("span", { class: "spinner", "aria-hidden": "true" }), h("p", {}, `Measuring ${machine.name}… This takes a few minutes; the page goes on by itself.`)));
            look({ name: machine.name }, found, (one) => one.measured);
          } catch (error) {
            again.disabled = false;
            ctx.toast(error.message, "bad");
          }
        }, { kind: "small" }) : null;
        set(found, h("div", { class: "stack" }, h("div", { class: "row" }, badge("it has joined", "good"), h("strong", {}, machine.name)),
          h("dl", { class: "facts" }, [["GPUs", gpusOf(machine)], ["CPU cores", machine.cpus ? count(machine.cpus) : DASH], ["Memory", bytes(machine.memory_bytes)], ["Measured", measured ?? (region ? "not yet" : "not measured: add --measure to the line")]].map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text)))), again));
        step.append(countIn(machine));
      }

      /** Offer to plan with the machine: what it is in the words of the fleet file. */
      function countIn(machine) {
        const first = machine.gpus?.[0];
        const where = input({ required: true, value: region ?? machine.region ?? machine.site ?? regionOf(file) ?? "local" });
        const type = input({ required: true, value: first ? `${first.type}:${first.count}` : typeOf(file) ?? "" });
        const number_ = input({ type: "number", min: 1, value: 1, required: true });
        const typeLine = field("Node type", type, { note: "GPU:NUMBER, as the catalog calls it." });
        const result = h("div", { class: "stack" });
        const told = region
          ? { note: "It is written into the fleet file as a machine of yours; the plan says what it is worth, and the controller starts instances on it." }
          : { note: "It is written into the fleet file as a machine of yours; the plan says what it is worth. This fleet's controller starts nothing on machines that join: operate it with --on local,joined. Until then a machine serves what it is assigned:" };
        return card("4. Plan with it", told, region ? null : snippet(`atoll assign ${machine.name} --model ORG/NAME --engine vllm --fabric @FOLDER/fabric.token`), h("form", { class: "stack", onsubmit: (event) => {
          event.preventDefault();
          running?.abort();
          set(result);
          typeLine.complain("");
          const edit = { machines: [{ region: where.value.trim(), node_type: type.value.trim(), count: Number(number_.value) }] };
          const measured = machine.measured;
          if (measured?.kind === "operators") edit.gpus = { [measured.gpu]: { operators: measured.operators } };
          running = showPlan(ctx, { place: result, ask: { fleet, edit }, word: "Use it", fleet, fileName: `${fleet}.yaml`, version: () => file.version, mayApply: ctx.can("operator") && known()?.kind === "operated", why: "An operator can make this change.", cancel: () => set(result),
            complain(error) {
              if (!/machine|node_type|region|offers|owned/.test(error.param ?? "")) return false;
              typeLine.complain(error.message);
              return true;
            },
            applied() {
              set(result, h("p", { class: "notice", role: "status" }, "The fleet file counts it now. ", h("a", { href: `/deploy?fleet=${encodeURIComponent(fleet)}` }, "Deploy"), " shows what the controller does with it."));
              loadFile();
            } });
        } }, h("div", { class: "fields" }, field("Region", where), typeLine, field("How many such machines", number_)), h("div", { class: "row" }, button("Show the plan", null, { kind: "primary", symbol: "play", type: "submit" }))), result);
      }

      const loadFile = async () => { file = await ctx.api.get(`${base(fleet)}/file`).catch(() => null); };
      loadFile();
      const can = ctx.can("operator");
      set(place, h("div", { class: "row" }, fleetChoice(fleets, fleet, show)),
        h("p", { class: "lead" }, "A machine joins the fabric of this fleet with a line that you type there. Its token lets it offer itself and nothing else."),
        can ? step : h("p", { class: "notice" }, "Operators ask machines to come."), card("Machines that were asked to come", {}, listed));
      if (can) askName();
    }

    set(place, loading());
    const stop = withPlanner(ctx, place, () => load(place, () => ctx.api.get("/atoll/v1/fleets"), (told) => {
      fleets = told.fleets.filter((one) => one.kind === "operated");
      const fleet = firstFleet(fleets, ctx.params);
      if (!fleet) return empty("No fleet to add a machine to", "Machines join the fabric of a fleet that is operated from here.", snippet("atoll operate fleet.yaml --dashboard --ask page"));
      queueMicrotask(() => show(fleet));
      return loading();
    }));
    return () => { stop(); clearTimeout(timer); running?.abort(); };
  },
};

/** The first region that a fleet file has machines in. */
function regionOf(file) {
  return /region: *["']?([\w./-]+)/.exec(file?.file ?? "")?.[1] ?? /owned:\s*\n?\s*\{? *([\w./-]+):/.exec(file?.file ?? "")?.[1] ?? null;
}

const typeOf = (file) => /node_type: *["']?([\w.:-]+)/.exec(file?.file ?? "")?.[1] ?? null;
