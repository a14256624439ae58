"""`atoll simulate`: would a plan hold under a workload?"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.api.fleet_plan import FleetPlan
from atoll.cli.progress import bar, show_progress
from atoll.cli.shared_options import AsJson, Overlays
from atoll.cli.trace import say_rows
from atoll.core.errors import InfeasibleError, InputError, UnknownNameError, UsageError
from atoll.core.files import check_target
from atoll.core.units import parse_duration, parse_share
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
_ENGINE = "Engines, where other than the fleet file says"
_TASKS = "Any-to-any services"
_TASK_OPTIONS = ("--routing", "--query-ms")
_REFUSED_FOR_TASKS = {
    "--trace": "a trace does not say what requests of any-to-any services bring and want",
    "--service": "any-to-any services run under their own classes",
    "--fail": "failures of executors of any-to-any services are not simulated",
    "--then": "changes of plan with any-to-any services are not simulated",
    "--startup": "executors of any-to-any services are there from the start",
}
_PLAIN_ONLY = ("--policy", "--batching")
_ROUTINGS: tuple[Routing, ...] = ("static", "dealt", "dynamic")


@app.command()
def simulate(
    context: typer.Context,
    target: Annotated[
        Path, typer.Argument(help="A plan.json, or a fleet file or problem.json to plan first.")
    ],
    fleet: Annotated[
        Path | None, typer.Option("--fleet", help="The fleet file that a plan.json answers.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            help='The workload: a file, or "azure-conv@10/s for=10min"; unless given, the demand '
            "of the plan.",
        ),
    ] = None,
    duration: Annotated[
        str, typer.Option("--for", help="How long the plan's own demand lasts.")
    ] = "10min",
    service: Annotated[
        str | None,
        typer.Option("--service", help="Send all of --trace to this service, whatever it names."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="iwrr, swarm, random, shortest-queue, least-load or two-choices.",
        ),
    ] = "iwrr",
    batching: Annotated[
        str, typer.Option("--batching", help="engine (chunked prefill) or best-effort.")
    ] = "engine",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of workload and policy.")] = 0,
    failures: Annotated[
        list[str] | None,
        typer.Option(
            "--fail",
            help='"60s HOST" or "60s INSTANCE/NODE": it dies then; "60s-300s ..." and comes back. '
            "May be repeated.",
        ),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(
            "--then", help='"10min PLAN.json": that plan counts from then on; repeatable.'
        ),
    ] = None,
    startup: Annotated[
        str, typer.Option("--startup", help="From renting an instance to its first request.")
    ] = "2min",
    warm_up: Annotated[
        str, typer.Option("--warm-up", help="Leave the first so long out of the figures.")
    ] = "0s",
    until: Annotated[
        str | None, typer.Option("--until", help="Stop the clock; else all requests finish.")
    ] = None,
    attain: Annotated[
        str | None,
        typer.Option("--attain", help="Fail (code 5) if a smaller share keeps its promises."),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            "--routing",
            help="How requests find executors: static or dealt when they come (the default), dynamic at "
            "every hand-over.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    query_ms: Annotated[
        float | None,
        typer.Option(
            "--query-ms",
            min=0.0,
            help="With --routing dynamic: milliseconds to ask an executor how much it has to do.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    requests_out: Annotated[
        Path | None, typer.Option("--requests", help="Write every request: .csv or .parquet.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a report as one .html file.")
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs", min=1, help="Most sequences in a step.", rich_help_panel=_ENGINE
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            min=16,
            help="Most tokens in a step.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory-utilization",
            help="Share of GPU memory that engines take, as 90%.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-dtype",
            help="Number format of the KV cache, such as fp8.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Reuse the KV cache of equal beginnings.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    scheduling: Annotated[
        str | None,
        typer.Option(
            "--scheduling",
            help="async (steps are prepared while the GPU works) or sync.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    overlay: Overlays = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan under a workload, event by event, and show how its promises fare.

    A trace that names no models goes to all services, by what is asked of each, or to --service. Any-to-any
    services run under their own classes of requests. A plan that is not valid is refused (code 7). The first
    run on a machine compiles the simulator, which takes some seconds.
    """
    # All that is told quickly comes before planning and compiling, which take long.
    min_share = None if attain is None else parse_share(attain, field="--attain")
    duration_s = parse_duration(duration, field="--for")
    _check_files(requests_out, report, [target, fleet, trace, *(overlay or ())])
    if trace is None and service is not None:
        raise UsageError("--service says where a trace goes", hint="add --trace, or leave it out")
    options = _options(policy, batching, seed, failures or [], startup, warm_up, until)
    limits = _read_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=None
        if gpu_memory_utilization is None
        else parse_share(gpu_memory_utilization, field="--gpu-memory-utilization"),
        prefix_caching=prefix_caching,
        scheduling=scheduling,
    )
    chosen_routing = _parse_routing(routing, queries=query_ms is not None)
    workload = None if trace is None else _workload(trace)
    epochs = [_epoch(text) for text in then or []]
    from atoll.solve.registry import require_packages

    require_packages()
    opened_fleet = _fleet(target, fleet, overlay)
    if service is not None:
        _check_service(service, opened_fleet.problem)
    _check_options(_given(context), opened_fleet.problem)
    plan = _plan_to_simulate(target, fleet, opened_fleet)
    _check_plan(plan, target)
    for epoch in epochs:
        _check_plan(FleetPlan.of(epoch.plan, opened_fleet.problem), target)
    plan = _start_engines_with(plan, limits, kv_cache_dtype)
    chosen = replace(
        options,
        epochs=tuple(epochs),
        failures=tuple(_of_host(failure, plan.problem.hosts) for failure in options.failures),
    )
    with bar("simulating", 1.0) as step:
        simulated = plan.simulate(
            workload,
            service=service,
            duration_s=duration_s,
            options=chosen,
            routing=chosen_routing,
            query_s=(query_ms or 0.0) / 1e3,
            on_progress=lambda done, total, clock: step(
                done / max(1, total), f"{done:,} of {total:,}, {clock:,.0f} s"
            ),
        )
    _write(simulated, requests_out, report)
    emit(simulated.summarize(), as_json, simulated)
    for path in (requests_out, report):
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
    _judge(simulated, min_share)


