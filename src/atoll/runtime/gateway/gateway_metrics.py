"""Metrics of the gateway. Labels are models and backends of the pool and statuses: bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric

from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.metrics import (
    Count,
    CounterFamily,
    Histogram,
    HistogramFamily,
    make_gauge,
    render_page,
)

STATES = ("up", "down", "slow", "ejected", "drained")
_MAX_TALLIES = 10_000
"""Kinds of requests whose counters are kept at hand; others are looked up each time."""


class RequestTally(NamedTuple):
    """The counters that a request of one kind moves when it ends."""

    requests: Count
    seconds: Histogram
    first: Histogram
    prompt: Count
    completion: Count

    def add(self, seconds: float, first_s: float | None, prompt: int, completion: int) -> None:
        """Count a request: its seconds, those to its first token, and its tokens."""
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
        self._requests = CounterFamily(
            "atoll_gateway_requests_total",
            "Requests answered, by status (499: the client left).",
            ("model", "endpoint", "status"),
        )
        self._seconds = HistogramFamily(
            "atoll_gateway_request_seconds",
            "From request to the end of its answer.",
            ("model", "endpoint"),
        )
        self._first = HistogramFamily(
            "atoll_gateway_first_token_seconds",
            "From request to the first byte of its answer.",
            ("model", "endpoint"),
        )
        self._tokens = CounterFamily(
            "atoll_gateway_tokens_total",
            "Tokens of requests, by kind (prompt, completion).",
            ("model", "kind"),
        )
        self._audio = CounterFamily(
            "atoll_gateway_audio_seconds_total", "Seconds of sound heard.", ("model",)
        )
        self._speech = CounterFamily(
            "atoll_gateway_speech_seconds_total", "Seconds of speech made.", ("model",)
        )
        self._pixels = CounterFamily(
            "atoll_gateway_image_pixels_total", "Pixels seen or drawn.", ("model",)
        )
        self._failovers = CounterFamily(
            "atoll_gateway_failovers_total",
            "Attempts given up, by when (before, after: the first token).",
            ("model", "when"),
        )
        self._prefills = CounterFamily(
            "atoll_gateway_prefills_total",
            "Prompts for another backend than the one that decodes, by outcome (handed over, replaced, "
            "recomputed, failed, not handed over).",
            ("model", "outcome"),
        )
        self._rejected = CounterFamily(
            "atoll_gateway_rejected_total", "Requests refused on arrival.", ("status",)
        )
        self._tallies: dict[tuple[str, str, int], RequestTally] = {}
        self.more: Callable[[], Iterable[Metric]] = tuple
        """Further metrics of the page."""

    @property
    def completion_tokens(self) -> float:
        """Tokens of all answers so far."""
        children = self._tokens.children.items()
        return sum(child.value for (_, kind), child in children if kind == "completion")

    def tally(self, model: str, endpoint: str, status: int) -> RequestTally:
        """Return what counts requests of a kind."""
        key = (model, endpoint, status)
        tally = self._tallies.get(key)
        if tally is None:
            tally = RequestTally(
                self._requests.child(model, endpoint, str(status)),
                self._seconds.child(model, endpoint),
                self._first.child(model, endpoint),
                self._tokens.child(model, "prompt"),
                self._tokens.child(model, "completion"),
            )
            if len(self._tallies) < _MAX_TALLIES:
                self._tallies[key] = tally
        return tally

    def add_media(
        self, model: str, audio_seconds: float, speech_seconds: float, pixels: int
    ) -> None:
        """Count the sound and the pictures of a request that ended."""
        for family, amount in (
            (self._audio, audio_seconds),
            (self._speech, speech_seconds),
            (self._pixels, pixels),
        ):
            if amount > 0:
                family.child(model).add(amount)

    def failed_over(self, model: str, *, begun: bool) -> None:
        """Count an attempt that was given up."""
        self._failovers.child(model, "after" if begun else "before").add()

    def prefilled(self, model: str, outcome: str) -> None:
        """Count what became of a prompt that another backend was to compute."""
        self._prefills.child(model, outcome).add()

    def rejected(self, status: int) -> None:
        """Count a request that was refused on arrival."""
        self._rejected.child(str(status)).add()

    def page(self, requests: int, connections: int) -> bytes:
        """Return the page that Prometheus reads."""
        return render_page(self._read(requests, connections))

    def _read(self, requests: int, connections: int) -> Iterator[Metric]:
        for family in (
            *(self._requests, self._seconds, self._first, self._tokens),
            *(self._audio, self._speech, self._pixels, self._failovers, self._prefills),
            self._rejected,
        ):
            yield family.read()
        yield make_gauge("atoll_gateway_running", "Requests running.", (), [((), requests)])
        yield make_gauge(
            "atoll_gateway_connections", "Connections of clients.", (), [((), connections)]
        )
        members = self._pool.members.values()
        yield make_gauge(
            "atoll_gateway_backend_running",
            "Requests running at a backend.",
            ("backend",),
            [((m.backend.id,), m.inflight) for m in members],
        )
        yield make_gauge(
            "atoll_gateway_backend_state",
            "1 for the state a backend is in.",
            ("backend", "state"),
            [((m.backend.id, state), float(m.state == state)) for m in members for state in STATES],
        )
        yield from self.more()
