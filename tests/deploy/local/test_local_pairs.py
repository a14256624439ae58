"""Prefill and decode on vLLM as two orders of the local target, and a gateway that asks both."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("zenoh", reason="needs the extra 'fabric'")

from atoll.deploy.commands.node_commands import CommandSettings, ServiceWeights, node_commands
from atoll.deploy.labels import Labels
from atoll.deploy.local.gpu_slots import PoolMachine
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.target import StartOrder
from atoll.engines.limits import EngineLaunch
from atoll.plan.engine_layout import handover_of
from atoll.plan.plan import Instance
from atoll.runtime.federation.federation import Federation
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.pool.routes import ModelRoutes, RoutesTold
from tests.runtime.gateway.engine import expected
from tests.runtime.gateway.harness import CHAT, Bench, chat
from tests.runtime.join.live import world
from tests.runtime.local.test_placing import instance
from tests.runtime.waiting import until

MACHINES = tuple(PoolMachine(name=f"m{at}", node_type="L4:1") for at in range(4))
TEXT = expected(CHAT, chat("hello", max_tokens=12)).text
ROOT = Path(__file__).resolve().parents[3]


def fake_vllm(folder: Path) -> Path:
    """Write a program `vllm` that hands KV cache over as vLLM does; returns the folder it is in."""
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "vllm"
    program.write_text(
        f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m tests.runtime.gateway.kv_engine "$@"\n'
    )
    program.chmod(0o755)
    return programs


def one(name: str, phase: str) -> Instance:
    return instance([(0, 32)], name=name, phase=phase).model_copy(update={"engine": "vllm"})


def order(made: Instance, all_of_them: list[Instance], token: Path) -> StartOrder:
    labels = Labels(
        fleet="lab", instance=made.id, plan="p", placement=made.id, service="chat", role=made.role
    )
    settings = CommandSettings(
        fabric=str(token),
        atoll=(sys.executable, "-m", "atoll"),
        python=sys.executable,
        drain_s=30.0,
    )
    launch = EngineLaunch(handover=handover_of(all_of_them, made))
    weights = ServiceWeights("hf://org/name", ("chat",))
    commands = node_commands(made, weights, settings, labels=labels, launch=launch, weight=1.0)
    return StartOrder(made, labels, commands)


@pytest.mark.slow
async def test_both_sides_start_and_the_gateway_pairs_them_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(fake_vllm(tmp_path)), prepend=":")
    deployer = LocalDeployer(MACHINES, tmp_path / "local", drain_s=60.0)
    made = [
        one("p-1", "prefill"),
        one("p-2", "prefill"),
        one("d-1", "decode"),
        one("d-2", "decode"),
    ]
    # In an open fabric all are of one provider, and so their labels count.
    async with world(tmp_path, provider="nobody") as seen:
        token = tmp_path / "fabric.token"
        token.write_text(seen.address)
        token.chmod(0o600)
        pool = BackendPool()
        federation = Federation(seen.observer, pool, seen.caller)
        settings = GatewaySettings(port=0, admin_socket=str(tmp_path / "admin.sock"))
        gateway = Gateway(pool, settings, federation=federation)
        _, port = await gateway.start()
        bench = Bench(gateway, [], port)
        try:
            for each in made:
                await asyncio.to_thread(deployer.start, order(each, made, token))
            await until(lambda: len(pool.members) == len(made), 120.0)
            assert {m.instance: (m.handover, m.phase) for m in pool.members.values()} == {
                each.id: ("nixl", str(each.phase)) for each in made
            }
            pairs = (("p-1", "d-2", 0.5), ("p-2", "d-1", 0.5))
            weights = dict.fromkeys([each.id for each in made], 0.5)
            routes = ModelRoutes(weights=weights, pairs=pairs)
            pool.route(RoutesTold(fleet="lab", models={"chat": routes}))
            paths = set()
            for _ in range(4):
                reply = await bench.post(CHAT, chat("hello", max_tokens=12) | {"model": "chat"})
                assert reply.json["choices"][0]["message"]["content"] == TEXT
                paths.add(reply.headers["x-atoll-path"])
            assert paths == {"prefill=p-1 decode=d-2", "prefill=p-2 decode=d-1"}
            # One side goes: the other pair serves all, then decode alone.
            await asyncio.to_thread(deployer.stop, "lab/p-1", 0)
            await until(lambda: len(pool.members) == len(made) - 1, 60.0)
            for _ in range(2):
                reply = await bench.post(CHAT, chat("hello", max_tokens=12) | {"model": "chat"})
                assert reply.json["choices"][0]["message"]["content"] == TEXT
                assert reply.headers["x-atoll-path"].startswith("prefill=p-2")
        finally:
            await gateway.close()
            await federation.close()
            for status in deployer.list("lab"):
                await asyncio.to_thread(deployer.stop, status.handle, 0)
