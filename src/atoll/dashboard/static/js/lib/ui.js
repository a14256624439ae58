// Parts that pages are made of. All take text as text.

import { h, icon, set } from "./dom.js";
import { sentence } from "./format.js";

/** A box with a heading. `actions` stand at its right. */
export function card(title, { actions = [], note = null, id = null, wide = false } = {}, ...children) {
  return h("section", { class: ["card", wide && "wide"], id, "aria-label": title },
    h("header", { class: "card-head" }, h("h2", {}, title), actions.length ? h("div", { class: "actions" }, actions) : null),
    note ? h("p", { class: "note" }, note) : null,
    h("div", { class: "card-body" }, children));
}

/** A figure with its name: figure("Cost", "$14.98/h", {note: "2.3 a million tokens", tone: "good"}). */
export function figure(name, value, { note = null, tone = null, extra = null } = {}) {
  return h("div", { class: ["figure", tone] }, h("div", { class: "figure-name" }, name), h("div", { class: "figure-value" }, value), note ? h("div", { class: "figure-note" }, note) : null, extra);
}

/** A word in a coloured pill; tone: good, warn, bad, info or none. The word says it, not the colour alone. */
export const badge = (text, tone = "") => h("span", { class: ["badge", tone] }, text);

const TONES = { up: "good", active: "good", ready: "good", serving: "good", optimal: "good", starting: "info", draining: "warn", drained: "warn", waiting: "warn", ejected: "bad", down: "bad", failed: "bad", left: "", revoked: "", expired: "warn", gone: "" };
export const stateBadge = (state) => badge(state ?? "unknown", TONES[state] ?? "");

export function button(text, onclick, { kind = "", symbol = null, disabled = false, title = null, type = "button", id = null } = {}) {
  return h("button", { class: ["button", kind], type, onclick, disabled, title, id }, symbol ? icon(symbol) : null, h("span", {}, text));
}

/** A button with a picture only; `text` is what a screen reader says. */
export function iconButton(text, symbol, onclick, { kind = "quiet", id = null } = {}) {
  return h("button", { class: ["button", "icon-only", kind], type: "button", onclick, "aria-label": text, title: text, id }, icon(symbol));
}

export function copyButton(text, label = "Copy") {
  const made = button(label, async () => {
    try {
      await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
      toast("Copied");
    } catch {
      toast("The browser does not let this page copy: select the text instead", "bad");
    }
  }, { kind: "small", symbol: "copy" });
  return made;
}

/** Code that can be copied. */
export function snippet(text, label = "Copy") {
  return h("div", { class: "snippet" }, h("pre", { tabindex: "0" }, h("code", {}, text)), copyButton(text, label));
}

let toastEnds = null;
export function toast(text, tone = "good") {
  const place = document.getElementById("toasts");
  set(place, h("div", { class: ["toast", tone] }, text));
  clearTimeout(toastEnds);
  toastEnds = setTimeout(() => set(place), tone === "bad" ? 9000 : 3500);
}

/** Nothing is there yet: what that means, and what to do next. */
export function empty(title, text, ...more) {
  return h("div", { class: "state empty" }, icon("info"), h("h2", {}, title), text ? h("p", {}, text) : null, more);
}

/** Something is on its way. */
export function loading(text = "Loading…") {
  return h("div", { class: "state loading", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), h("p", {}, text));
}

/** Something went wrong: what, and a way to try again. */
export function failed(error, again = null) {
  return h("div", { class: "state failed", role: "alert" }, icon("alert"), h("h2", {}, "This did not work"), h("p", {}, sentence(error?.message ?? error)), again ? button("Try again", again, { symbol: "refresh" }) : null);
}

/** Fill a place with what a promise brings: loading, then it, or what went wrong. Returns a function that loads again. */
export function load(place, fetcher, draw, { quiet = false } = {}) {
  let turn = 0;
  async function run(silent) {
    const mine = ++turn;
    if (!silent) set(place, loading());
    try {
      const data = await fetcher();
      if (mine === turn) set(place, draw(data));
    } catch (error) {
      if (error.name !== "AbortError" && mine === turn) set(place, failed(error, () => run(false)));
    }
  }
  run(quiet);
  return () => run(true);
}

/**
 * A table. columns: [{name, key|value(row), cell(row), right, sort(row), hide: "narrow"}]. On narrow screens rows become cards.
 * options: {caption, sort: index, down, onRow, rowClass(row), none: Node|string, key(row)}
 */
