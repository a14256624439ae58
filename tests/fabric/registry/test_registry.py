from __future__ import annotations

import itertools
import random
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError, UsageError
from atoll.fabric.registry import sync
from atoll.fabric.registry.effects import (
    Effect,
    Event,
    NewSession,
    Obituary,
    Publish,
    Pull,
    Refused,
    RegistrySettings,
    Revoked,
    Verify,
)
from atoll.fabric.registry.fabric_registry import Registry
from atoll.fabric.registry.records import NodeService, Record, SessionState, encode_metadata
from tests.fabric.registry.network import START_S, metadata, signer, verify

A, B = "m001-00000000000000aa", "m002-00000000000000bb"
HUB = "h0-00000000000000cc"
T = TypeVar("T")


def member(
    slot: str = "m000",
    seed: int = 0,
    *,
    state: SessionState = SessionState.SERVING,
    settings: RegistrySettings | None = None,
    check: Verify = verify,
    observer: bool = False,
) -> Registry:
    return Registry(
        slot,
        metadata(slot),
        sign=signer(slot),
        verify=check,
        rng=random.Random(seed),
        now_s=START_S,
        state=state,
        settings=settings,
        observer=observer,
    )


def record(
    sid: str = A,
    state: SessionState = SessionState.SERVING,
    rev: int = 1,
    *,
    by: str | None = None,
    age_s: float = 0.0,
    **said: object,
) -> Record:
    slot = sid.partition("-")[0]
    body = encode_metadata(metadata(slot, **said))
    return signer(by or slot)(sid, state, rev, START_S - age_s, body)


