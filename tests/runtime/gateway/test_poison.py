"""Which deaths of backends are a request's doing, and which errors a client's."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.backend_answer import fault_of_client, reason_of
from atoll.runtime.gateway.poison import DeathBook, Doubts
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool


def test_two_backends_that_died_of_a_request_convict_it() -> None:
    book, doubts = DeathBook(), Doubts()
    doubts.note_death(book.note("a", 10.0))
    assert not book.is_guilty(doubts.deaths, 10.0)
    doubts.note_death(book.note("b", 12.0))
    assert book.is_guilty(doubts.deaths, 12.0)
    book.convict(doubts.deaths, b"killer", 12.0)
    assert book.knows(b"killer", 30.0)
    assert not book.knows(b"other", 30.0)
    assert not book.knows(b"killer", 80.0)


def test_one_backend_that_dies_again_and_again_is_bad_itself() -> None:
    book, doubts = DeathBook(), Doubts()
    for now_s in (0.0, 5.0, 10.0):
        doubts.note_death(book.note("a", now_s))
    assert len(doubts.deaths) == 3
    assert not book.is_guilty(doubts.deaths, 10.0)


def test_one_death_is_one_whoever_tells() -> None:
    book, doubts = DeathBook(), Doubts()
    for now_s in (0.0, 0.2, 0.9):
        doubts.note_death(book.note("a", now_s))
    assert len(doubts.deaths) == 1


def test_where_others_die_too_two_deaths_say_little() -> None:
    book, doubts = DeathBook(), Doubts()
    book.note("x", 0.0)
    for number, name in enumerate("abcd"):
        doubts.note_death(book.note(name, 10.0 + number))
        assert book.is_guilty(doubts.deaths, 10.0 + number) == (number == 3)
    # A death of long ago excuses nothing.
    later = Doubts()
    for name in "ef":
        later.note_death(book.note(name, 100.0))
    assert book.is_guilty(later.deaths, 100.0)


def test_deaths_of_one_killer_do_not_excuse_the_next_but_those_of_many_do() -> None:
    book = DeathBook()

    def kill(start_s: float, *names: str) -> bool:
        doubts = Doubts()
        for number, name in enumerate(names):
            doubts.note_death(book.note(name, start_s + number))
        guilty = book.is_guilty(doubts.deaths, start_s + 2.0)
        if guilty:
            book.convict(doubts.deaths, repr(names).encode(), start_s + 2.0)
        return guilty

    assert kill(0.0, "a", "b")
    assert kill(10.0, "c", "d")
    # By now it looks as if the backends were what is wrong.
    assert not kill(20.0, "e", "f")
    # Once those are forgotten, two are enough again.
    assert kill(200.0, "a", "b")


def test_random_kills_convict_nobody() -> None:
    """Kills every 0.5 to 10 s, requests that take up to 1.5 s to their first token."""
    convicted = hit_twice = 0
    names = ["a", "b", "c"]
    for seed in range(6):
        rng = random.Random(seed)
        book, now_s = DeathBook(), 0.0
        waiting: list[tuple[str, float, Doubts]] = []
        for _ in range(1000):
            gap_s = rng.uniform(0.5, 10.0)
            for _ in range(int(2 * gap_s)):
                first_token_s = now_s + rng.uniform(0.0, gap_s) + rng.uniform(0.05, 1.5)
                waiting.append((rng.choice(names), first_token_s, Doubts()))
            now_s += gap_s
            killed = rng.choice(names)
            death = book.note(killed, now_s)
            there = [item for item in waiting if item[1] > now_s and item[0] == killed]
            waiting = [item for item in waiting if item[1] > now_s and item[0] != killed]
            for _, _, doubts in there:
                doubts.note_death(death)
                hit_twice += len(doubts.deaths) == 2
                convicted += book.is_guilty(doubts.deaths, now_s)
                other = rng.choice([name for name in names if name != killed])
                waiting.append((other, now_s + rng.uniform(0.05, 1.5), doubts))
    assert hit_twice > 5
    assert convicted == 0


def test_an_internal_error_counts_once_another_backend_could_answer() -> None:
    pool = BackendPool(Backend(id=name, url="http://h:1", models=("m",)) for name in "abc")
    doubts = Doubts()
    a, b, c = pool.members.values()
    doubts.note_failure(a, "status 500")
    doubts.note_failure(b, "status 500")
    assert [m.failures for m in (a, b, c)] == [0, 0, 0]
    doubts.settle(pool, c, 1.0)
    doubts.settle(pool, c, 1.0)
    assert [m.failures for m in (a, b, c)] == [1, 1, 0]


def test_one_bad_request_ejects_nobody() -> None:
    pool = BackendPool(Backend(id=name, url="http://h:1", models=("m",)) for name in "ab")
    for _ in range(20):
        doubts = Doubts()
        for member in pool.members.values():
            doubts.note_failure(member, "status 500")
    assert {m.state for m in pool.members.values()} == {"up"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "failed to parse grammar", "type": "server_error", "code": 500}, 400),
        ({"message": "Failed to initialize samplers: error parsing grammar: x"}, 400),
        ({"message": "Invalid JSON schema: unknown type"}, 400),
        ({"message": "Unsupported regex: look-around"}, 400),
        ({"message": "JSON schema conversion failed:\nUnrecognized schema"}, 400),
        ({"message": "too long", "type": "BadRequestError", "code": 400}, 400),
        ({"message": "no such thing", "type": "NotFoundError", "code": 404}, 404),
        (
            {"message": "CUDA error: out of memory", "type": "InternalServerError", "code": 500},
            None,
        ),
        ({"message": "the grammar of this sentence", "code": 500}, None),
        ({"message": "EngineDeadError"}, None),
        ({"message": "slow down", "code": 429}, None),
        ("failed to parse grammar", 400),
        (["failed to parse grammar"], None),
        (None, None),
    ],
)
def test_whose_fault_an_internal_error_is(error: Any, status: int | None) -> None:
    body = json.dumps({"error": error}).encode()
    fault = fault_of_client(500, body)
    assert (None if fault is None else fault.status) == status
    if fault is not None:
        said = error if isinstance(error, str) else error["message"]
        assert (fault.message, fault.code) == (said, "engine_refused")
    assert fault_of_client(502, body) is None


@given(
    st.binary(max_size=60)
    | st.builds(
        lambda x: json.dumps(x).encode(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda x: (
                st.lists(x, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["error", "message", "code", "type", "detail"]), x, max_size=4
                )
            ),
            max_leaves=8,
        ),
    )
)
def test_whatever_a_backend_says_is_read(body: bytes) -> None:
    fault = fault_of_client(500, body)
    assert fault is None or 400 <= fault.status < 500
    assert "\n" not in reason_of(body)
