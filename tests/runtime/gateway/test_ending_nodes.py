"""Nodes that will end: who gets what is long, what nobody lives long enough for, and deaths as announced."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.runtime.gateway.attempt import Attempts
from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.poison import DeathBook
from atoll.runtime.gateway.requirements import Requirements
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.http.http_request import Request
from atoll.runtime.openai import read_request
from atoll.runtime.pool.member import Backend, Facts, Member
from atoll.runtime.pool.pool import BackendPool

CHAT = "/v1/chat/completions"
TOKEN_S = 0.1


class Place:
    """Nodes of one model that write ten tokens a second, and end after so many seconds."""

    def __init__(self, **lives_s: float | None) -> None:
        self.pool = BackendPool(policy="learned")
        for name, life_s in lives_s.items():
            backend = Backend(id=name, url="http://127.0.0.1:1", models=("m",))
            self.pool.add(backend, Facts(ends_s=None if life_s is None else time.time() + life_s))
        for work in (100.0, 100.0, 900.0, *[100.0] * 7):
            for member in self.pool.members.values():
                self.pool.learn(member, "m", work, TOKEN_S * work, 0.0, 0.0)
        self.chooser = BackendChooser(self.pool, None, GatewaySettings())

    def require(self, **more: Any) -> Requirements:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | more
        request = read_request(CHAT, json.dumps(body).encode())
        return self.chooser.gather_requirements(Request(b"POST", b"/", {}), request, None, 0.0)

    def chosen(self, **more: Any) -> set[str | None]:
        found = set()
        for _ in range(20):
            member, _ = self.chooser.choose(self.require(**more), frozenset(), 0.0, squeeze=False)
            found.add(None if member is None else member.name)
        return found


def test_what_may_be_long_goes_to_who_has_no_end() -> None:
    """Twice the usual length (200 tokens, 20 s) would have fitted."""
    place = Place(ending=60.0, lasting=None)
    # Twice the time of 200 tokens, since times are guessed.
    assert "ending" in place.chosen(max_tokens=200)
    assert place.chosen(max_tokens=300) == {"lasting"}
    assert "ending" in place.chosen(max_tokens=300, stream=True)
    assert place.chosen(max_tokens=4000) == {"lasting"}
    # Without a limit, the longest answers lately count.
    assert place.chosen() == {"lasting"}
    assert "ending" in place.chosen(max_tokens=100)


def test_where_all_end_the_longest_answers_lately_count() -> None:
    place = Place(soon=60.0, later=200.0)
    assert place.chosen(max_tokens=4000) == {"later"}
    # Though it is busy: it is waited for.
    place.pool.members["later"].max_inflight = 1
    place.pool.members["later"].inflight = 1
    assert place.chosen(max_tokens=4000) == {None}


def test_where_nobody_lives_long_enough_it_is_said_at_once() -> None:
    place = Place(soon=60.0, sooner=5.0)
    asked = place.require(max_tokens=4000)
    assert place.chosen(max_tokens=4000) == {None}
    error, wait_s = place.chooser.explain_none(asked, 0.0)
    assert (error.status, error.code, wait_s) == (503, "nodes_ending", 0.0)
    assert error.retry_after_s
    assert "2 about to end" in error.message
    # A stream is begun there, and moved before the end.
    assert place.chosen(max_tokens=4000, stream=True) == {"soon"}


@pytest.mark.parametrize(("left_s", "guilty"), [(5.0, False), (-5.0, False), (900.0, True)])
def test_a_death_as_it_was_announced_is_nobody_s_fault(left_s: float, guilty: bool) -> None:
    book, loop = DeathBook(), SimpleNamespace(time=lambda: 10.0)
    attempts = Attempts(cast("Any", SimpleNamespace(loop=loop, deaths=book)), b"/", b"")
    pool = BackendPool()
    for name in ("a", "b"):
        backend = Backend(id=name, url="http://127.0.0.1:1", models=("m",))
        pool.add(backend, Facts(ends_s=time.time() + left_s))
        member: Member = pool.members[name]
        attempts.member, attempts.upstream = member, cast("Any", SimpleNamespace(unsent=False))
        attempts.note_death(silent=True)
    assert attempts.is_poison(b"body", 10.0) is guilty
