// The forms of a service and of a whole fleet file. What is written keeps the file's words and units; the server checks it.

import { h, set } from "../../lib/dom.js";
import { bytes, count, DASH } from "../../lib/format.js";
import { button, field, input, select } from "../../lib/ui.js";

const MIXES = ["azure-conv", "azure-code", "burstgpt", "long-context", "reasoning", "1024x256", "512x128"];
/** Keys of a service that the form shows, with what they mean. */
const KEYS = [
  ["ttft", "First token within", "2s", "Time from the request to its first token, as 1500ms or 2s."],
  ["tpot", "Each further token within", "100ms", "As 80ms."],
  ["attainment", "Kept by", "95%", "The share of requests that must keep both."],
  ["rate", "Demand", "1/s", "Requests that arrive, as 4/s or 240/min."],
  ["lengths", "Prompts and answers", "azure-conv", "A mix of lengths, or tokens as PROMPTxANSWER: 1024x256."],
];
let catalog = null;

/** The models of the catalog, asked for once. */
const listModels = (ctx) => (catalog ??= ctx.api.get("/atoll/v1/catalog/models").then((told) => told.models, (error) => { catalog = null; throw error; }));

function describe(model) {
  const parts = [model.params ? `${count(model.params)} parameters` : null, model.weight_bytes ? `${bytes(model.weight_bytes)} of weights` : null, model.context ? `${count(model.context)} tokens of context` : null];
  return parts.filter(Boolean).join(", ") || DASH;
}

/** Choose a model: returns {node, read() -> {model, models} or throws, complain}. */
function modelChoice(ctx, given) {
  const list = h("datalist", { id: "catalog-models" });
  const where = select([["catalog", "Catalog"], ["hub", "Hugging Face"], ["folder", "Folder of weights"]], { value: "catalog" });
  const named = input({ value: given ?? "", list: "catalog-models", required: true });
  const facts = h("p", { class: "note", role: "status" });
  const line = field("Model", named, { note: "A name of the catalog, with a precision as qwen3-8b@fp8 if you like." });
  const notes = { catalog: "A name of the catalog, with a precision as qwen3-8b@fp8 if you like.", hub: "ORG/NAME, as Qwen/Qwen3-8B. Its config.json is read from the hub.", folder: "A folder that all machines see, with the config.json of its weights." };
  const noteOf = () => line.querySelector(".field-note");
  let models = [];
  listModels(ctx).then((found) => {
    models = found;
    set(list, found.filter((one) => one.is_text).map((one) => h("option", { value: one.name })));
    tell();
  }, (error) => line.complain(error.message));
  const asked = () => named.value.trim();
  function tell() {
    const known = models.find((one) => one.name === asked().split("@")[0]);
    set(facts, where.value === "catalog" && known ? describe(known) : "");
  }
  named.addEventListener("input", tell);
  where.addEventListener("change", () => {
    set(noteOf(), notes[where.value]);
    if (where.value === "catalog") named.setAttribute("list", "catalog-models");
    else named.removeAttribute("list");
    tell();
  });
  return {
    node: h("div", { class: "stack" }, h("div", { class: "pair-fields" }, field("Where it is from", where), line), list, facts),
    complain: line.complain,
    suggested: () => asked().split("@")[0].replace(/\/+$/, "").split("/").at(-1).toLowerCase().replace(/[^a-z0-9._-]+/g, "-"),
    on: (listener) => named.addEventListener("change", listener),
    async read() {
      if (where.value === "catalog") return { model: asked(), models: {} };
      const found = await ctx.api.post("/atoll/v1/catalog/models", { source: asked() });
      set(facts, describe(found));
      return { model: found.name, models: found.entry ? { [found.name]: found.entry } : {} };
    },
  };
}

const isPlain = (value) => value === undefined || typeof value === "string" || typeof value === "number";

/**
 * The form of a service. about: {name: null for a new one, entry, taken}. doing: {plan(edit, complain), cancel}.
 * Fields whose value is more than a word are left to the text.
 */
export function serviceForm(ctx, { name, entry, taken }, doing) {
  const model = entry.models ? null : modelChoice(ctx, name ? entry.model ?? name : "");
  const title = input({ value: name ?? "", required: true, disabled: Boolean(name) });
  const titleLine = field("Name", title, { note: name ? null : "What requests ask for." });
  let touched = Boolean(name);
  title.addEventListener("input", () => { touched = true; });
  model?.on(() => { if (!touched) title.value = model.suggested(); });
  const lines = KEYS.filter(([key]) => isPlain(entry[key])).map(([key, words, usual, note]) => {
    const control = input({ value: entry[key] ?? (name ? "" : usual), placeholder: key === "attainment" ? "95%" : "", list: key === "lengths" ? "length-mixes" : undefined });
    return { key, control, line: field(words, control, { note }) };
  });
  const left = KEYS.filter(([key]) => !isPlain(entry[key])).map(([, words]) => words.toLowerCase());
  const submit = button("Show the plan", null, { kind: "primary", symbol: "play", type: "submit" });

  /** Put an error of the server beside the field it is about. */
  function complain(error) {
    const about = (error.param ?? "").split(".");
    const at = about.at(-1);
    const line = lines.find((one) => one.key === at);
    if (line) line.line.complain(error.message);
    else if (model && (at === "model" || at === "source" || error.param === "models")) model.complain(error.message);
    else return false;
    return true;
  }

  return h("form", { class: "stack", onsubmit: async (event) => {
    event.preventDefault();
    for (const one of lines) one.line.complain("");
    model?.complain("");
    titleLine.complain("");
    const called = name ?? title.value.trim();
    if (!name && taken.includes(called)) return titleLine.complain("The fleet has a service of this name: change that one.");
    submit.disabled = true;
    try {
      const chosen = model ? await model.read() : { models: {} };
      const changed = {};
      if (model && chosen.model !== (entry.model ?? (name ? name : null))) changed.model = chosen.model;
      for (const { key, control } of lines) {
        const value = control.value.trim();
        if (value !== String(entry[key] ?? "")) changed[key] = value === "" ? null : value;
      }
      await doing.plan({ services: { [called]: changed }, models: chosen.models }, complain);
    } catch (error) {
      if (!complain(error)) ctx.toast(error.message, "bad");
    } finally {
      submit.disabled = false;
    }
  } }, model?.node, h("div", { class: "fields" }, titleLine, lines.map((one) => one.line)),
    h("datalist", { id: "length-mixes" }, MIXES.map((mix) => h("option", { value: mix }))),
    left.length || !model ? h("p", { class: "note" }, `Of this service ${[...left, model ? null : "which models answer"].filter(Boolean).join(", ")} can be changed in the text only.`) : null,
    h("div", { class: "row" }, submit, button("Cancel", doing.cancel)));
}

/** The whole file as text. doing: {plan(text, complain), cancel}. */
export function textForm(text, doing) {
  const area = h("textarea", { rows: 18, spellcheck: "false", class: "mono" });
  area.value = text;
  const line = field("Fleet file", area);
  return h("form", { class: "stack", onsubmit: (event) => {
    event.preventDefault();
    line.complain("");
    doing.plan(area.value, (error) => {
      if (error.status && error.status !== 400 && error.status !== 404) return false;
      line.complain(error.message);
      return true;
    });
  } }, line, h("div", { class: "row" }, button("Show the plan", null, { kind: "primary", symbol: "play", type: "submit" }), button("Cancel", doing.cancel)));
}
