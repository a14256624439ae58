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
from atoll.runtime.openai import ChatRequest, Generation, StreamOptions

_ENDS = re.compile(rb'"finish_reason":\s*"')
_OPTIONS = re.compile(rb'"stream_options"\s*:\s*\{(?=\s*")')
_CONTINUOUS = b'"continuous_usage_stats"'


class _Field:
    """A field of events, and how it is taken out of them."""

    def __init__(self, name: bytes, value: bytes) -> None:
        # Inside of text the quotes would be escaped. Patterns that begin with fixed text are found fastest.
        self._tight, self._spaced = (
            re.compile(begin % name + value) for begin in (rb',"%b":', rb', "%b": ')
        )

    def drop(self, events: bytes) -> bytes:
        """Return events without it."""
        rest = self._tight.sub(b"", events)
        return rest if len(rest) < len(events) else self._spaced.sub(b"", events)


_NUMBERS = rb"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
"""An object of numbers, in at most two levels."""
_LIST = rb"\[[0-9, ]*\]"
_USAGE, _TIMINGS = _Field(b"usage", _NUMBERS), _Field(b"timings", _NUMBERS)
_IDS, _PROMPT_IDS = _Field(b"token_ids", _LIST), _Field(b"prompt_token_ids", _LIST)
_FLAGS: dict[CountRule, str] = {"timings": "timings_per_token", "ids": "return_token_ids"}
"""Fields of a request that ask for it."""


@dataclass(frozen=True, slots=True)
class EventCounts:
    """What an engine says of tokens in events of choices, and what of it a client asked for.

    `usage`: the client wants the usage with every event; `own`: it has set the engine's own flag (`_FLAGS`).
    """

    rule: CountRule
    usage: bool = False
    own: bool = False

    @property
    def translated(self) -> bool:
        """Whether the client asked for a usage that the engine does not write."""
        return self.usage and self.rule == "timings"

    def strip(self, events: bytes) -> bytes:
        """Return events of choices as the client should see them."""
        if self.rule == "ids":
            return events if self.own else _IDS.drop(_PROMPT_IDS.drop(events))
        if self.rule == "timings":
            # At the end of an answer llama.cpp says this without being asked.
            if _ENDS.search(events) is not None:
                return events
            if not self.own:
                events = _TIMINGS.drop(events)
        return events if self.usage else _USAGE.drop(events)

    def take(self, chunk: Chunk) -> Chunk | None:
        """Take out of a chunk what it says of the tokens of its answer so far; return it as a usage."""
        if self.rule == "ids" or not choices_of(chunk):
            return None
        if self.rule == "usage":
            usage = chunk.pop("usage", None)
            return usage if isinstance(usage, dict) else None
        timings = chunk.get("timings")
        made = timings.get("predicted_n") if isinstance(timings, dict) else None
        if not isinstance(timings, dict) or not isinstance(made, int) or finishes(chunk):
            return None
        if not self.own:
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
    "ids": EventCounts("ids"),
}


def counts_reasoning(usage: Chunk) -> bool:
    """Whether the usage in an event of a choice tells reasoning from the rest."""
    return isinstance(usage.get("completion_tokens_details"), dict)


def ask_counts(
    request: Generation, body: bytes, kind: str, *, recounts: bool = False, kept: bool = False
) -> tuple[bytes, EventCounts | None]:
    """Return a stream's request with the question for counts, and how a backend of a kind answers it.

    `body` asks for the usage already. `recounts`: the backend is known to count reasoning. `kept`: whoever
    reads the events knows what to make of counts (a dialect), so they stay, as a usage where that is cheap.
    None: such a backend does not count.
    """
    engine = find_engine(kind)
    rule = engine.counts
    if rule == "none":
        # The stage engine names its tokens, so that nobody else asks it to count.
        if kept and engine.resume == "tokens":
            return _with_continuous(body), EventCounts("usage", usage=True)
        return body, None
    options = request.stream_options
    usage = isinstance(options, StreamOptions) and bool(options.continuous_usage_stats)
    # Reasoning is told from the rest in chats alone.
    if recounts and engine.recounts and not usage and isinstance(request, ChatRequest):
        rule = engine.recounts
    if rule == "usage":
        if usage:
            return body, EventCounts(rule, usage=True)
        return _with_continuous(body), EventCounts(rule, usage=True) if kept else _UNASKED[rule]
    flag = _FLAGS[rule]
    named = b'"%b"' % flag.encode() in body
    own = named and bool(msgspec.json.decode(body).get(flag))
    if not own:
        body = _with_flag(body, flag, named=named)
    usage, own = usage or kept, own or kept
    return body, EventCounts(rule, usage, own) if usage or own else _UNASKED[rule]


def _with_continuous(body: bytes) -> bytes:
    found = _OPTIONS.findall(body)
    if len(found) == 1 and _CONTINUOUS not in body:
        # Nothing else changes, so nothing else is read and written again.
        return _OPTIONS.sub(found[0] + _CONTINUOUS + b":true,", body)
    data: Chunk = msgspec.json.decode(body)
    data["stream_options"] = data["stream_options"] | {"continuous_usage_stats": True}
    return msgspec.json.encode(data)


def _with_flag(body: bytes, flag: str, *, named: bool) -> bytes:
    if named:
        data: Chunk = msgspec.json.decode(body)
        return msgspec.json.encode(data | {flag: True})
    start = body.index(b"{") + 1
    return b'{"%b":true,' % flag.encode() + body[start:]