def of(kind: type[T], effects: list[Effect]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def swap(asker: Registry, peer: Registry, now_s: float = START_S) -> int:
    """Run one exchange and return the bytes sent both ways."""
    exchange, used = asker.exchange(), 0
    while exchange.ask is not None:
        answer, _ = peer.answer(exchange.ask, now_s)
        assert max(len(exchange.ask), len(answer)) < sync.BATCH_BYTES + 2 * 64 * 1024
        used += len(exchange.ask) + len(answer)
        exchange.answered(answer, now_s)
    return used


# Exchanges

histories = st.lists(
    st.builds(
        record,
        sid=st.sampled_from((A, B, "m003-00000000000000dd")),
        state=st.sampled_from(SessionState),
        rev=st.integers(0, 2),
        engine=st.sampled_from(("", "a")),
        by=st.none(),
    ),
    max_size=8,
)


@given(histories, histories)
def test_one_exchange_makes_two_replicas_equal(ours: list[Record], theirs: list[Record]) -> None:
    asker, peer = member("m000", 1), member("h0", 2)
    asker.merge(ours, START_S)
    peer.merge(theirs, START_S)
    swap(asker, peer)
    assert asker.hash == peer.hash
    assert {s: e.record for s, e in asker.entries().items()} == {
        s: e.record for s, e in peer.entries().items()
    }
    assert swap(peer, asker) < 60


@given(histories, st.randoms(use_true_random=False))
def test_the_hash_depends_on_what_is_held_alone(history: list[Record], rng: random.Random) -> None:
    one, other = member(), member()
    shuffled = [*history, *history]
    rng.shuffle(shuffled)
    one.merge(history, START_S)
    other.merge(shuffled, START_S)
    assert one.hash == other.hash
    different = other.merge([record("m004-00000000000000ee")], START_S)
    assert different
    assert one.hash != other.hash


def test_an_idle_exchange_costs_next_to_nothing() -> None:
    asker, peer = member("m000", 1), member("h0", 2)
    peer.merge([record(f"m{i:03d}-{i:016x}") for i in range(1, 101)], START_S)
    first = swap(asker, peer)
    assert first > 10_000
    assert swap(asker, peer) < 60


def test_what_does_not_fit_into_one_message_follows() -> None:
    services = tuple(NodeService(model="m" * 250 + str(i)) for i in range(64))
    many = [record(f"m001-{i:016x}", services=services) for i in range(150)]
    asker, peer = member("m000", 1), member("h0", 2)
    peer.merge(many, START_S)
    assert swap(asker, peer) > 2 * sync.BATCH_BYTES
    assert asker.hash == peer.hash
    late = member("h1", 3)
    for _ in range(4):  # giving is bounded too: the rest goes with the next exchange
        swap(asker, late)
    assert late.hash == asker.hash


def test_an_endless_peer_is_cut_short() -> None:
    asker = member()
    exchange = asker.exchange()
    endless = sync.encode_message(sync.SyncReply(bytes(16), None, (record(),), (A,)))
    rounds = 0
    while exchange.ask is not None:
        exchange.answered(endless, START_S)
        rounds += 1
    assert rounds <= 64


@pytest.mark.parametrize("noise", [b"", b"x", b"\x91\xc4\x01x", b"\x91" * 5000])
def test_noise_is_answered_and_counted(noise: bytes) -> None:
    registry = member()
    answer, effects = registry.answer(noise, START_S)
    assert sync.decode_answer(answer).versions is None
    assert registry.pushed(noise, START_S) == effects == [Refused("malformed", "")]
    assert registry.stats()["refused"] == {"malformed": 2}
    with pytest.raises(InputError):
        registry.exchange().answered(noise, START_S)


def test_a_refused_record_is_not_asked_for_again_at_once() -> None:
    registry, peer = member(), member("h0", 2, check=lambda record: None)
    forged = record(by="m002")
    peer.merge([forged], START_S)
    swap(registry, peer)
    assert registry.stats()["refused"] == {"session of another": 1}
    swap(registry, peer, START_S + 5)
    assert registry.stats()["refused"] == {"session of another": 1}
    swap(registry, peer, START_S + 61)
    assert registry.stats()["refused"] == {"session of another": 2}


# What is taken and what is not


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (record(by="m002"), "session of another"),
        (record(by="m002", state=SessionState.LEFT), "session of another"),
        (record(by="h0"), "session of another"),
        (msgspec.structs.replace(record(), signature=b"forged"), "signature"),
        (record(age_s=24 * 3600 + 1), "stale"),
        (record(age_s=-301), "from the future"),
        (msgspec.structs.replace(record(), body=b"\xc1"), "malformed"),
    ],
)
def test_refusals_name_a_reason_and_change_nothing(wrong: Record, reason: str) -> None:
    registry = member()
    before = registry.hash
    assert registry.merge([wrong], START_S) == [Refused(reason, A)]
    assert registry.hash == before
    assert registry.get(A) is None
    assert registry.stats()["refused"] == {reason: 1}


@pytest.mark.parametrize("age_s", [24 * 3600 - 1, -299])
def test_clocks_may_differ_by_some_minutes(age_s: float) -> None:
    registry = member()
    assert registry.merge([record(age_s=age_s)], START_S) == [Event("joined", A)]


def test_what_is_known_already_is_not_verified() -> None:
    asked: list[Record] = []

    def counting(one: Record) -> None:
        asked.append(one)

    registry = member(check=counting)
    registry.merge([record(rev=2), record(rev=2), record(rev=1)], START_S)
    assert asked == [record(rev=2)]


def test_one_slot_cannot_fill_the_registry() -> None:
    registry = member(settings=RegistrySettings(max_slot_records=3))
    many = [record(f"m001-{i:016x}") for i in range(5)]
    assert len(of(Refused, registry.merge(many, START_S))) == 2
    assert registry.merge([record(many[0].sid, SessionState.LEFT)], START_S) == [
        Event("left", many[0].sid)
    ]
    assert registry.merge([record(B)], START_S) == [Event("joined", B)]


