// One machine in the list: the main things in a line, everything when it is opened. It is changed in place, so that nothing jumps.

import { h, set } from "../../lib/dom.js";
import { ago, bytes, count, DASH, moment, number, percent, perHour, plural, seconds } from "../../lib/format.js";
import { badge, button, meter, stateBadge } from "../../lib/ui.js";
import { layerWords, loadWords } from "./pipeline.js";

export const gpuWords = (gpus) => (gpus ?? []).map((gpu) => `${gpu.count} × ${gpu.type}`).join(", ");
const gpuMemory = (gpu) => (gpu.memory_bytes ? `${gpu.count} × ${gpu.type}, ${bytes(gpu.memory_bytes)} each` : `${gpu.count} × ${gpu.type}`);
export const placeWords = (machine) => [machine.region, machine.site].filter(Boolean).join(" / ");
const ROLES = { node: "node of the fabric", hub: "hub of the fabric", backend: "backend" };

function trust(machine) {
  if (!machine.provider) return null;
  return [h("bdi", { class: "cut", title: machine.provider }, machine.provider), machine.verified ? badge("verified", "good") : badge("unverified", "warn")];
}

function hardware(machine) {
  const gpus = gpuWords(machine.gpus);
  const memory = gpus ? (machine.gpus ?? []).reduce((sum, gpu) => sum + (gpu.memory_bytes ?? 0) * gpu.count, 0) : machine.memory_bytes;
  const words = gpus || (machine.cpus ? plural(machine.cpus, "core") : null);
  return words ? [h("bdi", { class: "cut", title: words }, words), memory ? h("span", { class: "note" }, bytes(memory)) : null] : null;
}

function standing(machine) {
  const left = machine.ends_s ? machine.ends_s - Date.now() / 1000 : null;
  return [stateBadge(machine.state), left !== null && left < 86400 && machine.state !== "left" ? h("span", { class: "note" }, left > 0 ? `ends in ${seconds(60 * Math.ceil(left / 60))}` : "ends now") : null];
}

function serves(machine) {
  const all = machine.services ?? [];
  if (!all.length) return null;
  return [h("bdi", { class: "cut", title: all[0].model }, all[0].model), all[0].layers ? h("span", { class: "note" }, layerWords(all[0].layers)) : null, all.length > 1 ? h("span", { class: "note" }, `and ${all.length - 1} more`) : null];
}

function loadMeter(machine) {
  const load = machine.load ?? {};
  const words = loadWords(machine.load);
  if (words === null) return null;
  const kv = load.kv_share !== null && load.kv_share !== undefined;
  const share = load.kv_share ?? (load.capacity ? load.running / load.capacity : null);
  return [h("span", { class: "load-words" }, words, load.waiting ? h("span", { class: "waiting" }, ` + ${count(load.waiting)} waiting`) : null),
    share === null ? null : meter(kv ? "KV cache in use" : "Requests of its most", share, kv ? `${percent(share)} KV` : percent(share))];
}

/** Write a list of facts; what is not known is a dash. */
function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value === null || value === undefined || value === "" || (Array.isArray(value) && !value.length) ? DASH : value))));
}

/** The line of a machine. doing: {admin, role, drain(machine), undrain(machine)}. */
export class MachineLine {
  #doing; #cells; #body; #seen = new Map(); #busy = false;

