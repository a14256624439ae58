// Whether the gateway and the planner are there: pages look here first, and ask only who can answer.

import { h } from "./dom.js";
import { sentence } from "./format.js";
import { empty, loading, snippet } from "./ui.js";

const PATIENCE_MS = 3000; // after that a page asks without having heard

/**
 * Hear how a service stands: tell("up" | "down" | "none", why), now and when it changes; returns how to stop.
 * service: "gateway" or "planner".
 */
export function follow(ctx, service, tell) {
  let last = null;
  let gone = false;
  async function say(state, why) {
    if (gone || state === last) return;
    last = state;
    // Who logged in before there was a gateway knows neither its address nor whether it has keys.
    if (service === "gateway" && state === "up" && !ctx.session?.gateway) await ctx.refresh();
    if (!gone && last === state) tell(state, why);
  }
  const stop = ctx.live.on("health", (health) => health[service] && say(health[service], health.why ?? ""));
  const late = setTimeout(() => { if (last === null) say("up", ""); }, PATIENCE_MS);
  return () => { gone = true; stop(); clearTimeout(late); };
}

/** There is no gateway: what this page would show, and how to start one. */
export function noGateway(text, ...more) {
  return h("section", { class: "card", "aria-label": "No gateway" }, empty("No gateway runs here", text, snippet("atoll serve examples/demo-local.yaml"), more, h("p", {}, "Other ways are on the ", h("a", { href: "/overview" }, "overview"), ".")));
}

/** There is one, which does not answer. */
export function gatewayDown(why) {
  return h("section", { class: "card", "aria-label": "The gateway does not answer" }, empty("The gateway does not answer", `${why ? `${sentence(why)} ` : ""}This page goes on by itself once it does. On its machine, this shows what runs:`, snippet("atoll status")));
}

/** Fill a place by `draw` once the planner is there, which takes some seconds to start; returns how to stop. */
export function withPlanner(ctx, place, draw) {
  let drawn = false;
  return follow(ctx, "planner", (state) => {
    if (drawn) return;
    if (state === "none") place.replaceChildren(h("section", { class: "card", "aria-label": "No planner" }, empty("The planner was left out", "This dashboard was started without it. Start it again without --no-planner:", snippet("atoll dashboard"))));
    else if (state === "down") place.replaceChildren(loading("The planner is starting…"));
    else {
      drawn = true;
      draw();
    }
  });
}
