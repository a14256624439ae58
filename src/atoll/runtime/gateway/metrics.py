"""What the gateway counts. Labels are models and backends of the pool and statuses: bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.metrics import Count, Family, Gauge, Histogram, exposition

STATES = ("up", "down", "ejected")
_MOST_TALLIES = 10_000


class RequestTally(NamedTuple):
    """The counters that a request of one kind moves when it ends."""

    requests: Count
    seconds: Histogram
    first: Histogram
    prompt: Count
    completion: Count

    def add(self, seconds: float, first_s: float | None, prompt: int, completion: int) -> None:
        """Count a request."""
        self.requests.value += 1
        self.seconds.observe(seconds)
        if first_s is not None:
            self.first.observe(first_s)
        self.prompt.value += prompt
        self.completion.value += completion


class GatewayMetrics:
    """Counters of a gateway over its pool."""

    def __init__(self, pool: BackendPool) -> None:
        self._pool = pool
        self._requests = Family(
            "atoll_gateway_requests_total",
            "Requests answered, by status (499: the client left).",
            Count,
            ("model", "endpoint", "status"),
        )
        self._seconds = Family(
            "atoll_gateway_request_seconds",
            "From request to the end of its answer.",
            Histogram,
            ("model", "endpoint"),
        )
        self._first = Family(
            "atoll_gateway_first_token_seconds",
            "From request to the first byte of its answer.",
            Histogram,
            ("model", "endpoint"),
        )
        self._tokens = Family(
            "atoll_gateway_tokens_total",
            "Tokens of requests, by kind (prompt, completion).",
            Count,
            ("model", "kind"),
        )
        self._failovers = Family(
            "atoll_gateway_failovers_total",
            "Attempts given up, by when (before, after: the first token).",
            Count,
            ("model", "when"),
        )
        self._rejected = Family(
            "atoll_gateway_rejected_total", "Requests refused at the door.", Count, ("status",)
        )
        self._tallies: dict[tuple[str, str, int], RequestTally] = {}
        self.more: Callable[[], Iterable[Family[Count] | Gauge]] = tuple
        """What else stands on the page."""

    def tally(self, model: str, endpoint: str, status: int) -> RequestTally:
        """Return what counts requests of a kind."""
        key = (model, endpoint, status)
        found = self._tallies.get(key)
        if found is None:
            found = RequestTally(
                self._requests.child(model, endpoint, str(status)),
                self._seconds.child(model, endpoint),
                self._first.child(model, endpoint),
                self._tokens.child(model, "prompt"),
                self._tokens.child(model, "completion"),
            )
            if len(self._tallies) < _MOST_TALLIES:
                self._tallies[key] = found
        return found

    def failed_over(self, model: str, *, begun: bool) -> None:
        """Count an attempt that was given up."""
        self._failovers.child(model, "after" if begun else "before").add()

    def rejected(self, status: int) -> None:
        """Count a request that was refused at the door."""
        self._rejected.child(str(status)).add()

    def page(self, requests: int, connections: int) -> bytes:
        """Return the page that Prometheus reads."""
        return exposition(
            (
                self._requests,
                self._seconds,
                self._first,
                self._tokens,
                self._failovers,
                self._rejected,
                Gauge("atoll_gateway_running", "Requests running.", (), lambda: [((), requests)]),
                Gauge(
                    "atoll_gateway_connections",
                    "Connections of clients.",
                    (),
                    lambda: [((), connections)],
                ),
                Gauge(
                    "atoll_gateway_backend_running",
                    "Requests running at a backend.",
                    ("backend",),
                    self._running,
                ),
                Gauge(
                    "atoll_gateway_backend_state",
                    "1 for the state a backend is in.",
                    ("backend", "state"),
                    self._states,
                ),
                *self.more(),
            )
        )

    def _running(self) -> Iterable[tuple[tuple[str, ...], float]]:
        return [((m.backend.id,), float(m.inflight)) for m in self._pool.members.values()]

    def _states(self) -> Iterable[tuple[tuple[str, ...], float]]:
        return [
            ((m.backend.id, state), float(m.state == state))
            for m in self._pool.members.values()
            for state in STATES
        ]