def test_one_slot_cannot_fill_the_memory() -> None:
    registry = member(settings=RegistrySettings(max_slot_bytes=3000))
    wide = {str(i): "x" * 200 for i in range(4)}
    large = [record(f"m001-{i:016x}", labels=wide) for i in range(4)]
    effects = registry.merge(large, START_S)
    assert [e.reason for e in of(Refused, effects)] == ["too large together"]
    grown = registry.merge([record(large[0].sid, rev=2, labels={"a": "x" * 250})], START_S)
    assert grown == [Event("changed", large[0].sid)]
    assert (
        len(of(Event, registry.merge([record(s.sid, SessionState.LEFT) for s in large], START_S)))
        == 3
    )
    assert registry.merge([record(f"m001-{9:016x}")], START_S) == [
        Event("joined", f"m001-{9:016x}")
    ]


def test_events_follow_a_life() -> None:
    registry = member()
    kinds: list[str] = []

    def happened(effects: list[Effect]) -> None:
        kinds.extend(event.kind for event in of(Event, effects))

    happened(registry.token_up("m001", A, START_S))
    happened(registry.merge([record(rev=0)], START_S))
    happened(registry.merge([record(rev=1, engine="vllm")], START_S))
    happened(registry.token_down("m001", A, START_S))
    happened(registry.token_down("m001", A, START_S))
    happened(registry.token_up("m001", A, START_S))
    happened(registry.merge([record(state=SessionState.LEFT, rev=2)], START_S))
    happened(registry.token_down("m001", A, START_S))
    happened(registry.merge([record(rev=9)], START_S))
    assert kinds == ["joined", "changed", "down", "up", "left"]


def test_a_peer_is_masked_by_its_token_alone() -> None:
    registry = member()
    registry.merge([record()], START_S)
    assert not registry.alive(A)
    registry.token_up("m001", A, START_S + 1)
    assert registry.alive(A)
    assert registry._silent.get(A) is None
    registry.token_down("m001", A, START_S + 2)
    assert not registry.alive(A)
    assert registry._silent.get(A) == START_S + 2
    assert registry.peers()[A].record.state is SessionState.SERVING


def test_nobody_holds_a_token_for_another() -> None:
    registry = member()
    assert registry.token_up("m002", A, START_S) == [Refused("token of another", A)]
    assert registry.token_up("m002", "m002-x", START_S) == [Refused("token of another", "m002-x")]
    registry.token_up("m001", A, START_S)
    assert registry.token_down("m002", A, START_S) == []
    assert registry.alive(A)


# This member itself


def test_only_what_is_new_is_announced() -> None:
    registry = member(state=SessionState.JOIN)
    registry.tick(START_S)
    assert registry.announce(START_S) == []
    assert registry.announce(START_S, SessionState.JOIN, metadata("m000")) == []
    (published,) = of(Publish, registry.announce(START_S, SessionState.SERVING))
    assert [(r.state, r.rev) for r in published.records] == [(SessionState.SERVING, 1)]
    assert registry.tick(START_S) == []


def test_an_engine_that_is_well_again_gets_a_new_session() -> None:
    registry = member()
    old = registry.sid
    registry.announce(START_S, SessionState.DOWN)
    effects = registry.announce(START_S, SessionState.SERVING)
    assert of(NewSession, effects) == [NewSession(old, registry.sid, "back")]
    left, new = (publish.records[0] for publish in of(Publish, effects))
    assert (left.sid, left.state) == (old, SessionState.LEFT)
    assert (new.sid, new.state, new.rev) == (registry.sid, SessionState.SERVING, 0)


def test_buried_alive_it_takes_one_new_session() -> None:
    registry = member()
    old = registry.sid
    obituaries = [record(old, SessionState.LEFT, by=hub) for hub in ("h0", "h1")]
    effects = registry.merge([*obituaries, *obituaries], START_S)
    assert of(NewSession, effects) == [NewSession(old, registry.sid, "left")]
    assert registry.own_entry.record.state is SessionState.SERVING
    assert registry.own_entry.metadata == metadata("m000")
    assert registry.entries()[old].record.state is SessionState.LEFT


