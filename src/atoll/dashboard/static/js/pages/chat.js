// Chat: a conversation with any model that is served, in the memory of this page only.

import { h, icon, set } from "../lib/dom.js";
import { number, plural } from "../lib/format.js";
import { follow, gatewayDown, noGateway } from "../lib/services.js";
import { badge, button, empty, failed, field, iconButton, input, loading, snippet, toast } from "../lib/ui.js";
import { picture, sound, Tray } from "./chat/attachments.js";
import { ask, EXAMPLE_TOOLS, newAnswer, readTools, requestBody } from "./chat/conversation.js";
import { canRecord, record } from "./chat/sound.js";
import { Speaker, TurnView } from "./chat/turn.js";

const OFTEN_MS = 100; // the answer is drawn at most ten times a second
const NEAR_PX = 96; // a reader this close to the end follows it
const FRESH = () => ({ turns: [], model: null, draft: "", other: null, settings: { system: "", temperature: null, maxTokens: null, speak: false, voice: "", tools: null, toolText: "" } });
const kept = new WeakMap(); // what was said, by login: it goes with the login

const KINDS = { text: "text", image: "pictures", audio: "sound", video: "video" };
const words = (kinds) => kinds.map((kind) => KINDS[kind] ?? kind).join(", ");
const talks = (model) => model.makes.includes("text") || model.makes.includes("audio");
const upOf = (model) => model.offers.filter((offer) => offer.state === "up").length;

/** A model as the page needs it, whatever is null. */
function clean(model) {
  return { ...model, aliases: model.aliases ?? [], takes: model.takes ?? ["text"], makes: model.makes ?? ["text"], offers: model.offers ?? [] };
}

export const page = {
  mount(root, ctx) {
    if (!kept.has(ctx.session)) kept.set(ctx.session, FRESH());
    const place = h("div", { class: "chat" });
    root.append(place);
    let chat = null;
    let version = null;
    let gone = false;
    let broken = false;
    const load = async () => {
      try {
        const told = await ctx.api.get("/atoll/v1/models");
        if (gone) return;
        version = told.version;
        const models = (told.models ?? []).map(clean).filter(talks);
        if (chat) chat.know(models);
        else if (models.length) chat = openChat(place, ctx, kept.get(ctx.session), models);
        else set(place, nothing());
      } catch (error) {
        if (gone || chat) return;
        broken = true;
        set(place, failed(error, start));
      }
    };
    const start = () => { broken = false; set(place, loading()); load(); };
    set(place, loading());
    const stop = follow(ctx, "gateway", (state, why) => {
      if (chat) return;
      if (state === "up") start();
      else set(place, state === "none" ? noGateway("A gateway answers for all models. Start one, and this page finds it:") : gatewayDown(why));
    });
    const deaf = ctx.live.on("gateway", (told) => {
      if (broken) start();
      else if (version !== null && told.version !== undefined && told.version !== version) { version = told.version; load(); }
    });
    return () => { gone = true; stop(); deaf(); chat?.close(); };
  },
};

function nothing() {
  return h("div", { class: "card" }, empty("No model to talk to yet", "As soon as a machine serves a model, you can choose it here. On a machine with a GPU and vLLM:", snippet('atoll join --fabric @site.token -- vllm serve MODEL --port "{port}"'), h("a", { href: "/machines" }, "More on adding machines")));
}

