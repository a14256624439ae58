// A conversation in memory: what is sent to the model, and an answer as it comes in. No elements here.

import { part } from "./attachments.js";

const LEFT_OUT = { image: "[a picture that this model does not take]", audio: "[a sound that this model does not take]" };

/** An answer that nothing has come of yet. Times are performance.now(), ms. */
export function newAnswer(model) {
  return { model, state: "waiting", text: "", think: "", path: [], speech: [], calls: [], pieces: 0, begun: null, first: null, last: null, usage: null, finish: null, error: null };
}

/** Whether a turn is part of what the model is told of. */
const counts = (turn) => Boolean(turn.answer.text || turn.answer.calls.length);

function content({ text, attached }, takes) {
  if (!attached.length) return text;
  const parts = attached.map((one) => (takes.includes(one.kind) ? part(one) : { type: "text", text: LEFT_OUT[one.kind] }));
  return text ? [{ type: "text", text }, ...parts] : parts;
}

/** The body of the request for the last of `turns`. settings: {system, temperature, maxTokens, speak, tools}; model: as /models has it. */
export function requestBody(turns, settings, model) {
  const messages = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  turns.forEach((turn, at) => {
    const asked = at === turns.length - 1;
    if (!asked && !counts(turn)) return;
    if (turn.user.results) messages.push(...turn.user.results.map((one) => ({ role: "tool", tool_call_id: one.id, content: one.text })));
    else messages.push({ role: "user", content: content(turn.user, model.takes) });
    if (asked) return;
    // Calls that nobody answered are left out: models refuse them without results.
    const calls = turns[at + 1].user.results ? turn.answer.calls : [];
    messages.push({ role: "assistant", content: turn.answer.text || (calls.length ? null : "(it called tools)"), ...(calls.length ? { tool_calls: calls.map((one) => ({ id: one.id, type: "function", function: { name: one.name, arguments: one.arguments } })) } : {}) });
  });
  const body = { model: model.name, messages, stream: true, stream_options: { include_usage: true } };
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.maxTokens !== null) body.max_tokens = settings.maxTokens;
  if (settings.tools?.length) body.tools = settings.tools;
  if (settings.speak && model.makes.includes("audio")) {
    body.modalities = ["text", "audio"];
    body.audio = { format: "pcm16", ...(settings.voice ? { voice: settings.voice } : {}) };
  }
  return body;
}

/** Ask, and fill the answer as pieces come; `changed` is told of each. Never throws: what went wrong is in answer.error. */
export async function ask(api, body, answer, { signal, changed }) {
  answer.begun = performance.now();
  let ended = false;
  try {
    const reply = await api.send("POST", "/v1/chat/completions", { body, signal, headers: { accept: "text/event-stream", "x-atoll-events": "1" } });
    for await (const { data, comment } of api.events(reply)) {
      if (comment !== undefined) noteComment(answer, comment);
      else if (data === "[DONE]") ended = true;
      else notePiece(answer, JSON.parse(data), api);
      changed();
    }
    if (!ended && !answer.finish) throw new api.ApiError("the answer broke off before its end", { code: "stream_interrupted" });
    answer.state = "done";
  } catch (error) {
    answer.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) answer.error = error instanceof api.ApiError ? error : new api.ApiError(error instanceof SyntaxError ? "the answer cannot be read" : "the connection broke off", { code: "stream_interrupted" });
  }
  changed();
}

function noteComment(answer, comment) {
  if (!comment.startsWith("atoll ")) return;
  let told;
  try {
    told = JSON.parse(comment.slice(6));
  } catch {
    return;
  }
  if (told?.event !== "node") return;
  const name = String(told.node ?? told.backend ?? "a machine");
  if (answer.path.at(-1)?.name !== name) answer.path.push({ name, provider: told.provider ?? null, begun: Boolean(answer.pieces) });
}

