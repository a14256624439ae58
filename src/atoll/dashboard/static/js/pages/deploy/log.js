// The log of an instance, followed while it is looked at.

import { h, set } from "../../lib/dom.js";
import { button, card } from "../../lib/ui.js";

const EVERY_MS = 1500;
const LINES = 300;

/** Follow a log in a place; returns {close}. */
export function openLog(ctx, path, name, place) {
  let timer = null;
  let open = true;
  const text = h("pre", { class: "log", tabindex: "0", "aria-label": `Log of ${name}` }, "Loading…");
  const ended = h("p", { class: "note", role: "status" });
  set(place, card(`Log of ${name}`, { actions: [button("Close", close, { kind: "small" })] }, text, ended));
  async function read() {
    try {
      const told = await ctx.api.get(`${path}?lines=${LINES}`);
      if (!open) return;
      const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
      if (text.textContent !== told.text) text.textContent = told.text || "It has written nothing yet.";
      if (atEnd) text.scrollTop = text.scrollHeight;
      set(ended);
    } catch (error) {
      if (open) set(ended, error.message);
    }
    if (open) timer = setTimeout(read, EVERY_MS);
  }
  function close() {
    open = false;
    clearTimeout(timer);
    set(place);
  }
  read();
  return { close };
}
