// Light markdown as elements: paragraphs, lists, headings, quotes, tables, code, bold, italic, links. Never markup: what is not known stays text.

import { h } from "../../lib/dom.js";
import { copyButton } from "../../lib/ui.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?/;
const ALIGN = /^\s*\|?\s*:?-{1,}:?\s*(\|\s*:?-{1,}:?\s*)*\|?\s*$/;
const REACH = 2000; // characters within which a mark must be closed
const DEEP = 6; // lists and quotes within each other

// Blocks

/** Lines from an offset on, each with where it starts. */
function linesOf(text, from) {
  const lines = [];
  for (let at = from; at < text.length;) {
    const end = text.indexOf("\n", at);
    const stop = end < 0 ? text.length : end;
    lines.push({ at, text: text.slice(at, stop).replace(/\r$/, "") });
    at = stop + 1;
  }
  return lines;
}

const blank = (line) => !line || !line.text.trim();
const isTable = (lines, at) => lines[at].text.includes("|") && at + 1 < lines.length && lines[at + 1].text.includes("|") && ALIGN.test(lines[at + 1].text);
const startsBlock = (lines, at) => FENCE.test(lines[at].text) || HEADING.test(lines[at].text) || RULE.test(lines[at].text) || ITEM.test(lines[at].text) || QUOTE.test(lines[at].text) || isTable(lines, at);

/** Split text into blocks: [{kind, at, ...}]. A block that another one follows does not change when text is added at the end. */
export function blocks(text, from = 0) {
  const lines = linesOf(text, from);
  const found = [];
  let i = 0;
  const take = (kind, upTo, more = {}) => {
    found.push({ kind, at: lines[i].at, lines: lines.slice(i, upTo).map((line) => line.text), ...more });
    i = upTo;
  };
  while (i < lines.length) {
    if (blank(lines[i])) { i += 1; continue; }
    const line = lines[i].text;
    const fence = FENCE.exec(line);
    let end = i + 1;
    if (fence) {
      const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      while (end < lines.length && !close.test(lines[end].text)) end += 1;
      take("code", Math.min(end + 1, lines.length), { language: fence[2].trim(), closed: end < lines.length });
    } else if (HEADING.test(line)) take("heading", end);
    else if (RULE.test(line)) take("rule", end);
    else if (QUOTE.test(line)) {
      while (end < lines.length && QUOTE.test(lines[end].text)) end += 1;
      take("quote", end);
    } else if (ITEM.test(line)) {
      const [, indent, mark] = ITEM.exec(line);
      for (; end < lines.length; end += 1) {
        const more = lines[end].text;
        const item = ITEM.exec(more);
        if (blank(lines[end])) {
          const next = lines[end + 1];
          if (!next || !(ITEM.test(next.text) || /^\s{2,}\S/.test(next.text))) break;
        } else if (RULE.test(more)) break;
        else if (item) {
          // Numbers after bullets are another list.
          if (item[1].length <= indent.length + 1 && /\d/.test(item[2]) !== /\d/.test(mark)) break;
        } else if (!/^\s{2,}/.test(more) && (blank(lines[end - 1]) || startsBlock(lines, end))) break;
      }
      take("list", end);
    } else if (isTable(lines, i)) {
      end = i + 2;
      while (end < lines.length && !blank(lines[end]) && lines[end].text.includes("|")) end += 1;
      take("table", end);
    } else {
      while (end < lines.length && !blank(lines[end]) && !startsBlock(lines, end)) end += 1;
      take("paragraph", end);
    }
  }
  return found;
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
}

function drawList(lines, deep) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const indent = first[1].length;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1) items.push([item[3]]);
    else items.at(-1).push(line.slice(Math.min(line.length - line.trimStart().length, indent + 2)));
  }
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  return h(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null }, items.map((item) => {
    const inner = item.length > 1 || ITEM.test(item[0]) ? blocks(item.join("\n")) : null;
    if (!inner || deep >= DEEP) return h("li", {}, inline(item.join("\n")));
    // The words of an item stand bare; what is inside it follows.
    return h("li", {}, inner.map((block, at) => (at === 0 && block.kind === "paragraph" ? inline(block.lines.join("\n")) : draw(block, deep + 1))));
  }));
}

/** An element for a block. */
export function draw(block, deep = 0) {
  switch (block.kind) {
    case "code": return codeBlock(block);
    case "heading": {
      const [, marks, words] = HEADING.exec(block.lines[0]);
      return h("h3", { class: `size-${Math.min(4, marks.length)}` }, inline(words));
    }
    case "rule": return h("hr");
    case "quote": {
      const inner = block.lines.map((line) => line.replace(QUOTE, "")).join("\n");
      return h("blockquote", {}, deep >= DEEP ? inner : blocks(inner).map((one) => draw(one, deep + 1)));
    }
    case "list": return drawList(block.lines, deep);
    case "table": {
      const [head, , ...rows] = block.lines;
      const width = cells(head).length;
      return h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Table" }, h("table", { class: "plain" },
        h("thead", {}, h("tr", {}, cells(head).map((cell) => h("th", { scope: "col" }, inline(cell))))),
        h("tbody", {}, rows.map((row) => h("tr", {}, cells(row).slice(0, width).map((cell) => h("td", {}, inline(cell))))))));
    }
    default: return h("p", {}, inline(block.lines.join("\n")));
  }
}

