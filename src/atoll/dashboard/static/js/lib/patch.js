// Bring what is shown up to date without making it anew, so that focus, selection and what was opened stay.

import { h, set } from "./dom.js";

const keyOf = (node) => node.dataset?.key;

/**
 * Make the children of an element like these. Elements with the same data-key are the same one, in whatever order; one with
 * data-keep is left as it is while its key stays (parts with a state of their own: tabs, forms). Listeners are those of the
 * element that stays, so what a listener uses belongs into the key. Whether a <details> is open is the reader's choice.
 */
export function patch(element, ...children) {
  alignChildren(element, set(h("div"), ...children));
}

function alignChildren(old, next) {
  const keyed = new Map([...old.children].filter((child) => keyOf(child) !== undefined).map((child) => [keyOf(child), child]));
  let at = old.firstChild;
  for (const wanted of [...next.childNodes]) {
    const key = keyOf(wanted);
    const here = key === undefined ? at : keyed.get(key) ?? null;
    if (!here || !isSame(here, wanted)) {
      old.insertBefore(wanted, at);
      continue;
    }
    if (here !== at) old.insertBefore(here, at);
    else at = at.nextSibling;
    align(here, wanted);
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

const isSame = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

function align(old, next) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  if (old.dataset.keep !== undefined) return;
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (name === "open" && old.nodeName === "DETAILS") continue;
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  alignChildren(old, next);
}
