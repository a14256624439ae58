"""Serving a plan on this machine: which services, whose weights, and the processes with a gateway in front.

`local_fleet` puts it all together; `LocalFleet.start` brings it up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from atoll.core.errors import AtollError, UnknownNameError, UsageError
from atoll.core.listener import Listener

if TYPE_CHECKING:
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.runtime.join.joined_node import JoinedNode
    from atoll.runtime.local.instance_runner import InstanceRunner
    from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions
    from atoll.runtime.local.local_fleet import LocalFleet
    from atoll.runtime.local.weights import WeightSource
    from atoll.runtime.pool.routes import ChoiceRoutes, ModelPromise
    from atoll.runtime.task_fleet.deployment import TaskDeployment
    from atoll.telemetry.usage_record import OnUsage


def fetch_models(
    wanted: Mapping[str, WeightSource], listener: Listener, by_engine: Collection[str] = ()
) -> dict[str, LocalModel]:
    """Fetch and convert models where needed; engines fetch those of the services `by_engine` themselves."""
    from atoll.engine.weights.sources import resolve
    from atoll.runtime.local.local_endpoints import LocalModel

    folders: dict[str, Path | None] = dict.fromkeys(wanted[name].source for name in by_engine)
    here = (each.source for name, each in wanted.items() if name not in by_engine)
    # Services may share weights: every source is fetched once.
    for source in dict.fromkeys(here):
        with listener.working(f"fetching {source}") as say:

            def progress(
                done: int, total: int, name: str, say: Callable[[str], None] = say
            ) -> None:
                say(f"converting weights: {done} of {total} ({name})")

            folders[source] = resolve(source, progress)
    return {
        service: LocalModel(each.source, folders[each.source], each.stand_in, each.quantization)
        for service, each in wanted.items()
    }


def fetch_components(deployment: TaskDeployment, listener: Listener) -> None:
    """Fetch the weights of all components where needed."""
    from atoll.components.component_weights import prefetch

    names = [name for executor in deployment.executors for name in executor.components]
    with listener.working("fetching components") as say:

        def progress(done: int, total: int, name: str) -> None:
            say(f"fetching components: {done} of {total} packages {f'({name})' if name else ''}")

        prefetch(dict.fromkeys(names), progress)


def services_of(plan: Plan, only: Sequence[str]) -> list[str]:
    """Return the services of a plan, or those asked for; a choice is asked for by its name."""
    known = list(plan.served_services)
    if not known:
        raise UsageError("the plan has no instances", hint="serve another plan")
    behind = {mix.name: [name for name in mix.shares if name in known] for mix in plan.mixes}
    behind = {choice: ways for choice, ways in behind.items() if ways}
    for each in only:
        if each not in behind and each not in known:
            raise UnknownNameError("model", each, [*behind, *known], field="only")
    wanted = [name for each in only for name in behind.get(each, [each])]
    return choose_services(known, wanted)


def choices_of(plan: Plan, services: Collection[str]) -> dict[str, ChoiceRoutes]:
    """Return how requests for the choices of a plan are dealt to those of its services that are served."""
    from atoll.runtime.pool.routes import ChoiceRoutes

    choices = {}
    for mix in plan.mixes:
        shares = {name: share for name, share in mix.shares.items() if name in services}
        # A choice of which nothing is served has nobody to deal requests to.
        if any(shares.values()):
            choices[mix.name] = ChoiceRoutes.of(mix.model_copy(update={"shares": shares}))
    return choices


def promises_of(problem: Problem, services: Collection[str]) -> dict[str, ModelPromise]:
    """Return what a fleet promises for services that answer with tokens."""
    from atoll.runtime.pool.routes import ModelPromise

    return {
        one.name: ModelPromise.of(one) for one in problem.plain_services if one.name in services
    }


def choose_services(known: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the services that are there, or of them those asked for."""
    for name in only:
        if name not in known:
            raise UnknownNameError("model", name, known, field="only")
    return [name for name in known if not only or name in only]


@dataclass
class StartProgress:
    """How far the processes of a fleet are, in one line for `say`; `tell` takes what happens once all run."""

    say: Callable[[str], None]
    tell: Callable[[str], None]
    states: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    is_up: bool = False

    def __call__(self, name: str, state: object, reason: str) -> None:
        """Take the state a process is in now, and show it."""
        before = self.states.get(name)
        self.states[name], self.reasons[name] = str(state), reason
        if self.is_up:
            why = f": {reason}" if reason and str(state) != "ready" else ""
            # That processes stop in the end is no news.
            if (before, str(state)) != ("ready", "stopping") and str(state) != "stopped":
                self.tell(f"{name} {state}{why}")
            return
        ready = sum(value == "ready" for value in self.states.values())
        waiting = [
            f"{n} ({self.reasons[n]})" if self.reasons[n] else n
            for n, value in self.states.items()
            if value != "ready"
        ]
        self.say(f"starting: {ready} of {len(self.states)} ready; waiting for {', '.join(waiting)}")


