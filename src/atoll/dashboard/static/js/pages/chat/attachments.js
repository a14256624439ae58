// Pictures and sounds that go along with a message. They are read here, in the browser, and sent inside the request.

import { h, icon, set } from "../../lib/dom.js";
import { bytes } from "../../lib/format.js";
import { toWav } from "./sound.js";

const WIDEST = 2048; // pixels of the longer side
const LARGEST = 20 * 2 ** 20; // bytes of one sound

const base64 = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
  reader.onerror = () => reject(new Error("the file cannot be read"));
  reader.readAsDataURL(blob);
});

/** A picture, drawn anew at 2048 px at most: what a camera wrote into the file beside it (place, time) does not go along. */
export async function picture(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "This"} is not a picture that this browser can read`);
  }
  const scale = Math.min(1, WIDEST / Math.max(bitmap.width, bitmap.height));
  const canvas = h("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const as = (type) => new Promise((resolve) => canvas.toBlob(resolve, type, 0.9));
  // Drawings stay sharp as PNG; photos would be ten times as large.
  let blob = /png|gif|webp/.test(file.type) ? await as("image/png") : null;
  if (!blob || blob.size > 2 ** 20) blob = await as("image/jpeg");
  return { kind: "image", name: file.name || "picture", note: `${canvas.width} × ${canvas.height} px`, url: `data:${blob.type};base64,${await base64(blob)}` };
}

/** A sound: WAV and MP3 go as they are, the rest as WAV. */
export async function sound(file, name = file.name) {
  let format = /mpeg|mp3/.test(file.type) || /\.mp3$/i.test(name) ? "mp3" : /wav/.test(file.type) || /\.wav$/i.test(name) ? "wav" : null;
  let blob = file;
  if (!format) {
    try {
      blob = await toWav(file);
      format = "wav";
    } catch {
      throw new Error(`${name} is not a sound that this browser can read`);
    }
  }
  if (blob.size > LARGEST) throw new Error(`${name} has ${bytes(blob.size)}: at most ${bytes(LARGEST)} go along`);
  return { kind: "audio", name, note: bytes(blob.size), format, blob, data: await base64(blob) };
}

/** The part of a message for it, as the OpenAI API has it. */
export function part(one) {
  if (one.kind === "image") return { type: "image_url", image_url: { url: one.url } };
  return { type: "input_audio", input_audio: { data: one.data, format: one.format } };
}

/** How it looks; `urls` keeps what must be given back. */
export function show(one, urls, onRemove = null) {
  const seen = one.kind === "image" ? h("img", { src: one.url, alt: one.name }) : h("audio", { controls: true, src: blobUrl(one.blob, urls), "aria-label": one.name });
  return h("li", { class: ["attached", one.kind] }, seen, h("span", { class: "attached-name", title: one.name }, one.name), h("span", { class: "note" }, one.note),
    onRemove ? h("button", { class: "button icon-only quiet", type: "button", "aria-label": `Leave ${one.name} out`, title: "Leave out", onclick: onRemove }, icon("close")) : null);
}

export function blobUrl(blob, urls) {
  const url = URL.createObjectURL(blob);
  urls.push(url);
  return url;
}

/** What is attached to the message that is being written. */
export class Tray {
  items = [];
  #urls = [];

  constructor() {
    this.node = h("ul", { class: "attachments", "aria-label": "Goes along with the message" });
    this.#draw();
  }

  add(one) {
    this.items.push(one);
    this.#draw();
  }

  /** Hand over what is attached and be empty. */
  take() {
    const all = this.items;
    this.items = [];
    this.#draw();
    return all;
  }

  dispose() {
    for (const url of this.#urls.splice(0)) URL.revokeObjectURL(url);
  }

  #draw() {
    this.dispose();
    this.node.hidden = !this.items.length;
    set(this.node, this.items.map((one, at) => show(one, this.#urls, () => { this.items.splice(at, 1); this.#draw(); })));
  }
}
