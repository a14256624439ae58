"""`atoll simulate`: would a plan hold under a workload?"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.api.fleet_plan import FleetPlan
from atoll.cli.options import VerbSettings, argument, json_field, overlay_field, verb
from atoll.cli.progress import bar, show_progress
from atoll.cli.trace import say_rows
from atoll.core.errors import InfeasibleError, InputError, UnknownNameError, UsageError
from atoll.core.files import check_target
from atoll.core.options import option
from atoll.core.quantities import Duration, Share
from atoll.core.units import parse_duration
from atoll.report.terminal import emit, note

if TYPE_CHECKING:
    from atoll.api.fleet import Fleet
    from atoll.api.fleet_report import FleetReport, FleetTaskReport
    from atoll.engines.limits import EngineLimits
    from atoll.plan.problem import Problem
    from atoll.sim.sim_options import Epoch, Failure, SimOptions
    from atoll.sim.tasks.simulate_tasks import Routing
    from atoll.workload.requests import Workload

app = typer.Typer(add_completion=False)
_CANNOT_STAND = frozenset(("name", "host", "layers", "hops", "memory"))
"""Rules without which a plan cannot run, whatever is asked of it; its own structure aside."""
_LIMITS = (
    *("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"),
    *("prefix_caching", "scheduling"),
)
_of_engine = partial(option, panel="Engines, where other than the fleet file says")
_of_tasks = partial(option, panel="Any-to-any services")
_TASK_OPTIONS = ("routing", "query_ms")
REFUSED_FOR_TASKS = {
    "trace": "a trace does not say what requests of any-to-any services bring and want",
    "service": "any-to-any services run under their own classes",
    "failures": "failures of executors of any-to-any services are not simulated",
    "then": "changes of plan with any-to-any services are not simulated",
    "startup": "executors of any-to-any services are there from the start",
}
_PLAIN_ONLY = ("policy", "batching")
_ROUTINGS: tuple[Routing, ...] = ("static", "dealt", "dynamic")


class SimulateSettings(VerbSettings):
    """Options of `atoll simulate`."""

    target: Path = argument("A plan.json, or a fleet file or problem.json to plan first.")
    fleet: Path | None = option(None, "The fleet file that a plan.json answers.")
    trace: str | None = option(
        None,
        'The workload: a file, or "azure-conv@10/s for=10min"; unless given, the demand of the plan.',
    )
    duration: Duration = option("10min", "How long the plan's own demand lasts.", "--for")
    service: str | None = option(None, "Send all of --trace to this service, whatever it names.")
    policy: str = option("iwrr", "iwrr, swarm, random, shortest-queue, least-load or two-choices.")
    batching: str = option("engine", "engine (chunked prefill) or best-effort.")
    seed: int = option(0, "Seed of workload and policy.", ge=0)
    failures: tuple[str, ...] = option(
        (),
        '"60s HOST" or "60s INSTANCE/NODE": it dies then; "60s-300s ..." and comes back. May be repeated.',
        "--fail",
    )
    then: tuple[str, ...] = option(
        (), '"10min PLAN.json": that plan counts from then on; repeatable.'
    )
    startup: Duration | None = option(
        None,
        "From ordering an instance to its first request; unless given, as the fleet file says or engines "
        "were measured to take.",
    )
    warm_up: Duration = option("0s", "Leave the first so long out of the figures.")
    until: Duration | None = option(None, "Stop the clock; else all requests finish.")
    attain: Share | None = option(
        None,
        "Fail (code 5) if a smaller share of a service or of one of its classes keeps its promises.",
    )
    routing: str | None = _of_tasks(
        None,
        "How requests find executors: static or dealt when they come (the default), dynamic at every "
        "hand-over.",
    )
    query_ms: float | None = _of_tasks(
        None,
        "With --routing dynamic: milliseconds to ask an executor how much it has to do.",
        ge=0.0,
    )
    requests_out: Path | None = option(None, "Write every request: .csv or .parquet.", "--requests")
    report: Path | None = option(None, "Write a report as one .html file.")
    max_num_seqs: int | None = _of_engine(None, "Most sequences in a step.", ge=1)
    max_num_batched_tokens: int | None = _of_engine(None, "Most tokens in a step.", ge=16)
    gpu_memory_utilization: Share | None = _of_engine(
        None, "Share of GPU memory that engines take, as 90%."
    )
    kv_cache_dtype: str | None = _of_engine(None, "Number format of the KV cache, such as fp8.")
    prefix_caching: bool | None = _of_engine(
        None, "Reuse the KV cache of equal beginnings.", "--prefix-caching/--no-prefix-caching"
    )
    scheduling: str | None = _of_engine(
        None, "async (steps are prepared while the GPU works) or sync."
    )
    overlay: tuple[Path, ...] = overlay_field()
    as_json: bool = json_field()


@verb(app, SimulateSettings)
def simulate(asked: SimulateSettings) -> None:
    """Run a plan under a workload, event by event, and show how its promises fare.

    A trace that names no models goes to all services, by what is asked of each, or to --service. Any-to-any
    services run under their own classes of requests. A plan that is not valid is refused (code 7). The first
    run on a machine compiles the simulator, which takes some seconds.
    """
    # All that is told quickly comes before planning and compiling, which take long.
    _check_files(asked)
    if asked.trace is None and asked.service is not None:
        raise UsageError("--service says where a trace goes", hint="add --trace, or leave it out")
    options = _options(asked)
    limits = _read_limits(asked)
    chosen_routing = _parse_routing(asked.routing, queries=asked.query_ms is not None)
    workload = None if asked.trace is None else _workload(asked.trace)
    epochs = [_epoch(text) for text in asked.then]
    from atoll.plan.startup import StartupTimes
    from atoll.solve.registry import require_packages

    require_packages()
    target, service = asked.target, asked.service
    opened_fleet = _fleet(target, asked.fleet, asked.overlay)
    if service is not None:
        _check_service(service, opened_fleet.problem)
    _check_options(asked.model_fields_set, opened_fleet.problem)
    plan = _plan_to_simulate(target, asked.fleet, opened_fleet)
    _check_plan(plan, target)
    for epoch in epochs:
        _check_plan(FleetPlan.of(epoch.plan, opened_fleet.problem), target)
    plan = _start_engines_with(plan, limits, asked.kv_cache_dtype)
    times = StartupTimes(plan.problem)
    own_s = max((times.of(each) for epoch in epochs for each in epoch.plan.instances), default=0.0)
    chosen = replace(
        options,
        epochs=tuple(epochs),
        startup_s=own_s if asked.startup is None else asked.startup,
        failures=tuple(_of_host(failure, plan.problem.hosts) for failure in options.failures),
    )
    with bar("simulating", 1.0) as step:
        simulated = plan.simulate(
            workload,
            service=service,
            duration_s=asked.duration,
            options=chosen,
            routing=chosen_routing,
            query_s=(asked.query_ms or 0.0) / 1e3,
            on_progress=lambda done, total, clock: step(
                done / max(1, total), f"{done:,} of {total:,}, {clock:,.0f} s"
            ),
        )
    _write(simulated, asked.requests_out, asked.report)
    emit(simulated.summarize(), asked.as_json, simulated)
    for path in (asked.requests_out, asked.report):
        if path is not None:
            note(f"wrote {path}")
    if workload is not None:
        say_rows(workload)
    if simulated.attainment is None:
        note(
            "note: no request was judged: nothing is promised, or none had ended or was late; let it run "
            "for longer, or with a shorter --warm-up"
        )
    # Last: the figures are shown and written even where they are not good enough.
    _judge(simulated, asked.attain)


def _check_options(given: Collection[str], problem: Problem) -> None:
    """Raise UsageError for an option that was given and that none of the services has a use for."""
    refused: dict[str, tuple[str, str]] = {}
    if not problem.graph_services:
        why = "this is for any-to-any services, and the fleet has none"
        refused = dict.fromkeys(_TASK_OPTIONS, (why, "leave it out, or say --policy"))
    else:
        refused = {name: (why, "leave it out") for name, why in REFUSED_FOR_TASKS.items()}
        if not problem.plain_services:
            why = "this is for plain services, and the fleet has none"
            refused |= dict.fromkeys(_PLAIN_ONLY, (why, "leave it out, or say --routing"))
    for name, (why, hint) in refused.items():
        if name in given:
            raise UsageError(why, field=name, hint=hint)


def _parse_routing(name: str | None, *, queries: bool) -> Routing:
    """Return how requests find executors; `queries` is whether it is said what asking executors takes."""
    for routing in _ROUTINGS:
        if routing == (name or "dealt"):
            if queries and routing != "dynamic":
                raise UsageError(
                    "--query-ms: nobody is asked unless routing is dynamic",
                    hint="add --routing dynamic, or leave it out",
                )
            return routing
    raise UnknownNameError("routing", str(name), _ROUTINGS, field="--routing")


def _check_files(asked: SimulateSettings) -> None:
    """Raise if a file could not be written, or would replace one that is read."""
    given = (asked.target, asked.fleet, asked.trace, *asked.overlay)
    for path, endings in ((asked.requests_out, (".csv", ".parquet")), (asked.report, (".html",))):
        if path is not None:
            check_target(path, endings)
            if any(
                other is not None and path.resolve() == Path(other).resolve() for other in given
            ):
                raise UsageError(f"{path} is read for this run", hint="name another file to write")


def _fleet(target: Path, fleet: Path | None, overlay: tuple[Path, ...]) -> Fleet:
    """The fleet that says what was promised."""
    from atoll.api.fleet import Fleet
    from atoll.plan.files.read import is_plan

    if fleet is None and is_plan(target):
        raise UsageError(
            f"{target} does not say what was promised", hint="add --fleet with its fleet file"
        )
    return Fleet.load(target if fleet is None else fleet, overlays=overlay)


def _plan_to_simulate(target: Path, fleet: Path | None, opened_fleet: Fleet) -> FleetPlan:
    """The plan of a plan.json with its fleet file, or of a fleet file planned now."""
    if fleet is not None:
        return opened_fleet.load_plan(target)
    from atoll.solve.effort import DEADLINE_S

    with show_progress("planning", DEADLINE_S) as tell:
        plan = opened_fleet.plan(on_progress=tell, rank=False)
    if not plan.instances:
        why = "; ".join(plan.reasons[:2])
        raise InfeasibleError(
            f"there is no plan for {plan.problem_name}" + (f": {why}" if why else ""),
            hint="`atoll explain --fleet FLEET` finds what would help",
        )
    return plan


def _check_plan(plan: FleetPlan, path: Path) -> None:
    """Refuse a plan that is not valid, and warn where it was made for another fleet.

    On another fleet than its own a plan may ask for more than there is, or serve less than is asked; that is
    what simulations are for, as for what it states of promises. What could not stand at all is refused
    there, too.
    """
    from atoll.plan.validate.check import InvalidPlanError, validate, validate_structure

    if not plan.instances:
        raise InputError("the plan has no instances", path=path, hint="plan again")
    same = plan.problem_hash == plan.problem.content_hash()
    violations = validate(plan, plan.problem, same_problem=False)
    refused = [each for each in violations if each.rule != "promise"]
    if not same:
        refused = [each for each in violations if each.rule in _CANNOT_STAND]
        own = [each for each in validate_structure(plan) if each.rule != "promise"]
        refused = own or refused
    if refused:
        raise InvalidPlanError(plan.problem_name, refused)
    if not same:
        broken = f"; there it would not be valid: {violations[0]}" if violations else ""
        note(
            f"note: {path} was made for another fleet, or the fleet file has changed since{broken}"
            " (plan again for one that fits)"
        )


def _check_service(name: str, problem: Problem) -> None:
    known = [service.name for service in problem.services]
    if name not in known:
        raise UnknownNameError("service", name, known, field="--service")


def _workload(trace: str) -> Workload:
    from atoll.workload.spec import workload_of

    return workload_of(trace)


def _read_limits(asked: SimulateSettings) -> EngineLimits:
    from atoll.engines.limits import EngineLimits

    known = ("sync", "async")
    if asked.scheduling not in (None, *known):
        raise UnknownNameError("scheduling", str(asked.scheduling), known, field="--scheduling")
    return EngineLimits.parse({name: getattr(asked, name) for name in _LIMITS})


def _start_engines_with(
    plan: FleetPlan, limits: EngineLimits, kv_cache_dtype: str | None
) -> FleetPlan:
    """Return the plan on engines with other limits than its fleet file sets."""
    if not limits.given and kv_cache_dtype in (None, "auto"):
        return plan
    changed = plan.problem.with_engine_limits(limits, kv_cache_dtype)
    for service in changed.services:
        changed.catalog().model(service.model)  # an unknown number format is named here
    return FleetPlan.of(plan, changed, plan.stats)


def _options(asked: SimulateSettings) -> SimOptions:
    """Return the simulation's options from the command line, checked before anything is planned."""
    from atoll.routing.policies import policy_code
    from atoll.sim.sim_options import SimOptions

    policy_code(asked.policy)
    known = ("engine", "best-effort")
    if asked.batching not in known:
        raise UnknownNameError("batching", asked.batching, known, field="--batching")
    return SimOptions(
        seed=asked.seed,
        policy=asked.policy,
        batching="engine" if asked.batching == "engine" else "best-effort",
        failures=tuple(_failure(text) for text in asked.failures),
        from_s=asked.warm_up,
        until_s=math.inf if asked.until is None else asked.until,
    )


