"""How many tokens the answers of a stream have, in the words of the engine that makes them.

A busy engine puts several tokens into one event, and none where it holds text back: events do not tell how
much is left of `max_tokens` when a stream has to move. So engines that can are asked to say it with every
event (`Engine.counts`). Clients see that only if they asked for it themselves; then they see it in the form
of `continuous_usage_stats`, whoever goes on with their stream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from atoll.engines.engine import CountRule
from atoll.engines.table import find_engine
from atoll.runtime.gateway.events import Chunk, choices_of, finishes
from atoll.runtime.openai import Generation, StreamOptions

_ENDS = re.compile(rb'"finish_reason":\s*"')
_OPTIONS = re.compile(rb'"stream_options"\s*:\s*\{(?=\s*")')
_CONTINUOUS = b'"continuous_usage_stats"'


class _Numbers:
    """A field of events that holds numbers, in objects of at most two levels."""

    def __init__(self, name: bytes) -> None:
        # Inside of text the quotes would be escaped. Patterns that begin with fixed text are found fastest.
        self._tight, self._spaced = (
            re.compile(begin % name + rb"[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
            for begin in (rb',"%b":\{', rb', "%b": \{')
        )

    def drop(self, events: bytes) -> bytes:
        """Return events without it."""
        rest = self._tight.sub(b"", events)
        return rest if len(rest) < len(events) else self._spaced.sub(b"", events)


_USAGE, _TIMINGS = _Numbers(b"usage"), _Numbers(b"timings")


@dataclass(frozen=True, slots=True)
class EventCounts:
    """What an engine says of tokens in events of choices, and what of it a client asked for.

    `usage`: the client wants the usage with every event; `timings`: it wants those of llama.cpp.
    """

    rule: CountRule
    usage: bool = False
    timings: bool = False

    @property
    def translated(self) -> bool:
        """Whether the client asked for a usage that the engine does not write."""
        return self.usage and self.rule == "timings"

    def strip(self, events: bytes) -> bytes:
        """Return events of choices as the client should see them."""
        if self.rule == "timings":
            # At the end of an answer llama.cpp says this without being asked.
            if _ENDS.search(events) is not None:
                return events
            if not self.timings:
                events = _TIMINGS.drop(events)
        return events if self.usage else _USAGE.drop(events)

    def take(self, chunk: Chunk) -> Chunk | None:
        """Take out of a chunk what it says of the tokens of its answer so far; return it as a usage."""
        if not choices_of(chunk):
            return None
        if self.rule == "usage":
            usage = chunk.pop("usage", None)
            return usage if isinstance(usage, dict) else None
        timings = chunk.get("timings")
        made = timings.get("predicted_n") if isinstance(timings, dict) else None
        if not isinstance(timings, dict) or not isinstance(made, int) or finishes(chunk):
            return None
        if not self.timings:
            del chunk["timings"]
        read = [timings.get(key) for key in ("cache_n", "prompt_n")]
        prompt = sum(tokens for tokens in read if isinstance(tokens, int))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }


_UNASKED: dict[CountRule, EventCounts] = {
    "usage": EventCounts("usage"),
    "timings": EventCounts("timings"),
}


def ask_counts(request: Generation, body: bytes, kind: str) -> tuple[bytes, EventCounts | None]:
    """Return a stream's request with the question for counts, and how a backend of a kind answers it.

    `body` asks for the usage already; None: such a backend does not count.
    """
    rule = find_engine(kind).counts
    if rule == "none":
        return body, None
    options = request.stream_options
    usage = isinstance(options, StreamOptions) and bool(options.continuous_usage_stats)
    if rule == "usage":
        if usage:
            return body, EventCounts(rule, usage=True)
        return _with_continuous(body), _UNASKED[rule]
    timings = b'"timings_per_token"' in body and bool(
        msgspec.json.decode(body).get("timings_per_token")
    )
    if not timings:
        body = _with_timings(body)
    return body, EventCounts(rule, usage, timings) if usage or timings else _UNASKED[rule]


def _with_continuous(body: bytes) -> bytes:
    found = _OPTIONS.findall(body)
    if len(found) == 1 and _CONTINUOUS not in body:
        # Nothing else changes, so nothing else is read and written again.
        return _OPTIONS.sub(found[0] + _CONTINUOUS + b":true,", body)
    data: Chunk = msgspec.json.decode(body)
    data["stream_options"] = data["stream_options"] | {"continuous_usage_stats": True}
    return msgspec.json.encode(data)


def _with_timings(body: bytes) -> bytes:
    if b'"timings_per_token"' in body:
        data: Chunk = msgspec.json.decode(body)
        return msgspec.json.encode(data | {"timings_per_token": True})
    start = body.index(b"{") + 1
    return b'{"timings_per_token":true,' + body[start:]
