// What is served, where, on what and at which price; and how to ask for it.

import { h, icon, set } from "../lib/dom.js";
import { count, DASH, number, percent, perHour, plural, promiseText, seconds, usd } from "../lib/format.js";
import { patch } from "../lib/patch.js";
import { follow, gatewayDown, noGateway } from "../lib/services.js";
import { badge, button, copyButton, empty, failed, field, input, loading, select, snippet, stateBadge, table, tabs } from "../lib/ui.js";

const SHOWN = 12; // offers of a model before one asks for all
const name = (text) => h("bdi", {}, text);

// Filtering

/** The GPU types of "2xA100, L4". */
const gpuTypes = (gpus) => (gpus ?? "").split(",").map((part) => part.trim().replace(/^\d+\s*x\s*/i, "")).filter(Boolean);
const FACETS = [
  ["provider", "Provider", (offer) => (offer.provider ? [offer.provider] : [])],
  ["region", "Region", (offer) => (offer.region ? [offer.region] : [])],
  ["gpu", "GPU", (offer) => gpuTypes(offer.gpus)],
  ["precision", "Precision", (offer) => (offer.precision ? [offer.precision] : [])],
];

const modelWords = (model) => [model.name, ...(model.aliases ?? []), ...Object.keys(model.choice?.shares ?? {}), ...(model.takes ?? []), ...(model.makes ?? [])].join("\n").toLowerCase();
const offerWords = (offer) => [offer.machine, offer.name, offer.provider, offer.region, offer.gpus, offer.precision, offer.kind, offer.state].filter(Boolean).join("\n").toLowerCase();

/** Models that a filter lets through, each with the offers that fit: [{model, offers}]. */
function sift(models, filter) {
  const terms = filter.q.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = FACETS.filter(([id]) => filter[id]);
  const found = [];
  for (const model of models) {
    const words = modelWords(model);
    const left = terms.filter((term) => !words.includes(term));
    const offers = (model.offers ?? []).filter((offer) => {
      const own = left.length ? offerWords(offer) : "";
      return left.every((term) => own.includes(term)) && chosen.every(([id, , read]) => read(offer).includes(filter[id]));
    });
    if (offers.length || (!left.length && !chosen.length)) found.push({ model, offers });
  }
  return found;
}

// How to ask

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const has = (list, word) => (list ?? []).some((each) => each.startsWith(word));

/** What a model is asked for: chat, hear, speak, draw or embed. */
function useOf({ takes, makes }) {
  if (has(makes, "text")) return has(takes, "text") || has(takes, "image") || !has(takes, "audio") ? "chat" : "hear";
  if (has(makes, "audio") || has(makes, "speech")) return "speak";
  if (has(makes, "image")) return "draw";
  return has(makes, "embedding") || has(makes, "vector") ? "embed" : "chat";
}

