// One stream of events from the server, for all pages: the last word on each topic is kept.

const HIDDEN_MS = 5000;
const topics = ["gateway", "fleets", "health"];

/**
 * `over` is called when the server says that the login is over; {message} says why. `check` is asked before a stream that
 * was refused is opened again: it returns whether somebody is still logged in.
 */
export function openLive({ over, check }) {
  const last = new Map();
  const listeners = new Map(topics.map((topic) => [topic, new Set()]));
  let source = null;
  let retry = null;
  let hiding = null;
  let closed = false;

  function tell(topic, value) {
    last.set(topic, value);
    for (const listener of [...listeners.get(topic)]) listener(value);
  }

  // A browser has about six connections to a server: tabs that nobody sees give theirs to others.
  function followVisibility() {
    clearTimeout(hiding);
    if (document.visibilityState === "hidden") {
      hiding = setTimeout(() => {
        clearTimeout(retry);
        source.close();
        source = null;
      }, HIDDEN_MS);
    } else if (source === null && !closed) {
      open();
    }
  }
  document.addEventListener("visibilitychange", followVisibility);

  function open() {
    source = new EventSource("/atoll/v1/live");
    for (const topic of topics) source.addEventListener(topic, (event) => tell(topic, JSON.parse(event.data)));
    source.addEventListener("over", (event) => {
      closed = true;
      source.close();
      over(JSON.parse(event.data));
    });
    source.onerror = () => {
      tell("health", { ...(last.get("health") ?? {}), page: "down" });
      if (closed) return;
      if (source?.readyState === EventSource.CLOSED) retry = setTimeout(async () => { if ((await check()) && !closed && source !== null) open(); }, 3000);
    };
    source.onopen = () => tell("health", { ...(last.get("health") ?? {}), page: "up" });
  }
  open();

  return {
    /** Hear of a topic, now if there is a word on it, and from then on; returns how to stop. */
    on(topic, listener) {
      listeners.get(topic).add(listener);
      if (last.has(topic)) listener(last.get(topic));
      return () => listeners.get(topic).delete(listener);
    },
    last: (topic) => last.get(topic) ?? null,
    close() {
      closed = true;
      clearTimeout(retry);
      clearTimeout(hiding);
      document.removeEventListener("visibilitychange", followVisibility);
      source?.close();
    },
  };
}
