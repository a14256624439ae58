// One turn on the page: what was asked, the answer as it grows, who gave it and how fast.

import { h, icon, set } from "../../lib/dom.js";
import { count, number, seconds } from "../../lib/format.js";
import { button, copyButton } from "../../lib/ui.js";
import { blobUrl, show } from "./attachments.js";
import { explain, figures } from "./conversation.js";
import { Growing } from "./markdown.js";
import { speech } from "./sound.js";

const ENDS = { length: "It ended at the most tokens that were allowed.", content_filter: "It was ended by a filter of the model." };

/** Machines that worked on an answer: gpu1 → gpu2, and in words what happened. */
function drawPath(path) {
  const names = path.map(({ name, provider }, at) => [at ? h("span", { class: "path-arrow" }, icon("arrow")) : null, h("bdi", { class: ["path-node", at < path.length - 1 && "left"], title: provider ? `${name} of ${provider}` : name }, name)]);
  const moves = path.slice(1).map(({ name, begun }, at) => (begun ? ["went on at ", h("bdi", {}, name), " after ", h("bdi", {}, path[at].name), " failed"] : [h("bdi", {}, name), " took over from ", h("bdi", {}, path[at].name)]));
  return h("span", { class: "path" }, h("span", { class: "path-nodes" }, h("span", { class: "unseen" }, "Answered by "), names),
    moves.length ? h("span", { class: "path-words" }, moves.at(-1), moves.length > 1 ? ` (${moves.length} moves)` : "") : null);
}

function drawFigures(answer) {
  const told = figures(answer);
  const one = (value, words, title) => h("span", { title }, h("b", {}, value), ` ${words}`);
  return [
    told.first_s === null ? null : one(seconds(told.first_s), "to first token", "From sending to the first piece of the answer, as seen here"),
    told.per_s === null ? null : one(`${told.counted ? "" : "≈ "}${number(told.per_s)}`, "tokens/s", "After the first token"),
    told.prompt === null ? null : one(count(told.prompt), "tokens of prompt", "With the whole conversation so far"),
    told.made === null ? null : one(count(told.made), "tokens of answer"),
  ];
}

/** The view of a turn. doing: {edit(turn, text), again(), busy() -> bool, role}. */
export class TurnView {
  #turn; #doing; #urls = []; #growing; #parts; #shown = {}; #timer = null; #editing = false;

