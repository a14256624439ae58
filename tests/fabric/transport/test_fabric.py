"""Members of a real fabric on loopback: joining, talking, losing hubs, being put out."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import Access
from atoll.fabric.registry.effects import RegistrySettings
from atoll.fabric.registry.peers import Load
from atoll.fabric.registry.records import Metadata, NodeService, SessionState
from atoll.fabric.transport import silent_links
from atoll.fabric.transport.fabric import Fabric, Peer
from atoll.fabric.transport.hub import Hub, hub_options
from atoll.fabric.transport.link import FabricLink, UnreachableError
from tests.fabric.transport.site import SETTINGS, Scenario, Site, free_port, two_hubs, until


def names(fabric: Fabric) -> dict[str, str]:
    return {
        peer.name: peer.state.name if peer.alive else "silent"
        for peer in fabric.peers()
        if peer.metadata.role != "hub"
    }


def test_members_see_each_other_come_change_and_go(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        seen: list[tuple[str, str]] = []
        a = await site.join(site.issue("a"), name="n1")
        a.listeners.append(lambda kind, peer: seen.append((kind, peer.name)))
        b = await site.join(site.issue("b", "tum", "gateway"), name="", state=SessionState.JOIN)
        assert names(b) == {"a/n1": "SERVING"}  # complete when connect returns
        await until(lambda: names(a) == {"b": "JOIN"})
        peer = a.peer(b.sid)
        assert peer is not None
        assert (peer.provider, peer.metadata.role, peer.verified) == ("tum", "gateway", True)
        assert not peer.routable
        serving = msgspec.structs.replace(b.metadata, services=(NodeService(model="m"),))
        await b.announce(SessionState.SERVING, serving)
        await until(lambda: names(a) == {"b": "SERVING"})
        assert a.peer(b.sid).metadata.services[0].model == "m"  # type: ignore[union-attr]
        await b.leave()
        await until(lambda: names(a) == {})
        # Its token may come before its record, or after.
        kinds = [kind for kind, name in seen if name == "b" and kind != "up"]
        assert kinds[:2] == ["joined", "changed"]
        assert ("left", "b") in seen
        assert a.peer(b.sid).state is SessionState.LEFT  # type: ignore[union-attr]

    run(scenario)


def test_a_member_whose_link_is_silent_is_cut_off_and_comes_back(
    run: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays open: the hub goes by what the kernel says, with whoever it says it of."""

    async def scenario(site: Site) -> None:
        a, b = await site.join(site.issue("a")), await site.join(site.issue("b"))
        await until(lambda: names(a) == {"b/x": "SERVING"})
        hub = site.hubs[0].fabric._link
        await until(lambda: {a._link.id, b._link.id} <= hub._silent._heard_s.keys())
        silent = {ends[1] for ends, peer in _links_of(hub) if peer == b._link.id}
        age_s = silent_links.data_age_s

        def frozen(descriptor: int) -> float | None:
            ends = {d: there for (_, there), d in hub._silent._descriptors.items()}
            return 60.0 if ends.get(descriptor) in silent else age_s(descriptor)

        monkeypatch.setattr(silent_links, "data_age_s", frozen)
        await until(lambda: hub._silent.cut)
        # Whether others hear that it was gone depends on how soon it is back.
        await until(lambda: b.connected and {e[1] for e, _ in _links_of(hub)}.isdisjoint(silent))
        await until(lambda: names(a) == {"b/x": "SERVING"})
        assert hub._silent.cut == 1

    run(scenario)


