"""A real fabric by site on loopback: who sees whom, speakers, old tokens beside new ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.access import Access
from atoll.fabric.identity.authority import Authority
from atoll.fabric.registry import sites as rules
from atoll.fabric.registry.peers import Load
from atoll.fabric.registry.records import Metadata, NodeService, SessionState
from atoll.fabric.transport.fabric import Fabric
from tests.fabric.transport.site import SETTINGS, Site, until


async def join(made: Site, access: Access, site: str = "") -> Fabric:
    services = (NodeService(model="m"),) if access.identity.role == "worker" else ()
    metadata = Metadata(
        name="n", provider="", role="worker", site=site, services=services, max_inflight=8
    )
    fabric = await Fabric.connect(
        access, metadata, state=SessionState.SERVING, settings=SETTINGS, hear_loads=not services
    )
    made.members.append(fabric)
    return fabric


def workers(fabric: Fabric) -> set[str]:
    return {p.name for p in fabric.peers() if p.metadata.role == "worker" and p.routable}


def test_members_of_two_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SETTLED_S", 0.5)
    monkeypatch.setattr(rules, "LOOK_S", 0.3)

    async def scenario() -> None:
        made = Site(tmp_path, 1)
        # A fabric that becomes one by site: who has an older token stays with all.
        older = made.issue("older")
        made.authority.grow(made.authority.slots, by_site=True)
        try:
            await made.hub()
            a, b, c = [await join(made, made.issue(n), s) for n, s in ("ax", "bx", "cy")]
            gateway = await join(made, made.issue("g", "lab", "gateway"))
            old = await join(made, older)
            assert (a.access.by_site, old.access.by_site) == (True, False)
            await until(lambda: workers(gateway) == {"a/n", "b/n", "c/n", "older/n"})
            await until(lambda: workers(a) == {"b/n", "older/n"})
            assert workers(c) == {"older/n"}
            hub = made.hubs[0].fabric
            await until(lambda: workers(hub) == workers(gateway))
            # Everybody knows what speakers say: one for each site.
            everybody = (a, b, c, gateway, old, hub)
            expected = {"x": 2, "y": 1}
            await until(
                lambda: all(
                    {s: v.serving for s, v in f.sites().items()} == expected for f in everybody
                )
            )
            assert sum(f._registry.speaks for f in (a, b)) == 1
            (service,) = old.sites()["x"].services
            assert (service.room, service.ask) == (16, (hub.sid,))
            # A speaker hears the loads of its site, whoever else does not; gateways hear all.
            speaker = next(f for f in (a, b) if f._registry.speaks)
            other = b if speaker is a else a
            monkeypatch.setattr(rules, "BUSY_EVERY_S", 0.0)
            other.say_load(Load(running=8))
            await until(lambda: gateway.loads.get(other.sid) == Load(running=8))
            await until(lambda: c.sites()["x"].services[0].busy == 0.5)
            # It goes: the other one speaks, and knows of one less.
            await speaker.close()
            await until(lambda: {s: v.serving for s, v in c.sites().items()} == {"x": 1, "y": 1})
            assert other._registry.speaks
            assert workers(gateway) == {other.metadata.name, "c/n", "older/n"}
            # One that changes what it says is heard by who routes.
            said = msgspec.structs.replace(c.metadata, services=(NodeService(model="new"),))
            await c.announce(metadata=said)
            await until(lambda: [s.model for s in old.sites()["y"].services] == ["new"])
        finally:
            await made.close()

    async def timed() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(timed())


def test_tokens_say_it_only_where_it_is_so(tmp_path: Path) -> None:
    plain = Authority.create(tmp_path / "plain", "lab", ["127.0.0.1:7447"])
    sited = Authority.create(tmp_path / "sited", "lab", ["127.0.0.1:7447"], by_site=True)
    assert not plain.issue("a", "lab", "worker").by_site
    access = sited.issue("a", "lab", "worker")
    assert Access.open(access.pack()).by_site
    rules = keys.hub_rules(3, by_site=True)
    assert [rule for rule in keys.hub_rules(3)["rules"] if "site" in str(rule)] == []  # type: ignore[attr-defined]
    (put,) = [rule for rule in rules["rules"] if rule["id"] == "put m001"]  # type: ignore[attr-defined]
    assert "atoll/site/*/reg/m001/*" in put["key_exprs"]
    # A member speaks in every part by its own slot alone.
    assert keys.split_part("atoll/site/0123abcd/reg/m001/x") == ("0123abcd", "atoll/reg/m001/x")
    assert keys.split_part("atoll/reg/m001/x") == ("", "atoll/reg/m001/x")
    assert keys.in_part("0123abcd", keys.alive("m001-x")) == "atoll/site/0123abcd/alive/m001/m001-x"
