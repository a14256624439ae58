// Elements without markup: text is always text, so a name of a model, node or key cannot become code.

const SVG = "http://www.w3.org/2000/svg";
const SAFE_URL = /^(?:https?:|blob:|data:(?:image|audio|video)\/|\/|#)/i;
const URLS = new Set(["href", "src", "xlink:href", "action", "formaction", "poster"]);

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.setAttribute("class", Array.isArray(value) ? value.filter(Boolean).join(" ") : value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, val] of Object.entries(value)) element.style.setProperty(key, val);
    else if (name.startsWith("on") && typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name.startsWith("on")) throw new Error(`${name} takes a function`);
    else if (URLS.has(name.toLowerCase()) && !SAFE_URL.test(String(value))) continue;
    else if (["value", "checked", "selected", "indeterminate", "open"].includes(name) && name in element) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false || child === true) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** An HTML element: h("p", {class: "note"}, "text", h("b", {}, "more")). */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Replace what is in an element. */
export function set(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

const PATHS = {
  overview: "M4 13h6V4H4zm0 7h6v-5H4zm10 0h6v-9h-6zm0-16v5h6V4z",
  models: "M12 3 3 7.5 12 12l9-4.5zM3 12l9 4.5L21 12M3 16.5 12 21l9-4.5",
  chat: "M4 5h16v11H9l-5 4z",
  deploy: "M12 3c4 2.5 5.5 6.5 5 11l-2.5 2h-5L7 14c-.5-4.5 1-8.5 5-11zM12 9.2v.1M9.5 16 8 20.5M14.5 16l1.5 4.5",
  machines: "M4 4h16v6H4zm0 10h16v6H4zM7.5 7h.01M7.5 17h.01M12 7h5M12 17h5",
  requests: "M4 6h9M7 11h11M10 16h10",
  logs: "M5 4h14v16H5zM8.5 8.5h7M8.5 12h7M8.5 15.5h4",
  history: "M4 4v16h16M8 15l3.5-4 3 2.5L20 7",
  join: "M4 5h16v6H4zM7.5 8h.01M12 14v7M8.5 17.5h7",
  plan: "M5 4h5v5H5zm9 11h5v5h-5zM7.5 9v5a3 3 0 0 0 3 3H14M14 4h5v5h-5zM10 6.5h4",
  whatif: "M5 7h8m4 0h2M5 17h2m4 0h8M15 4.5v5M9 14.5v5",
  keys: "M14.5 9.5a4.5 4.5 0 1 1-4.3-4.5 4.5 4.5 0 0 1 4.3 4.5zm-1.2 3.2L20 19.5M17 16.5l-2 2",
  traces: "M3 13h4l3-8 4 14 3-6h4",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2.5M12 19.5V22M2 12h2.5M19.5 12H22M5 5l1.7 1.7M17.3 17.3 19 19M19 5l-1.7 1.7M6.7 17.3 5 19",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6 6 18",
  copy: "M9 9h10v11H9zM5 15H4V4h11v1",
  check: "M5 12.5 10 17 19 7",
  alert: "M12 4 2.5 20h19zM12 10v4.5M12 17.2v.3",
  info: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 11v5.5M12 7.6v.3",
  plus: "M12 5v14M5 12h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  download: "M12 4v11m-4.5-4L12 15.5 16.5 11M5 20h14",
  upload: "M12 16V5M7.5 9 12 4.5 16.5 9M5 20h14",
  send: "M4 12 20 4l-5 16-3.5-6.5z",
  stop: "M7 7h10v10H7z",
  logout: "M14 4H5v16h9M10 12h10m-3.5-3.5L20 12l-3.5 3.5",
  arrow: "M5 12h13m-5-5 5 5-5 5",
  power: "M12 3.5V12M7 6.5a7 7 0 1 0 10 0",
  image: "M4 5h16v14H4zM4 16l4.5-4.5 4 4L16 12l4 4M9 9.2v.1",
  sound: "M4 10v4h3.5L12 18V6l-4.5 4zM15.5 9a4 4 0 0 1 0 6M18 6.5a8 8 0 0 1 0 11",
  refresh: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  play: "M7 5l12 7-12 7z",
};

/** A picture of 20 px that says nothing to a screen reader: put words beside it. */
export function icon(name) {
  return s("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true", focusable: "false" }, s("path", { d: PATHS[name] ?? PATHS.info }));
}