function openChat(place, ctx, state, models) {
  const may = ctx.can("member");
  let chosen = null;
  let running = null;
  let timer = null;
  let recording = null;
  let closed = false;
  let speakLine = null;
  const views = new Map();

  // What there is to see
  const choice = h("select", { id: "chat-model", onchange: () => choose(choice.value) });
  const against = h("select", { id: "chat-other", onchange: () => compare(against.value) });
  const about = h("p", { class: "note chat-about" });
  const thread = h("ol", { class: "thread", "aria-label": "Conversation" });
  const hint = h("div", { class: "chat-hint" });
  const heard = h("div", { class: "unseen", "aria-live": "polite" });
  const speaker = new Speaker(heard);
  const tray = new Tray();
  const box = h("textarea", { id: "chat-text", rows: 1, dir: "auto", placeholder: "Ask something…", "aria-label": "Message", disabled: !may, oninput: () => { state.draft = box.value; fit(); }, onkeydown: (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  }, onpaste: (event) => take(event.clipboardData?.files, event) });
  const files = h("input", { type: "file", multiple: true, hidden: true, onchange: () => { take(files.files); files.value = ""; } });
  const attach = iconButton("Attach a picture or a sound", "image", () => files.click());
  const mic = iconButton("Record a sound", "sound", () => (recording ? endRecording() : beginRecording()));
  const send = h("button", { class: "button primary chat-send", type: "submit", disabled: !may }, icon("send"), h("span", {}, "Send"));
  const stop = h("button", { class: "button danger chat-stop", type: "button", hidden: true, onclick: () => { running?.abort(); box.focus(); } }, icon("stop"), h("span", {}, "Stop"));
  const toEnd = button("To the end", () => scrollTo({ top: document.documentElement.scrollHeight }), { kind: "small to-end", symbol: "arrow" });
  toEnd.hidden = true;
  const fresh = button("New conversation", renew, { symbol: "plus" });
  const form = h("form", { class: "composer", "aria-label": "Write to the model", onsubmit: (event) => { event.preventDefault(); submit(); } },
    toEnd, tray.node, h("div", { class: "composer-row" }, attach, mic, box, send, stop, files),
    h("p", { class: "note composer-note" }, may ? [h("span", { class: "keys" }, h("kbd", {}, "Enter"), " sends, ", h("kbd", {}, "Shift"), "+", h("kbd", {}, "Enter"), " is a new line. "), "Nothing is stored: the conversation is in this page’s memory and gone when you reload or log out."]
      : "Asking is for members and admins."));
  set(place,
    h("div", { class: "chat-bar" }, h("div", { class: "chat-choice" }, h("label", { for: choice.id, class: "unseen" }, "Model"), choice, h("label", { for: against.id, class: "unseen" }, "Compare with"), against, about), fresh),
    h("div", { class: "chat-grid" }, h("section", { class: "chat-main", "aria-label": "Conversation" }, h("h2", { class: "unseen" }, "Conversation"), hint, thread, form), settingsPanel()),
    heard);
  box.value = state.draft;

  // Models

  function find(name) {
    return models.find((model) => model.name === name) ?? models.find((model) => model.aliases.includes(name)) ?? null;
  }

  function know(next) {
    models = next;
    const names = new Set(models.map((model) => model.name));
    set(choice, models.map((model) => h("option", { value: model.name }, upOf(model) || !model.offers.length ? model.name : `${model.name} (no machine up)`)));
    const other = state.other;
    set(against, h("option", { value: "" }, "Compare with…"), models.filter((model) => model.name !== chosen?.name).map((model) => h("option", { value: model.name, selected: model.name === other }, model.name)));
    if (chosen && !names.has(chosen.name)) choice.append(h("option", { value: chosen.name }, `${chosen.name} (not served now)`));
    if (chosen) chosen = find(chosen.name) ?? { ...chosen, offers: [] };
    describe();
  }

  /** Ask a second model the same from now on; nothing: only one. */
  function compare(name) {
    state.other = find(name)?.name ?? null;
    const query = new URLSearchParams(location.search);
    if (state.other) query.set("other", state.other);
    else query.delete("other");
    history.replaceState(null, "", `/chat?${query}`);
    know(models);
  }

  function choose(name) {
    chosen = find(name);
    state.model = chosen.name;
    if (state.other === chosen.name) compare("");
    else know(models);
    const query = new URLSearchParams(location.search);
    query.set("model", chosen.name);
    history.replaceState(null, "", `/chat?${query}`);
    describe();
    if (!state.turns.length) drawHint();
  }

  function describe() {
    if (!chosen) return;
    choice.value = chosen.name;
    choice.title = chosen.name;
    const up = upOf(chosen);
    set(about, badge(up ? `${plural(up, "machine")} up` : "no machine up", up ? "good" : "bad"),
      h("span", {}, `takes ${words(chosen.takes)}${chosen.context ? `, ${number(chosen.context)} tokens of context` : ""}`),
      chosen.stand_in ? h("span", { class: "stand-in" }, badge("stand-in", "warn"), " other weights answer for this model: ", h("bdi", {}, chosen.stand_in)) : null);
    const [pictures, sounds] = ["image", "audio"].map((kind) => chosen.takes.includes(kind));
    attach.hidden = !may || !(pictures || sounds);
    mic.hidden = !may || !sounds || !canRecord();
    attach.setAttribute("aria-label", `Attach ${pictures && sounds ? "a picture or a sound" : pictures ? "a picture" : "a sound"}`);
    attach.title = attach.getAttribute("aria-label");
    files.accept = [pictures && "image/*", sounds && "audio/*"].filter(Boolean).join(",");
    speakLine.hidden = !chosen.makes.includes("audio");
  }

  // Settings

  function settingsPanel() {
    const own = state.settings;
    const numeric = (value) => (value.trim() === "" || !Number.isFinite(Number(value)) ? null : Number(value));
    const system = h("textarea", { rows: 4, placeholder: "You are a helpful assistant.", dir: "auto", oninput: () => { own.system = system.value; } });
    system.value = own.system;
    const heat = input({ type: "number", min: 0, max: 2, step: 0.1, inputmode: "decimal", placeholder: "the model’s own", value: own.temperature ?? "", oninput: () => { own.temperature = numeric(heat.value); } });
    const most = input({ type: "number", min: 1, step: 1, inputmode: "numeric", placeholder: "no limit", value: own.maxTokens ?? "", oninput: () => { const n = numeric(most.value); own.maxTokens = n === null ? null : Math.max(1, Math.round(n)); } });
    const spoken = h("input", { type: "checkbox", id: "chat-speak", checked: own.speak, onchange: () => { own.speak = spoken.checked; } });
    const voice = input({ placeholder: "the model’s own", maxlength: 100, value: own.voice, oninput: () => { own.voice = voice.value.trim(); } });
    speakLine = h("div", { class: "stack" }, h("div", { class: "row" }, spoken, h("label", { for: spoken.id }, "Answer with speech, too")), field("Voice", voice, { note: "A voice that the model knows." }));
    const panel = h("details", { class: "card chat-settings" }, h("summary", {}, h("h2", {}, "Settings")), h("div", { class: "stack" },
      field("System prompt", system, { note: "Tells the model how to behave; goes before the conversation." }),
      field("Temperature", heat, { note: "0: the likeliest words; 1: freer; up to 2." }),
      field("Most tokens of an answer", most), speakLine, toolsPanel(own)));
    panel.open = matchMedia("(min-width: 1180px)").matches;
    return panel;
  }

  function toolsPanel(own) {
    const text = h("textarea", { rows: 4, spellcheck: "false", class: "mono", oninput: () => read() });
    text.value = own.toolText;
    const line = field("Tools", text, { note: "Functions that the model may call, as OpenAI’s API has them (JSON). You tell it what they return." });
    function read() {
      own.toolText = text.value;
      try {
        own.tools = readTools(text.value);
        line.complain("");
      } catch (error) {
        own.tools = null;
        line.complain(error.message);
      }
    }
    return h("div", { class: "stack" }, line, h("div", { class: "row" }, button("Insert an example", () => { text.value = EXAMPLE_TOOLS; read(); }, { kind: "small" })));
  }

  // The thread

  function drawHint() {
    hint.hidden = state.turns.length > 0;
    if (state.turns.length || !chosen) return;
    if (!may) set(hint, h("div", { class: "state empty" }, icon("info"), h("h3", {}, "You can look, but not ask models"), h("p", {}, "You are logged in as viewer. An admin can make you a key of role member on the page Keys and usage.")));
    else set(hint, h("div", { class: "state empty" }, icon("chat"), h("h3", {}, "Say hello to ", h("bdi", {}, chosen.name)),
      h("p", {}, "Each answer tells which machine gave it, how long the first token took and how fast it wrote. If a machine fails in the middle, another one goes on.")));
  }

  const atEnd = () => document.documentElement.scrollHeight - (scrollY + innerHeight) < NEAR_PX;
  const follow = () => scrollTo({ top: document.documentElement.scrollHeight });
  function watchEnd() { toEnd.hidden = !running || atEnd(); }

  const doing = { role: ctx.session?.role ?? "viewer", busy: () => Boolean(running) || !may, again: () => run(state.turns.at(-1)), edit: (turn, text) => { turn.user = { ...turn.user, text }; run(turn); }, results: (turn, results) => reply(turn, results) };
  // Of a model that is compared only the answers: what was asked stands beside them already.
  const doingTwin = { ...doing, busy: () => true, results: null };
  const allTurns = () => state.turns.flatMap((turn) => [turn, turn.twin].filter(Boolean));

  /** Show all turns; only `anew` is made again where it stood already. */
  function draw(anew = null) {
    const all = allTurns();
    for (const [turn, view] of views) {
      if (turn !== anew && turn !== anew?.twin && all.includes(turn)) continue;
      view.dispose();
      view.node.remove();
      views.delete(turn);
    }
    for (const turn of all) {
      if (views.has(turn)) continue;
      const isTwin = !state.turns.includes(turn);
      const view = new TurnView(turn, isTwin ? doingTwin : doing);
      view.node.classList.toggle("twin", isTwin);
      view.node.classList.toggle("paired", Boolean(turn.twin));
      views.set(turn, view);
      thread.append(view.node);
    }
    thread.classList.toggle("compare", all.length > state.turns.length);
    drawHint();
    paintAll();
  }

  function paintAll() {
    const last = state.turns.at(-1);
    for (const [turn, view] of views) view.paint(turn === last || turn === last?.twin);
    send.hidden = Boolean(running);
    stop.hidden = !running;
    fresh.disabled = !state.turns.length;
  }

  function fit() {
    box.style.height = "auto";
    box.style.height = `${Math.min(innerHeight * 0.4, box.scrollHeight + 2)}px`;
  }

  // Asking

  function submit() {
    const text = box.value;
    if (running || !may || recording) return;
    if (!text.trim() && !tray.items.length) { box.focus(); return; }
    add({ text: text.trim() ? text : "", attached: tray.take() });
    box.value = state.draft = "";
    fit();
  }

  function add(user) {
    const turn = { user, answer: newAnswer(chosen.name) };
    if (state.other && find(state.other) && !user.results) turn.twin = { user, answer: newAnswer(state.other) };
    state.turns.push(turn);
    run(turn);
  }

  /** Tell the model what the tools that it called have returned. */
  function reply(turn, results) {
    if (!running && may && turn === state.turns.at(-1)) add({ text: "", attached: [], results });
  }

  /** Ask for the answer of the last turn, for the first time or again. */
  async function run(turn) {
    if (running || !may) return;
    const stopper = (running = new AbortController());
    const answer = (turn.answer = newAnswer(chosen.name));
    const body = requestBody(state.turns, state.settings, chosen);
    const twin = turn.twin ?? null;
    const second = twin && (find(twin.answer.model) ?? { name: twin.answer.model, takes: ["text"], makes: ["text"] });
    if (twin) Object.assign(twin, { user: turn.user, answer: newAnswer(second.name) });
    speaker.reset();
    draw(turn);
    follow();
    const view = views.get(turn);
    let cost = 0;
    const paint = () => {
      timer = null;
      const near = atEnd();
      const from = performance.now();
      view.paint(true);
      if (twin) views.get(twin)?.paint(true);
      cost = performance.now() - from;
      if (near) follow();
      watchEnd();
      speaker.hear(answer.text);
    };
    // Where drawing is slow, it happens less often: the page stays smooth.
    const changed = () => { if (!closed) timer ??= setTimeout(paint, Math.max(OFTEN_MS, 6 * cost)); };
    const asked = [ask(ctx.api, body, answer, { signal: stopper.signal, changed })];
    if (twin) asked.push(ask(ctx.api, requestBody(state.turns.map((each) => each.twin).filter(Boolean), state.settings, second), twin.answer, { signal: stopper.signal, changed }));
    await Promise.all(asked);
    clearTimeout(timer);
    timer = null;
    running = null;
    if (closed) return;
    const near = atEnd();
    const held = stop === document.activeElement;
    paintAll();
    if (near) follow();
    watchEnd();
    speaker.hear(answer.text, true);
    if (held) box.focus();
  }

  function renew() {
    running?.abort();
    state.turns = [];
    speaker.reset();
    tray.take();
    draw();
    box.focus();
  }

  // Pictures and sounds

  async function take(list, event = null) {
    const all = [...(list ?? [])];
    if (!all.length || !may) return;
    event?.preventDefault();
    for (const file of all) {
      const kind = file.type.startsWith("image/") ? "image" : file.type.startsWith("audio/") ? "audio" : null;
      try {
        if (!kind) throw new Error(`${file.name}: only pictures and sounds can go along`);
        if (!chosen.takes.includes(kind)) throw new Error(`${chosen.name.slice(0, 60)} does not take ${KINDS[kind]}`);
        const made = kind === "image" ? await picture(file) : await sound(file);
        if (!closed) tray.add(made);
      } catch (error) {
        toast(error.message, "bad");
      }
    }
  }

  async function beginRecording() {
    try {
      recording = await record();
      if (closed) return recording.cancel();
      mic.classList.add("recording");
      mic.setAttribute("aria-label", "End the recording");
      mic.title = "End the recording";
      set(mic, icon("stop"));
    } catch {
      toast("The browser does not let this page use the microphone", "bad");
    }
  }

  async function endRecording() {
    const it = recording;
    mic.classList.remove("recording");
    mic.setAttribute("aria-label", "Record a sound");
    mic.title = "Record a sound";
    set(mic, icon("sound"));
    try {
      const file = await it.stop();
      if (!closed) tray.add(await sound(file, "recording.wav"));
    } catch {
      toast("Nothing was recorded", "bad");
    } finally {
      recording = null;
    }
  }

  const over = (event) => { if (event.dataTransfer?.types.includes("Files")) { event.preventDefault(); place.classList.add("drop"); } };
  const off = () => place.classList.remove("drop");
  place.addEventListener("dragover", over);
  place.addEventListener("dragleave", off);
  place.addEventListener("drop", (event) => { off(); event.preventDefault(); take(event.dataTransfer?.files); });
  addEventListener("scroll", watchEnd, { passive: true });

  const wanted = ctx.params.get("model");
  state.other = find(ctx.params.get("other") ?? state.other)?.name ?? null;
  know(models);
  const start = (wanted && find(wanted)) || (state.model && find(state.model)) || models.find((model) => upOf(model)) || models[0];
  choose(start.name);
  if (wanted && !find(wanted)) toast(`${wanted.slice(0, 80)} is not served here: ${start.name.slice(0, 80)} is chosen instead`, "bad");
  draw();
  fit();
  if (state.turns.length) requestAnimationFrame(follow);
  if (may && matchMedia("(min-width: 760px)").matches) setTimeout(() => { if (!closed) box.focus({ preventScroll: true }); });

  return {
    know,
    close() {
      closed = true;
      running?.abort();
      recording?.cancel();
      clearTimeout(timer);
      speaker.reset();
      tray.dispose();
      removeEventListener("scroll", watchEnd);
      for (const view of views.values()) view.dispose();
    },
  };
}
