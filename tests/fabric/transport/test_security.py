"""What a stranger, a member with ill will or a copy of old news cannot do."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority
from atoll.fabric.identity.record_trust import sign_record
from atoll.fabric.registry.records import Metadata, Record, SessionState, encode_metadata
from atoll.fabric.registry.sync import encode_message
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.hub import Hub
from atoll.fabric.transport.link import FabricLink, UnreachableError
from tests.fabric.transport.site import SETTINGS, ListLog, Scenario, Site, until

IMPATIENT = replace(SETTINGS, connect_s=0.3)


async def refused_at_the_door(access: Access) -> None:
    with pytest.raises(UnreachableError):
        await FabricLink.open(access, IMPATIENT)


def test_nobody_enters_without_a_certificate_of_this_fabric(run: Scenario, tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        hub = f"127.0.0.1:{site.ports[0]}"
        good = site.issue("good")
        # No TLS at all.
        await refused_at_the_door(Access.open_at([hub]))
        # A certificate of another authority, presented under the real one's name.
        foreign = Authority.create(tmp_path / "other", "test", [hub]).issue("w", "ethz", "worker")
        await refused_at_the_door(replace(foreign, authority=good.authority))
        # TLS without a certificate.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
            await _first_byte(site.ports[0], context)
        # The real one is let in.
        await site.join(good)

    run(scenario)


async def _first_byte(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"hello")
        await writer.drain()
        return await asyncio.wait_for(reader.readexactly(1), 60)
    finally:
        writer.close()


def test_a_member_cannot_pass_as_a_hub(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        crook = site.issue("crook")
        await site.stop_hub(0)
        address = f"127.0.0.1:{site.ports[0]}"
        trap = await FabricLink.open(crook, SETTINGS, listen=[address])
        await refused_at_the_door(site.issue("victim"))
        await trap.close()

    run(scenario)


# The name of a slot beyond the first thousand begins like that of another: neither may pass for the other.
@pytest.mark.parametrize(
    ("slots", "friends", "crooks"),
    [
        (0, "m002", "m003"),
        pytest.param(1101, "m1100", "m110", marks=pytest.mark.slow),
        pytest.param(1101, "m110", "m1100", marks=pytest.mark.slow),
        pytest.param(10_000, "m9999", "m9998", marks=pytest.mark.slow),
    ],
)
def test_members_write_and_hear_only_their_own_keys(
    run: Scenario, slots: int, friends: str, crooks: str
) -> None:
    async def scenario(site: Site) -> None:
        if slots:
            await site.grow(slots)
        log = ListLog()
        victim = await site.join(site.issue("victim"), log=log)
        friend = await site.join(site.issue_slot(friends, "friend"))
        crook_access = site.issue_slot(crooks, "crook")
        crook = await FabricLink.open(crook_access, SETTINGS)
        own, other = crook_access.identity.slot, friend.identity.slot

        heard: list[tuple[str, bytes]] = []
        victim.subscribe(keys.inward_all(victim.sid), heard.extend)
        victim.queryable(keys.req(victim.sid), lambda query: query.reply(b"real"))
        tapped: list[tuple[str, bytes]] = []
        taps = (f"{keys.PREFIX}/**", f"{keys.PREFIX}/in/**", keys.inward_all(victim.sid))
        for key in taps:
            crook.subscribe(key, tapped.extend)
        crook.queryable(keys.req(victim.sid), lambda query: query.reply(b"forged"))
        crook.queryable(f"{keys.PREFIX}/req/**", lambda query: query.reply(b"forged"))
        ghost = f"{other}-{'a' * 16}"
        crook.token(keys.alive(ghost))
        await asyncio.sleep(0.2)

        friend.put(keys.inward(victim.sid, other), b"from a friend")
        crook.put(keys.inward(victim.sid, other), b"as the friend")
        crook.put(keys.reg(friend.sid), b"junk in another's name")
        crook.put(keys.load(friend.sid), b"\x95\x01\x01\xc0\x00\xc0")
        crook.put(keys.inward(victim.sid, own), b"as itself")
        await until(lambda: (keys.inward(victim.sid, own), b"as itself") in heard)
        await until(lambda: (keys.inward(victim.sid, other), b"from a friend") in heard)
        await asyncio.sleep(0.1)
        assert {text for _, text in heard} == {b"from a friend", b"as itself"}
        # What a session sends itself, it hears; nothing of others comes to it.
        assert b"from a friend" not in {text for _, text in tapped}
        assert {await friend.query(keys.req(victim.sid), b"", 30.0) for _ in range(10)} == {b"real"}
        assert victim.stats()["refused"] == {}  # the hub stopped it all
        assert ghost not in [sid for _, sid in victim._registry.tokens()]
        assert friend.sid not in victim.loads
        await crook.close()

    run(scenario)


def signed(
    access: Access,
    *,
    sid: str = "",
    at_s: float = 0.0,
    state: SessionState = SessionState.SERVING,
    **said: str,
) -> Record:
    identity = access.identity
    fields = {"name": identity.name, "provider": identity.provider} | said
    metadata = Metadata(
        name=fields["name"],
        provider=fields["provider"],
        role="worker",
    )
    return sign_record(
        identity,
        access.fabric_id,
        sid or f"{identity.slot}-{'b' * 16}",
        state,
        5,
        at_s or time.time(),
        encode_metadata(metadata),
    )


def test_forged_old_and_oversized_records_are_refused_and_logged(
    run: Scenario, tmp_path: Path
) -> None:
    async def scenario(site: Site) -> None:
        log = ListLog()
        victim = await site.join(site.issue("victim"), log=log)
        friend = await site.join(site.issue("friend"))
        access = site.issue("crook")
        crook = await FabricLink.open(access, SETTINGS)
        sid = f"{access.identity.slot}-{'b' * 16}"

        async def refused(payload: bytes, reason: str) -> None:
            before = victim.stats()["refused"].get(reason, 0)
            crook.put(keys.reg(sid), payload)
            await until(lambda: victim.stats()["refused"].get(reason, 0) > before)
            assert reason in log.reasons()

        await refused(encode_message((signed(access, provider="eth"),)), "forged provider")
        await refused(encode_message((signed(access, name="friend"),)), "forged provider")
        await refused(encode_message((signed(access, sid=friend.sid),)), "session of another")
        obituary = signed(access, sid=friend.sid, state=SessionState.LEFT)
        await refused(encode_message((obituary,)), "session of another")
        replayed = signed(access, at_s=time.time() - 25 * 3600)
        await refused(encode_message((replayed,)), "stale")
        await refused(encode_message((signed(access, at_s=time.time() + 3600),)), "from the future")
        good = signed(access)
        bad = msgspec.structs.replace(good, signature=b"0" * 70)
        await refused(encode_message((bad,)), "signature")
        foreign = Authority.create(tmp_path / "other", "test", ["h"]).issue("crook", "p", "worker")
        stranger = signed(replace(foreign, fabric_id=access.fabric_id))
        await refused(encode_message((stranger,)), "foreign")
        large = msgspec.structs.replace(good, body=b"x" * 100_000)
        await refused(encode_message((large,)), "malformed")
        await refused(b"\xc1junk", "malformed")

        # None of it left a trace, and the one good record is taken.
        assert {peer.name for peer in victim.peers()} == {"hub-0", "friend/x"}
        peer = victim.peer(friend.sid)
        assert peer is not None
        assert (peer.state, peer.provider) == (SessionState.SERVING, "ethz")
        crook.put(keys.reg(sid), encode_message((good,)))
        await until(lambda: victim.peer(sid) is not None)
        await crook.close()

    run(scenario)


def test_an_old_record_cannot_bring_a_session_back(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.join(site.issue("a")), await site.join(site.issue("b"))
        entry = b._registry.get(a.sid)
        assert entry is not None
        await a.leave()
        await until(lambda: b.peer(a.sid).state is SessionState.LEFT)  # type: ignore[union-attr]
        access = site.issue("crook")
        crook = await FabricLink.open(access, SETTINGS)
        known = b.stats()["known"]
        crook.put(keys.reg(f"{access.identity.slot}-{'c' * 16}"), encode_message((entry.record,)))
        await until(lambda: b.stats()["known"] > known)
        assert b.peer(a.sid).state is SessionState.LEFT  # type: ignore[union-attr]
        await crook.close()

    run(scenario)


def test_nothing_secret_is_logged(run: Scenario, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(site: Site) -> None:
        log = ListLog()
        access = site.issue("a")
        fabric: Fabric = await site.join(access, log=log)
        await site.join(site.issue("b"))
        await until(lambda: len(fabric.peers()) == 2)
        hub: Hub = site.hubs[0]
        assert access.key is not None
        shown = f"{log.events} {hub.options} {fabric.stats()} {capfd.readouterr()}"
        assert access.key.hex() not in shown
        assert repr(access.key)[2:60] not in shown
        assert access.pack()[100:200] not in shown

    run(scenario)
