"""The whole life of a node: join, start the engine, announce, serve, withdraw, restore, drain, leave.

node = JoinedNode(options, access, home)
await node.start()
await node.wait_ended()          # stop() was called, the node's time is up, or its engine was given up
await node.close()
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from atoll.core.errors import AtollError, UsageError
from atoll.core.units import format_duration
from atoll.fabric.identity.access import Access, is_loopback
from atoll.fabric.identity.identity import RefusedError
from atoll.fabric.registry.measured import pack_measured
from atoll.fabric.registry.records import Hardware, Metadata, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.transport.fabric_settings import FabricSettings
from atoll.fabric.tunnel.tunnel_server import TunnelServer
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.join.announcement import (
    INSTANCES,
    TAKES_LABEL,
    Announcement,
    NodeSituation,
    choose_announcement,
)
from atoll.runtime.join.assignment import Assignment, take_assignments
from atoll.runtime.join.bridge import Bridge
from atoll.runtime.join.deadline import LAST_S, NodeDeadline, SpotNotices, parse_ends, slurm_end_s
from atoll.runtime.join.engine_load import LoadReader, ReadFigures
from atoll.runtime.join.engine_start import (
    ENGINE,
    PreparedEngine,
    engine_for_order,
    prepare,
    refuse_taken,
)
from atoll.runtime.join.hardware import gpus_from_text, host_name, read_gpu_use, read_hardware
from atoll.runtime.join.join_options import JoinOptions
from atoll.runtime.join.measuring import measure
from atoll.runtime.join.offers import Inspector
from atoll.runtime.join.signed_orders import OrderReceiver
from atoll.runtime.join.watcher import EngineProbe, Watcher, WatchSettings
from atoll.runtime.supervise import supervision as supervise
from atoll.runtime.supervise.agent import Agent, ProcessError, ProcessSpec, SupervisedProcess
from atoll.telemetry.logs import Log, SilentLog

_DOOR_S = 0.3
"""How long requests are still taken after the word that none should come."""
_FLUSH_S = 0.1
_TRUST_S = 2.0


@dataclass(slots=True)
class RunningEngine:
    """The engine of a node."""

    prepared: PreparedEngine
    watcher: Watcher
    load: LoadReader
    tasks: tuple[asyncio.Task[None], ...]
    assigned: bool
    given_up: ProcessError | None = None


class Hosting(Protocol):
    """Instances that a node with nothing of its own to serve hosts for its fabric's operators."""

    @property
    def busy(self) -> bool:
        """Whether they hold any of its GPUs."""
        ...

    async def leave(self, drain_s: float) -> None:
        """Take no more and end those that run, which have so many seconds to finish."""
        ...

    async def close(self) -> None:
        """End all that is left now."""
        ...