def _failure(text: str) -> Failure:
    """Read "60s HOST", "60s INSTANCE", "60s-300s INSTANCE/NODE"; hosts are told from instances later."""
    from atoll.sim.sim_options import Failure

    when, _, name = text.strip().partition(" ")
    start, dash, end = when.partition("-")
    if not name.strip():
        raise InputError(
            f"cannot read {text!r}", field="--fail", hint='write "60s INSTANCE/NODE" or "60s HOST"'
        )
    time_s = parse_duration(start, field="--fail")
    back_s = parse_duration(end, field="--fail") if dash else None
    target = name.strip()
    instance, slash, node = target.rpartition("/")
    if not slash:
        instance, node = target, ""
    return Failure(time_s, instance=instance, node=node or None, back_s=back_s)


def _of_host(failure: Failure, hosts: frozenset[str]) -> Failure:
    """The failure of a machine, where what fails is the name of one."""
    name = failure.instance if failure.node is None else f"{failure.instance}/{failure.node}"
    if name not in hosts:
        return failure
    return replace(failure, host=name, instance=None, node=None)


def _epoch(text: str) -> Epoch:
    """Read "10min PLAN.json"."""
    from atoll.plan.files.read import read_plan
    from atoll.sim.sim_options import Epoch

    when, _, path = text.strip().partition(" ")
    if not path.strip():
        raise InputError(f"cannot read {text!r}", field="--then", hint='write "10min PLAN.json"')
    return Epoch(parse_duration(when, field="--then"), read_plan(path.strip()))


def _write(
    simulated: FleetReport | FleetTaskReport, requests_out: Path | None, report: Path | None
) -> None:
    if requests_out is not None:
        from atoll.sim.sim_result import write_requests

        write_requests(simulated, requests_out)
    if report is not None:
        from atoll.core.files import atomic_write

        atomic_write(report, simulated.render_page())


def _judge(simulated: FleetReport | FleetTaskReport, min_share: float | None) -> None:
    if min_share is None:
        return
    found = [outcome.find_short(min_share) for outcome in simulated.outcomes]
    short = [one for one in found if one is not None]
    if simulated.attainment is not None and not short:
        return
    said = "no request was judged"
    if short:
        name, kept = min(short, key=lambda one: one[1])
        said = f"{name}: {kept:.1%} kept their promises"
    raise InfeasibleError(
        f"{said}, {min_share:.1%} asked for", hint="plan with more headroom, or for more demand"
    )