const codeText = (block) => block.lines.slice(1, block.closed ? -1 : undefined).join("\n");

function codeBlock(block) {
  const code = h("code", {}, codeText(block));
  const made = h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, block.language.slice(0, 40) || "code"), copyButton(() => code.textContent, "Copy code")),
    h("pre", { tabindex: "0" }, code));
  made.update = (next) => { code.textContent = codeText(next); };
  return made;
}

// Words

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];
const ESCAPED = /[\\`*_{}[\]()#+\-.!|~>]/;
const URL_END = /[\s<>"]/;

/** Where a mark that opens at `at` closes, or -1. */
function closes(text, mark, at) {
  const word = /[\p{L}\p{N}]/u;
  if (!text[at + mark.length] || /\s/.test(text[at + mark.length])) return -1;
  if (mark[0] === "_" && at && word.test(text[at - 1])) return -1;
  for (let end = text.indexOf(mark, at + mark.length + 1); end >= 0 && end - at < REACH; end = text.indexOf(mark, end + 1)) {
    if (/\s/.test(text[end - 1]) || text[end - 1] === "\\") continue;
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) continue;
    if (mark[0] === "_" && text[end + mark.length] && word.test(text[end + mark.length])) continue;
    return end;
  }
  return -1;
}

function link(words, url) {
  if (!/^https?:\/\/[^\s/]/i.test(url)) return null;
  const made = h("a", { href: url, rel: "noopener noreferrer", target: "_blank" }, words);
  return made.textContent === url ? made : h("span", {}, made, h("span", { class: "link-to" }, ` (${url})`));
}

/** Text with marks as nodes. */
export function inline(text, deep = 0) {
  const out = [];
  const none = new Set(); // marks that nothing closes from here on
  let plain = "";
  let at = 0;
  const put = (node, next) => {
    if (plain) out.push(plain);
    plain = "";
    out.push(node);
    at = next;
  };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && ESCAPED.test(text[at + 1] ?? "")) { plain += text[at + 1]; at += 2; continue; }
    if (char === "\n") { put(h("br"), at + 1); continue; }
    if (char === "`") {
      const run = /^`+/.exec(text.slice(at, at + 20))[0];
      const end = none.has(run) ? -1 : text.indexOf(run, at + run.length);
      if (end >= 0) { put(h("code", {}, text.slice(at + run.length, end)), end + run.length); continue; }
      none.add(run);
      plain += run;
      at += run.length;
      continue;
    }
    if ((char === "[" || (char === "!" && text[at + 1] === "[")) && deep < DEEP) {
      const found = /^(!?)\[([^[\]]{0,400})\]\(\s*(\S{1,2000}?)(?:\s+"[^"]{0,200}")?\s*\)/.exec(text.slice(at, at + 2700));
      // A picture of somewhere else is never loaded: it is a link.
      const made = found && link(found[1] ? [`picture: ${found[2]}`] : inline(found[2], deep + 1), found[3]);
      if (made) { put(made, at + found[0].length); continue; }
    }
    if (char === "h" && /^https?:\/\/[^\s/]/i.test(text.slice(at, at + 12)) && !/\w/.test(text[at - 1] ?? "")) {
      let end = at;
      while (end < text.length && !URL_END.test(text[end])) end += 1;
      while (/[.,;:!?)\]'*_]/.test(text[end - 1])) end -= 1;
      const url = text.slice(at, end);
      const made = link([url], url);
      if (made) { put(made, end); continue; }
    }
    const mark = deep < DEEP ? MARKS.find(([word]) => text.startsWith(word, at) && !none.has(word)) : null;
    if (mark) {
      const [word, tag] = mark;
      const end = closes(text, word, at);
      if (end > 0) { put(h(tag, {}, inline(text.slice(at + word.length, end), deep + 1)), end + word.length); continue; }
      if (text.indexOf(word, at + word.length) < 0) none.add(word);
      plain += word;
      at += word.length;
      continue;
    }
    plain += char;
    at += 1;
  }
  if (plain) out.push(plain);
  return out;
}

/** Writes markdown that grows into a place: only its last block is ever drawn again. */
export class Growing {
  #place;
  #from = 0;
  #last = null;

  constructor(place) {
    this.#place = place;
  }

  /** Show this text; it begins with what was shown before. */
  update(text) {
    blocks(text, this.#from).forEach((block, at) => {
      if (at === 0 && this.#last?.kind === "code" && block.kind === "code" && this.#last.node.update) this.#last.node.update(block);
      else {
        const node = draw(block);
        if (at === 0 && this.#last) this.#last.node.replaceWith(node);
        else this.#place.append(node);
        this.#last = { kind: block.kind, node };
      }
      this.#from = block.at;
    });
  }
}