def test_a_member_that_dies_is_known_to_be_gone_at_once_however_late_all_were(
    run: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection closes: only a hub that is gone at the same time is a reason to wait."""

    async def scenario(site: Site) -> None:
        a, b = await site.join(site.issue("a")), await site.join(site.issue("b"))
        await until(lambda: names(a) == {"b/x": "SERVING"})
        loop, waits = asyncio.get_running_loop(), []
        # Both stood still for a long time.
        for name in (a.sid, b.sid, a._link.id, b._link.id):
            a.patience.tell(name, 100.0, loop.time())
        a.patience.tick(loop.time() + 100.0)

        class Loop:
            def __getattr__(self, name: str) -> Any:
                return getattr(loop, name)

            def call_later(self, delay_s: float, function: Any, *args: Any) -> Any:
                if function == a._token_gone:
                    waits.append(delay_s)
                return loop.call_later(delay_s, function, *args)

        monkeypatch.setattr(a, "_loop", Loop())
        # And a hub was lost a moment ago.
        a._shaken_s = loop.time()
        await b._link.close()
        await until(lambda: names(a) == {"b/x": "silent"})
        assert waits
        assert max(waits) <= a.settings.flap_s

    run(scenario)


def _links_of(link: FabricLink) -> list[tuple[tuple[str, str], str]]:
    return [((each.src, each.dst), str(each.zid)) for each in link._session.info.links()]


def test_a_listener_that_fails_stops_nobody(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        def fails(kind: str, peer: Peer) -> None:
            raise ValueError(kind)

        a = await site.join(site.issue("a"))
        a.listeners.append(fails)
        await site.join(site.issue("b"))
        await until(lambda: "b/x" in names(a))

    run(scenario)


def test_questions_messages_and_load(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.join(site.issue("a")), await site.join(site.issue("b"))
        declared = a.queryable(keys.req(a.sid), lambda query: query.reply(query.payload + b"!"))
        assert await b.query(keys.req(a.sid), b"hello", 30.0) == b"hello!"
        got: list[tuple[str, bytes]] = []
        subscription = b.subscribe(keys.outward_all(b.sid), got.extend)
        key = keys.outward(b.sid, a.identity.slot, "7")
        a.put(key, b"first")
        await until(lambda: got)
        got.clear()
        for number in range(300):
            a.put(key, b"%d" % number)
        await until(lambda: len(got) == 300)
        assert got == [(key, b"%d" % number) for number in range(300)]
        a.say_load(Load(running=3))
        await until(lambda: a.sid in b.loads)
        assert b.loads[a.sid].running == 3
        subscription.close()
        declared.close()
        with pytest.raises(TimeoutError):
            await b.query(keys.req(a.sid), b"anybody?", 0.2)

    run(scenario)


def test_a_question_waits_for_its_answerer(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.join(site.issue("a")), await site.join(site.issue("b"))
        asking = asyncio.create_task(b.query(keys.req(a.sid), b"x", 5.0))
        await asyncio.sleep(0.1)
        a.queryable(keys.req(a.sid), lambda query: query.reply(b"late"))
        assert await asking == b"late"

    run(scenario)


def test_a_new_session_replaces_the_old(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.join(site.issue("a")), await site.join(site.issue("b"))
        renewed: list[tuple[str, str]] = []
        a.on_renewed.append(lambda old, new: renewed.append((old, new)))
        old = a.sid
        new = await a.renew()
        assert renewed == [(old, new)]
        await until(lambda: b.peer(new) is not None and b.peer(new).routable)  # type: ignore[union-attr]
        await until(lambda: b.peer(old).state is SessionState.LEFT)  # type: ignore[union-attr]
        assert names(b) == {"a/x": "SERVING"}

    run(scenario)


@two_hubs
def test_when_a_hub_dies_members_move_and_nobody_counts_as_down(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        # On a busy machine moving takes longer than it may by default.
        settings = replace(SETTINGS, flap_s=30.0)
        members = [await site.join(site.issue(f"w{n}"), settings=settings) for n in range(4)]
        downs: list[str] = []
        for member in members:
            member.listeners.append(
                lambda kind, peer: downs.append(peer.name) if kind == "down" else None
            )
        await until(lambda: all(len(names(member)) == 3 for member in members))
        await site.stop_hub(0)
        await until(lambda: all(member.connected for member in members))
        everybody = {"SERVING"}
        await until(lambda: all(set(names(m).values()) == everybody for m in members))
        a, b = members[:2]
        a.queryable(keys.req(a.sid), lambda query: query.reply(b"here"))
        assert await b.query(keys.req(a.sid), b"", 30.0) == b"here"
        assert not downs

    run(scenario)


def test_what_is_said_without_a_hub_is_known_once_it_is_back(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        a, b = await site.join(site.issue("a")), await site.join(site.issue("b"))
        await until(lambda: names(a) and names(b))
        await site.stop_hub(0)
        await until(lambda: names(a) == {"b/x": "silent"} and names(b) == {"a/x": "silent"})
        assert not a.connected
        await a.announce(metadata=msgspec.structs.replace(a.metadata, region="eu"))
        await site.hub(0)
        await until(lambda: names(b) == {"a/x": "SERVING"})
        await until(lambda: b.peer(a.sid).metadata.region == "eu")  # type: ignore[union-attr]
        assert (a.stats()["sessions_taken"], b.stats()["sessions_taken"]) == (1, 1)

    run(scenario)


def test_a_hub_that_is_added_joins_those_that_run(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        a = await site.join(site.issue("a"))
        site.ports.append(free_port())
        site.authority.add_hub(f"127.0.0.1:{site.ports[1]}")
        await site.hub(1)
        access = site.authority.renew("a")
        there_only = replace(site.issue("b"), hubs=access.hubs[1:])
        b = await site.join(there_only)
        await until(lambda: names(a) == {"b/x": "SERVING"} and names(b) == {"a/x": "SERVING"})
        a.queryable(keys.req(a.sid), lambda query: query.reply(b"here"))
        assert await b.query(keys.req(a.sid), b"", 30.0) == b"here"

    run(scenario)


def test_a_revoked_member_is_put_out_at_once(
    run: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.fabric.transport.hub._LOOK_S", 0.05)
    monkeypatch.setattr("atoll.fabric.transport.hub._RELOAD_S", 0.1)

    async def scenario(site: Site) -> None:
        a, b = await site.join(site.issue("a")), await site.join(site.issue("b"))
        await until(lambda: names(a) == {"b/x": "SERVING"})
        site.authority.revoke("b")
        await until(lambda: names(a) == {})
        await until(lambda: b.sid not in {peer.sid for peer in site.hubs[0].fabric.peers()})
        # It has heard why, is cut off, and stays so however often it comes back.
        await until(lambda: int(site.authority.members[-1].serial, 16) in b.verifier.revoked)
        await until(lambda: site.hubs[0].reloads == 1)
        await until(lambda: a.connected and b.connected)
        c = await site.join(site.issue("c"))
        await until(lambda: names(a) == {"c/x": "SERVING"})
        assert c.sid not in {peer.sid for peer in b.peers()}
        with pytest.raises(TimeoutError):
            await b.query(keys.sync(c.sid), b"", 0.3)
        # At a hub that starts later, it has no rights either.
        await site.stop_hub(0)
        await site.hub(0)
        await until(lambda: a.connected and b.connected and c.connected)
        with pytest.raises(TimeoutError):
            await b.query(keys.sync(c.sid), b"", 0.3)
        assert names(a) == {"c/x": "SERVING"}

    run(scenario)


async def test_a_hub_buries_the_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    # One hub has no other to leave time to.
    soon = partial(RegistrySettings, obituary_spread_s=0.0)
    monkeypatch.setattr("atoll.fabric.transport.fabric.RegistrySettings", soon)
    settings = replace(SETTINGS, obituary_s=0.3)
    hub = await Hub.start(hub_options(None, listen=[f"127.0.0.1:{port}"], settings=settings))
    a, b = [
        await Fabric.connect(
            Access.open_at([f"127.0.0.1:{port}"], name=name, provider="p"),
            Metadata(name="", provider="", role="worker"),
            state=SessionState.SERVING,
            settings=SETTINGS,
        )
        for name in ("a", "b")
    ]
    assert not b.peers()[0].verified
    await until(lambda: names(a) == {"b": "SERVING"})
    sid = b.sid
    # Its process hangs: the link is there, the token is not, and it says nothing.
    b._undeclare("")
    await until(lambda: names(a) == {"b": "silent"})
    async with asyncio.timeout(120):
        await until(lambda: hub.fabric.peer(sid).state is SessionState.LEFT)  # type: ignore[union-attr]
        await until(lambda: b.sid != sid)  # it lives, so it takes a new session
        await until(lambda: names(a) == {"b": "SERVING"})
    for fabric in (a, b):
        await fabric.close()
    await hub.close()


async def test_no_hub_is_a_clear_error() -> None:
    port = free_port()

    with pytest.raises(UnreachableError, match=f"no hub answers at 127.0.0.1:{port}"):
        await Fabric.connect(
            Access.open_at([f"127.0.0.1:{port}"]),
            Metadata(name="x", provider="", role="worker"),
            settings=replace(SETTINGS, connect_s=0.3),
        )


def test_one_dead_hub_of_two_does_not_delay_joining(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        alive = f"127.0.0.1:{site.ports[0]}"
        for order in ((f"127.0.0.1:{free_port()}", alive), (alive, f"127.0.0.1:{free_port()}")):
            access = replace(site.issue(f"a{order.index(alive)}"), hubs=order)
            # Whoever waited for the dead one would do so for all of this.
            async with asyncio.timeout(60):
                await site.join_with(access, replace(SETTINGS, connect_s=600.0))

    run(scenario)


def test_a_taken_port_is_a_clear_error(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(UnreachableError, match="cannot listen"):
            await site.hub(0)

    run(scenario)


def test_a_hub_is_found_by_any_of_its_names_addresses(
    run: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(site: Site) -> None:
        port = site.ports[0]

        async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            assert host == "hubs.example"
            # The first of them is nobody's.
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
                for address in ("127.0.0.3", "127.0.0.1")
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        access = replace(site.issue("a"), hubs=(f"hubs.example:{port}",))
        fabric = await site.join(access)
        assert fabric.connected

    run(scenario)


def test_a_closed_subscription_leaves_no_thread(run: Scenario) -> None:
    async def scenario(site: Site) -> None:
        a = await site.join(site.issue("a"))
        before = threading.active_count()
        subscriptions = [a.subscribe(keys.outward_all(a.sid), lambda _: None) for _ in range(5)]
        assert threading.active_count() == before + 5
        for subscription in subscriptions:
            subscription.close()
        await until(lambda: threading.active_count() == before)

    run(scenario)