  constructor(machine, doing) {
    this.#doing = doing;
    this.#cells = Object.fromEntries(["name", "trust", "place", "hardware", "serves", "load", "price", "state"].map((name) => [name, h("span", { class: `m-${name}` })]));
    this.#body = h("div", { class: "machine-more" });
    this.details = h("details", { class: "machine", ontoggle: () => { if (this.details.open) this.#drawMore(); } }, h("summary", {}, Object.values(this.#cells)), this.#body);
    this.node = h("li", {}, this.details);
    this.update(machine);
  }

  /** Show how it is now; only what changed is touched. */
  update(machine) {
    this.machine = machine;
    const cell = (name, from, draw) => {
      const key = JSON.stringify(from);
      if (this.#seen.get(name) === key) return;
      this.#seen.set(name, key);
      set(this.#cells[name], draw());
      this.#cells[name].classList.toggle("none", !this.#cells[name].hasChildNodes());
    };
    const { name, role, provider, verified, gpus, cpus, services, load, usd_per_hour, state } = machine;
    cell("name", [name, role, Boolean(this.#doing.isInstance?.(machine))], () => [h("bdi", { title: name }, name), role === "node" ? null : badge(this.#doing.isInstance?.(machine) ? "instance" : role)]);
    cell("trust", [provider, verified], () => trust(machine));
    cell("place", [machine.region, machine.site], () => [machine.region, machine.site].filter(Boolean).map((name, at) => h("bdi", { class: ["cut", at && "note"], title: name }, name)));
    cell("hardware", [gpus, cpus, machine.memory_bytes], () => hardware(machine));
    cell("serves", services, () => serves(machine));
    cell("load", load, () => loadMeter(machine));
    cell("price", usd_per_hour, () => (usd_per_hour === null || usd_per_hour === undefined ? null : perHour(usd_per_hour)));
    cell("state", [state, machine.ends_s, machine.ends_s ? Math.floor(Date.now() / 60000) : 0], () => standing(machine));
    if (this.details.open) this.#drawMore();
  }

  #drawMore() {
    const machine = this.machine;
    // Times go on; the buttons must not be drawn anew under somebody's hand.
    const key = JSON.stringify([machine, this.#busy, Math.floor(Date.now() / 15000)]);
    if (this.#seen.get("more") === key) return;
    this.#seen.set("more", key);
    const held = this.#body.contains(document.activeElement) && document.activeElement.matches("button");
    const load = machine.load ?? {};
    set(this.#body,
      machine.reason ? h("p", { class: "reason" }, h("strong", {}, machine.state === "up" ? "Note: " : "Why: "), machine.reason) : null,
      facts([
        ["Name", h("bdi", {}, machine.name)], ["Kind", this.#doing.isInstance?.(machine) ? "instance of several machines" : machine.planned || machine.holds ? "process behind a backend" : ROLES[machine.role] ?? machine.role],
        ["Provider", machine.provider ? [h("bdi", {}, machine.provider), machine.verified ? ", verified by its certificate" : ", not verified: it only says so"] : null],
        ["Region / site", placeWords(machine) ? h("bdi", {}, placeWords(machine)) : null],
        ["GPUs", (machine.gpus ?? []).map(gpuMemory).join("; ")],
        ["CPU and memory", [machine.cpus ? plural(machine.cpus, "core") : null, machine.memory_bytes ? bytes(machine.memory_bytes) : null].filter(Boolean).join(", ")],
        ["Engine", machine.engine], ["Stability", machine.stability],
        ["Load", [loadWords(machine.load), load.waiting ? `${count(load.waiting)} waiting` : null, load.kv_share === null || load.kv_share === undefined ? null : `${percent(load.kv_share)} of the KV cache used`].filter(Boolean).join(", ")],
        ["Answered", machine.requests === null || machine.requests === undefined ? null : `${plural(machine.requests, "request")}, ${count(machine.failures ?? 0)} failed`],
        ["Here since", machine.since_s ? h("time", { title: moment(machine.since_s) }, ago(machine.since_s)) : null],
        ["Ends", machine.ends_s ? h("time", { title: moment(machine.ends_s) }, ago(machine.ends_s)) : "no end known"],
        ["Price", perHour(machine.usd_per_hour)],
        ["Part of", machine.instance ? [h("bdi", {}, machine.instance), machine.fleet ? [" of fleet ", h("bdi", {}, machine.fleet)] : null] : null],
        machine.planned ? ["Stands in for", machine.planned] : null,
      ].filter(Boolean)),
      (machine.services ?? []).length ? h("div", {}, h("h3", {}, "Serves"), h("ul", { class: "served" }, machine.services.map((one) => h("li", {}, h("bdi", {}, one.model),
        h("span", { class: "note" }, [layerWords(one.layers), one.precision, one.context ? `${number(one.context)} tokens of context` : null].filter(Boolean).join(" · ")))))) : null,
      h("div", { class: "row" }, this.#action()));
    if (held) this.#body.querySelector("button")?.focus({ preventScroll: true });
  }

  #action() {
    const { machine } = this;
    const run = (what) => async () => {
      this.#busy = true;
      this.#drawMore();
      try {
        await what(this.machine);
      } finally {
        this.#busy = false;
        this.#drawMore();
        if (document.activeElement === document.body) this.#body.querySelector("button")?.focus({ preventScroll: true });
      }
    };
    if (!this.#doing.admin) return h("p", { class: "note" }, `Taking a machine out of service is for operators; you are logged in as ${this.#doing.role}.`);
    if (machine.drained && machine.can_drain) return [button("Take back into service", run(this.#doing.undrain), { symbol: "power", disabled: this.#busy }), h("p", { class: "note" }, "It gets no new requests now.")];
    if (!machine.can_drain) return h("p", { class: "note" }, machine.role === "hub" ? "A hub answers no requests itself, so there is nothing to drain." : "No requests go to this machine directly: drain what serves the whole model.");
    return [button("Drain…", run(this.#doing.drain), { kind: "danger", symbol: "power", disabled: this.#busy }), h("p", { class: "note" }, "It gets no new requests; what runs goes on elsewhere or ends there.")];
  }
}
