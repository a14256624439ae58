"""Host time of a server, found by asking it: a clock that steps move stands for the server."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.engines.limits import HostTime
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.runtime.local.host_time import MeasuredStep, completions, fit_host, measure_steps

STEPS = analytic(
    Catalog.default().model("llama-3.1-8b").llm, Catalog.default().node("H100:1"), engine="none"
)


class SimulatedServer:
    """Answers take a connection, a prompt, and steps of all clients that ask at a time."""

    def __init__(self, host: HostTime, clients: int) -> None:
        self.now_s = 0.0
        self._host, self._clients = host, clients
        self._barrier = threading.Barrier(clients, self._answer)
        self._tokens = 0

    def _answer(self) -> None:
        step_s = step_seconds(STEPS, Batch.decode(self._clients, 104.0), 0, 32)
        step_s += self._host.seconds(float(self._clients))
        self.now_s += 0.05 + 0.02 * self._clients + self._tokens * step_s

    def clock(self) -> float:
        return self.now_s

    def ask(self, prompt: str, tokens: int) -> None:
        assert prompt
        self._tokens = tokens
        self._barrier.wait()


@pytest.mark.parametrize(
    "host",
    [
        HostTime(step_s=0.4e-3, sequence_s=2e-6),
        HostTime(step_s=1e-3, sequence_s=5e-5),
        HostTime(),
    ],
)
def test_the_host_time_of_a_server_is_found(host: HostTime) -> None:
    measured: list[MeasuredStep] = []
    for clients in (1, 2, 4, 8):
        server = SimulatedServer(host, clients)
        measured += measure_steps(server.ask, STEPS, [clients], repeats=2, clock=server.clock)
    found = fit_host(measured)
    assert found.step_s == pytest.approx(host.step_s, abs=1e-6)
    assert found.sequence_s == pytest.approx(host.sequence_s, abs=1e-7)


numbers = st.lists(st.integers(1, 256), min_size=2, max_size=8, unique=True)


@given(numbers, st.floats(0.0, 5e-3), st.floats(0.0, 1e-4))
def test_a_line_is_found_again(counts: list[int], fixed: float, slope: float) -> None:
    steps = [MeasuredStep(n, 1e-2 + fixed + slope * n, 1e-2) for n in counts]
    found = fit_host(steps)
    assert found.step_s == pytest.approx(fixed, abs=1e-7)
    assert found.sequence_s == pytest.approx(slope, abs=1e-8)


@given(numbers, st.lists(st.floats(-5e-3, 5e-3), min_size=8, max_size=8))
def test_neither_part_is_ever_negative_nor_worse_than_nothing(
    counts: list[int], rest: list[float]
) -> None:
    steps = [MeasuredStep(n, 1e-2 + more, 1e-2) for n, more in zip(counts, rest, strict=False)]
    found = fit_host(steps)
    assert found.step_s >= 0.0
    assert found.sequence_s >= 0.0

    def error(host: HostTime) -> float:
        return sum((s.step_s - s.kernels_s - host.seconds(float(s.sequences))) ** 2 for s in steps)

    assert error(found) <= error(HostTime()) * (1.0 + 1e-9) + 1e-15


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="at least two"):
        fit_host([MeasuredStep(1, 1e-2, 1e-2)])
    with pytest.raises(InputError, match="http://HOST:PORT"):
        completions("localhost:8000", "m")
