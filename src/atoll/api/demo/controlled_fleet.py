"""A fleet that a controller keeps, for `atoll demo`: its plan changes under load.

Everything is as in a real fleet: a hub, a gateway that finds instances by itself, the local target, and
`FleetController` with its lease and history. Only the planner is plain: as many instances as are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.control.operation.control_loop import FleetController, FleetPlace
from atoll.control.operation.gateways import GatewayAddress, GatewayGroup
from atoll.deploy.target import StartOrder
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service

if TYPE_CHECKING:
    from atoll.control.decision.decide import StartInstance
    from atoll.deploy.local.local_deployer import LocalDeployer
    from atoll.runtime.federation.federated_gateway import GatewayProcess
    from atoll.runtime.local.local_endpoints import LocalModel

FLEET = "demo"
MACHINE = "CORE-L:1"
REGION = "here"
_MACHINES = 3
_PER_S = 1.0
"""Requests/s that an instance is said to carry."""
_PATIENCE_S = 300.0
_TURN_S = 0.2
_KV_BYTES = 128 * 2**20
_LAST_TERM = 2**31


class DemoFleet:
    """A fleet of one service on this machine, behind a gateway; see the module."""

    def __init__(self, service: str, model: LocalModel, home: Path) -> None:
        self._service, self._model, self._home = service, model, home
        self._gateway: GatewayProcess
        self._target: LocalDeployer
        self._controller: FleetController
        self._gateways: GatewayGroup
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    async def open(self) -> None:
        """Start a hub and a gateway in this process, and make a controller that has nothing to do yet."""
        from atoll.control.decision.control_view import ControlPolicy
        from atoll.control.operation.control_loop import InstanceStore
        from atoll.control.operation.controller_lease import FileLease
        from atoll.control.operation.fleet_history import History
        from atoll.deploy.local.gpu_slots import pretend_machines
        from atoll.deploy.local.local_deployer import LocalDeployer
        from atoll.fabric.identity.access import Access
        from atoll.fabric.transport.hub import Hub, hub_options
        from atoll.runtime.federation.federated_gateway import GatewayProcess, ServiceOptions
        from atoll.runtime.gateway.settings import GatewayFile
        from atoll.runtime.http.listen_address import free_ports

        (port,) = free_ports(1)
        hub = await Hub.start(hub_options(None, listen=[f"127.0.0.1:{port}"]))
        self._stack.push_async_callback(hub.close)
        address = f"open://127.0.0.1:{port}"
        admin = self._home / "admin"
        settings = GatewayFile(port=0, affinity=False, admin_socket=str(admin), queue_s=30.0)
        self._gateway = GatewayProcess(
            ServiceOptions(settings, Access.open(address), keys_needed=False)
        )
        await self._gateway.start()
        self._stack.push_async_callback(self._gateway.stop)
        self.url = "http://{}:{}".format(*self._gateway.address)
        token = self._home / "fabric.token"
        token.touch(mode=0o600)
        token.write_text(address, encoding="ascii")
        problem = self._ask(_PER_S)
        self._gateways = GatewayGroup(problem, [GatewayAddress(self.url, admin)])
        self._target = LocalDeployer(pretend_machines(problem.offers), self._home / "local")
        self._stack.push_async_callback(self._take_down)
        place = FleetPlace(
            FLEET,
            problem,
            {"local": self._target},
            self._gateways,
            lambda _instance: "local",
            self._order,
        )
        self._controller = FleetController(
            place,
            InstanceStore(self._home / "instances"),
            History(self._home / "history.jsonl"),
            FileLease(self._home / "lease.json"),
            self._plan,
            holder=f"demo-{os.getpid()}",
            clock=time.time,
            policy=ControlPolicy(startup_s=10.0, retry_s=1.0),
        )

    async def close(self) -> None:
        """Take the fleet down, then gateway and hub."""
        await self._stack.aclose()

    async def _take_down(self) -> None:
        for status in self._target.list(FLEET):
            await asyncio.to_thread(self._target.stop, status.handle, _LAST_TERM)

    def ask_for(self, rate_per_s: float) -> None:
        """Say how much the fleet must carry from now on."""
        problem = self._gateways.problem = self._ask(rate_per_s)
        self._controller.place = replace(self._controller.place, problem=problem)

    async def settle(self, count: int, say: Callable[[str], None]) -> None:
        """Turn until so many instances serve and gateways know of them, telling what is decided."""
        until_s = time.monotonic() + _PATIENCE_S
        while self._serving() != count:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{count} instances did not come within {_PATIENCE_S:g} s")
            turn = await asyncio.to_thread(self._controller.turn)
            for failure in turn.failures:
                raise TimeoutError(failure)
            for action in turn.decision.actions:
                name = getattr(getattr(action, "instance", None), "id", None)
                if name is not None:
                    say(f"{turn.decision.reasons[0]}: the controller starts {name}")
            await asyncio.sleep(_TURN_S)

    def describe_shares(self) -> str:
        """Return how many requests each instance has got, as the gateway counts them."""
        counts = {
            member.backend.metadata.get("node", member.name): member.requests
            for member in self._gateway.gateway.pool.members.values()
        }
        shown = ", ".join(f"{count} to {name}" for name, count in sorted(counts.items()))
        return f"requests so far: {shown}"

    def _serving(self) -> int:
        ready = sum(one.state == "ready" for one in self._target.list(FLEET))
        known = sum(member.state == "up" for member in self._gateway.gateway.pool.members.values())
        return min(ready, known)

    def _ask(self, rate_per_s: float) -> Problem:
        service = Service(
            name=self._service,
            model="smollm2-135m",
            ttft_s=5.0,
            tpot_s=0.5,
            rate_per_s=rate_per_s,
            lengths=Lengths(
                input_mean=128.0,
                output_mean=64.0,
                input_mean_square=2.0 * 128.0**2,
                output_mean_square=2.0 * 64.0**2,
            ),
            phases="together",
        )
        offer = Offer(
            region=REGION,
            node_type=MACHINE,
            market="owned",
            available=_MACHINES,
            usd_per_hour=0.0,
        )
        return Problem(name=FLEET, services=(service,), offers=(offer,))

    def _plan(self, asked: Problem) -> Plan:
        """As many instances of one machine as carry what is asked, those that run first."""
        (service,) = asked.services
        count = math.ceil(service.demand_per_s / _PER_S)
        names = [f"{service.name}-{at}" for at in range(count)]
        instances = tuple(self._instance(name) for name in names)
        return Plan(
            problem_hash=asked.content_hash(),
            problem_name=asked.name,
            instances=instances,
            routes=tuple(
                Route(service=service.name, instances=(name,), share=1.0 / count) for name in names
            ),
            served_fraction={service.name: 1.0},
            usd_per_hour=0.0,
            status="feasible",
            solver="replicas",
        )

    def _instance(self, name: str) -> Instance:
        layers = self._model.layers
        return Instance(
            id=name,
            service=self._service,
            role=f"{self._service}/llm/both",
            region=REGION,
            stages=1,
            nodes=(Node(id="n0", node_type=MACHINE, market="owned", start=0, end=layers, tp=1),),
            flows=(
                Flow(src="source", dst="n0", per_s=_PER_S),
                Flow(src="n0", dst="sink", per_s=_PER_S),
            ),
            throughput_per_s=_PER_S,
            usd_per_hour=0.0,
        )

    def _order(self, action: StartInstance, plan: Plan) -> StartOrder:
        from atoll.deploy.commands.node_commands import (
            CommandSettings,
            ServiceWeights,
            node_commands,
            share_of,
        )

        settings = CommandSettings(
            fabric=str(self._home / "fabric.token"),
            atoll=(sys.executable, "-m", "atoll"),
            python=sys.executable,
            device="cpu",
            dtype="float32",
            kv_bytes=_KV_BYTES,
            alone=False,
        )
        weights = ServiceWeights(str(self._model.folder), (self._service,), engine="atoll")
        commands = node_commands(
            action.instance,
            weights,
            settings,
            labels=action.labels,
            weight=share_of(plan, action.instance),
        )
        return StartOrder(action.instance, action.labels, commands, ready_s=_PATIENCE_S)


@contextlib.asynccontextmanager
async def operate_here(service: str, model: LocalModel, home: Path) -> AsyncIterator[DemoFleet]:
    """Keep a fleet while the block runs; nothing of it is left afterwards."""
    fleet = DemoFleet(service, model, home)
    try:
        await fleet.open()
        yield fleet
    finally:
        await fleet.close()