export function table(columns, rows, { caption, sort = null, down = false, none = "Nothing here.", rowClass = null, id = null } = {}) {
  let by = sort;
  let reverse = down;
  const body = h("tbody");
  const heads = columns.map((column, at) => {
    const words = column.sort ? h("button", { type: "button", class: "sort", onclick: () => { reverse = by === at ? !reverse : Boolean(column.right); by = at; draw(); } }, column.name) : column.name;
    return h("th", { scope: "col", class: [column.right && "right", column.hide && `hide-${column.hide}`] }, words);
  });
  function draw() {
    heads.forEach((head, at) => (at === by ? head.setAttribute("aria-sort", reverse ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    const shown = [...rows];
    const order = by === null ? null : columns[by].sort;
    if (order) {
      shown.sort((a, b) => {
        const x = order(a), y = order(b);
        if (x === y) return 0;
        if (x === null || x === undefined) return 1;
        if (y === null || y === undefined) return -1;
        return (x < y ? -1 : 1) * (reverse ? -1 : 1);
      });
    }
    set(body, shown.map((row) => h("tr", { class: rowClass?.(row) }, columns.map((column, at) => {
      const props = { class: [column.right && "right", column.hide && `hide-${column.hide}`], "data-name": column.name };
      const content = column.cell ? column.cell(row) : column.value ? column.value(row) : row[column.key];
      return at === 0 ? h("th", { scope: "row", ...props }, content) : h("td", props, content);
    }))));
    if (!shown.length) set(body, h("tr", { class: "none" }, h("td", { colspan: columns.length }, none)));
  }
  draw();
  return h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": caption, id }, h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, heads)), body));
}

let serial = 0;
/** A field with its name above; `control` is an input, select or textarea. */
export function field(name, control, { note = null, error = null } = {}) {
  control.id ||= `field-${++serial}`;
  const described = [];
  const parts = [];
  if (note) {
    const id = `${control.id}-note`;
    described.push(id);
    parts.push(h("div", { class: "field-note", id }, note));
  }
  const wrong = h("div", { class: "field-error", id: `${control.id}-error`, role: "alert" }, error);
  described.push(wrong.id);
  control.setAttribute("aria-describedby", described.join(" "));
  const made = h("div", { class: "field" }, h("label", { for: control.id }, name), control, parts, wrong);
  made.complain = (text) => { set(wrong, text); control.toggleAttribute("aria-invalid", Boolean(text)); };
  return made;
}

export const input = (props = {}) => h("input", { type: "text", autocomplete: "off", spellcheck: "false", ...props });
export const select = (options, props = {}) => h("select", props, options.map((option) => {
  const [value, text] = Array.isArray(option) ? option : [option, option];
  return h("option", { value, selected: value === props.value }, text);
}));

/**
 * A question in a dialog; resolves to what `read` returns, or null if it was left. `check` may take its time (a request): the
 * dialog stays open until it has said yes. Without a `cancel` it is left by its button only.
 */
export function ask(title, content, { ok = "OK", kind = "primary", cancel = "Cancel", read = () => true, check = () => true } = {}) {
  return new Promise((resolve) => {
    const box = h("dialog", { class: "dialog", "aria-label": title });
    let result = null;
    const okButton = button(ok, null, { kind, type: "submit" });
    const form = h("form", { method: "dialog", onsubmit: async (event) => {
      event.preventDefault();
      if (okButton.disabled) return;
      okButton.disabled = true;
      const fine = await check();
      okButton.disabled = false;
      if (!fine) return;
      result = read();
      box.close();
    } }, h("h2", {}, title), h("div", { class: "dialog-body" }, content), h("div", { class: "dialog-foot" }, cancel ? button(cancel, () => box.close()) : null, okButton));
    box.append(form);
    if (!cancel) box.addEventListener("cancel", (event) => event.preventDefault());
    box.addEventListener("close", () => { box.remove(); resolve(result); });
    document.body.append(box);
    box.showModal();
    box.querySelector("input, select, textarea")?.focus();
  });
}

/** Ask somebody to type a name before something is done that others will notice. */
export function confirmName(title, text, name, ok) {
  const typed = input({ required: true });
  const line = field(`Type “${name}” to go ahead`, typed);
  return ask(title, [h("p", {}, text), line], { ok, kind: "danger", read: () => typed.value, check: () => {
    line.complain(typed.value === name ? "" : "That is not its name");
    return typed.value === name;
  } });
}

/** A bar of a share, with its figures beside: meter("Today", 0.42, "420 k of 1 M tokens"). */
export function meter(name, share, text) {
  const clean = Math.max(0, Math.min(1, share || 0));
  const tone = clean >= 0.95 ? "bad" : clean >= 0.75 ? "warn" : "good";
  const bar = h("span", { class: ["meter-fill", tone] });
  bar.style.setProperty("--share", `${clean * 100}%`);
  return h("div", { class: "meter" }, h("span", { class: "meter-name" }, name), h("span", { class: "meter-bar", role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": Math.round(clean * 100), "aria-valuetext": text }, bar), h("span", { class: "meter-text" }, text));
}

/** Tabs: tabs([{name, draw() -> Node}]). */
export function tabs(label, items, { start = 0 } = {}) {
  const id = `tabs-${++serial}`;
  const place = h("div", { role: "tabpanel", id: `${id}-panel`, tabindex: "0" });
  const heads = items.map((item, at) => h("button", { type: "button", role: "tab", id: `${id}-${at}`, "aria-controls": place.id, onclick: () => show(at), onkeydown: (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { show((at + step + items.length) % items.length); heads[(at + step + items.length) % items.length].focus(); }
  } }, item.name));
  function show(at) {
    heads.forEach((head, i) => { head.setAttribute("aria-selected", String(i === at)); head.tabIndex = i === at ? 0 : -1; });
    place.setAttribute("aria-labelledby", heads[at].id);
    set(place, items[at].draw());
  }
  show(start);
  return h("div", { class: "tabs" }, h("div", { role: "tablist", "aria-label": label }, heads), place);
}
