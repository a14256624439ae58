"""A simulation of any-to-any services in the terminal, and as plain data: classes, executors, machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atoll.core.units import format_duration, format_price, format_share, format_throughput
from atoll.report.promises import (
    PromiseVerdict,
    draw_verdicts,
    judge_kept_groups,
    judge_run,
    say_groups,
    say_kept,
)
from atoll.report.render import Grid
from atoll.report.simulation.simulation_tables import (
    choose_busiest,
    describe_service,
    format_part,
    list_nodes,
    list_promises,
    list_run_groups,
    say_busiest,
    summarize,
)
from atoll.report.terminal import jsonable
from atoll.sim.tasks.mixed_report import MixedReport
from atoll.sim.tasks.task_result import ClassResult, ExecutorResult

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.workload.classes import RequestClass

MEASURES = (
    ("whole request", "e2e_s", None),
    ("first text", "ttft_s", "ttft"),
    ("per token", "tpot_s", "tpot"),
    ("first audio", "first_audio_s", None),
    ("speech ahead", "ahead_s", "ahead"),
    ("image", "image_s", "image"),
)
"""Measured times of a request: name, field of results, and the promise about it."""
_IN_WORDS = {promise: words for words, _, promise in MEASURES if promise}
_MAX_MACHINES = 12
"""Machines in a terminal, the busiest; pages list all."""


def summarize_tasks(report: MixedReport) -> dict[str, object]:
    """Return a run as plain data, without its single requests; plain services under "plain"."""
    tasks = report.tasks
    return {
        "plan": report.plan_name,
        "routing": report.routing,
        "query_s": report.query_s,
        "seed": report.seed,
        "clock_s": report.clock_s,
        "finished": report.finished,
        "attainment": report.attainment,
        "usd_per_hour": report.usd_per_hour,
        "services": [describe_service(service) for service in report.services],
        "tasks": {
            "clock_s": tasks.clock_s,
            "arrived": tasks.arrived,
            "finished": tasks.finished,
            "in_flight": tasks.in_flight,
            "requests_per_s": tasks.requests_per_s,
            "by_makespan_per_s": tasks.by_makespan_per_s,
            "queries": tasks.queries,
            "gave_way": tasks.gave_way,
            "cut": tasks.cut,
            "cpu_s": tasks.cpu_s,
        },
        "classes": [
            {**_as_record(klass), "promised_s": promises_of(report, klass)}
            for klass in tasks.classes
        ],
        "executors": jsonable(tasks.executors),
        "machines": [
            {"name": name, "sending": sends, "receiving": receives}
            for name, (sends, receives) in tasks.nic_busy.items()
        ],
        "plain": None if report.plain is None else summarize(report.plain),
    }


def _as_record(klass: ClassResult) -> dict[str, object]:
    record = jsonable(klass)
    assert isinstance(record, dict)
    # By part of the run: services have groups with what that comes to.
    del record["counts"]
    return record


def promises_of(report: MixedReport, klass: ClassResult) -> dict[str, float]:
    """Return what a class is promised, in seconds, by promise."""
    promised: RequestClass = report.problem.service(klass.service).klass(klass.name)
    limits = {
        "ttft": promised.ttft_s,
        "tpot": promised.tpot_s,
        "ahead": promised.ahead_s,
        "image": promised.image_s,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def describe_tasks(report: MixedReport) -> str:
    """Return the run in one line."""
    tasks = report.tasks
    parts = [f"{report.finished:,} requests in {format_duration(report.clock_s)}"]
    if report.attainment is not None:
        parts.append(f"{format_share(report.attainment)} kept their promises")
    parts.append(f"{format_throughput(tasks.requests_per_s)} of any-to-any services")
    if report.usd_per_hour > 0:
        parts.append(format_price(report.usd_per_hour))
    said = [", ".join(parts), f"routing {report.routing}"]
    if tasks.queries:
        said[-1] += f": executors asked {tasks.queries:,} times, {report.query_s * 1e3:g} ms each"
    for number, what in (
        (tasks.in_flight, "not finished"),
        (tasks.gave_way, "sequences computed again for want of KV cache"),
        (tasks.cut, "cut short: no KV cache has room for them"),
    ):
        if number:
            said.append(f"{number:,} {what}")
    behind = [f"{k.service} {k.name}" for k in tasks.classes if k.falls_behind]
    if behind:
        said.append(f"falls further and further behind: {', '.join(behind)}")
    return "; ".join(said)


def judge_tasks(report: MixedReport) -> list[PromiseVerdict]:
    """Return how many requests of each service kept their promises, where it had any."""
    verdicts = []
    for service in report.services:
        if service.kept is None:
            promised = any(
                promises_of(report, k) for k in report.tasks.classes if k.service == service.name
            )
            text = "no request was judged" if promised else "nothing is promised"
            verdicts.append(PromiseVerdict(f"{service.name}: {text}", None))
            continue
        enough = service.kept >= service.target
        text = say_kept(service.name, service.kept, service.target, enough)
        if not enough:
            text += ": " + ", ".join(
                f"{_IN_WORDS[name]} {format_share(share)}" for name, share in service.each.items()
            )
        if service.groups:
            text += f"; {say_groups(service.groups)}"
        is_kept = enough and all(group.is_kept is not False for group in service.groups)
        verdicts += [
            PromiseVerdict(text, is_kept),
            *judge_kept_groups(service.name, service.groups),
        ]
    if report.plain is not None:
        verdicts += judge_run(report.plain, report.problem)
    return verdicts


def list_classes(report: MixedReport) -> Grid:
    """Return a row for each class: how many requests, and how many kept all promises, and how sure it is."""
    groups = {(s.name, group.name): group for s in report.services for group in s.groups}

    def between(klass: ClassResult) -> str | None:
        group = groups.get((klass.service, klass.name))
        if group is None or group.kept is None:
            return None
        few = ", too few to tell" if group.is_kept is None else ""
        return f"{format_share(group.low)} to {format_share(group.high)}{few}"

    return Grid.of(
        report.tasks.classes,
        {
            "service": lambda klass: klass.service,
            "class": lambda klass: klass.name,
            "requests": lambda klass: f"{klass.arrived:,}",
            "finished": lambda klass: f"{klass.finished:,}",
            "rate": lambda klass: format_throughput(klass.requests_per_s),
            "kept": lambda klass: format_part(klass.kept_all),
            "95% confidence": between,
            "promised": lambda klass: format_share(
                report.problem.service(klass.service).class_target(klass.name)
            ),
        },
        right=("requests", "finished", "rate", "kept", "promised"),
    )


def list_latencies(report: MixedReport) -> Grid:
    """Return the rows of each class: what was measured, and what was promised and kept of it."""
    columns = ("service", "class", "of it", "p50", "p90", "p95", "p99", "promised", "kept")
    rows = []
    for klass in report.tasks.classes:
        promised = promises_of(report, klass)
        named = False
        for words, attribute, promise in MEASURES:
            spread = getattr(klass, attribute)
            limit = promised.get(promise or "")
            if spread.p50 is None and limit is None:
                continue
            rows.append(
                (
                    "" if named else klass.service,
                    "" if named else klass.name,
                    words,
                    *(_signed(v) for v in (spread.p50, spread.p90, spread.p95, spread.p99)),
                    _signed(limit),
                    format_part(klass.kept.get(promise or "")),
                )
            )
            named = True
    return Grid(columns, rows, columns[3:])


def list_parts(classes: Iterable[ClassResult]) -> Grid:
    """Return how long requests of each class are at each part, waiting included."""
    columns = ("service", "class", "part", "p50", "p90", "p95", "p99")
    rows = []
    for klass in classes:
        for at, (part, spread) in enumerate(klass.part_s.items()):
            rows.append(
                (
                    "" if at else klass.service,
                    "" if at else klass.name,
                    part,
                    *(_signed(v) for v in (spread.p50, spread.p90, spread.p95, spread.p99)),
                )
            )
    return Grid(columns, rows, columns[3:])


def list_executors(executors: Iterable[ExecutorResult]) -> Grid:
    """Return the rows of each executor: how busy in all, and of each part how busy, full and crowded."""
    # What concerns the executor stands in the row of its first part only.
    parts = (
        (None if at else executor, part)
        for executor in executors
        for at, part in enumerate(executor.parts)
    )
    return Grid.of(
        parts,
        {
            "executor": lambda row: row[0].name if row[0] else "",
            "machine": lambda row: row[0].box if row[0] else "",
            "busy": lambda row: f"{row[0].busy:.0%}" if row[0] else "",
            "part": lambda row: row[1].part,
            "with it": lambda row: f"{row[1].busy:.0%}",
            "batch": lambda row: f"{row[1].batch_mean:.1f}",
            "KV mean": lambda row: f"{row[1].kv_mean:.0%}" if row[1].kv_peak > 0.0 else "-",
            "KV peak": lambda row: f"{row[1].kv_peak:.0%}" if row[1].kv_peak > 0.0 else "-",
            "queue": lambda row: f"{row[1].queue_mean:.1f}",
        },
        right=("busy", "with it", "batch", "KV mean", "KV peak", "queue"),
    )


def list_machines(report: MixedReport, limit: int | None = None) -> Grid:
    """Return a row for each machine: the shares of time its interface sends and receives."""
    columns = ("machine", "sending", "receiving")
    busy = sorted(report.tasks.nic_busy.items(), key=lambda item: -max(item[1]))[:limit]
    rows = [(name, f"{out:.1%}", f"{into:.1%}") for name, (out, into) in busy]
    return Grid(columns, rows, columns[1:])


def draw_tasks(report: MixedReport) -> RenderableType:
    """Return a run for a terminal; of many executors and machines only the busiest."""
    from rich.console import Group
    from rich.text import Text

    tasks = report.tasks
    shown = choose_busiest(tasks.executors, lambda executor: executor.busy)
    machines = list_machines(report, _MAX_MACHINES)
    parts: list[RenderableType] = [
        *draw_verdicts(judge_tasks(report)),
        Text(describe_tasks(report)),
        list_classes(report).draw(),
        list_latencies(report).draw(),
        list_executors(shown).draw(caption=say_busiest(shown, tasks.executors)),
        machines.draw(caption=say_busiest(machines.rows, tasks.nic_busy)),
    ]
    if report.plain is not None:
        nodes = choose_busiest(report.plain.nodes, lambda node: node.busy)
        parts += [
            Text("Plain services"),
            list_promises(report.plain, report.problem).draw(),
            *([groups.draw()] if (groups := list_run_groups(report.plain)).rows else []),
            list_nodes(nodes).draw(caption=say_busiest(nodes, report.plain.nodes)),
        ]
    return Group(*parts)


def _signed(seconds: float | None) -> str:
    """A time that may be negative: speech that is behind its listener."""
    if seconds is None:
        return "-"
    return f"-{format_duration(-seconds)}" if seconds < 0.0 else format_duration(seconds)