function snippets(model, url, keyed) {
  const use = useOf(model);
  const text = (value) => JSON.stringify(value);
  const auth = keyed ? ` \\\n  -H "Authorization: Bearer $ATOLL_API_KEY"` : "";
  const asJson = (path, body) => `curl ${quote(url + path)}${auth} \\\n  -H "Content-Type: application/json" \\\n  -d ${quote(JSON.stringify(body))}`;
  const client = `${keyed ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${text(url)}, api_key=${keyed ? 'os.environ["ATOLL_API_KEY"]' : '"none"'})\n`;
  const id = text(model.name);
  const hello = [{ role: "user", content: "Say hello in five words." }];
  const stream = `stream = client.chat.completions.create(\n    model=${id},\n    messages=[{"role": "user", "content": "Say hello in five words."}],\n    stream=True,\n)\nfor chunk in stream:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)\n`;
  const picture = `import base64\n\nwith open("picture.png", "rb") as file:\n    picture = base64.b64encode(file.read()).decode()\nanswer = client.chat.completions.create(\n    model=${id},\n    messages=[{"role": "user", "content": [\n        {"type": "text", "text": "What do you see?"},\n        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},\n    ]}],\n)\nprint(answer.choices[0].message.content)\n`;
  const made = {
    chat: [["curl", asJson("/chat/completions", { model: model.name, messages: hello })], ["Python", client + stream]],
    hear: [["curl", `curl ${quote(`${url}/audio/transcriptions`)}${auth} \\\n  -F ${quote(`model=${model.name}`)} -F file=@speech.wav`], ["Python", `${client}with open("speech.wav", "rb") as file:\n    print(client.audio.transcriptions.create(model=${id}, file=file).text)\n`]],
    speak: [["curl", `${asJson("/audio/speech", { model: model.name, input: "Hello.", voice: "default" })} \\\n  -o hello.wav`], ["Python", `${client}answer = client.audio.speech.create(model=${id}, input="Hello.", voice="default", response_format="wav")\nanswer.write_to_file("hello.wav")\n`]],
    draw: [["curl", asJson("/images/generations", { model: model.name, prompt: "A red circle" })], ["Python", `${client}answer = client.images.generate(model=${id}, prompt="A red circle")\nprint(len(answer.data[0].b64_json), "bytes in base64")\n`]],
    embed: [["curl", asJson("/embeddings", { model: model.name, input: "Hello." })], ["Python", `${client}answer = client.embeddings.create(model=${id}, input="Hello.")\nprint(answer.data[0].embedding[:4])\n`]],
  }[use];
  if (use === "chat" && has(model.takes, "image")) made.push(["Python, with a picture", `${client.replace("import os\n\n", "import os\n")}${picture}`]);
  return made;
}

function howTo(model, session) {
  const url = session.base_url ?? "http://GATEWAY:8080/v1";
  const keyed = session.keys_needed !== false;
  const made = snippets(model, url, keyed);
  const key = `use ${model.name} ${url} ${keyed} ${useOf(model)} ${made.length}`;
  return h("details", { class: "how", dataset: { key: "how" } }, h("summary", {}, "Use it from your code"),
    h("div", { dataset: { key, keep: "" } }, tabs(`Ways to ask ${model.name}`, made.map(([title, text]) => ({ name: title, draw: () => snippet(text) }))),
      keyed ? h("p", { class: "note" }, "Put your key into the environment first: ", h("code", {}, "export ATOLL_API_KEY=atoll-…"), ". ", h("a", { href: "/keys" }, "Keys"), " shows how to get one.") : null));
}

// Offers

function price(offer) {
  const some = [offer.usd_per_mtoken_in, offer.usd_per_mtoken_out].some(Number.isFinite);
  if (some) return [h("span", {}, `${usd(offer.usd_per_mtoken_in)} in, ${usd(offer.usd_per_mtoken_out)} out`), h("div", { class: "note" }, "per M tokens")];
  return perHour(offer.usd_per_hour);
}

function latency(offer) {
  const parts = [];
  if (Number.isFinite(offer.first_token_s)) parts.push(h("div", {}, `${seconds(offer.first_token_s)} to first token`));
  if (Number.isFinite(offer.mean_s)) parts.push(h("div", { class: "note" }, `${seconds(offer.mean_s)} an answer`));
  return parts.length ? parts : DASH;
}

function provider(offer) {
  if (!offer.provider) return DASH;
  const mark = offer.verified === true ? h("span", { class: "verified", title: "Its certificate says so" }, icon("check"), "verified") : offer.verified === false ? h("span", { class: "note", title: "It says so itself; nobody has checked" }, "not verified") : null;
  return [name(offer.provider), mark ? h("div", {}, mark) : null];
}

const OFFERS = [
  { name: "Machine", cell: (o) => [h("a", { href: `/machines?id=${encodeURIComponent(o.machine)}` }, name(o.name || o.machine)), h("div", { class: "note" }, o.region ? name(o.region) : null)] },
  { name: "Provider", cell: provider },
  { name: "Hardware", cell: (o) => [name(o.gpus ?? DASH), o.kind ? h("div", { class: "note" }, name(o.kind)) : null] },
  { name: "Precision", cell: (o) => name(o.precision ?? DASH) },
  { name: "Context", value: (o) => (o.context ? `${number(o.context)} tokens` : DASH) },
  { name: "Price", cell: price },
  { name: "Latency", cell: latency },
  { name: "State", cell: (o) => [stateBadge(o.state), o.running ? h("div", { class: "note" }, `${count(o.running)} running`) : null] },
];