def test_of_two_clones_one_keeps_the_session() -> None:
    one, other = member(seed=7), member(seed=7)
    assert one.sid == other.sid
    shared = one.sid
    one.announce(START_S, metadata=metadata("m000", engine="a"))
    other.announce(START_S, metadata=metadata("m000", engine="b"))
    # A clone shares the state of the generator too, so give the other one luck of its own.
    other._rng.seed(8)
    swap(one, other)
    swap(one, other)
    sids = {one.sid, other.sid}
    assert len(sids) == 2
    assert shared in sids
    assert one.hash == other.hash


def test_another_signature_under_the_same_words_is_no_clone() -> None:
    registry = member(check=lambda record: None)
    own = registry.own_entry.record
    registry.merge([msgspec.structs.replace(own, signature=b"z" * 64)], START_S)
    assert registry.sid == own.sid


def test_after_leaving_an_obituary_changes_nothing() -> None:
    registry = member()
    sid = registry.sid
    (bye,) = of(Publish, registry.leave(START_S))
    assert bye.records[0].state is SessionState.LEFT
    assert registry.leave(START_S) == []
    assert registry.merge([record(sid, SessionState.LEFT, 99, by="h0")], START_S) == []
    assert registry.sid == sid
    with pytest.raises(UsageError, match="left"):
        registry.announce(START_S, SessionState.SERVING)
    effects = registry.renew(START_S)
    assert of(NewSession, effects) == [NewSession(sid, registry.sid, "renewed")]
    assert registry.own_entry.record.state is SessionState.JOIN


def test_an_observer_leaves_no_trace() -> None:
    registry, hub = member(observer=True), member("h0", 2)
    hub.merge([record()], START_S)
    effects = registry.tick(START_S) + registry.token_up("h0", hub.sid, START_S)
    effects += registry.tick(START_S + 1)
    assert of(Pull, effects) == [Pull(hub.sid)]
    before = hub.hash
    swap(registry, hub)
    effects += registry.leave(START_S)
    assert not of(Publish, effects)
    assert registry.hash == hub.hash == before
    assert set(registry.peers()) == {A, hub.sid}


# Time


def run_until(registry: Registry, start_s: float, end_s: float) -> list[tuple[float, Effect]]:
    """Tick whenever due, as a driver does."""
    now_s, effects = start_s, []
    while now_s <= end_s:
        effects += [(now_s, effect) for effect in registry.tick(now_s)]
        due_s = registry.due_s
        assert due_s > now_s, "a driver would spin"
        now_s = due_s
    return effects


@pytest.mark.parametrize("left", [False, True])
def test_idle_it_wakes_seldom_and_pulls_every_five_seconds(left: bool) -> None:
    registry = member(settings=RegistrySettings(resign_s=60.0))
    registry.token_up("m001", A, START_S)
    if left:
        registry.leave(START_S)
    effects = run_until(registry, START_S, START_S + 500)
    pulls = [at_s for at_s, effect in effects if isinstance(effect, Pull)]
    gaps = [b - a for a, b in itertools.pairwise(pulls)]
    assert 75 < len(pulls) < 130
    assert min(gaps[1:]) >= 2.5
    assert max(gaps) <= 7.5
    signed = [at_s for at_s, effect in effects if isinstance(effect, Publish)]
    assert (len(signed) <= 2) if left else (8 <= len(signed) <= 18)


def test_the_first_token_is_followed_by_a_pull_at_once_from_a_hub() -> None:
    registry = member()
    registry.tick(START_S)
    for slot, sid in (("m001", A), ("h0", HUB), ("m002", B)):
        registry.token_up(slot, sid, START_S)
    effects = run_until(registry, START_S, START_S + 0.05)
    assert [effect for _, effect in effects if isinstance(effect, Pull)] == [Pull(HUB)]


