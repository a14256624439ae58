// Asking the server that this page came from; nothing else is ever asked.

let csrf = "";
let onLogout = () => {};

export function configure({ token, loggedOut }) {
  if (token !== undefined) csrf = token;
  if (loggedOut) onLogout = loggedOut;
}

/** What went wrong, in words that may be shown. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter });
  }
}

async function failure(answer) {
  let told = {};
  try {
    told = (await answer.json()).error ?? {};
  } catch {
    // Not ours: the status must do.
  }
  const text = told.message ?? `the server answered ${answer.status}`;
  const error = new ApiError(text, { status: answer.status, code: told.code ?? null, param: told.param ?? null, retryAfter: answer.headers.get("retry-after") });
  if (answer.status === 401 && !new URL(answer.url).pathname.startsWith("/atoll/v1/session")) onLogout(error);
  return error;
}

/** Send a request; the answer as it comes. `body` that is plain data goes as JSON. */
export async function send(method, path, { body, headers = {}, signal } = {}) {
  const all = { accept: "application/json", ...headers };
  let data = body;
  if (body !== undefined && !(body instanceof Blob) && !(body instanceof ArrayBuffer) && typeof body !== "string") {
    data = JSON.stringify(body);
    all["content-type"] = "application/json";
  }
  if (method !== "GET") all["x-csrf-token"] = csrf;
  let answer;
  try {
    answer = await fetch(path, { method, body: data, headers: all, signal, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the dashboard does not answer: is it still running?");
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

async function json(method, path, options) {
  const answer = await send(method, path, options);
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

export const get = (path, options) => json("GET", path, options);
export const post = (path, body, options) => json("POST", path, { body, ...options });
export const patch = (path, body, options) => json("PATCH", path, { body, ...options });
export const put = (path, body, options) => json("PUT", path, { body, ...options });
export const del = (path, options) => json("DELETE", path, options);

/** Events of a streamed answer: yields {event, data, comment}; `data` is text. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      rest += value.replaceAll("\r\n", "\n");
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const block = rest.slice(0, end);
        rest = rest.slice(end + 2);
        let event = "message";
        const data = [];
        const comments = [];
        for (const line of block.split("\n")) {
          if (line.startsWith(":")) comments.push(line.slice(1).trim());
          else if (line.startsWith("event:")) event = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        }
        for (const comment of comments) yield { comment };
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Ask for work that takes a while: `onProgress` hears of it, the result is returned. */
export async function job(path, body, { onProgress = () => {}, signal } = {}) {
  const answer = await send("POST", path, { body, signal, headers: { accept: "text/event-stream" } });
  for await (const { event, data } of events(answer)) {
    if (event === "progress") onProgress(JSON.parse(data));
    else if (event === "result") return JSON.parse(data);
    else if (event === "error") {
      const told = JSON.parse(data);
      const error = told.error ?? told;
      throw new ApiError(error.message ?? "it failed", error);
    }
  }
  throw new ApiError("the answer broke off");
}
