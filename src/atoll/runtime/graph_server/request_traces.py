"""Where the time of requests went, invocation by invocation; the last ones are kept in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

_KEPT = 200
_MAX_INVOCATIONS = 1000
"""Invocations of one request that are written down; what comes after is counted only."""


@dataclass(slots=True)
class InvocationTrace:
    """One invocation. Times are seconds; `started_s` since the request came, `took_s` as seen by the server.

    `waited_s` and `ran_s` are what the executor says of the attempt that succeeded, `batch` how many ran
    together. `input_bytes` and `output_bytes` are those of arrays.
    """

    component: str
    number: int
    piece: int | None
    started_s: float
    input_bytes: int
    executor: str = ""
    took_s: float | None = None
    waited_s: float = 0.0
    ran_s: float = 0.0
    batch: int = 0
    output_bytes: int = 0
    attempts: int = 0
    troubles: list[str] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        took = None if self.took_s is None else round(self.took_s, 6)
        return {
            "component": self.component,
            "invocation": self.number,
            "piece": self.piece,
            "executor": self.executor,
            "started_s": round(self.started_s, 6),
            "took_s": took,
            "waited_s": round(self.waited_s, 6),
            "ran_s": round(self.ran_s, 6),
            "batch": self.batch,
            "input_bytes": self.input_bytes,
            "output_bytes": self.output_bytes,
            "attempts": self.attempts,
            "troubles": self.troubles,
        }


class RequestTrace:
    """One request as it goes."""

    def __init__(self, request: str, endpoint: str, service: str) -> None:
        self.request = request
        self.endpoint = endpoint
        self.service = service
        self.path = ""
        self.klass = ""
        self.rounds = 0
        self.intake_s: float | None = None
        """Until what it brought was decoded and stored."""
        self.first_s: float | None = None
        """Until something of the answer could be sent."""
        self.took_s: float | None = None
        self.status: int | None = None
        self.invocations: list[InvocationTrace] = []
        self.left_out = 0
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        """Return seconds since the request came."""
        return time.monotonic() - self._began_s

    def begin(
        self, component: str, number: int, piece: int | None, input_bytes: int
    ) -> InvocationTrace:
        """Take note of an invocation that begins."""
        entry = InvocationTrace(component, number, piece, self.now_s(), input_bytes)
        if len(self.invocations) < _MAX_INVOCATIONS:
            self.invocations.append(entry)
        else:
            self.left_out += 1
        return entry

    def first(self) -> None:
        """Take note that something of the answer is there."""
        if self.first_s is None:
            self.first_s = self.now_s()

    def shown(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "id": self.request,
            "endpoint": self.endpoint,
            "model": self.service,
            "class": self.klass,
            "path": self.path,
            "status": self.status,
            "rounds": self.rounds,
            "intake_s": _rounded(self.intake_s),
            "first_s": _rounded(self.first_s),
            "took_s": _rounded(self.took_s),
            "invocations": [entry.shown() for entry in self.invocations],
            "invocations_left_out": self.left_out,
        }


class TraceKeeper:
    """The last traces, by the id of their request."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._traces: OrderedDict[str, RequestTrace] = OrderedDict()

    def add(self, trace: RequestTrace) -> None:
        """Keep a trace; the oldest goes where there are too many."""
        self._traces.pop(trace.request, None)
        self._traces[trace.request] = trace
        while len(self._traces) > self._kept:
            self._traces.popitem(last=False)

    def get(self, request: str) -> RequestTrace | None:
        """Return the trace of a request, None if it is not kept."""
        return self._traces.get(request)

    def ids(self) -> list[str]:
        """Return the requests whose traces are kept, newest first."""
        return list(reversed(self._traces))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
