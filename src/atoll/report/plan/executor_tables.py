"""Any-to-any services of a plan as tables: executors, how busy they are, classes and their paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.units import (
    format_count,
    format_duration,
    format_price,
    format_rate,
    format_share,
    format_throughput,
    format_usd,
)
from atoll.plan.cost import cost_report
from atoll.plan.executor_use import ClassUse, ExecutorPlanUse, ExecutorUse
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.report.render import Grid
from atoll.report.terminal import tighten

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_PATHS = 24
"""Paths of a class listed one by one, the largest first."""
TIMES = (
    "Takes: a request alone on the slowest executors of its paths, hand-over included; waiting for others "
    "comes on top."
)


@dataclass(frozen=True)
class ServiceTables:
    """One any-to-any service: a title, and its executors, classes and paths as tables."""

    service: str
    title: str
    executors: Grid
    classes: Grid
    paths: Grid


@dataclass(frozen=True)
class ExecutorGroup:
    """Equal executors: same parts on the same kind of node, all kept or all new."""

    example: ExecutorUse
    uses: tuple[ExecutorUse, ...]

    @property
    def requests_per_s(self) -> float:
        """Requests/s that pass them, all together."""
        return sum(use.requests_per_s for use in self.uses)

    @property
    def usd_per_hour(self) -> float:
        """Cost of all of them, USD per hour."""
        return sum(use.usd_per_hour for use in self.uses)

    @property
    def busy(self) -> float | None:
        """How busy they are on average, None where that is not known."""
        known = [use.busy for use in self.uses if use.busy is not None]
        return sum(known) / len(known) if known else None

    def busy_with(self, part: str) -> float:
        """How busy a part keeps them on average."""
        return sum(use.busy_by_part.get(part, 0.0) for use in self.uses) / len(self.uses)


def group_executors(uses: Sequence[ExecutorUse]) -> list[ExecutorGroup]:
    """Return executors with equal ones folded, by parts, place and kind."""

    def key(use: ExecutorUse) -> tuple[object, ...]:
        return (use.service, use.guests, use.parts, use.region, use.kind, use.market, not use.kept)

    groups: dict[tuple[object, ...], list[ExecutorUse]] = {}
    for use in sorted(uses, key=lambda use: (key(use), use.id)):
        groups.setdefault(key(use), []).append(use)
    return [ExecutorGroup(group[0], tuple(group)) for group in groups.values()]


def list_services(plan: Plan, problem: Problem, use: ExecutorPlanUse) -> list[ServiceTables]:
    """Return the tables of every any-to-any service, in the problem's order."""
    costs = {line.service: line for line in cost_report(plan, problem).services}
    found = []
    for service in problem.graph_services:
        cost = costs[service.name]
        said = [service.model, f"{format_rate(service.rate_per_s)}"]
        said += [format_price(cost.usd_per_hour)]
        if cost.usd_per_thousand_requests is not None:
            said.append(f"{format_usd(cost.usd_per_thousand_requests)} per 1,000 requests")
        if cost.served < 1.0:
            said.append(f"serves {format_share(cost.served)}")
        groups = group_executors(use.of_service(service.name))
        classes = use.classes_of(service.name)
        found.append(
            ServiceTables(
                service.name,
                f"{service.name}: {', '.join(said)}",
                _list_executors(groups, problem, service.name),
                _list_classes(classes),
                _list_paths(classes),
            )
        )
    return found


def draw_services(plan: Plan, problem: Problem, use: ExecutorPlanUse) -> list[RenderableType]:
    """Return the tables of every any-to-any service for a terminal."""
    from rich.text import Text

    drawn: list[RenderableType] = []
    for tables in list_services(plan, problem, use):
        name = tables.service
        for title, grid in (
            (f"Executors of {tables.title}", tables.executors),
            (f"Classes of {name}", tables.classes),
            (f"Paths of {name}", tables.paths),
        ):
            if grid.rows:
                # A table folds its own title to its width, and some are narrow.
                drawn += [Text(title, style="italic"), tighten(grid.draw())]
    return [*drawn, Text(TIMES, style="dim"), Text("")]