@contextlib.contextmanager
def local_fleet(
    plan: Plan | None,
    models: dict[str, LocalModel],
    options: LocalOptions,
    *,
    name: str | None = None,
    host: str,
    port: int,
    log: Path | None,
    on_progress: Callable[[str, object, str], None],
    on_usage: OnUsage | None = None,
    tasks: TaskDeployment | None = None,
    promises: Mapping[str, ModelPromise] | None = None,
    runners: Sequence[InstanceRunner] = (),
    gateway: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[LocalFleet]:
    """Return a fleet that is not started yet; its folder goes when it is left.

    `name` is what others see, the plan's unless given. Without a plan only `tasks` stand. The gateway counts
    who keeps `promises`. `runners` say what runs each instance of the plan, those left out too; `gateway` are
    more settings of the gateway.
    """
    import os

    from atoll.runtime.endpoints.endpoint import RunDirectory
    from atoll.runtime.gateway import GatewaySettings
    from atoll.runtime.local.fleet_state import new_home, remove_home
    from atoll.runtime.local.local_endpoints import build
    from atoll.runtime.local.local_fleet import LivenessTracker, LocalFleet
    from atoll.runtime.task_fleet.task_endpoint import language_models, remove_store, task_endpoint
    from atoll.telemetry.logs import JsonLog

    home = RunDirectory(new_home())
    liveness = LivenessTracker()
    target = log or home.folder / "gateway.log"
    # A log that cannot be written is refused before anything starts.
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        remove_home(home.folder)
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"cannot write {target}: {reason}", field="log", hint="name another file"
        ) from error
    stand_ins = {name: model.stand_in for name, model in models.items() if model.stand_in}
    try:
        named = build(plan, models, home, liveness, options) if plan and models else ()
        if tasks is not None:
            named = (*named, task_endpoint(tasks, home, options.cores))
        on_cores = {
            i.service
            for i in (plan.instances if plan else ())
            if options.engine_of(i).staged and options.gpus_of(i) is None
        }
        warm = [str(model.folder) for name, model in models.items() if name in on_cores]
        warm += [] if tasks is None else list(language_models(tasks))
        yield LocalFleet(
            name or (plan.problem_name if plan else "tasks"),
            named,
            home,
            GatewaySettings.parse(gateway).model_copy(
                update={
                    "host": host,
                    "port": port,
                    "choices": choices_of(plan, models) if plan else {},
                    "promises": dict(promises or {}),
                }
            ),
            liveness,
            warm=tuple(dict.fromkeys(warm)),
            on_progress=on_progress,
            on_usage=on_usage,
            log=JsonLog(descriptor, **({"stand_in": stand_ins} if stand_ins else {})),
            runners=runners,
        )
    finally:
        os.close(descriptor)
        remove_store(home)
        remove_home(home.folder)


class ServingRun:
    """A fleet that is served here from start to stop; `stop` finishes what runs, `at_once` does not wait."""

    def __init__(self, fleet: LocalFleet, drain_s: float, offer: FabricOffer | None = None) -> None:
        self.fleet, self._drain_s, self._offer = fleet, drain_s, offer
        self.stop, self.at_once = asyncio.Event(), asyncio.Event()

    async def start(self) -> bool:
        """Return when all of it serves; False where it was told to stop before."""
        starting = asyncio.create_task(self.fleet.start())
        stopped = asyncio.create_task(self.stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            await _cancel(starting)
            return False
        starting.result()
        # Offered to others only once all of it serves.
        if self._offer is not None:
            await self._offer.start()
        return True

    async def finish(self) -> None:
        """Finish what runs within the time for that, and end all processes; `at_once` cuts it short."""
        stopping = asyncio.create_task(self._finish())
        hurried = asyncio.create_task(self.at_once.wait())
        await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not stopping.done():
            await _cancel(stopping)
            await self.fleet.gateway.close()
            await self.fleet.agent.close()

    async def _finish(self) -> None:
        # First, so that nothing new comes from the fabric while the rest drains.
        if self._offer is not None:
            await self._offer.stop()
        await self.fleet.stop(self._drain_s)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class FabricOffer:
    """A fleet as one node of a fabric."""

    def __init__(
        self, fabric: str, name: str | None, fleet: LocalFleet, say: Callable[[str], None]
    ) -> None:
        from atoll.fabric.identity.access import Access

        self._access = Access.open(fabric)
        self._name = name
        self._fleet = fleet
        self._say = say
        self._node: JoinedNode | None = None

    async def start(self) -> None:
        """Join the fabric as a node that offers the gateway's address."""
        import dataclasses

        from atoll.runtime.join.hardware import host_name
        from atoll.runtime.join.join_options import JoinOptions
        from atoll.runtime.join.joined_node import JoinedNode

        access = self._access
        if access.is_open:
            access = dataclasses.replace(access, open_name=self._name or host_name())
        options = JoinOptions(url=self._fleet.url, name=self._name)
        self._node = JoinedNode(
            options, access, self._fleet.home, say=self._say, figures=self._read_figures
        )
        await self._node.start()

    def _read_figures(self) -> dict[str, float]:
        """Return how busy the gateway is: its page of metrics is for admins, and it is right here."""
        gateway = self._fleet.gateway
        waiting = len(gateway.queue.waiting)
        return {
            "running": len(gateway.relays) - waiting,
            "waiting": waiting,
            "tokens": gateway.metrics.completion_tokens,
        }

    async def stop(self) -> None:
        """Finish what came from there, and leave."""
        if self._node is not None:
            with contextlib.suppress(AtollError):
                await self._node.leave()
            await self._node.close()
