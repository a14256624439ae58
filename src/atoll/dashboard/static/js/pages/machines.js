// Machines: every node and backend, what each holds and how busy it is, and pipelines as pictures. Admins drain here.

import { h, icon, set } from "../lib/dom.js";
import { bytes, count, number, perHour, plural } from "../lib/format.js";
import { follow, gatewayDown, noGateway } from "../lib/services.js";
import { ask, button, card, confirmName, failed, figure, input, loading, select, snippet } from "../lib/ui.js";
import { gpuWords, MachineLine, placeWords } from "./machines/machine.js";
import { drawPipeline } from "./machines/pipeline.js";

const OFTEN_MS = 4000; // loads are asked for at most this often, and only while somebody looks
const PICTURES = 30; // pipelines shown at first
const ORDER = { down: 0, ejected: 1, draining: 2, drained: 3, starting: 4, up: 5, left: 6 };
const instanceOf = (machine) => JSON.stringify([machine.fleet, machine.instance]);
const collator = new Intl.Collator("en", { numeric: true });

export const page = {
  mount(root, ctx) {
    const place = h("div", { class: "machines" });
    root.append(place);
    const view = openView(place, ctx);
    let asked = 0;
    let version = null;
    let handled = null;
    let running = null;
    let busy = false;
    let gone = false;
    let broken = false;
    let revealed = false; // the machine that the address names

    async function load() {
      if (busy) return;
      busy = true;
      asked = performance.now();
      try {
        const told = await ctx.api.get("/atoll/v1/machines");
        if (gone) return;
        version = told.version ?? version;
        view.show(told);
        const wanted = ctx.params.get("id");
        if (wanted && !revealed) {
          revealed = true;
          if (!view.reveal(wanted)) ctx.toast("That machine is not here any more", "bad");
        }
      } catch (error) {
        broken = !gone && view.fail(error, again);
      } finally {
        busy = false;
      }
    }

    /** Ask again where machines changed; for loads only where something runs, and not too often. */
    function look(told) {
      if (broken && told) again();
      if (!told || document.visibilityState !== "visible" || gone) return;
      const changed = version !== null && told.version !== undefined && told.version !== version && told.version !== handled;
      const stale = performance.now() - asked >= OFTEN_MS && (told.running || told.running !== running);
      if (!changed && !stale) return;
      if (changed && performance.now() - asked < 1000) return; // the next snapshot tells it again
      running = told.running;
      handled = told.version;
      load();
    }
    const again = () => { broken = false; set(place, loading()); load(); };
    const seen = () => look(ctx.live.last("gateway"));
    set(place, loading());
    const stop = follow(ctx, "gateway", (state, why) => {
      if (view.isBuilt()) return;
      if (state === "up") again();
      else set(place, state === "none" ? noGateway("Machines are known to a gateway. Start one, and this page finds it:") : gatewayDown(why));
    });
    const deaf = ctx.live.on("gateway", look);
    document.addEventListener("visibilitychange", seen);
    view.reload = load;
    return () => {
      gone = true;
      stop();
      deaf();
      document.removeEventListener("visibilitychange", seen);
      view.close();
    };
  },
};

function noMachines() {
  return h("div", { class: "card" }, h("div", { class: "state empty" }, icon("machines"), h("h3", {}, "No machine has joined yet"),
    h("p", {}, "A machine joins with one command. It needs the token of its site, which whoever runs the fabric issues:"), snippet("atoll fabric issue mysite --provider MyLab --out mysite.token"),
    h("p", {}, "On the machine: start an engine and offer it, "), snippet('atoll join --fabric @mysite.token -- vllm serve MODEL --port "{port}"'),
    h("p", {}, "or offer one that is running already:"), snippet("atoll join --fabric @mysite.token --url http://127.0.0.1:8000"),
    h("p", { class: "note" }, "It appears here within seconds. Slurm jobs, cloud and spot machines join in the same way: see the guide on joining nodes, docs/guides/joining.md.")));
}

