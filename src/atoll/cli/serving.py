"""What `serve` and `demo` share: reading the plan, fetching models, showing progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.progress import live_line, show_progress
from atoll.core.errors import InfeasibleError, MissingDependencyError, UnknownNameError, UsageError
from atoll.report.terminal import note

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.runtime.local.build import LocalModel, LocalOptions
    from atoll.runtime.local.fleet import LocalFleet
    from atoll.runtime.local.weights import WeightSource
    from atoll.runtime.pool.routes import ChoiceRoutes, ModelPromise
    from atoll.runtime.task_fleet.deployment import TaskDeployment
    from atoll.telemetry.usage import OnUsage


def need_serving() -> None:
    """Say which extra to install where the packages that serve are missing."""
    for package in ("httptools", "msgspec", "prometheus_client", "python_multipart"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "serve", needed_for="serving")


def need_fabric() -> None:
    """Say which extra to install where the packages of the fabric are missing."""
    for package in ("zenoh", "cryptography", "msgspec"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "fabric", needed_for="a fabric")


def need_engine() -> None:
    """Say which extra to install where the packages of the stage engine are missing."""
    for package in ("torch", "transformers", "zmq", "tokenizers"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "engine", needed_for="the stage engine")


def need_components() -> None:
    """Say which extra to install where the packages of components are missing."""
    for package in ("onnxruntime", "hibari", "PIL"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "components", needed_for="any-to-any models")


def plan_fleet(fleet: Fleet, path: Path, seconds: float) -> Plan:
    """Make a plan of a fleet with little effort, in so many seconds at most."""
    from atoll.solve.effort import LEVELS, Effort

    effort = Effort(work=LEVELS["low"])
    with show_progress(f"planning {fleet.name}", seconds) as tell:
        plan = fleet.plan(effort=effort, deadline_s=seconds, on_progress=tell, rank=False)
    if plan.status == "infeasible":
        raise InfeasibleError(
            f"no plan meets the demand of {plan.problem_name}",
            hint=f"`atoll plan {path}` says why",
        )
    return plan


def fetch_models(wanted: Mapping[str, WeightSource]) -> dict[str, LocalModel]:
    """Fetch and convert models where needed, with progress on stderr."""
    from atoll.engine.weights.sources import resolve
    from atoll.runtime.local.build import LocalModel

    folders: dict[str, Path] = {}
    for source in dict.fromkeys(each.source for each in wanted.values()):
        with live_line(f"fetching {source}") as say:

            def progress(
                done: int, total: int, name: str, say: Callable[[str], None] = say
            ) -> None:
                say(f"converting weights: {done} of {total} ({name})")

            folders[source] = resolve(source, progress)
    return {
        service: LocalModel(each.source, folders[each.source], each.stand_in)
        for service, each in wanted.items()
    }


def fetch_components(deployment: TaskDeployment) -> None:
    """Fetch the weights of all components where needed, with progress on stderr."""
    from atoll.components.weights import prefetch

    names = [name for executor in deployment.executors for name in executor.components]
    with live_line("fetching components") as say:

        def progress(done: int, total: int, name: str) -> None:
            say(f"fetching components: {done} of {total} packages {f'({name})' if name else ''}")

        prefetch(dict.fromkeys(names), progress)


def services_of(plan: Plan, only: Sequence[str]) -> list[str]:
    """Return the services of a plan, or those asked for; a choice is asked for by its name."""
    known = list(dict.fromkeys(instance.service for instance in plan.instances))
    if not known:
        raise UsageError("the plan has no instances", hint="serve another plan")
    behind = {mix.name: [name for name in mix.shares if name in known] for mix in plan.mixes}
    behind = {choice: ways for choice, ways in behind.items() if ways}
    for each in only:
        if each not in behind and each not in known:
            raise UnknownNameError("model", each, [*behind, *known], field="--only")
    wanted = [name for each in only for name in behind.get(each, [each])]
    return choose_services(known, wanted)


def choices_of(plan: Plan, services: Collection[str]) -> dict[str, ChoiceRoutes]:
    """Return how requests for the choices of a plan are dealt to those of its services that are served."""
    from atoll.runtime.pool.routes import ChoiceRoutes

    choices = {}
    for mix in plan.mixes:
        shares = {name: share for name, share in mix.shares.items() if name in services}
        if any(shares.values()):
            choices[mix.name] = ChoiceRoutes.of(mix.model_copy(update={"shares": shares}))
    return choices


def promises_of(problem: Problem, services: Collection[str]) -> dict[str, ModelPromise]:
    """Return what a fleet promises for services that answer with tokens."""
    from atoll.runtime.pool.routes import ModelPromise

    return {
        one.name: ModelPromise(ttft_s=one.ttft_s, tpot_s=one.tpot_s, target=one.attainment)
        for one in problem.services
        if one.name in services and not one.is_graph
    }


def choose_services(known: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the services that are there, or of them those asked for."""
    for name in only:
        if name not in known:
            raise UnknownNameError("model", name, known, field="--only")
    return [name for name in known if not only or name in only]