class JoinedNode:
    """See the module. `say` gets a line for people whenever something happens.

    `host` begins to host instances, once the node has joined and where it waits to be told what to serve.
    `figures` are those of a server that runs in this process; others publish theirs.
    """

    def __init__(
        self,
        options: JoinOptions,
        access: Access,
        home: RunDirectory,
        *,
        log: Log | None = None,
        say: Callable[[str], None] | None = None,
        settings: FabricSettings | None = None,
        engine_log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        figures: ReadFigures | None = None,
        host: Callable[[JoinedNode], Hosting] | None = None,
    ) -> None:
        self.options = options
        self._figures = figures
        self._host = host if options.waits else None
        self._hosting: Hosting | None = None
        self.home = home
        self.engine_log = engine_log or home.log(ENGINE)
        self.fabric: Fabric
        self.bridge: Bridge | None = None
        self.answerer: TunnelServer | None = None
        self.running: RunningEngine | None = None
        self.deadline = NodeDeadline()
        if access.identity.role == "hub":
            raise UsageError(
                "this token is a hub's",
                field="--fabric",
                hint="atoll fabric issue NAME --role worker",
            )
        self.access = access
        self.log = log or SilentLog()
        self.say = say or (lambda _line: None)
        self._settings = settings or FabricSettings(proxy=options.proxy)
        self._environment = os.environ if environment is None else environment
        self.hardware = Hardware()
        self._measured: dict[str, str] = {}
        self._agent = Agent(self._process_changed)
        self._said = Announcement(SessionState.JOIN, None)
        self._said_ends_s: float | None = None
        self._said_labels: dict[str, str] = {}
        self._measuring = False
        self._joined = self._leaving = self._closed = False
        self._dirty = asyncio.Event()
        self._over = asyncio.Event()
        self._error: AtollError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._order_receiver: OrderReceiver | None = None
        self._assigning = asyncio.Lock()

    # Beginning

    async def start(self) -> None:
        """Join, and start the engine if there is one to start."""
        options = self.options
        # All that can be refused is refused before others hear of this node.
        self._check_orders()
        prepared = prepare(options, self.engine_log)
        if prepared is not None and prepared.command is not None:
            await refuse_taken(prepared.server.url)
        self.hardware = self._read_hardware()
        if options.measure:
            await self._measure()
        await self._first_deadline()
        self.fabric = await Fabric.connect(
            self.access,
            self._metadata(None),
            state=SessionState.JOIN,
            settings=self._settings,
            log=self.log,
            hear_loads=False,
        )
        self._joined = True
        self._said_ends_s = self.deadline.ends_s
        self._event("node.joined", sid=self.fabric.sid)
        self._spawn(self._announcing())
        self._spawn(self._watching_the_clock())
        self._spawn(self._watching_trust())
        if options.spot is not None:
            self._spawn(self._noticing(SpotNotices(options.spot, options.spot_url or "")))
        if options.waits or options.accept_assignments:
            self._order_receiver = take_assignments(
                self.fabric, self._ordered, self.log, models=options.models
            )
            self.say(f"taking assignments: atoll assign {self.fabric.sid} --model ...")
        if self._host is not None:
            self._hosting = self._host(self)
            self.say("taking instances of fleets that are operated with --on joined")
            self._dirty.set()
        if prepared is not None:
            self._run(prepared)

    def _check_orders(self) -> None:
        access = self.access
        takes = self.options.waits or self.options.accept_assignments
        if takes and access.is_open and not all(map(is_loopback, access.hubs)):
            raise UsageError(
                "in an open fabric anybody could tell this node what to run",
                field="--fabric",
                hint="make certificates with 'atoll fabric init', or give a command to run",
            )

    async def _measure(self) -> None:
        """Find out how fast the machine is; one that cannot be measured joins all the same."""
        self.say("measuring this machine: nothing else should run here")
        try:
            self._measured = pack_measured(await measure(self.hardware))
        except AtollError as error:
            self.say(f"not measured: {error}")
            return
        self.say("measured" if self._measured else "not measured: the result is too long to tell")

    def _read_hardware(self) -> Hardware:
        hardware = read_hardware(self._environment)
        if self.options.gpus is not None:
            hardware = msgspec.structs.replace(hardware, gpus=gpus_from_text(self.options.gpus))
        return hardware

    def _run(self, prepared: PreparedEngine, *, assigned: bool = False) -> None:
        """Start an engine, or take up with one that runs."""
        options = self.options
        settings = WatchSettings(options.health_interval, options.health_failures)
        watcher = Watcher(Inspector(prepared.server), self._changed, settings)
        server = prepared.server
        bridge = self.bridge
        if bridge is None:
            bridge = self.bridge = Bridge(
                server.url,
                api_key=server.api_key,
                generic=server.generic is not None,
                max_inflight=options.max_inflight,
                on_trouble=self._trouble,
            )
            if options.tunnel:
                self.answerer = TunnelServer(
                    self.fabric, bridge.handle, accept=options.accept, log=self.log
                )
        else:
            # The bridge stays: the tunnel hands requests to it.
            bridge.aim(server.url)
        for spec in prepared.before:
            self._agent.add(spec)
        if prepared.command is not None:
            probe = EngineProbe(watcher, options.hung)
            self._agent.add(ProcessSpec(ENGINE, prepared.command, probe, prepared.limits))
        load = LoadReader(
            server.url if server.generic is None else None,
            lambda: bridge.inflight,
            self._say_load,
            api_key=server.api_key,
            capacity=options.max_inflight,
            figures=self._figures,
            gpu_use=read_gpu_use,
        )
        tasks = (self._spawn(watcher.run()), self._spawn(load.run()))
        self.running = RunningEngine(prepared, watcher, load, tasks, assigned)
        if prepared.command is not None:
            self.say(f"starting {prepared.title} ...; its words go to {prepared.command.log}")
        else:
            self.say(f"offering {server.url}")

    # While it runs

    def _changed(self) -> None:
        self._dirty.set()

    def _trouble(self) -> None:
        if self.running is not None:
            self.running.watcher.hurry()

    def _process_changed(self, process: SupervisedProcess) -> None:
        state = process.state
        self._event("node.process", process=process.name, state=str(state), reason=process.reason)
        if (
            process.name == ENGINE
            and state is supervise.ProcessState.STARTING
            and self.bridge is not None
        ):
            self.bridge.fresh()
        if state is supervise.ProcessState.WAITING and process.restarts:
            self.say(f"{process.name} {process.reason}; starting it again")
        if state is supervise.ProcessState.FAILED and self.running is not None:
            self.running.given_up = process.error()
        self._dirty.set()

    def _situation(self) -> NodeSituation:
        running = self.running
        if running is None:
            return NodeSituation(idle=True, leaving=self._leaving)
        process = self._agent.processes.get(ENGINE)
        alive = (
            supervise.ProcessState.STARTING,
            supervise.ProcessState.READY,
            supervise.ProcessState.STOPPING,
        )
        dead = process is not None and process.state not in alive
        return NodeSituation(running.watcher.offer, dead, leaving=self._leaving)

    async def _announcing(self) -> None:
        """Say whatever changed, one thing after the other."""
        while True:
            await self._dirty.wait()
            # Cleared first: what changes while this is said is said in the next round.
            self._dirty.clear()
            await self._announce()
            running = self.running
            if running is not None and running.given_up is not None and not self._leaving:
                await self._given_up(running.given_up)

    async def _announce(self) -> None:
        last, ends_s = self._said, self.deadline.ends_s
        announcement = choose_announcement(last, self._situation())
        # Open as long as something is announced. While leaving, `leave` decides.
        if self.bridge is not None and not self._leaving:
            self.bridge.open = announcement.offer is not None
        labels = self._own_labels()
        if (last, self._said_ends_s, self._said_labels) == (announcement, ends_s, labels):
            return
        self._said, self._said_ends_s, self._said_labels = announcement, ends_s, labels
        await self.fabric.announce(announcement.state, self._metadata(announcement))
        offer = announcement.offer
        models = [service.model for service in offer.services] if offer else []
        self._event(
            "node.announced",
            sid=self.fabric.sid,
            state=announcement.state.name,
            models=models,
            ends_s=ends_s,
        )
        if last != announcement:
            self._tell(announcement, models)

    def _tell(self, announcement: Announcement, models: list[str]) -> None:
        engine = self._describe_engine()
        if models:
            self.say(f"serving {', '.join(models)}{engine} as {self.fabric.sid}")
        elif self._leaving:
            self.say("withdrawn: finishing what runs")
        elif announcement.state is SessionState.DOWN:
            self.say("down: the engine has ended")
        elif self.running is not None and announcement.state is SessionState.SERVING:
            self.say(f"withdrawn: {self.running.watcher.health.reason}")

    def _describe_engine(self) -> str:
        offer = self.running.watcher.offer if self.running is not None else None
        if offer is None or not offer.engine:
            return ""
        return f" ({offer.engine} {offer.version})".replace(" )", ")")

    def _metadata(self, announcement: Announcement | None) -> Metadata:
        identity = self.access.identity
        name = self.options.name or host_name()
        base = self.options.metadata(name, identity.provider, identity.role)
        offer = announcement.offer if announcement is not None else None
        known = offer or (self.running.watcher.inspector.known if self.running else None)
        return msgspec.structs.replace(
            base,
            hardware=self.hardware,
            labels=base.labels | self._own_labels(),
            engine=known.engine if known else "",
            engine_version=known.version if known else "",
            services=offer.services if offer else (),
            ends_s=self.deadline.ends_s,
        )

    @property
    def is_free(self) -> bool:
        """Whether it may host instances now: not beside an assignment, while it measures, or at the end."""
        return self.running is None and not self._measuring and not self._leaving

    def _own_labels(self) -> dict[str, str]:
        """Say what was measured, and whether operators may start instances here."""
        free = self._hosting is not None and self.is_free
        return self._measured | ({TAKES_LABEL: INSTANCES} if free else {})

    def measure_again(self) -> None:
        """Begin to measure a machine that has joined; RefusedError while anything else runs there."""
        if not self.is_free or self._assigning.locked() or (self._hosting and self._hosting.busy):
            raise RefusedError("busy", "something runs on the machine, or it is measured already")
        self._measuring = True
        self._dirty.set()
        self._spawn(self._measure_now())

    async def _measure_now(self) -> None:
        try:
            await self._measure()
        finally:
            self._measuring = False
            self._dirty.set()

    def _say_load(self, load: Any) -> None:
        if not self._closed:
            self.fabric.say_load(load)

    async def _given_up(self, error: ProcessError) -> None:
        if self.running is not None and self.running.assigned:
            self.say(f"{error}; waiting for another assignment")
            await self._stop_engine()
            self._dirty.set()
        else:
            self._end(error)

    # Time

    async def _first_deadline(self) -> None:
        now_s = time.time()
        if self.options.ends is not None:
            self.deadline.asked_s = parse_ends(self.options.ends, now_s)
        self.deadline.batch_s = await slurm_end_s(self._environment)
        ends_s = self.deadline.ends_s
        if ends_s is not None and ends_s <= now_s + LAST_S:
            raise UsageError("this node's time is up already", field="--ends")

    def notice(self) -> None:
        """Take a batch system's signal: the end comes in `notice` seconds at the latest."""
        self.deadline.notice(time.time() + self.options.notice)
        self.say(f"the end comes in {format_duration(self.options.notice)} at the latest")
        self._dirty.set()

    async def _watching_the_clock(self) -> None:
        await self.deadline.watch(self._environment, self._dirty.set)
        self.say("this node's time is up")
        self._end(None)

    async def _watching_trust(self) -> None:
        """End the node when others believe its certificate no more."""
        certificate = self.access.identity.certificate
        while True:
            try:
                self.fabric.verifier.person(certificate)
            except RefusedError as error:
                raise UsageError(
                    f"{error}, so nobody takes this node's word",
                    field="--fabric",
                    hint="ask whoever runs the fabric for another token ('atoll fabric issue')",
                ) from error
            await asyncio.sleep(_TRUST_S)

    async def _noticing(self, notices: SpotNotices) -> None:
        self.deadline.notice(await notices.wait())
        self.say(f"{notices.cloud} takes this machine back")
        self._dirty.set()

    # Assignments

    def _ordered(self, assignment: Assignment, operator: str) -> None:
        if self._leaving or self._measuring or self._assigning.locked():
            raise RefusedError("busy", "the node is leaving or still busy with another order")
        if self._hosting is not None and self._hosting.busy:
            raise RefusedError("busy", "instances of a fleet hold the node's GPUs")
        self._spawn(self._become(assignment, operator))

    async def _become(self, assignment: Assignment, operator: str) -> None:
        async with self._assigning:
            if assignment.model:
                self.say(f"{operator} assigned {assignment.model} with {assignment.engine}")
            else:
                self.say(f"{operator} ended the assignment")
            await self._stop_engine()
            self._dirty.set()
            if not assignment.model:
                return
            try:
                prepared = await asyncio.to_thread(
                    engine_for_order, assignment, self.options, self.hardware, self.home
                )
            except AtollError as error:
                self._event("assign.failed", message=str(error))
                self.say(str(error))
                return
            if not self._leaving:
                self._run(prepared, assigned=True)

    async def _stop_engine(self) -> None:
        # Taken away first, so that nothing is announced as served while the engine ends.
        running, self.running = self.running, None
        if running is None:
            return
        if self.bridge is not None:
            self.bridge.open = False
            self._dirty.set()
            await self.bridge.drain(self.options.drain)
            self.bridge.abandon("the node serves something else now")
        await _cancel(running.tasks)
        await self._agent.stop(list(self._agent.processes))

    # The end

    @property
    def stopping(self) -> bool:
        """Whether the end has begun."""
        return self._over.is_set()

    def stop(self) -> None:
        """Begin the graceful end."""
        self._end(None)

    def _end(self, error: AtollError | None) -> None:
        # The first error is the one that is told.
        self._error = self._error or error
        self._over.set()

    async def wait_ended(self) -> None:
        """Wait until the node should end; raises the error that made it."""
        await self._over.wait()
        if self._error is not None:
            raise self._error

    async def leave(self) -> None:
        """Withdraw, finish what runs, say LEFT and stop the engine."""
        ends_s, now_s = self.deadline.ends_s, time.time()
        drain_s = self.options.drain
        if ends_s is not None:
            # A second is left for what comes after the drain.
            drain_s = max(0.0, min(drain_s, ends_s - now_s - 1.0))
        self._leaving = True
        self.deadline.notice(now_s + drain_s)
        await self._announce()
        if self.bridge is not None and (self.bridge.open or self.bridge.inflight):
            until_s = time.monotonic() + drain_s
            await asyncio.sleep(min(_DOOR_S, drain_s))
            late = await self.bridge.drain(max(0.0, until_s - time.monotonic()))
            await self._quiet(until_s)
            if late:
                self.say(f"{late} requests were not finished in time; they go on elsewhere")
            self.bridge.abandon("the node leaves")
            await self._flush(max(_FLUSH_S, drain_s / 4))
        if self._hosting is not None:
            await self._hosting.leave(drain_s)
        await self.fabric.leave()
        self._event("node.left", sid=self.fabric.sid)

    async def _quiet(self, until_s: float) -> None:
        """Wait for what came past the tunnel; an engine that publishes no figures gets all the time."""
        if self.options.advertise is None or self.running is None:
            return
        while time.monotonic() < until_s and await self.running.load.running() != 0:
            await asyncio.sleep(0.2)

    async def _flush(self, max_s: float) -> None:
        """Wait until callers have got what was sent."""
        until_s = time.monotonic() + max_s
        while self.answerer is not None and self.answerer.running and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        await asyncio.sleep(_FLUSH_S)

    async def close(self) -> None:
        """End everything at once: what `leave` did not finish is lost here and goes on elsewhere."""
        if self._closed:
            return
        self._closed = True
        # First, so that nothing announces or starts anything while the rest ends.
        await _cancel(tuple(self._tasks))
        if self.bridge is not None:
            await self.bridge.close()
        if self.answerer is not None:
            await self.answerer.close()
        if self._order_receiver is not None:
            self._order_receiver.close()
        if self._hosting is not None:
            await self._hosting.close()
        if self._joined:
            await self.fabric.close()
        await self._agent.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._event("node.failed", error=repr(error))
            known = error if isinstance(error, AtollError) else None
            self._end(known or AtollError(f"{type(error).__name__}: {error}"))

    def _event(self, name: str, **fields: object) -> None:
        self.log.event(name, **fields)
        self.log.flush()


async def _cancel(tasks: tuple[asyncio.Task[None], ...]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