def _shared_parts(one: ExecutorUse, service: str) -> str:
    """The parts of an executor, and who else's requests come to it."""
    others = [name for name in (one.service, *one.guests) if name != service]
    with_whom = f", shared with {' and '.join(others)}" if others else ""
    return "+".join(one.parts) + with_whom


def _list_executors(groups: Sequence[ExecutorGroup], problem: Problem, service: str) -> Grid:
    region = len({group.example.region for group in groups}) > 1
    state = bool(problem.running)
    columns = ["", "parts", "on", *(["region"] if region else []), "requests", "busy", "with"]
    columns += ["KV tokens", "$/h", *(["state"] if state else [])]
    rows = []
    for group in groups:
        one = group.example
        spot = " spot" if one.market == "spot" else ""
        tokens = None if one.kv_tokens is None else format_count(float(f"{one.kv_tokens:.3g}"))
        rows.append(
            [
                f"{len(group.uses)}x",
                _shared_parts(one, service),
                f"{one.kind}{spot}",
                *([one.region] if region else []),
                format_throughput(group.requests_per_s),
                None if group.busy is None else _percent(group.busy),
                _busy_with(group),
                tokens,
                format_usd(group.usd_per_hour, sign=False),
                *(["kept" if one.kept else "new"] if state else []),
            ]
        )
    return Grid(columns, rows, ("", "requests", "busy", "KV tokens", "$/h"))


def _busy_with(group: ExecutorGroup) -> str | None:
    """Share of an executor's time that each of several parts takes."""
    parts = group.example.parts
    if len(parts) < 2 or group.busy is None:
        return None
    return ", ".join(f"{part} {_percent(group.busy_with(part))}" for part in parts)


def _percent(share: float) -> str:
    """A share for a narrow column: "82%"; what is not nothing is not "0%"."""
    return f"{share:.0%}" if share >= 0.005 or share <= 1e-9 else "<1%"


def _list_classes(classes: Sequence[ClassUse]) -> Grid:
    """Promises of every class beside the time it takes; columns that no class needs are left out."""
    pairs = [
        ("first text within", [c.ttft_s for c in classes], [c.first_text_s for c in classes]),
        ("speech within", [c.speech_within_s for c in classes], [c.speech_made_s for c in classes]),
        ("image within", [c.image_within_s for c in classes], [c.image_made_s for c in classes]),
    ]
    columns, cells = (
        ["class", "requests"],
        [[c.klass, format_throughput(c.requests_per_s)] for c in classes],
    )
    seen = 0
    for name, promised, takes in pairs:
        if any(value is not None for value in (*promised, *takes)):
            # Columns of one name would share their alignment, and nothing else: spaces tell them apart.
            columns += [name, "takes" + " " * seen]
            seen += 1
            for row, asked, took in zip(cells, promised, takes, strict=True):
                row += [_seconds(asked), _seconds(took)]
    if any(c.tpot_s is not None for c in classes):
        columns.append("per token")
        for row, of_class in zip(cells, classes, strict=True):
            row.append(_seconds(of_class.tpot_s))
    return Grid(columns, cells, columns[1:])


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_duration(float(f"{value:.3g}"))


def _list_paths(classes: Sequence[ClassUse]) -> Grid:
    """The paths of every class, the largest first; those left out are counted."""
    rows: list[tuple[object, ...]] = []
    for of_class in classes:
        for at, path in enumerate(of_class.paths[:MAX_PATHS]):
            name = of_class.klass if at == 0 else ""
            rate = format_throughput(path.requests_per_s)
            rows.append((name, format_share(path.share), rate, path.text))
        left = of_class.paths[MAX_PATHS:]
        if left:
            share = format_share(sum(path.share for path in left))
            rows.append(("", share, "", f"{len(left)} smaller ones"))
    return Grid(("class", "share", "requests", "path"), rows, ("share", "requests"))