  constructor(turn, doing) {
    this.#turn = turn;
    this.#doing = doing;
    const p = (this.#parts = {
      asked: h("div", { class: "asked" }), askedFoot: h("div", { class: "turn-foot" }),
      thinkText: h("div", { class: "think-text" }), text: h("div", { class: "markdown" }), speech: h("div", { class: "speech" }), calls: h("div", { class: "calls" }), wait: h("p", { class: "waiting" }),
      error: h("div"), path: h("div", { class: "told" }), numbers: h("div", { class: "told" }), foot: h("div", { class: "turn-foot" }),
    });
    p.think = h("details", { class: "think" }, h("summary", {}, "Thoughts"), p.thinkText);
    this.#growing = new Growing(p.text);
    this.node = h("li", { class: "turn" },
      h("article", { class: "bubble user", "aria-label": "You" }, p.asked, p.askedFoot),
      h("article", { class: "bubble answer", "aria-label": `Answer of ${turn.answer.model}` },
        h("div", { class: "speaker", title: turn.answer.model }, turn.answer.model), p.think, p.text, p.calls, p.wait, p.speech, p.error, h("div", { class: "tellings" }, p.path, p.numbers), p.foot));
    this.#drawAsked();
    this.paint(true);
  }

  #drawAsked() {
    const { user } = this.#turn;
    if (user.results) return set(this.#parts.asked, user.results.map((one) => h("div", { class: "asked-text" }, h("div", { class: "note" }, `Result of ${one.name}`), h("code", {}, one.text))));
    set(this.#parts.asked, user.text ? h("div", { class: "asked-text", dir: "auto" }, user.text) : null,
      user.attached.length ? h("ul", { class: "attachments" }, user.attached.map((one) => show(one, this.#urls))) : null);
  }

  /** Show how the answer stands; `last`: whether it is the last turn. */
  paint(last) {
    const { answer } = this.#turn;
    const p = this.#parts;
    const seen = this.#shown;
    const running = answer.state === "waiting" || answer.state === "writing";
    if (seen.text !== answer.text) this.#growing.update((seen.text = answer.text));
    p.think.hidden = !answer.think;
    if (seen.think !== answer.think) set(p.thinkText, (seen.think = answer.think));
    const calls = JSON.stringify([answer.calls, running, last && !this.#doing.busy()]);
    if (seen.calls !== calls) this.#drawCalls(answer, !running && last && !this.#doing.busy());
    seen.calls = calls;
    const waits = running && !answer.text && !answer.calls.length;
    p.wait.hidden = !waits;
    if (waits && seen.wait !== answer.think.length > 0) set(p.wait, h("span", { class: "spinner", "aria-hidden": "true" }), (seen.wait = answer.think.length > 0) ? "Thinking…" : "Waiting for the first token…");
    if (seen.path !== answer.path.length) set(p.path, (seen.path = answer.path.length) ? drawPath(answer.path) : null);
    set(p.numbers, drawFigures(answer));
    const state = `${answer.state} ${last} ${this.#doing.busy()} ${this.#editing}`;
    if (seen.state === state) return;
    seen.state = state;
    this.node.classList.toggle("running", running);
    if (!running && !seen.ended) this.#end(answer);
    this.#drawError(answer, last);
    const free = last && !this.#doing.busy();
    set(p.askedFoot, free && !this.#editing && !this.#turn.user.results ? button("Edit and resend", () => this.edit(), { kind: "small quiet" }) : null);
    set(p.foot, running ? null : [answer.text ? copyButton(() => answer.text, "Copy answer") : null, free && answer.state !== "failed" ? button("Answer again", () => this.#doing.again(), { kind: "small", symbol: "refresh" }) : null]);
  }

  #end(answer) {
    this.#shown.ended = true;
    const file = speech(answer.speech);
    if (file) set(this.#parts.speech, h("audio", { controls: true, src: blobUrl(file, this.#urls), "aria-label": "The answer as speech" }));
    const why = answer.state === "stopped" ? "Stopped." : ENDS[answer.finish];
    if (why) this.#parts.text.after(h("p", { class: "note ended" }, why));
    else if (answer.state === "done" && !answer.text && !answer.calls.length && !file) this.#parts.text.after(h("p", { class: "note ended" }, "The model ended without saying anything."));
  }

  /** Calls of tools; `open`: what they return may be told now. */
  #drawCalls(answer, open) {
    if (!answer.calls.length) return set(this.#parts.calls);
    const boxes = answer.calls.map((call) => h("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "what the tool returns, as text or JSON" }));
    const list = answer.calls.map((call, at) => h("div", { class: "call" }, h("div", {}, icon("play"), h("b", {}, call.name || "…")), h("pre", { tabindex: "0", "aria-label": `Arguments of ${call.name}` }, h("code", {}, call.arguments)), open && this.#doing.results ? boxes[at] : null));
    set(this.#parts.calls, list, open && this.#doing.results ? button("Send results", () => this.#doing.results(this.#turn, answer.calls.map((call, at) => ({ id: call.id, name: call.name, text: boxes[at].value || "null" }))), { kind: "small primary", symbol: "send" }) : null);
  }

  #drawError(answer, last) {
    clearInterval(this.#timer);
    if (!answer.error) return;
    const { title, text, wait_s = 0 } = explain(answer.error, { role: this.#doing.role, model: answer.model });
    const again = button("Try again", () => this.#doing.again(), { symbol: "refresh" });
    const until = answer.begun + wait_s * 1000;
    const tick = () => {
      const left = Math.ceil((until - performance.now()) / 1000);
      again.disabled = left > 0;
      again.lastChild.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
      if (left <= 0) clearInterval(this.#timer);
    };
    if (wait_s) this.#timer = setInterval(tick, 500);
    tick();
    set(this.#parts.error, h("div", { class: "chat-error", role: this.#shown.told ? null : "alert" }, icon("alert"), h("div", {}, h("strong", {}, title), h("p", {}, text)), last && !this.#doing.busy() ? again : null));
    this.#shown.told = true;
  }

  /** Change what was asked, in its place. */
  edit() {
    const { user } = this.#turn;
    const box = h("textarea", { rows: Math.min(12, user.text.split("\n").length + 1), "aria-label": "What you asked", dir: "auto" });
    box.value = user.text;
    const close = () => { this.#editing = false; this.#drawAsked(); this.#shown.state = null; this.paint(true); };
    const send = () => { if (box.value.trim() || user.attached.length) this.#doing.edit(this.#turn, box.value); };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.#editing = true;
    set(this.#parts.asked, box, user.attached.length ? h("ul", { class: "attachments" }, user.attached.map((one) => show(one, this.#urls))) : null);
    set(this.#parts.askedFoot, button("Cancel", close, { kind: "small" }), button("Send", send, { kind: "small primary", symbol: "send" }));
    box.focus();
  }

  dispose() {
    clearInterval(this.#timer);
    for (const url of this.#urls.splice(0)) URL.revokeObjectURL(url);
  }
}

/** Says finished sentences of an answer to a screen reader, a few at a time, never token by token. */
export class Speaker {
  #place; #said = 0; #timer = null; #text = "";

  constructor(place) {
    this.#place = place;
  }

  /** The answer so far; `end`: that is all of it. */
  hear(text, end = false) {
    this.#text = text;
    if (end) this.#say(text.length);
    else this.#timer ??= setTimeout(() => {
      this.#timer = null;
      const found = [...this.#text.slice(this.#said).matchAll(/[.!?。！？…:](?=\s)|\n/g)].at(-1);
      if (found) this.#say(this.#said + found.index + 1);
    }, 2500);
  }

  #say(upTo) {
    const words = this.#text.slice(this.#said, upTo).replace(/[*_`#|>~]+/g, " ").replace(/\s+/g, " ").trim();
    this.#said = upTo;
    if (words) set(this.#place, words);
  }

  reset() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#said = 0;
    this.#text = "";
    set(this.#place);
  }
}
