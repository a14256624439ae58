"""A gateway on a real fabric that is told who serves: instances by the labels of their sessions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from atoll.control.operation.gateways import GatewayAddress, GatewayGroup
from atoll.deploy.commands.node_commands import STAND_IN_LABEL, label_options
from atoll.deploy.labels import Labels
from atoll.plan.plan import Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.workload.lengths import LengthMix
from tests.runtime.federation.live import Site, site
from tests.runtime.federation.test_live import LONG, TEXT80
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.waiting import until

PROBLEM = Problem(
    name="fleet",
    services=(
        Service(
            name="chat",
            model="llama-3.1-8b",
            ttft_s=30.0,
            tpot_s=30.0,
            rate_per_s=0.001,
            lengths=Lengths.of(LengthMix.fixed(600.0, 120.0)),
            phases="together",
        ),
    ),
    offers=(Offer(region="here", node_type="L40S:1", available=4, usd_per_hour=1.0),),
    settings=Settings(max_nodes_per_instance=1, engine="none"),
)


def labels(instance: str, fleet: str = "fleet") -> dict[str, str]:
    """As `atoll join` gets them of a deployer."""
    made = Labels(
        fleet=fleet, instance=instance, plan="p", placement="q", service="chat", role="chat"
    )
    options = label_options(made)
    return dict(option.split("=", 1) for option in options[1::2])


def group_of(fabric: Site, said: list[str] | None = None) -> GatewayGroup:
    address = GatewayAddress("http://localhost", fabric.gateway.admin_socket)
    say = None if said is None else said.append
    return GatewayGroup(PROBLEM, [address], names={"chat": ("m",)}, say=say)


def share(instance: str, part: float) -> Route:
    return Route(service="chat", instances=(instance,), share=part)


async def served(fabric: Site, count: int) -> Counter[str]:
    """Who serves so many requests, each of another conversation."""
    nodes: Counter[str] = Counter()
    for number in range(count):
        reply = await fabric.chat(text=f"{time.monotonic_ns()} {number}", max_tokens=2)
        assert reply.status == 200
        nodes[reply.headers["x-atoll-node"].partition("/")[0]] += 1
    return nodes


async def test_shares_follow_labels_and_change_who_serves(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        group = group_of(fabric)
        await fabric.worker("a", labels=labels("chat-1"))
        await fabric.worker("b", labels=labels("chat-2"))
        await asyncio.to_thread(group.route, [share("chat-1", 0.75), share("chat-2", 0.25)])
        assert await served(fabric, 8) == {"a": 6, "b": 2}
        # One that joins before anybody told of it has a share like its kind.
        await fabric.worker("c", labels=labels("chat-3"))
        assert (await served(fabric, 12))["c"] == pytest.approx(4, abs=1)
        shares = [share("chat-1", 0.5), share("chat-2", 0.0), share("chat-4", 0.5)]
        await asyncio.to_thread(group.route, [*shares[:1], *shares[2:]])
        # chat-2 has no share any more, and chat-4 has its own once it comes.
        await fabric.worker("d", labels=labels("chat-4"))
        nodes = await served(fabric, 12)
        assert nodes["b"] == 0
        assert nodes["a"] == nodes["d"] == 4
        # Instances of other fleets with the same name, and strangers who say they are one, are nobody's.
        other = await fabric.worker("e", labels=labels("chat-1", "other"))
        strange = await fabric.worker("f", "ETH", labels=labels("chat-1"))
        weights = dict(
            zip(
                (m.name for m in fabric.gateway.pool.rings["m"].members),
                fabric.gateway.pool.rings["m"].weight,
                strict=True,
            )
        )
        metadata = fabric.gateway.pool.members[strange.fabric.sid].backend.metadata
        assert "instance" not in metadata
        assert weights[other.fabric.sid] == weights[strange.fabric.sid] == pytest.approx(0.5)
        # All others gone: weight 0 is better than nobody.
        for worker in fabric.workers:
            if worker.fabric.identity.name != "b":
                await worker.announce(services=())
        await until(lambda: len(fabric.gateway.pool.members) == 1)
        assert await served(fabric, 2) == {"b": 2}


async def test_a_node_that_stands_in_is_named_in_every_answer(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        await fabric.worker("a", labels={STAND_IN_LABEL: "pypi://small"})
        reply = await fabric.chat(text="who?", max_tokens=2)
        assert reply.headers["x-atoll-stand-in"] == "pypi://small"


async def test_traffic_and_ends_reach_a_controller(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        said: list[str] = []
        group = group_of(fabric, said)
        one = await fabric.worker("a", labels=labels("chat-1"))
        await fabric.worker("b", labels=labels("chat-2"))
        stranger = await fabric.worker("f", "ETH", labels=labels("chat-2"))
        await asyncio.to_thread(group.route, [share("chat-1", 0.5), share("chat-2", 0.5)])
        await served(fabric, 30)
        ends_s = float(int(time.time()) + 3600)
        await one.announce(ends_s=ends_s)
        await stranger.announce(ends_s=ends_s)
        ends = [w.fabric.sid for w in (one, stranger)]
        members = fabric.gateway.pool.members
        await until(lambda: all(members[sid].ends_s == ends_s for sid in ends))
        await fabric.bench.settled()
        report = await asyncio.to_thread(group.look, time.time())
        assert [(n.name, n.ends_s) for n in report.notices] == [("chat-1", ends_s)]
        (seen,) = report.traffic
        assert seen.service == "chat"
        assert seen.minute.rate_per_s > 0.0
        lengths = seen.hour.lengths
        assert lengths is not None
        sent = [(r.prompt_tokens, r.completion_tokens) for r in fabric.records]
        assert len(sent) == 30
        assert lengths.input_mean == pytest.approx(sum(p for p, _ in sent) / 30)
        assert lengths.output_mean == pytest.approx(sum(a for _, a in sent) / 30)
        (promise,) = report.promises
        assert (promise.requests, promise.kept) == (30, 1.0)
        assert said == []


@pytest.mark.slow
async def test_node_that_drains_takes_nothing_new_and_finishes(tmp_path: Path) -> None:
    async with site(tmp_path) as fabric:
        slow = ScriptedEngine(step_s=0.02)
        leaving = await fabric.worker("a", engine=slow, labels=labels("chat-1"))
        running = asyncio.create_task(fabric.chat(stream=True, text=LONG, max_tokens=80))
        await until(lambda: slow.running == 1)
        await fabric.worker("b", labels=labels("chat-2"))
        group = group_of(fabric)
        await asyncio.to_thread(group.route, [share("chat-1", 1.0), share("chat-2", 0.0)])
        # What a node says that was asked to stop: it serves nothing any more, and is still there.
        await leaving.announce(services=(), ends_s=time.time() + 60.0)
        await until(lambda: leaving.fabric.sid not in fabric.gateway.pool.members)
        assert await served(fabric, 4) == {"b": 4}
        assert (await running).text == TEXT80
        await fabric.bench.settled()
        assert fabric.records[-1].backends == (leaving.fabric.sid,)
