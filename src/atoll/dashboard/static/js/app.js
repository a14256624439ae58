// The shell: who is logged in, where one can go, and which page is shown.

import * as api from "./lib/api.js";
import { h, icon, set } from "./lib/dom.js";
import { sentence } from "./lib/format.js";
import { openLive } from "./lib/live.js";
import { badge, button, failed, field, iconButton, input, loading, toast } from "./lib/ui.js";

const PAGES = [
  ["overview", "Overview"],
  ["models", "Models"],
  ["chat", "Chat"],
  ["deploy", "Deploy"],
  ["machines", "Machines"],
  ["join", "Add a machine"],
  ["history", "History"],
  ["requests", "Requests"],
  ["logs", "Logs"],
  ["plan", "Plan"],
  ["whatif", "What if"],
  ["keys", "Keys and usage"],
  ["traces", "Traces"],
];
const RANKS = { viewer: 0, member: 1, operator: 2, admin: 3 };
const root = document.getElementById("app");
let session = null;
let live = null;
let leave = null;
let shown = null;

function themeButton() {
  const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const made = iconButton("", "moon", () => {
    const next = dark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("atoll-theme", next); } catch { /* for this visit then */ }
    paint();
  }, { id: "theme" });
  function paint() {
    const text = dark() ? "Light colours" : "Dark colours";
    made.setAttribute("aria-label", text);
    made.title = text;
    set(made, icon(dark() ? "sun" : "moon"));
  }
  paint();
  return made;
}

const logo = () => h("span", { class: "logo" }, h("img", { src: "/static/img/atoll.svg", alt: "", width: 28, height: 28 }), "Atoll");

// Log in

async function logIn(body) {
  session = await api.post("/atoll/v1/session", body);
  api.configure({ token: session.csrf });
  start();
}

function showLogin(told = {}) {
  document.title = "Log in · Atoll";
  const key = input({ type: "password", name: "key", placeholder: "atoll-…", autocomplete: "current-password", required: true });
  const line = field("API key", key, { note: "A key of role viewer, member or admin. It stays on the server, in memory; this page gets a cookie." });
  const submit = button("Log in", null, { kind: "primary", type: "submit" });
  const form = h("form", { class: "login", onsubmit: async (event) => {
    event.preventDefault();
    submit.disabled = true;
    line.complain("");
    try {
      await logIn({ key: key.value.trim() });
    } catch (error) {
      line.complain(sentence(error.message));
      submit.disabled = false;
      key.focus();
    }
  } }, h("div", { class: "login-head" }, logo(), themeButton()), h("h1", {}, "Log in"),
    told.message ? h("p", { class: "notice", role: "status" }, told.message) : null, h("input", { type: "text", name: "username", autocomplete: "username", value: "Atoll", hidden: true }), line, submit,
    h("p", { class: "note" }, "No key? Whoever runs the gateway makes one: ", h("code", {}, "atoll keys create NAME --role member"), ". On the machine itself, open the link that ", h("code", {}, "atoll dashboard"), " printed; ", h("code", {}, "atoll dashboard --link"), " prints a new one."));
  set(root, h("main", { id: "page", class: "login-page", tabindex: "-1" }, form));
  key.focus();
}

async function logOut() {
  try { await api.del("/atoll/v1/session"); } catch { /* it is gone either way */ }
  ended({ message: "You are logged out." });
}

function ended(error) {
  if (!session) return; // said already
  leave?.();
  leave = shown = null;
  live?.close();
  live = session = null;
  showLogin({ message: error.code === "login" ? "Your session is over: log in again." : sentence(error.message) });
}

/** Whether the login still counts, as far as can be told now. */
async function isLoggedIn() {
  const told = await api.get("/atoll/v1/session").catch(() => null);
  if (!told || told.role || !session) return true;
  ended({ message: told.message, code: told.message ? null : "login" });
  return false;
}

// The shell

