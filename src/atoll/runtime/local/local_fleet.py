"""Starting, watching and stopping a plan on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.engines.table import find_engine
from atoll.runtime.endpoints.endpoint import Endpoint, RunDirectory
from atoll.runtime.endpoints.probes import read_start
from atoll.runtime.gateway import Gateway, GatewaySettings
from atoll.runtime.http.http_client import FetchError, fetch
from atoll.runtime.local.fleet_state import EndpointState, FleetState, NodeState, write_state
from atoll.runtime.local.instance_runner import InstanceRunner
from atoll.runtime.pool.member import STAND_IN
from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.supervise.agent import Agent, SupervisedProcess
from atoll.runtime.supervise.fork_client import ForkServer
from atoll.runtime.supervise.supervision import ProcessState
from atoll.telemetry.logs import Log
from atoll.telemetry.usage_record import OnUsage

_POLL_S = 1.0
_FOLLOW_S = 0.5
_STALE_S = 3.0
_SOCKET = "gateway.sock"
OnProgress = Callable[[str, ProcessState, str], None]
"""Called with a process, its state and a reason whenever that changes."""


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """An endpoint with the service it belongs to and the node types of its nodes, by process.

    Of executors `holds` says what each runs, and `answers` which paths each model has.
    """

    endpoint: Endpoint
    service: str
    node_types: dict[str, str]
    holds: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class LivenessTracker:
    """When the instances last heard from their nodes."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}

    def heard(self, nodes: Sequence[tuple[str, bool]]) -> None:
        """Take what an instance says of its nodes."""
        now_s = time.monotonic()
        for name, alive in nodes:
            # After a time without news, silence begins to count anew.
            stale = now_s - self._asked_s.get(name, float("-inf")) > _STALE_S
            self._asked_s[name] = now_s
            if alive or stale:
                self._heard_s[name] = now_s

    def silent_s(self, node: str) -> float:
        """Return for how long a node had been silent when its instance was last heard itself."""
        asked_s = self._asked_s.get(node)
        if asked_s is None:
            return 0.0
        return asked_s - self._heard_s[node]


class LocalFleet:
    """Endpoints and a gateway, kept running until stopped.

    fleet = LocalFleet("demo", named, home, GatewaySettings(port=8080), liveness)
    await fleet.start(); ...; await fleet.stop(10.0)

    `warm` names the folders of models whose nodes are forked from a process that has loaded the code,
    `runners` what runs each instance of the plan.
    """

    def __init__(
        self,
        name: str,
        endpoints: Sequence[ServiceEndpoint],
        home: RunDirectory,
        settings: GatewaySettings,
        liveness: LivenessTracker,
        *,
        warm: Sequence[str] = (),
        on_progress: OnProgress | None = None,
        on_usage: OnUsage | None = None,
        log: Log | None = None,
        runners: Sequence[InstanceRunner] = (),
        plan: str | None = None,
        source: str = "",
    ) -> None:
        """`plan` (JSON) is what is served, and `source` the fleet file that it was made for."""
        self.name = name
        self._runners = tuple(runners)
        self._plan, self._source = plan, source
        self.endpoints = tuple(endpoints)
        self.home = home
        self.pool = BackendPool(outliers=settings.outliers, policy=settings.policy)
        if settings.admin_socket is None:
            settings = settings.model_copy(update={"admin_socket": str(home.folder / _SOCKET)})
        self.gateway = Gateway(self.pool, settings, on_usage=on_usage, log=log)
        self.agent = Agent(self._changed)
        self.url = ""
        self._liveness = liveness
        self._warm = tuple(warm)
        self._on_progress = on_progress or (lambda _name, _state, _reason: None)
        self._servers = {e.endpoint.backend.id for e in self.endpoints if e.endpoint.server}
        self._poller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start every process, wait until all give tokens, then open the gateway."""
        if self._warm:
            self.agent.fork_server = await ForkServer.start(self._warm)
        for named in self.endpoints:
            for spec in named.endpoint.processes:
                self.agent.add(spec)
        following = asyncio.create_task(self._follow_starts())
        try:
            await self.agent.ready([m.name for e in self.endpoints for m in e.endpoint.processes])
            following.cancel()
            for named in self.endpoints:
                self.pool.add(named.endpoint.backend)
            host, port = await self.gateway.start()
        except BaseException:
            # Where not all came up, nothing is left running.
            following.cancel()
            await self.agent.close()
            raise
        # In a URL an IPv6 address stands in brackets.
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"
        self._poller = asyncio.create_task(self._poll())
        write_state(self.state(), self._plan)

    async def stop(self, drain_s: float) -> None:
        """Finish what runs, within limits; then stop instances, then nodes."""
        await self.gateway.drain(drain_s)
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller
        await self.gateway.close()
        await self.agent.stop([name for name in self._servers if name in self.agent.processes])
        await self.agent.close()

    def state(self) -> FleetState:
        """Return what others may know."""
        return FleetState(
            name=self.name,
            pid=os.getpid(),
            url=self.url,
            started_s=time.time(),
            folder=str(self.home.folder),
            admin_socket=str(self.gateway.admin_socket or ""),
            source=self._source,
            endpoints=tuple(self._endpoint_state(named) for named in self.endpoints),
            instances=self._runners,
        )

    def _endpoint_state(self, named: ServiceEndpoint) -> EndpointState:
        endpoint = named.endpoint
        return EndpointState(
            id=endpoint.backend.id,
            service=named.service,
            url=endpoint.backend.url,
            kind=endpoint.backend.kind,
            weight=endpoint.backend.weight,
            stand_in=endpoint.backend.metadata.get(STAND_IN, ""),
            answers=dict(named.answers),
            nodes=tuple(
                NodeState(
                    process=process,
                    instance=process.rpartition("/")[0] or process,
                    node=node,
                    node_type=named.node_types.get(process, ""),
                    start=start,
                    end=end,
                    log=str(self.home.log(process)),
                    holds=named.holds.get(process, ""),
                )
                for process, node, start, end in endpoint.held
            ),
        )

    def _changed(self, process: SupervisedProcess) -> None:
        self._on_progress(process.name, process.state, process.reason)
        if process.name in self._servers and process.name in self.pool.members:
            # What runs there moves on at once instead of waiting for a deadline.
            up = process.state is ProcessState.READY
            self.pool.set_health(process.name, up=up, reason=process.reason or str(process.state))

    async def _follow_starts(self) -> None:
        """Tell how far nodes are that load and make themselves warm."""
        told: dict[str, str] = {}
        while True:
            for name, process in self.agent.processes.items():
                said = read_start(process)
                if said and said != told.get(name):
                    told[name] = said
                    self._on_progress(name, process.state, said)
            await asyncio.sleep(_FOLLOW_S)

    async def _poll(self) -> None:
        """Ask the instances about their nodes, so that a node that hangs is noticed."""
        staged = [
            named.endpoint
            for named in self.endpoints
            if find_engine(named.endpoint.backend.kind).staged
        ]
        while True:
            await asyncio.gather(*(self._ask(endpoint) for endpoint in staged))
            await asyncio.sleep(_POLL_S)

    async def _ask(self, endpoint: Endpoint) -> None:
        try:
            status, body = await fetch(f"{endpoint.backend.url}/atoll/v1/status", timeout_s=2.0)
            nodes = json.loads(body)["nodes"] if status == 200 else []
        except (FetchError, ValueError, KeyError):
            return
        self._liveness.heard([(n["name"], bool(n["alive"])) for n in nodes])