/** The page's parts; show(told) fills them and changes them in place later. */
function openView(place, ctx) {
  let machines = [];
  let pipelines = [];
  let known = new Map();
  let staged = new Set(); // instances whose machines are listed
  let built = false;
  let all = false;
  let drawn = "";
  const lines = new Map();
  const admin = ctx.can("operator");

  const figures = h("div", { class: "figures" });
  const pictures = h("div", { class: "pipes" });
  const pipeCard = card("Pipelines", { note: "Models that are spread over machines: boxes are as wide as the layers that a machine holds, and machines with the same layers share the requests. Choose a box for details." }, pictures);
  const words = input({ type: "search", placeholder: "Name, provider, region, GPU, model…", "aria-label": "Find machines", oninput: () => filter() });
  const states = select([["", "All states"]], { "aria-label": "State", onchange: () => filter() });
  const models = select([["", "All models"]], { "aria-label": "Model", onchange: () => filter() });
  const found = h("p", { class: "note", role: "status" });
  const list = h("ul", { class: "machine-list", "aria-label": "Machines" });
  const heads = h("div", { class: "machine-heads", "aria-hidden": "true" }, ["Machine", "Provider", "Region / site", "Hardware", "Serves", "Load", "Price", "State"].map((name, at) => h("span", { class: at === 6 ? "m-price" : null }, name)));
  const listCard = card("Machines", {}, h("div", { class: "stack" }, h("div", { class: "filters" }, words, states, models), found, heads, list));
  const doing = { admin, role: ctx.session?.role ?? "viewer", drain, undrain };
  const watcher = new ResizeObserver(() => drawPictures());
  watcher.observe(pictures);

  function show(told) {
    machines = told.machines ?? [];
    pipelines = told.pipelines ?? [];
    known = new Map(machines.map((machine) => [machine.id, machine]));
    staged = new Set(machines.filter((machine) => machine.role === "node" && machine.instance && !machine.can_drain).map(instanceOf));
    doing.isInstance = isInstance;
    if (!machines.length) {
      built = false;
      set(place, noMachines());
      return;
    }
    if (!built) {
      built = true;
      set(place, figures, pipeCard, listCard);
    }
    drawFigures();
    options(states, "All states", [...new Set(machines.map((machine) => machine.state ?? "unknown"))]);
    options(models, "All models", [...new Set(machines.flatMap((machine) => (machine.services ?? []).map((one) => one.model)))]);
    drawList();
    drawPictures();
  }

  function options(control, first, values) {
    const sorted = values.sort(collator.compare);
    const key = JSON.stringify(sorted);
    if (control.dataset.key === key) return;
    const was = control.value;
    control.dataset.key = key;
    set(control, h("option", { value: "" }, first), sorted.map((value) => h("option", { value }, value)));
    control.value = sorted.includes(was) ? was : "";
  }

  /** Whether it is the instance that machines of the list make up together: no machine of its own. */
  const isInstance = (machine) => machine.role === "backend" && machine.instance && staged.has(instanceOf(machine));

  /** Machines of an instance right below it. */
  function underInstances(sorted) {
    const within = sorted.filter((machine) => !isInstance(machine) && machine.instance && staged.has(instanceOf(machine)) && !machine.can_drain);
    return sorted.filter((machine) => !within.includes(machine)).flatMap((machine) => (isInstance(machine) ? [machine, ...within.filter((part) => instanceOf(part) === instanceOf(machine))] : [machine]));
  }

  function drawFigures() {
    const workers = machines.filter((machine) => machine.role !== "hub");
    const counted = workers.filter((machine) => !isInstance(machine) && machine.state !== "left");
    const up = counted.filter((machine) => machine.state === "up").length;
    const kinds = workers.flatMap((machine) => machine.gpus ?? []);
    const memory = kinds.reduce((sum, gpu) => sum + (gpu.memory_bytes ?? 0) * gpu.count, 0);
    // Stages behind a backend run what the backend runs: each request counts once.
    const entry = workers.filter((machine) => machine.can_drain);
    const runs = (entry.length ? entry : workers).reduce((sum, machine) => sum + (machine.load?.running ?? 0), 0);
    const priced = workers.filter((machine) => machine.usd_per_hour !== null && machine.usd_per_hour !== undefined);
    const sites = new Set(workers.map(placeWords).filter(Boolean)).size;
    set(figures,
      figure("Machines up", `${number(up)} of ${number(counted.length)}`, { tone: up === counted.length ? "good" : up ? "warn" : "bad", note: [workers.some(isInstance) ? plural(workers.filter(isInstance).length, "instance") : null, sites ? plural(sites, "site") : null].filter(Boolean).join(", ") || null }),
      figure("GPUs", count(kinds.reduce((sum, gpu) => sum + gpu.count, 0)), { note: memory ? `${bytes(memory)} of memory` : null }),
      figure("Requests running", count(runs), { note: "on all machines" }),
      figure("Cost", priced.length ? perHour(priced.reduce((sum, machine) => sum + machine.usd_per_hour, 0)) : "–", { note: !priced.length ? "no machine says a price" : priced.length < counted.length ? `${plural(priced.length, "machine")} of ${number(counted.length)} ${priced.length === 1 ? "says" : "say"} a price` : null }));
  }

  function drawList() {
    const seen = new Set();
    const sorted = underInstances([...machines].sort((a, b) => (ORDER[a.state] ?? 9) - (ORDER[b.state] ?? 9) || collator.compare(a.name, b.name)));
    const keyed = sorted.map((machine) => {
      let key = machine.id;
      while (seen.has(key)) key += "#";
      seen.add(key);
      return [key, machine];
    });
    for (const [key, line] of lines) {
      if (seen.has(key)) continue;
      line.node.remove();
      lines.delete(key);
    }
    let before = null;
    for (const [key, machine] of keyed) {
      let line = lines.get(key);
      if (line) line.update(machine);
      else lines.set(key, (line = new MachineLine(machine, doing)));
      line.node.className = isInstance(machine) ? "instance" : staged.has(instanceOf(machine)) && !machine.can_drain ? "within" : "";
      // Only what is out of its place is moved: the focus stays where it is.
      const next = before ? before.nextSibling : list.firstChild;
      if (line.node !== next) list.insertBefore(line.node, next);
      before = line.node;
    }
    filter();
  }

  function filter() {
    const wanted = words.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const line of lines.values()) {
      const { machine } = line;
      const text = [machine.name, machine.provider, placeWords(machine), gpuWords(machine.gpus), machine.engine, machine.role, machine.instance, machine.fleet, ...(machine.services ?? []).map((one) => one.model)].join(" ").toLowerCase();
      const fits = wanted.every((word) => text.includes(word)) && (!states.value || (machine.state ?? "unknown") === states.value) && (!models.value || (machine.services ?? []).some((one) => one.model === models.value));
      line.node.hidden = !fits;
      shown += fits;
    }
    const rows = [...lines.values()].some((line) => isInstance(line.machine)) ? "machines and instances" : "machines";
    set(found, shown === lines.size ? null : shown ? `${shown} of ${lines.size} ${rows} shown` : "No machine fits: change or clear the filter.");
  }

  function drawPictures() {
    pipeCard.hidden = !pipelines.length;
    const width = Math.floor(pictures.clientWidth);
    if (!pipelines.length || width < 80) return;
    const shown = all ? pipelines : pipelines.slice(0, PICTURES);
    const key = JSON.stringify([width, shown, shown.flatMap((pipeline) => (pipeline.stages ?? []).map((stage) => { const m = known.get(stage.machine); return m ? [m.name, m.state, m.load] : null; }))]);
    if (key === drawn) return;
    drawn = key;
    const boxes = () => [...pictures.querySelectorAll(".pipe-box")];
    const held = boxes().indexOf(document.activeElement);
    set(pictures, shown.map((pipeline) => drawPipeline(pipeline, known, width, reveal)), shown.length < pipelines.length ? button(`Show all ${pipelines.length} pipelines`, () => { all = true; drawPictures(); }) : null);
    if (held >= 0) boxes()[held]?.focus({ preventScroll: true });
  }

  /** Open a machine in the list and go there. */
  function reveal(id) {
    const line = lines.get(id);
    if (!line) return false;
    if (line.node.hidden) {
      words.value = states.value = models.value = "";
      filter();
    }
    line.details.open = true;
    line.details.querySelector("summary").focus({ preventScroll: true });
    line.node.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    return true;
  }

  // Draining

  const path = (machine) => `/atoll/v1/machines/${encodeURIComponent(machine.id)}/drain`;

  function changed(machine, text) {
    ctx.toast(text);
    const at = machines.findIndex((one) => one.id === machine?.id);
    if (at >= 0) {
      machines[at] = machine;
      known.set(machine.id, machine);
      drawFigures();
      drawList();
      drawPictures();
    } else api.reload();
  }

  const brief = (name) => (name.length > 60 ? `${name.slice(0, 60)}…` : name);

  async function drain(machine) {
    const name = brief(machine.name);
    const going = machine.load?.running ? ` ${count(machine.load.running)} running now go on elsewhere or end there.` : "";
    const sure = await confirmName(`Drain ${name}?`, `It gets no new requests from now on.${going} You can take it back at any time.`, machine.name, "Drain");
    if (sure === null) return;
    try {
      changed(await ctx.api.post(path(machine), { confirm: machine.name }), `${name} is being drained`);
    } catch (error) {
      if (error.code !== "last_backend") return ctx.toast(`Not drained: ${error.message}`, "bad");
      await drainLast(machine, name, error);
    }
  }

  async function drainLast(machine, name, error) {
    const served = (machine.services ?? []).map((one) => brief(one.model));
    const sure = await ask(`${name} is the last one`, [
      h("p", {}, h("strong", {}, "If you drain it, requests for ", served.length ? served.join(", ") : "what it serves", " will fail"), " until another machine serves that or this one is taken back."),
      h("p", { class: "note" }, `The gateway says: ${error.message}`)], { ok: "Drain it anyway", kind: "danger", cancel: "Leave it in service" });
    if (sure === null) return;
    try {
      changed(await ctx.api.post(path(machine), { confirm: machine.name, force: true }), `${name} is being drained`);
    } catch (again) {
      ctx.toast(`Not drained: ${again.message}`, "bad");
    }
  }

  async function undrain(machine) {
    try {
      changed(await ctx.api.del(path(machine)), `${brief(machine.name)} is back in service`);
    } catch (error) {
      ctx.toast(`Not taken back: ${error.message}`, "bad");
    }
  }

  const api = {
    show,
    /** Say what went wrong, unless something is shown already: then that stays, and the shell says that the gateway is away. Returns whether it was said. */
    fail(error, again) {
      if (!built) set(place, failed(error, again));
      return !built;
    },
    isBuilt: () => built,
    reveal,
    reload: () => {},
    close: () => watcher.disconnect(),
  };
  return api;
}
