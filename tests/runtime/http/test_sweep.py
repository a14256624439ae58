"""Deadlines of connections where there are tens of thousands: all are looked at within a second."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from atoll.runtime.http import http_server
from atoll.runtime.http.http_server import Application, Connection, Request


class Counting(Application):
    def handle(self, connection: Connection, request: Request) -> None:
        raise AssertionError

    def refused(self, error: Any) -> None:
        raise AssertionError


class Idle:
    def __init__(self, seen: Counter[int], number: int) -> None:
        self._seen, self._number = seen, number

    def tick(self, now_s: float) -> None:
        del now_s
        self._seen[self._number] += 1


def sweep(count: int, ticks: int) -> tuple[Counter[int], list[int]]:
    app, seen = Counting(), Counter[int]()
    app.connections = cast("set[Connection]", {Idle(seen, number) for number in range(count)})
    looked = []
    for _ in range(ticks):
        before = seen.total()
        app.tick_connections(0.0, b"")
        looked.append(seen.total() - before)
    return seen, looked


def test_few_are_all_looked_at_each_time() -> None:
    seen, looked = sweep(1000, 3)
    assert looked == [1000] * 3
    assert set(seen.values()) == {3}


def test_of_many_a_tenth_is() -> None:
    seen, looked = sweep(50_000, http_server._SWEEPS)
    assert set(looked) == {5000}
    assert seen == Counter(range(50_000))
