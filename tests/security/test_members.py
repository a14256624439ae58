"""What a member with a good certificate and ill will tries against the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from atoll.core.errors import InputError
from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import is_loopback
from atoll.fabric.registry.effects import Pull, Verify
from atoll.fabric.registry.fabric_registry import Registry
from atoll.fabric.registry.peers import Load, decode_load, encode_load
from atoll.fabric.registry.records import (
    Metadata,
    Record,
    SessionState,
    decode_metadata,
    encode_metadata,
)
from atoll.fabric.registry.sync import SyncRequest, encode_message
from atoll.fabric.registry.sync_exchange import one_of
from atoll.fabric.transport.fabric import Quota
from atoll.fabric.transport.link import FabricLink
from tests.fabric.transport.site import SETTINGS, ListLog, Site, until


def live(tmp_path: Path, scenario: Callable[[Site], Awaitable[None]]) -> None:
    async def go() -> None:
        made = Site(tmp_path, 1)
        try:
            await made.hub()
            await scenario(made)
        finally:
            await made.close()

    asyncio.run(asyncio.wait_for(go(), 240))


def test_nobody_speaks_for_a_session_of_another_under_its_own_slot(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        log = ListLog()
        watcher = await site.join(site.issue("watcher"), log=log)
        friend = await site.join(site.issue("friend"))
        await until(lambda: watcher.peer(friend.sid) is not None)
        access = site.issue("crook")
        crook = await FabricLink.open(access, SETTINGS)
        # A hub lets these pass: the slot is the crook's own.
        own = access.identity.slot
        watcher.loads.clear()
        crook.put(f"{keys.PREFIX}/load/{own}/{friend.sid}", encode_load(Load(running=999)))
        crook.put(f"{keys.PREFIX}/reg/{own}/{friend.sid}", b"\x90")
        token = crook.token(f"{keys.PREFIX}/alive/{own}/{friend.sid}")
        await until(lambda: {"token of another", "malformed"} <= log.reasons())
        await asyncio.sleep(0.1)
        assert friend.sid not in watcher.loads
        # The friend dies while the crook's token stands and falls: its death counts all the same.
        await friend._link.close()
        for _ in range(20):
            token.close()
            token = crook.token(f"{keys.PREFIX}/alive/{own}/{friend.sid}")
            await asyncio.sleep(0.005)
        await until(lambda: not watcher._registry.alive(friend.sid))
        await crook.close()

    live(tmp_path, scenario)


def test_a_flood_of_news_is_dropped_and_the_news_of_others_is_heard(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        log = ListLog()
        watcher = await site.join(site.issue("watcher"), log=log)
        watcher._pushes = Quota(1.0, 5.0)
        access = site.issue("crook")
        crook = await FabricLink.open(access, SETTINGS)
        for _ in range(50):
            crook.put(keys.reg(f"{access.identity.slot}-{'b' * 16}"), b"\x90")
        await until(lambda: "flood" in log.reasons())
        friend = await site.join(site.issue("friend"))
        await until(lambda: watcher.peer(friend.sid) is not None)
        await crook.close()

    live(tmp_path, scenario)


def test_what_each_may_say_comes_back_with_time() -> None:
    quota = Quota(2.0, 3.0)
    assert [quota.take("m001", 0.0) for _ in range(4)] == [True, True, True, False]
    assert quota.take("m002", 0.0)
    assert [quota.take("m001", 1.0) for _ in range(3)] == [True, True, False]
    # A clock that goes back gives nothing.
    assert not quota.take("m001", 0.5)


def test_who_shows_many_tokens_is_not_asked_more_often() -> None:
    sids = [f"m001-{number:016x}" for number in range(1000)] + [f"m002-{0:016x}", f"h0-{0:016x}"]
    rng = Random(7)
    shown = Counter(map(keys.slot_of, sids))
    asked = [keys.slot_of(one_of(sids, shown, rng)) for _ in range(300)]
    assert min(asked.count(slot) for slot in ("m001", "m002", "h0")) > 60


def registry(verify: Verify = lambda _record: None) -> Registry:
    return Registry(
        "m000",
        Metadata(name="a", provider="p", role="worker"),
        sign=lambda sid, state, rev, at_s, body: Record(sid, state, rev, at_s, body, b"", b""),
        verify=verify,
        rng=Random(1),
        now_s=0.0,
    )


def test_tokens_of_one_slot_are_bounded() -> None:
    one = registry()
    most = one.settings.max_slot_records
    for number in range(most + 10):
        one.token_up("m001", f"m001-{number:016x}", 0.0)
    assert one.stats()["alive"] == most + 1
    assert one.stats()["refused"] == {"too many tokens": 10}
    for number in range(5):
        one.token_down("m001", f"m001-{number:016x}", 1.0)
    one.token_up("m001", f"m001-{most + 100:016x}", 1.0)
    assert one.stats()["alive"] == most - 3
    pulls = [effect for effect in one.tick(10.0) if isinstance(effect, Pull)]
    assert len(pulls) == 1


@pytest.mark.parametrize("serial", ["", "zz", "0x1", "-1", "1_0", "A", "1" * 65, "1\n"])
def test_a_serial_that_is_none_makes_a_record_malformed(serial: str) -> None:
    body = msgspec.msgpack.encode(
        {"name": "h", "provider": "p", "role": "hub", "revoked": [serial]}
    )
    with pytest.raises(InputError, match="revoked"):
        decode_metadata(body)
    good = Metadata(name="h", provider="p", role="hub", revoked=("0af",))
    assert decode_metadata(encode_metadata(good)).revoked == ("0af",)


@pytest.mark.parametrize(
    "sample",
    [
        [10**9, 0],
        [-1, 0],
        [0, 0, None, float("nan")],
        [0, 0, None, float("inf")],
        [0, 0, None, 0.0, float("nan")],
        [0, 0, None, 0.0, 0.0, 0.0, "x" * 1000],
    ],
)
def test_loads_that_would_poison_routing_are_no_loads(sample: list[object]) -> None:
    assert decode_load(msgspec.msgpack.encode(sample)) is None
    assert decode_load(encode_load(Load(3, 1, 8, 12.5, 0.5))) == Load(3, 1, 8, 12.5, 0.5)


@pytest.mark.parametrize(
    ("address", "near"),
    [
        ("127.0.0.1:7447", True),
        ("127.8.0.1", True),
        ("localhost:1", True),
        ("[::1]:7447", True),
        ("::1", True),
        ("127.evil.example:7447", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:7447", False),
        ("::1:2", False),
        ("0.0.0.0:7447", False),
        ("10.0.0.1:7447", False),
    ],
)
def test_only_addresses_of_this_machine_are_its_own(address: str, near: bool) -> None:
    assert is_loopback(address) is near


def test_a_revoked_member_is_nobody_to_those_who_hear_of_it(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        log = ListLog()
        watcher = await site.join(site.issue("watcher"), log=log)
        bad = await site.join(site.issue("bad"))
        await until(lambda: watcher.peer(bad.sid) is not None)
        site.authority.revoke("bad")
        await until(lambda: watcher.peer(bad.sid) is None)
        # It goes on talking, and is refused each time.
        before = watcher.stats()["refused"].get("revoked", 0)
        await bad.announce(SessionState.DOWN)
        await until(lambda: watcher.stats()["refused"].get("revoked", 0) > before)
        assert "revoked" in log.reasons()
        assert watcher.peer(bad.sid) is None

    live(tmp_path, scenario)


def test_what_is_too_large_is_not_passed_on(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        log = ListLog()
        watcher = await site.join(site.issue("watcher"), log=log)
        access = site.issue("crook")
        crook = await FabricLink.open(access, SETTINGS)
        own = access.identity.slot
        heard: list[tuple[str, bytes]] = []
        watcher.subscribe(keys.inward_all(watcher.sid), heard.extend)
        asked: list[bytes] = []
        watcher.queryable(keys.req(watcher.sid), lambda query: asked.append(query.payload))
        await asyncio.sleep(0.1)
        crook.put(keys.inward(watcher.sid, own), b"x" * 2_000_000)
        crook.put(keys.reg(f"{own}-{'b' * 16}"), b"x" * 3_000_000)
        with pytest.raises(TimeoutError):
            await crook.query(keys.req(watcher.sid), b"x" * 100_000, 0.5)
        crook.put(keys.inward(watcher.sid, own), b"x" * 1_000_000)
        crook.put(keys.reg(f"{own}-{'b' * 16}"), b"x" * 1_000_000)
        await until(lambda: heard and watcher.stats()["refused"])
        assert [len(data) for _, data in heard] == [1_000_000]
        assert watcher.stats()["refused"] == {"malformed": 1}
        assert asked == []
        await crook.close()

    live(tmp_path, scenario)


def test_of_many_forged_records_only_a_few_are_verified() -> None:
    verified: list[Record] = []

    def verify(record: Record) -> str | None:
        verified.append(record)
        return "signature"

    one = registry(verify)
    body = encode_metadata(Metadata(name="b", provider="p", role="worker"))
    forged = [
        Record(f"m001-{number:016x}", SessionState.SERVING, 0, 0.0, body, b"", b"")
        for number in range(1000)
    ]
    one.merge(forged, 0.0)
    assert len(verified) == 8
    # Many of one session count as the greatest of them.
    verified.clear()
    one.merge(
        [Record(forged[0].sid, SessionState.SERVING, n, 0.0, body, b"", b"") for n in range(100)], 0
    )
    assert [record.rev for record in verified] == [99]


def test_questions_beyond_all_measure_are_not_answered(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        watcher = await site.join(site.issue("watcher"))
        watcher._asks = Quota(0.001, 30.0)
        crook = await FabricLink.open(site.issue("crook"), SETTINGS)
        ask = encode_message(SyncRequest(bytes(16)))
        answered = 0
        with contextlib.suppress(TimeoutError):
            while answered < 100:
                await crook.query(keys.sync(watcher.sid), ask, 2.0)
                answered += 1
        # The hub asks now and then as well.
        assert 20 <= answered <= 30
        await crook.close()

    live(tmp_path, scenario)