function choiceBar(shares) {
  const parts = Object.entries(shares).sort((a, b) => b[1] - a[1]);
  return h("div", { class: "choice" }, h("p", { class: "note" }, "A choice: each request goes to one of these models, in these shares."),
    h("ul", {}, parts.map(([each, share], at) => {
      const bar = h("span", { class: ["choice-bar", `tone-${at % 6}`], "aria-hidden": "true" });
      bar.style.setProperty("--share", `${Math.max(0, Math.min(1, share || 0)) * 100}%`);
      return h("li", {}, h("a", { href: `/models?q=${encodeURIComponent(each)}` }, name(each)), h("span", { class: "choice-track" }, bar), h("span", { class: "choice-text" }, percent(share)));
    })));
}

function modelCard({ model, offers }, ctx, all, showAll) {
  const every = model.offers ?? [];
  const up = every.filter((offer) => offer.state === "up").length;
  const state = every.length ? (up ? badge(up < every.length ? `${up} of ${every.length} up` : plural(up, "machine"), up < every.length ? "warn" : "good") : badge("down", "bad")) : model.choice ? badge("choice", "info") : badge("nobody serves it", "bad");
  const facts = [
    `${(model.takes ?? ["text"]).join(", ")} → ${(model.makes ?? ["text"]).join(", ")}`,
    model.context ? `context ${number(model.context)} tokens` : null,
    model.promise ? `promise: ${promiseText(model.promise)}` : null,
  ].filter(Boolean);
  const cut = all ? offers : offers.slice(0, SHOWN);
  return h("section", { class: "card model", "aria-label": model.name, dataset: { key: model.name } },
    h("header", { class: "card-head" }, h("h2", {}, name(model.name), " ", state),
      h("div", { class: "actions" }, copyButton(model.name, "Copy name"), ctx.can("member") ? h("a", { class: "button small", href: `/chat?model=${encodeURIComponent(model.name)}` }, icon("chat"), "Try in chat") : null)),
    h("p", { class: "facts" }, facts.map((fact) => h("span", {}, fact))),
    model.aliases?.length ? h("p", { class: "facts" }, "Also called ", model.aliases.map((alias, at) => [at ? ", " : "", h("code", {}, name(alias))])) : null,
    model.stand_in ? h("p", { class: "notice" }, "Other weights stand in for this model: ", name(model.stand_in)) : null,
    model.choice ? choiceBar(model.choice.shares ?? {}) : null,
    offers.length ? table(OFFERS, cut, { caption: `Machines that serve ${model.name}` }) : null,
    cut.length < offers.length ? h("p", { dataset: { key: `all ${offers.length}` } }, button(`Show all ${plural(offers.length, "machine")}`, showAll, { kind: "small" })) : null,
    offers.length < every.length ? h("p", { class: "note" }, `${plural(every.length - offers.length, "machine")} of this model left out by the filter`) : null,
    howTo(model, ctx.session));
}

function address(session) {
  const url = session.base_url;
  if (!url) return null;
  return h("p", { class: "address" }, h("span", {}, "Base URL"), h("code", {}, url), copyButton(url), h("span", { class: "note" }, session.keys_needed === false ? "OpenAI’s API; no key is needed" : "OpenAI’s API; with a key as bearer token"));
}

