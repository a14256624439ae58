"""The last requests of a gateway, in memory: the way that each took and its times, never what was said."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple, NotRequired, TypedDict

KEPT = 1000
"""Requests; the oldest go first."""


class TriedBackend(NamedTuple):
    """A backend that was asked, and when (seconds since the request came) it began and ended with it."""

    name: str
    began_s: float
    ended_s: float


class RequestSummary(TypedDict):
    """A request as a list of requests has it; `started_s` is a Unix time."""

    id: str
    trace: str
    model: str
    endpoint: str
    stream: bool
    status: int
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    started_s: float
    seconds: float
    first_token_s: float | None
    backend: str | None
    attempts: int


class RequestSpan(TypedDict):
    """A step of a request, in seconds since it came; that of an executor says how it waited and ran."""

    kind: str
    name: str
    start_s: float
    seconds: float
    failed: bool
    waited_s: NotRequired[float | None]
    ran_s: NotRequired[float | None]
    batch: NotRequired[float | None]


class RequestWay(RequestSummary):
    """A request with where its time went."""

    spans: list[RequestSpan]


class LoggedRequest(NamedTuple):
    """A request that ended. `first_s` and `seconds` are from its arrival at `started_s` (Unix time)."""

    id: str
    trace: str
    model: str
    endpoint: str
    stream: bool
    status: int
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    started_s: float
    seconds: float
    first_s: float | None
    key_id: str | None
    prefills: tuple[TriedBackend, ...]
    """Those that computed its prompt for another one."""
    tried: tuple[TriedBackend, ...]

    def summary(self) -> RequestSummary:
        """Return it as a list of requests has it."""
        last = self.tried[-1].name if self.tried else None
        return {
            "id": self.id,
            "trace": self.trace,
            "model": self.model,
            "endpoint": self.endpoint,
            "stream": self.stream,
            "status": self.status,
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "started_s": round(self.started_s, 3),
            "seconds": round(self.seconds, 6),
            "first_token_s": None if self.first_s is None else round(self.first_s, 6),
            "backend": last,
            "attempts": len(self.tried),
        }

    def spans(self) -> list[RequestSpan]:
        """Return where its time went: the gateway, then what waited and who worked, in order of time."""
        found = [_span("gateway", f"{self.endpoint} {self.model}", 0.0, self.seconds)]
        begins = [each.began_s for each in (*self.prefills, *self.tried)]
        waited_s = min(begins, default=self.seconds)
        if waited_s > 0.001:
            found.append(_span("wait", "waits for a machine", 0.0, waited_s))
        found += [_span("prefill", one.name, one.began_s, one.ended_s) for one in self.prefills]
        for at, each in enumerate(self.tried):
            is_last = at == len(self.tried) - 1
            kind = "decode" if self.prefills else "attempt"
            failed = not is_last or self.outcome in ("error", "truncated")
            found.append(_span(kind, each.name, each.began_s, each.ended_s, failed=failed))
            if is_last and self.first_s is not None and each.began_s <= self.first_s:
                found.append(_span("first", "until the first token", each.began_s, self.first_s))
                if self.first_s < each.ended_s:
                    found.append(_span("tokens", "further tokens", self.first_s, each.ended_s))
        return found


def _span(
    kind: str, name: str, begin_s: float, end_s: float, *, failed: bool = False
) -> RequestSpan:
    return {
        "kind": kind,
        "name": name,
        "start_s": round(begin_s, 6),
        "seconds": round(max(0.0, end_s - begin_s), 6),
        "failed": failed,
    }


def executor_spans(told: dict[str, Any], begin_s: float) -> list[RequestSpan]:
    """Return the spans of a graph server's trace, which began with the request's attempt there."""
    found = []
    if isinstance(told.get("intake_s"), float):
        found.append(_span("intake", "reads what was sent", begin_s, begin_s + told["intake_s"]))
    for one in told.get("invocations", ()):
        took_s = one.get("took_s")
        if took_s is None:
            continue
        at_s = begin_s + one["started_s"]
        name = f"{one['component']} on {one['executor']}"
        span = _span("executor", name, at_s, at_s + took_s, failed=bool(one.get("troubles")))
        # As the executor says: how long it waited there for its turn, ran, and with how many others.
        span["waited_s"], span["ran_s"] = one["waited_s"], one["ran_s"]
        span["batch"] = one["batch"]
        found.append(span)
    return found


class RequestLog:
    """See the module."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._requests: OrderedDict[str, LoggedRequest] = OrderedDict()

    def add(self, request: LoggedRequest) -> None:
        """Keep a request; one with the id of an earlier one takes its place."""
        self._requests.pop(request.id, None)
        self._requests[request.id] = request
        if len(self._requests) > self._kept:
            self._requests.popitem(last=False)

    def get(self, name: str) -> LoggedRequest | None:
        """Return a request by its id, or by that of its trace; None where it is not kept."""
        found = self._requests.get(name)
        if found is not None:
            return found
        return next((one for one in self._requests.values() if one.trace == name), None)

    def last(self) -> list[LoggedRequest]:
        """Return all that are kept, the newest first."""
        return list(reversed(self._requests.values()))
