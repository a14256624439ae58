"""A node whose certificate was revoked: out of the pool at once, and what ran there goes on elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.fabric.registry.records import SessionState
from tests.runtime.federation.live import Site, Worker, site
from tests.runtime.federation.test_live import LONG, TEXT80
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.waiting import until


def revoke(fabric: Site, worker: Worker) -> None:
    """Do what a gateway does that hears of it from a hub."""
    heard = fabric.federation.fabric
    heard.verifier.revoke(
        [worker.fabric.verifier.person(worker.fabric.identity.certificate).serial]
    )
    heard.recheck()


@pytest.mark.parametrize(
    "way", [pytest.param("tunnel", marks=pytest.mark.slow), pytest.param("direct")]
)
async def test_what_runs_on_a_revoked_node_moves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("atoll.runtime.federation.upstreams._elsewhere", lambda *_: True)
    async with site(tmp_path, policy="iwrr", affinity=False) as fabric:
        slow = ScriptedEngine(step_s=0.1)
        url = await slow.start()
        bad = await fabric.worker("a", engine=slow, direct=url if way == "direct" else None)
        sid = bad.fabric.sid
        if way == "direct":
            upstreams = fabric.gateway.upstreams(fabric.gateway.pool.members[sid])
            await until(lambda: upstreams.direct is not None)  # type: ignore[attr-defined]
        running = asyncio.create_task(fabric.chat(stream=True, text=LONG, max_tokens=80))
        await until(lambda: slow.running == 1)
        await asyncio.sleep(0.25)
        assert bad.bridge.requests == (way == "tunnel")
        await fabric.worker("b")
        (relay,) = fabric.gateway.relays
        revoke(fabric, bad)
        # In the same turn of the loop: nothing was waited for.
        assert sid not in fabric.gateway.pool.members
        assert relay.attempts.member is None or relay.attempts.member.name != sid
        assert (await running).text == TEXT80
        await fabric.bench.settled()
        assert [a.node for a in fabric.records[0].attempts] == ["a/n1", "b/n1"]
        # Whatever it says from now on, it is not taken.
        await bad.announce(SessionState.SERVING, region="eu")
        await bad.fabric.renew()
        await asyncio.sleep(0.3)
        assert {m.backend.metadata["node"] for m in fabric.gateway.pool.members.values()} == {
            "b/n1"
        }


async def test_a_node_that_leaves_by_its_own_word_finishes_what_it_has(tmp_path: Path) -> None:
    async with site(tmp_path, policy="iwrr", affinity=False) as fabric:
        engine = ScriptedEngine(step_s=0.01)
        leaving = await fabric.worker("a", engine=engine)
        running = asyncio.create_task(fabric.chat(stream=True, text=LONG, max_tokens=80))
        await until(lambda: engine.running == 1)
        await fabric.worker("b")
        await leaving.announce(SessionState.LEFT)
        await until(lambda: len(fabric.gateway.pool.members) == 1)
        assert (await running).text == TEXT80
        await fabric.bench.settled()
        assert [a.node for a in fabric.records[0].attempts] == ["a/n1"]