def test_whoever_was_alone_says_it_again() -> None:
    registry = member()
    assert of(Publish, registry.tick(START_S))
    registry.token_up("h0", HUB, START_S + 1)
    effects = run_until(registry, START_S + 1, START_S + 1.05)
    assert [e.records for _, e in effects if isinstance(e, Publish)] == [
        (registry.own_entry.record,)
    ]


def test_a_newcomer_that_has_spoken_is_not_asked() -> None:
    registry = member()
    registry.token_up("h0", HUB, START_S)
    swap(registry, member("h0", 5))
    run_until(registry, START_S, START_S + 0.1)
    for slot, sid in (("m001", A), ("m002", B)):
        registry.token_up(slot, sid, START_S + 0.1)
    registry.merge([record(A)], START_S + 0.11)
    effects = run_until(registry, START_S + 0.2, START_S + 1)
    assert [e for _, e in effects if isinstance(e, Pull)] == [Pull(B)]


def test_many_tokens_make_one_pull() -> None:
    registry = member()
    registry.token_up("h0", HUB, START_S)
    swap(registry, member("h0", 5))
    run_until(registry, START_S, START_S + 1)
    for i in range(50):
        registry.token_up("m001", f"m001-{i:016x}", START_S + 1)
    effects = run_until(registry, START_S + 1, START_S + 2)
    pulls = [effect for _, effect in effects if isinstance(effect, Pull)]
    assert 1 <= len(pulls) <= 2
    assert pulls[0].sid.startswith("m001-")


def test_a_failed_pull_is_tried_again_soon() -> None:
    registry = member()
    registry.token_up("h0", HUB, START_S)
    run_until(registry, START_S, START_S + 1)
    registry.pull_failed(START_S + 1)
    effects = run_until(registry, START_S + 1, START_S + 2)
    assert [effect for _, effect in effects if isinstance(effect, Pull)]
    assert registry.stats()["exchanges_failed"] == 1


def test_what_a_peer_may_have_missed_is_said_again() -> None:
    registry = member()
    for slot, sid in (("h0", HUB), ("m001", A)):
        registry.token_up(slot, sid, START_S)
        registry.merge([record(sid)], START_S)
    run_until(registry, START_S, START_S + 20)
    registry.token_down("m001", A, START_S + 20)
    registry.token_up("m001", A, START_S + 25)
    quiet = run_until(registry, START_S + 25, START_S + 26)
    assert not [effect for _, effect in quiet if isinstance(effect, Publish)]
    registry.token_down("m001", A, START_S + 30)
    registry.announce(START_S + 31, metadata=metadata("m000", engine="x"))
    registry.token_up("m001", A, START_S + 35)
    again = run_until(registry, START_S + 35, START_S + 36)
    (published,) = [effect for _, effect in again if isinstance(effect, Publish)]
    assert published.records == (registry.own_entry.record,)


def watched(hub: Registry, start_s: float, seconds: int) -> list[Effect]:
    return [e for s in range(seconds + 1) for e in hub.tick(start_s + s)]


def test_only_a_hub_writes_obituaries_and_only_after_a_minute() -> None:
    hub, other = member("h0"), member("m009")
    for registry in (hub, other):
        registry.merge([record(), record(B)], START_S)
        registry.token_up("m002", B, START_S)
    assert not of(Obituary, watched(hub, START_S, 59))
    effects = watched(hub, START_S + 60, 10)
    assert of(Obituary, effects) == [Obituary(A)]
    buried = of(Publish, effects)[0].records[0]
    assert (buried.sid, buried.state, buried.certificate) == (A, SessionState.LEFT, b"h0")
    assert not of(Obituary, watched(other, START_S, 100))
    assert of(Event, other.merge([buried], START_S + 100)) == [Event("left", A)]
    assert hub.get(B) is not None
    assert hub.peers().keys() == {B}