function notePiece(answer, told, api) {
  if (told.error) throw new api.ApiError(told.error.message ?? "the stream broke off", { code: told.error.code ?? "stream_interrupted", param: told.error.param ?? null });
  if (told.usage) answer.usage = told.usage;
  const choice = told.choices?.[0];
  if (!choice) return;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  const delta = choice.delta ?? {};
  const text = delta.content || delta.audio?.transcript || delta.refusal || "";
  const think = delta.reasoning_content || delta.reasoning || "";
  if (typeof text === "string") answer.text += text;
  if (typeof think === "string") answer.think += think;
  if (typeof delta.audio?.data === "string") answer.speech.push(delta.audio.data);
  for (const call of delta.tool_calls ?? []) noteCall(answer, call);
  if (!text && !think && !delta.audio?.data && !delta.tool_calls?.length) return;
  answer.state = "writing";
  answer.pieces += 1;
  answer.last = performance.now();
  answer.first ??= answer.last;
}

/** A piece of a call of a tool: name and arguments come bit by bit. */
function noteCall(answer, told) {
  const at = Number.isInteger(told.index) ? told.index : answer.calls.length;
  if (at > 64) return;
  const call = (answer.calls[at] ??= { id: "", name: "", arguments: "" });
  if (typeof told.id === "string" && told.id) call.id = told.id;
  if (typeof told.function?.name === "string") call.name += told.function.name;
  if (typeof told.function?.arguments === "string") call.arguments += told.function.arguments;
  call.id ||= `call_${at}`;
}

/** Tools in the words of OpenAI's API, from the text of a field; throws with what is wrong. */
export function readTools(text) {
  if (!text.trim()) return null;
  let told;
  try {
    told = JSON.parse(text);
  } catch {
    throw new Error("This is no JSON");
  }
  const tools = Array.isArray(told) ? told : [told];
  for (const tool of tools) {
    if (tool?.type !== "function" || typeof tool.function?.name !== "string") throw new Error('Each tool is {"type": "function", "function": {"name": …, "parameters": …}}');
  }
  return tools;
}

export const EXAMPLE_TOOLS = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "The weather of a place now", parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] } } }], null, 2);

/** Figures of an answer: seconds to the first token, tokens a second, tokens of prompt and answer; null where not known. */
export function figures(answer) {
  const made = answer.usage?.completion_tokens ?? null;
  const tokens = made ?? answer.pieces;
  const span = answer.first === null ? 0 : (answer.last - answer.first) / 1000;
  return {
    first_s: answer.first === null ? null : (answer.first - answer.begun) / 1000,
    per_s: tokens > 1 && span > 0.05 ? (tokens - 1) / span : null,
    counted: made !== null,
    prompt: answer.usage?.prompt_tokens ?? null,
    made,
  };
}

/** What went wrong in plain words: {title, text, wait_s}. */
export function explain(error, { role, model }) {
  const wait = Number(error.retryAfter);
  const wait_s = Number.isFinite(wait) && wait > 0 ? Math.min(3600, Math.ceil(wait)) : 0;
  const told = error.message;
  if (error.status === 401) return { title: "You are not logged in any more", text: "Log in again, then ask once more." };
  if (error.code === "role_forbids") return { title: "Your role may look, but not ask models", text: `You are logged in as ${role}. An admin can make you a key of role member: Keys and usage.` };
  if (error.status === 403) return { title: `You may not use ${model}`, text: told };
  if (error.status === 404) return { title: `${model} is not served here now`, text: told };
  if (error.status === 429) return { title: "Too many requests at the moment", text: told, wait_s };
  if (error.status === 413) return { title: "This is too large", text: `${told}. Leave out a picture or a sound, or begin a new conversation.` };
  if (error.code === "stream_interrupted") return { title: "The answer broke off", text: `${told}. What came until then stands above; asking again begins anew.` };
  if (error.status === 503 || error.status === 502 || error.status === 504) return { title: "No machine can answer now", text: `${told}. Machines shows who serves ${model}.`, wait_s };
  if (error.status === 0) return { title: "The connection failed", text: told };
  return { title: "The request was refused", text: told };
}
