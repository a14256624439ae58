// Logs: what an instance, the gateway or the hub writes, live.

import { h, set } from "../lib/dom.js";
import { firstFleet, fleetChoice } from "../lib/fleetchoice.js";
import { withPlanner } from "../lib/services.js";
import { badge, button, card, empty, failed, field, input, load, loading, select, snippet } from "../lib/ui.js";

const MOST = 5000; // lines that are kept on the page
const NEAR_PX = 40; // a reader this close to the end follows it

export const page = {
  mount(root, ctx) {
    if (!ctx.can("operator")) {
      set(root, h("section", { class: "card", "aria-label": "Logs" }, empty("Logs are for operators", "What engines write may have words of requests in it. Log in with a key of role operator or admin.")));
      return null;
    }
    const place = h("div", { class: "stack" });
    root.append(place);
    let fleets = [];
    let listening = null;
    const stop = withPlanner(ctx, place, () => load(place, () => ctx.api.get("/atoll/v1/fleets"), (told) => {
      fleets = told.fleets.filter((one) => one.kind === "operated" || one.kind === "served");
      const fleet = firstFleet(fleets, ctx.params);
      if (!fleet) return h("section", { class: "card", "aria-label": "Logs" }, empty("No fleet runs here", "Logs are read of fleets that this machine operates or serves:", snippet("atoll up fleet.yaml"), snippet("atoll serve fleet.yaml")));
      queueMicrotask(() => show(fleet, ctx.params.get("log")));
      return loading();
    }));

    function show(fleet, named = null) {
      listening?.abort();
      const inner = h("div");
      set(place, h("div", { class: "toolbar" }, fleetChoice(fleets, fleet, (next) => show(next))), inner);
      load(inner, () => ctx.api.get(`/atoll/v1/fleets/${encodeURIComponent(fleet)}/logs`), ({ logs, errors }) => {
        if (!logs.length) return card("Logs", {}, empty("Nothing to read yet", errors[0] ?? "Instances of this fleet have not started."));
        return drawLog(fleet, logs, errors, logs.includes(named) ? named : logs.find((each) => each !== "gateway" && each !== "hub") ?? logs[0]);
      });
    }

    function drawLog(fleet, logs, errors, first) {
      const lines = [];
      const box = h("pre", { class: "log", tabindex: "0", role: "log", "aria-label": "Log", "aria-live": "off" });
      const state = h("span", { role: "status" });
      const find = input({ type: "search", placeholder: "all lines", oninput: () => paint() });
      const choice = select(logs, { value: first, onchange: () => listen() });
      const pause = button("Pause", () => (listening ? end("paused") : listen()), { id: "log-pause" });
      const save = button("Download", () => {
        const link = h("a", { href: URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/plain" })), download: `${choice.value.replace(/[^A-Za-z0-9._-]+/g, "-")}.log` });
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 1000);
      }, { symbol: "download" });

      const fits = (line) => line.toLowerCase().includes(find.value.trim().toLowerCase());
      function paint(fresh = null) {
        const near = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
        const node = (line) => h("span", { class: ["log-line", /\b(error|fatal|traceback|exception)\b/i.test(line) ? "bad" : /\bwarn(ing)?\b/i.test(line) ? "warn" : null] }, `${line}\n`);
        if (fresh) box.append(...fresh.filter(fits).map(node));
        else set(box, lines.filter(fits).map(node));
        while (box.childElementCount > MOST) box.firstElementChild.remove();
        if (near || !fresh) box.scrollTop = box.scrollHeight;
      }
      function end(word) {
        listening?.abort();
        listening = null;
        set(state, badge(word, word === "live" ? "good" : "warn"));
        pause.lastChild.textContent = "Follow";
      }
      async function listen() {
        listening?.abort();
        const mine = (listening = new AbortController());
        lines.length = 0;
        set(box);
        set(state, badge("connecting…"));
        pause.lastChild.textContent = "Pause";
        history.replaceState(null, "", `/logs?fleet=${encodeURIComponent(fleet)}&log=${encodeURIComponent(choice.value)}`);
        try {
          const answer = await ctx.api.send("GET", `/atoll/v1/fleets/${encodeURIComponent(fleet)}/logs/${encodeURIComponent(choice.value)}?follow=1&lines=500`, { signal: mine.signal, headers: { accept: "text/event-stream" } });
          for await (const { event, data } of ctx.api.events(answer)) {
            if (mine !== listening) return;
            if (event === "error") throw new Error(JSON.parse(data).message);
            if (event !== "lines") continue;
            const fresh = JSON.parse(data).lines;
            set(state, badge("live", "good"));
            lines.push(...fresh);
            if (lines.length > MOST) lines.splice(0, lines.length - MOST);
            paint(fresh);
          }
          if (mine === listening) end("ended");
        } catch (error) {
          if (error.name === "AbortError" || mine !== listening) return;
          end("broken off");
          set(box, failed(error, () => listen()));
        }
      }
      listen();
      return card("Log", { actions: [pause, save] },
        errors.length ? h("ul", { class: "bullets bad" }, errors.map((text) => h("li", {}, text))) : null,
        h("div", { class: "toolbar" }, field("Of", choice), field("Find", find), state), box);
    }

    set(place, loading());
    return () => { stop(); listening?.abort(); listening = null; };
  },
};
