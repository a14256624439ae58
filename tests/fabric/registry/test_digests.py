"""The tree of hashes: what two replicas say to each other when little, much or nothing differs."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.registry import sync
from atoll.fabric.registry.fabric_registry import Registry
from atoll.fabric.registry.records import Record, SessionState
from atoll.fabric.registry.replica import DigestTree, place_of
from tests.fabric.registry.network import START_S, metadata, signer, verify
from tests.seeds import examples


def replica(slot: str, count: int, seed: int = 1) -> Registry:
    """A registry that knows `count` others; equal seeds know the same."""
    registry = Registry(
        slot,
        metadata(slot),
        sign=signer(slot),
        verify=verify,
        rng=random.Random(slot),
        now_s=START_S,
    )
    registry.merge(records(count, seed), START_S)
    return registry


def records(count: int, seed: int = 1) -> list[Record]:
    rng = random.Random(seed)
    slots = [f"m{number % 1000:03d}" for number in range(count)]
    return [
        signer(slot)(
            f"{slot}-{rng.getrandbits(64):016x}",
            SessionState.SERVING,
            1,
            START_S,
            b"\x83\xa4name\xa1n\xa8provider\xa1p\xa4role\xa6worker",
        )
        for slot in slots
    ]


def compare(asker: Registry, peer: Registry) -> tuple[int, int]:
    """Run an exchange; return how many messages and bytes it took."""
    exchange, messages, size = asker.exchange(), 0, 0
    while exchange.ask is not None:
        answer, _ = peer.answer(exchange.ask, START_S)
        messages += 2
        size += len(exchange.ask) + len(answer)
        exchange.answered(answer, START_S)
    return messages, size


def same(a: Registry, b: Registry) -> None:
    b.merge([a.own_entry.record], START_S)
    a.merge([b.own_entry.record], START_S)


def test_equal_replicas_say_two_short_messages_whatever_their_size() -> None:
    for count in (3, 1000):
        a, b = replica("m001", count), replica("m002", count)
        same(a, b)
        messages, size = compare(a, b)
        assert messages == 2
        assert size < 100


def test_one_difference_among_thousands_costs_little() -> None:
    a, b = replica("m001", 2000), replica("m002", 2000)
    same(a, b)
    news = signer("h0")(f"h0-{'7' * 16}", SessionState.SERVING, 1, START_S, records(1)[0].body)
    b.merge([news], START_S)
    messages, size = compare(a, b)
    assert a.hash == b.hash
    assert messages <= 12
    assert size < 8000  # all versions would be 100 KB


def test_who_asks_without_places_is_told_all_versions() -> None:
    a, b = replica("m001", 200), replica("m002", 200)
    old = sync.encode_message(sync.SyncRequest(a.hash))
    answer = sync.decode_answer(b.answer(old, START_S)[0])
    assert answer.versions is not None
    assert len(answer.versions) == 201
    assert answer.digests == {}
    # And whoever answers so, as earlier versions do, is understood.
    exchange = a.exchange()
    exchange.answered(b.answer(old, START_S)[0], START_S)
    while exchange.ask is not None:
        exchange.answered(b.answer(exchange.ask, START_S)[0], START_S)
    assert a.hash == b.hash


@examples(20)
@given(
    here=st.integers(0, 150),
    there=st.integers(0, 150),
    both=st.integers(0, 150),
    cut=st.integers(0, 9),
)
def test_any_two_replicas_agree_after_one_exchange(
    here: int, there: int, both: int, cut: int
) -> None:
    a, b = replica("m001", both), replica("m002", both)
    a.merge(records(here, 2), START_S)
    b.merge(records(there, 3), START_S)
    # Some were said again since.
    later = [
        signer(record.slot)(record.sid, SessionState.DOWN, 2, START_S, record.body)
        for record in records(both)[: cut * 3]
    ]
    (a if cut % 2 else b).merge(later, START_S)
    compare(a, b)
    assert a.hash == b.hash
    assert a.entries().keys() == b.entries().keys()


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=120))
def test_a_trees_hashes_are_those_of_what_is_in_it(steps: list[tuple[int, bool]]) -> None:
    tree, held = DigestTree(), dict[str, bytes]()
    for number, keep in steps:
        sid = f"m001-{random.Random(number).getrandbits(64):016x}"
        new = random.Random((number, len(held)).__hash__()).randbytes(16) if keep else None
        tree.replace(sid, held.get(sid), new)
        held.pop(sid, None)
        if new is not None:
            held[sid] = new
    fresh = DigestTree()
    for sid, tag in held.items():
        fresh.replace(sid, None, tag)
    for sid in held:
        for depth in range(4):
            assert tree.hash(place_of(sid, depth)) == fresh.hash(place_of(sid, depth))
    assert tree.hash() == fresh.hash()
    assert tree.parts("") == fresh.parts("")


def test_malformed_places_are_refused() -> None:
    b = replica("m002", 3)
    for places in (["zz"], ["0123"], ["0"] * 5000):
        asked = sync._ENCODER.encode([bytes(16), [], [], places])
        answer, effects = b.answer(asked, START_S)
        assert sync.decode_answer(answer).versions is None
        assert effects
