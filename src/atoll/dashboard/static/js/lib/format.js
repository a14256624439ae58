// Numbers with units, as people read them. What is not known is a dash.

export const DASH = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(Number(value));

/** A number with at most three digits that matter: 0.042, 3.81, 120, 4,100. */
export function number(value, digits = 3) {
  if (!known(value)) return DASH;
  const v = Number(value);
  if (v === 0) return "0";
  const size = Math.abs(v);
  if (size >= 1000) return Math.round(v).toLocaleString("en-US");
  const places = Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(size))));
  return String(Number(v.toFixed(places)));
}

/** A count, short: 950, 12.3 k, 4.1 M. */
export function count(value) {
  if (!known(value)) return DASH;
  const v = Number(value);
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(v) >= size * (unit === "k" ? 10 : 1)) return `${number(v / size)} ${unit}`;
  }
  return v >= 1000 ? Math.round(v).toLocaleString("en-US") : number(v);
}

/** US dollars: $0.0042, $14.98, $1,204. */
export function usd(value) {
  if (!known(value)) return DASH;
  const v = Number(value);
  const size = Math.abs(v);
  const sign = v < 0 ? "−" : "";
  if (size >= 1000) return `${sign}$${Math.round(size).toLocaleString("en-US")}`;
  if (size >= 0.095 || size === 0) return `${sign}$${size.toFixed(2)}`;
  return `${sign}$${number(size, 2)}`;
}

export const perHour = (value) => (known(value) ? `${usd(value)}/h` : DASH);
export const perMillion = (value) => (known(value) ? `${usd(value)}/M tokens` : DASH);
export const rate = (value, unit = "") => (known(value) ? `${number(value)}${unit ? ` ${unit}` : ""}/s` : DASH);

/** A share as per cent: 97 %, 99.5 %; never 100 % unless it is all. */
export function percent(value) {
  if (!known(value)) return DASH;
  const v = Number(value) * 100;
  if (v >= 100 || v <= 0 || Number.isInteger(v)) return `${Math.round(v)} %`;
  const places = v > 99 ? 2 : 1;
  const text = v.toFixed(places);
  return `${Number(text) >= 100 ? (100 - 10 ** -places).toFixed(places) : Number(text)} %`;
}

/** Seconds as people say them: 41 ms, 1.2 s, 4 min 10 s, 3 h 20 min, 12 days. */
export function seconds(value) {
  if (!known(value)) return DASH;
  const v = Math.abs(Number(value));
  if (v === 0) return "0 s";
  if (v < 0.9995) return `${number(v * 1000)} ms`;
  if (v < 99.5) return `${number(v)} s`;
  if (v < 3600) return `${Math.floor(v / 60)} min${v % 60 >= 1 ? ` ${Math.floor(v % 60)} s` : ""}`;
  if (v < 172800) return `${Math.floor(v / 3600)} h${v % 3600 >= 60 ? ` ${Math.floor((v % 3600) / 60)} min` : ""}`;
  return `${Math.floor(v / 86400)} days`;
}

/** How long ago a moment (Unix time) was, or how far ahead. */
export function ago(at_s, now_s = Date.now() / 1000) {
  if (!known(at_s)) return DASH;
  const past = now_s - at_s;
  if (Math.abs(past) < 5) return "just now";
  return past > 0 ? `${seconds(Math.max(1, Math.round(past)))} ago` : `in ${seconds(Math.round(-past))}`;
}

/** A moment (Unix time) in the reader's own time zone. */
export function moment(at_s) {
  if (!known(at_s)) return DASH;
  return new Date(at_s * 1000).toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "medium" });
}

export function day(at_s) {
  if (!known(at_s)) return DASH;
  return new Date(at_s * 1000).toISOString().slice(0, 10);
}

/** Memory: 80 GiB. */
export function bytes(value) {
  if (!known(value)) return DASH;
  let v = Number(value);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (v < 1024) return `${number(v)} ${unit}`;
    v /= 1024;
  }
  return `${number(v)} TiB`;
}

/** How often: 3.2/s, and where that says little, 4 a minute or 2 an hour. */
export function often(value) {
  if (!known(value)) return DASH;
  const v = Number(value);
  if (v === 0 || v >= 0.1) return rate(v);
  return v * 60 >= 0.95 ? `${number(v * 60, 2)} a minute` : v * 3600 >= 0.95 ? `${number(v * 3600, 2)} an hour` : "less than 1 an hour";
}

/** Words of a service as a sentence: a capital first, a full stop last. */
export function sentence(text) {
  const clean = String(text ?? "").trim();
  return clean && `${clean[0].toUpperCase()}${clean.slice(1)}${/[.!?…]$/.test(clean) ? "" : "."}`;
}

/** "1 machine", "3 machines". */
export const plural = (n, word, many = `${word}s`) => `${count(n)} ${Number(n) === 1 ? word : many}`;

/** A promise in words: "first token in 1 s, then 50 ms a token, for 95 %". */
export function promiseText(promise) {
  if (!promise) return "no promise";
  const parts = [];
  if (promise.ttft_s) parts.push(`first token in ${seconds(promise.ttft_s)}`);
  if (promise.tpot_s) parts.push(`then ${seconds(promise.tpot_s)} a token`);
  if (promise.target) parts.push(`for ${percent(promise.target)}`);
  return parts.join(", ") || "no promise";
}