def test_a_token_in_time_saves() -> None:
    hub = member("h0")
    hub.merge([record()], START_S)
    watched(hub, START_S, 59)
    hub.token_up("m001", A, START_S + 59)
    assert not of(Obituary, watched(hub, START_S + 59, 100))
    hub.token_down("m001", A, START_S + 159)
    assert not of(Obituary, watched(hub, START_S + 159, 59))
    assert of(Obituary, watched(hub, START_S + 218, 12)) == [Obituary(A)]


@pytest.mark.parametrize("jump_s", [100.0, 5000.0, -100.0, -5000.0])
def test_only_watched_time_counts(jump_s: float) -> None:
    hub = member("h0")
    hub.merge([record()], START_S)
    watched(hub, START_S, 30)
    woken_s = START_S + 30 + jump_s
    assert not of(Obituary, watched(hub, woken_s, 29))
    assert of(Obituary, watched(hub, woken_s + 30, 12)) == [Obituary(A)]


def test_a_clock_that_was_set_makes_it_sign_again() -> None:
    registry = member()
    registry.tick(START_S)
    effects = registry.tick(START_S - 5000)
    assert of(Publish, effects)[-1].records[0].signed_s == START_S - 5000
    assert registry.own_entry.record.rev == 1


def test_what_is_left_is_remembered_for_a_day_and_then_forgotten() -> None:
    settings = RegistrySettings(gap_s=float("inf"))
    registry = member(settings=settings)
    registry.merge([record(state=SessionState.LEFT), record(B)], START_S)
    day_s = 24 * 3600.0
    registry.tick(START_S + day_s)
    assert registry.merge([record(age_s=-1, rev=5)], START_S + day_s - 60) == []
    assert set(registry.entries()) == {A, B, registry.sid}
    effects = registry.tick(START_S + day_s + 700)
    assert of(Event, effects) == [Event("left", B)]
    assert set(registry.entries()) == {registry.sid}
    assert registry.own_entry.record.rev > 0
    for old in (record(), record(state=SessionState.LEFT)):
        assert registry.merge([old], START_S + day_s + 700) == [Refused("stale", A)]


def test_revoked_certificates_lose_their_records() -> None:
    bad: set[str] = set()

    def check(one: Record) -> str | None:
        return "revoked" if one.certificate.decode() in bad else verify(one)

    registry = member(check=check)
    registry.merge(
        [record(), record(B), record("m001-00000000000000ff", SessionState.LEFT)], START_S
    )
    effects = registry.merge([record(HUB, revoked=("0a", "0b"))], START_S)
    assert of(Revoked, effects) == [Revoked(frozenset({"0a", "0b"}))]
    assert not of(Revoked, registry.merge([record(HUB, rev=2, revoked=("0a",))], START_S))
    assert not of(Revoked, registry.merge([record(B, rev=2, revoked=("0c",))], START_S))
    bad.add("m001")
    effects = registry.recheck(START_S)
    assert effects == [Refused("revoked", A), Event("left", A)]
    assert "m001-00000000000000ff" in registry.entries()
    assert registry.merge([record(rev=7)], START_S) == [Refused("revoked", A)]


def test_figures() -> None:
    registry = member()
    registry.merge([record(), record(B, SessionState.LEFT)], START_S)
    registry.token_up("m001", A, START_S)
    swap(registry, member("h0", 2))
    registry.pushed(sync.encode_message((record(rev=5),)), START_S + 0.25)
    stats = registry.stats()
    assert stats["sessions"] == {"join": 0, "serving": 3, "down": 0, "left": 1}
    assert stats["alive"] == 2
    assert (stats["merged"], stats["exchanges"], stats["sessions_taken"]) == (4, 1, 1)
    assert (stats["last_sync_s"], stats["spread_s"]) == (START_S, 0.25)