export const page = {
  mount(root, ctx) {
    const filter = { q: ctx.params.get("q") ?? "" };
    for (const [id] of FACETS) filter[id] = ctx.params.get(id) ?? "";
    let told = null;
    let version = null;
    let busy = false;
    let gone = false;
    const unfolded = new Set();

    const box = input({ type: "search", value: filter.q, placeholder: "name, provider, region, GPU, precision…", oninput: () => change("q", box.value) });
    const facets = h("div", { class: "facets" });
    const found = h("p", { class: "note", role: "status" });
    const clear = button("Clear", () => {
      for (const id of Object.keys(filter)) filter[id] = "";
      for (const control of [box, ...facets.querySelectorAll("select")]) control.value = "";
      change();
      box.focus();
    }, { kind: "small" });
    const where = h("div");
    const bar = h("section", { class: "card filter", "aria-label": "Filter" }, where, h("div", { class: "filter-row" }, field("Filter (press / to come here)", box), facets), h("div", { class: "row" }, found, clear));
    const list = h("div", { class: "stack" }, loading());
    root.append(bar, list);
    bar.hidden = true;

    function change(id, value) {
      if (id) filter[id] = value;
      const query = new URLSearchParams(Object.entries(filter).filter(([, text]) => text)).toString();
      history.replaceState(null, "", query ? `/models?${query}` : "/models");
      draw();
    }

    function drawFacets() {
      const offers = (told?.models ?? []).flatMap((model) => model.offers ?? []);
      const wanted = FACETS.map(([id, title, read]) => {
        const values = [...new Set(offers.flatMap(read))].sort();
        if (filter[id] && !values.includes(filter[id])) values.push(filter[id]);
        return [id, title, values];
      }).filter(([id, , values]) => values.length > 1 || filter[id]);
      patch(facets, wanted.map(([id, title, values]) => h("div", { dataset: { key: `${id} ${JSON.stringify(values)}`, keep: "" } },
        field(title, select([["", "any"], ...values.map((value) => [value, value])], { value: filter[id], onchange: (event) => change(id, event.target.value) })))));
    }

    function draw() {
      if (!told) return;
      const models = told.models ?? [];
      bar.hidden = false;
      if (!models.length) {
        bar.hidden = true;
        return set(list, h("section", { class: "card", "aria-label": "No model" }, empty("No model is served yet", "The gateway runs and waits for machines. On a machine with an engine:", snippet("atoll join --fabric @cluster.token -- vllm serve MODEL"), h("p", {}, "More ways to start are on the ", h("a", { href: "/overview" }, "overview"), "."))));
      }
      const shown = sift(models, filter);
      clear.hidden = !Object.values(filter).some(Boolean);
      set(found, shown.length === models.length ? plural(models.length, "model") : `${shown.length} of ${plural(models.length, "model")}`);
      patch(list, shown.length ? shown.map((each) => modelCard(each, ctx, unfolded.has(each.model.name), () => { unfolded.add(each.model.name); draw(); })) : h("section", { class: "card", dataset: { key: "\nnone" } }, empty("Nothing fits this filter", "Take a word away, or clear it.")));
      return null;
    }

    async function load() {
      if (busy) return;
      busy = true;
      try {
        const answer = await ctx.api.get("/atoll/v1/models");
        if (gone) return;
        if (!told) set(list);
        told = answer;
        version = answer.version ?? version;
        if (!where.hasChildNodes()) set(where, address(ctx.session));
        drawFacets();
        draw();
      } catch (error) {
        if (gone) return;
        if (told) ctx.toast(`Models could not be asked for again: ${error.message}`, "bad");
        else set(list, h("section", { class: "card", "aria-label": "Models" }, failed(error, () => { set(list, loading()); load(); })));
      } finally {
        busy = false;
      }
    }

    const stop = ctx.live.on("gateway", (snapshot) => {
      if (!told ? !busy : version !== null && snapshot.version !== version) load();
    });
    const hotkey = (event) => {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, textarea, select, dialog")) return;
      event.preventDefault();
      box.focus();
    };
    document.addEventListener("keydown", hotkey);
    const deaf = follow(ctx, "gateway", (state, why) => {
      if (told) return;
      if (state === "up") load();
      else set(list, state === "none" ? noGateway("Start one, and this page shows what it serves:") : gatewayDown(why));
    });
    return () => { gone = true; stop(); deaf(); document.removeEventListener("keydown", hotkey); };
  },
};