@dataclass
class StartProgress:
    """How far the processes of a fleet are, for one line on stderr."""

    say: Callable[[str], None]
    states: dict[str, str] = field(default_factory=dict)
    is_up: bool = False
    tell: Callable[[str], None] = note
    """Takes what happens once all of it runs."""

    def __call__(self, name: str, state: object, reason: str) -> None:
        """Take the state a process is in now, and show it."""
        before = self.states.get(name)
        self.states[name] = str(state)
        if self.is_up:
            why = f": {reason}" if reason and str(state) != "ready" else ""
            if (before, str(state)) != ("ready", "stopping") and str(state) != "stopped":
                self.tell(f"{name} {state}{why}")
            return
        ready = sum(value == "ready" for value in self.states.values())
        waiting = [n for n, value in self.states.items() if value != "ready"]
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
) -> Iterator[LocalFleet]:
    """Return a fleet that is not started yet; its folder goes when it is left.

    `name` is what others see, the plan's unless given. Without a plan only `tasks` stand. The gateway counts
    who keeps `promises`.
    """
    import os

    from atoll.runtime.adapters.base import RunDirectory
    from atoll.runtime.gateway import GatewaySettings
    from atoll.runtime.local.build import build
    from atoll.runtime.local.fleet import LivenessTracker, LocalFleet
    from atoll.runtime.local.state import new_home, remove_home
    from atoll.runtime.task_fleet.endpoint import language_models, remove_store, task_endpoint
    from atoll.telemetry.logs import JsonLog

    home = RunDirectory(new_home())
    liveness = LivenessTracker()
    target = log or home.folder / "gateway.log"
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        remove_home(home.folder)
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"cannot write {target}: {reason}", field="--log", hint="name another file"
        ) from error
    stand_ins = {name: model.stand_in for name, model in models.items() if model.stand_in}
    try:
        named = build(plan, models, home, liveness, options) if plan and models else ()
        if tasks is not None:
            named = (*named, task_endpoint(tasks, home, options.cores))
        warm = [str(m.folder) for m in models.values()] if options.engine == "atoll" else []
        warm += [] if tasks is None else list(language_models(tasks))
        yield LocalFleet(
            name or (plan.problem_name if plan else "tasks"),
            named,
            home,
            GatewaySettings(
                host=host,
                port=port,
                choices=choices_of(plan, models) if plan else {},
                promises=dict(promises or {}),
            ),
            liveness,
            warm=tuple(dict.fromkeys(warm)),
            on_progress=on_progress,
            on_usage=on_usage,
            log=JsonLog(descriptor, **({"stand_in": stand_ins} if stand_ins else {})),
        )
    finally:
        os.close(descriptor)
        remove_store(home)
        remove_home(home.folder)