function frame() {
  const health = h("div", { class: "health", id: "health" });
  const nav = h("nav", { id: "nav", "aria-label": "Pages" }, h("ul", {}, PAGES.map(([id, title]) => h("li", {}, h("a", { href: `/${id}`, dataset: { page: id } }, icon(id), h("span", {}, title))))));
  const menu = iconButton("Pages", "menu", () => {
    const open = document.body.classList.toggle("menu-open");
    menu.setAttribute("aria-expanded", String(open));
  }, { id: "menu" });
  menu.setAttribute("aria-controls", "nav");
  menu.setAttribute("aria-expanded", "false");
  const who = h("div", { class: "who" }, h("span", { class: "who-name", title: session.owner || "" }, session.name || "admin"), badge(session.role, session.role === "admin" ? "info" : ""));
  const head = h("header", { class: "top" }, menu, h("a", { href: "/overview", class: "home" }, logo()), health, who, themeButton(), iconButton("Log out", "logout", logOut, { id: "logout" }));
  const place = h("main", { id: "page", tabindex: "-1" });
  set(root, head, nav, place);
  live.on("health", (told) => set(health, describeHealth(told)));
  return place;
}

function describeHealth(told) {
  if (told.page === "down") return badge("reconnecting…", "warn");
  if (told.gateway === "none") return badge("no gateway", "");
  if (told.gateway === "down") return badge("gateway does not answer", "bad");
  return told.gateway === "up" ? badge("live", "good") : null;
}

function start() {
  live = openLive({ over: ended, check: isLoggedIn });
  frame();
  go(location.pathname + location.search, { replace: true });
}

const ctx = {
  api,
  get session() { return session; },
  get live() { return live; },
  /** Whether who is logged in has at least this role. */
  can: (role) => RANKS[session?.role ?? "viewer"] >= RANKS[role],
  go,
  /** Ask again who is logged in, and where the gateway is. */
  async refresh() {
    const told = await api.get("/atoll/v1/session").catch(() => null);
    if (session && told?.role) Object.assign(session, told);
  },
  toast,
};

export async function go(path, { replace = false } = {}) {
  const [where, query = ""] = path.split("?");
  const id = where.replace(/^\/+|\/+$/g, "") || "overview";
  const known = PAGES.find(([name]) => name === id);
  const url = `/${known ? id : "overview"}${query ? `?${query}` : ""}`;
  history[replace ? "replaceState" : "pushState"](null, "", url);
  await show(known ? id : "overview", new URLSearchParams(query));
}

async function show(id, params) {
  const place = document.getElementById("page");
  document.body.classList.remove("menu-open");
  document.getElementById("menu")?.setAttribute("aria-expanded", "false");
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.dataset.page === id) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const title = PAGES.find(([name]) => name === id)[1];
  document.title = `${title} · Atoll`;
  leave?.();
  leave = null;
  const mine = (shown = Symbol(id));
  set(place, h("h1", {}, title), loading());
  try {
    const [{ page }] = await Promise.all([import(`./pages/${id}.js`), style(id)]);
    if (shown !== mine) return;
    const body = h("div", { class: ["page", `page-${id}`] });
    set(place, h("h1", {}, title), body);
    leave = page.mount(body, Object.create(ctx, { params: { value: params } })) ?? null;
    place.focus({ preventScroll: true });
    scrollTo(0, 0);
  } catch (error) {
    if (shown === mine) set(place, h("h1", {}, title), failed(error, () => show(id, params)));
  }
}

/** Load a page's own style, once. */
function style(id) {
  const href = `/static/css/pages/${id}.css`;
  if (document.querySelector(`link[href="${href}"]`)) return null;
  return new Promise((resolve) => {
    const link = h("link", { rel: "stylesheet", href });
    link.onload = link.onerror = resolve;
    document.head.append(link);
  });
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/']");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || link.target || link.hasAttribute("download")) return;
  if (link.getAttribute("href").startsWith("/atoll/")) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});
addEventListener("popstate", () => session && show(location.pathname.slice(1) || "overview", new URLSearchParams(location.search)));
api.configure({ loggedOut: ended });

async function boot() {
  const token = /[#&]token=([^&]+)/.exec(location.hash)?.[1];
  if (token) history.replaceState(null, "", location.pathname + location.search);
  try {
    if (token) {
      try {
        await logIn({ token });
        return;
      } catch (error) {
        if (error.status !== 401) throw error;
      }
    }
    const told = await api.get("/atoll/v1/session");
    if (told.role) {
      session = told;
      api.configure({ token: session.csrf });
      start();
    } else showLogin({ message: token ? "That link was used already or is too old." : sentence(told.message) });
  } catch (error) {
    set(root, h("main", { id: "page", class: "login-page" }, failed(error, () => location.reload())));
  }
}
boot();