def _given(context: typer.Context) -> frozenset[str]:
    """The options on the command line, as they are written there."""
    found = set()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        # By name: typer may bring a click of its own.
        if source is not None and source.name == "COMMANDLINE":
            # The long form, which messages use.
            found.add(max(parameter.opts, key=len))
    return frozenset(found)


def _check_options(given: Collection[str], problem: Problem) -> None:
    """Raise UsageError for an option on the command line that none of the services has a use for."""
    if not problem.graph_services:
        for option in _TASK_OPTIONS:
            if option in given:
                raise UsageError(
                    f"{option} is for any-to-any services, and the fleet has none",
                    hint="leave it out, or say --policy",
                )
        return
    for option, why in _REFUSED_FOR_TASKS.items():
        if option in given:
            raise UsageError(f"{option}: {why}", hint="leave it out")
    if not problem.plain_services:
        for option in _PLAIN_ONLY:
            if option in given:
                raise UsageError(
                    f"{option} is for plain services, and the fleet has none",
                    hint="leave it out, or say --routing",
                )


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


def _check_files(
    requests_out: Path | None, report: Path | None, given: Sequence[Path | str | None]
) -> None:
    """Raise if a file could not be written, or would replace one that is read."""
    for path, endings in ((requests_out, (".csv", ".parquet")), (report, (".html",))):
        if path is not None:
            check_target(path, endings)
            if any(
                other is not None and path.resolve() == Path(other).resolve() for other in given
            ):
                raise UsageError(f"{path} is read for this run", hint="name another file to write")


def _fleet(target: Path, fleet: Path | None, overlay: list[Path] | None) -> Fleet:
    """The fleet that says what was promised."""
    from atoll.api.fleet import Fleet
    from atoll.plan.files.read import is_plan

    if fleet is None and is_plan(target):
        raise UsageError(
            f"{target} does not say what was promised", hint="add --fleet with its fleet file"
        )
    return Fleet.load(target if fleet is None else fleet, overlays=overlay or ())


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
    what simulations are for. What could not stand at all is refused there, too.
    """
    from atoll.plan.validate.check import InvalidPlanError, validate, validate_structure

    if not plan.instances:
        raise InputError("the plan has no instances", path=path, hint="plan again")
    same = plan.problem_hash == plan.problem.content_hash()
    violations = validate(plan, plan.problem, same_problem=False)
    refused = violations
    if not same:
        refused = [each for each in violations if each.rule in _CANNOT_STAND]
        refused = validate_structure(plan) or refused
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


def _read_limits(**limits: object) -> EngineLimits:
    from atoll.engines.limits import EngineLimits

    if limits["scheduling"] not in (None, "sync", "async"):
        raise UnknownNameError(
            "scheduling", str(limits["scheduling"]), ("sync", "async"), field="--scheduling"
        )
    return EngineLimits.parse(limits)


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


def _options(
    policy: str,
    batching: str,
    seed: int,
    failures: list[str],
    startup: str,
    warm_up: str,
    until: str | None,
) -> SimOptions:
    """Return the simulation's options from the command line, checked before anything is planned."""
    from atoll.routing.policies import policy_code
    from atoll.sim.sim_options import SimOptions

    policy_code(policy)
    if batching not in ("engine", "best-effort"):
        raise UnknownNameError("batching", batching, ("engine", "best-effort"), field="--batching")
    return SimOptions(
        seed=seed,
        policy=policy,
        batching="engine" if batching == "engine" else "best-effort",
        failures=tuple(_failure(text) for text in failures),
        startup_s=parse_duration(startup, field="--startup"),
        from_s=parse_duration(warm_up, field="--warm-up"),
        until_s=math.inf if until is None else parse_duration(until, field="--until"),
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
    kept = simulated.attainment
    if kept is None or kept < min_share:
        outcome = "no request was judged" if kept is None else f"{kept:.1%} kept their promises"
        raise InfeasibleError(
            f"{outcome}, {min_share:.1%} asked for",
            hint="plan with more headroom, or for more demand",
        )
