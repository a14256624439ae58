"""A plan for people in a terminal: instances, roles, where the money goes, what is proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.plan.cost import cost_report
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem
from atoll.report.terminal import table
from atoll.solve.comparison import Compared
from atoll.solve.explain.explanation import money, served_share, share, slacks

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_PHASES = tuple(Phase)
_LEAST_LAYOUT = 18
_GOOD_LAYOUT = 30
"""Columns that two stages take; with less, each region gets a table of its own."""
_UNITS = "Per second: prompt tokens (prefill), generated tokens (decode), requests (both)."


@dataclass(frozen=True)
class Row:
    """Equal instances together: same role, region, layout and markets, all kept or all new."""

    example: Instance
    layout: str
    number: int
    per_s: float
    usd_per_hour: float

    @property
    def service(self) -> str:
        """The service they belong to."""
        return self.example.service

    @property
    def phase(self) -> Phase:
        """The phase they run."""
        return self.example.phase

    @property
    def region(self) -> str:
        """Where they stand."""
        return self.example.region

    @property
    def kept(self) -> bool:
        """Whether they ran before."""
        return self.example.kept


def rows(plan: Plan) -> list[Row]:
    """Return the instances of a plan with equal ones folded, by service, phase, region and layout."""

    def key(instance: Instance) -> tuple[str, int, str, str, bool]:
        phase = _PHASES.index(instance.phase)
        kept = not instance.kept
        return (instance.service, phase, instance.region, instance.describe(), kept)

    groups: dict[tuple[str, int, str, str, bool], list[Instance]] = {}
    for instance in sorted(plan.instances, key=key):
        groups.setdefault(key(instance), []).append(instance)
    return [
        Row(
            example=group[0],
            layout=group[0].describe(),
            number=len(group),
            per_s=sum(i.throughput_per_s for i in group),
            usd_per_hour=sum(i.usd_per_hour for i in group),
        )
        for group in groups.values()
    ]


def rate(per_s: float) -> str:
    """Write units per second: "6,459/s", "2.59/s"."""
    return f"{per_s:,.0f}/s" if per_s >= 99.95 else f"{per_s:.3g}/s"


def format_gap(gap: float) -> str:
    """Write a proven gap: "0.08%", and "below 0.01%" for what hardly is one."""
    return "0%" if gap < 1e-9 else "below 0.01%" if gap < 1e-4 else share(gap)


def headline(plan: Plan) -> str:
    """Say in a line or two what the plan costs and what is proven of it."""
    size = f"{many(plan.nodes, 'node')}, {many(plan.gpus, 'GPU')}"
    cost = f"{money(plan.usd_per_hour)} on {size}"
    if plan.init_usd > 0:
        cost += f", and {money(plan.init_usd)} for starting new instances"
    if plan.bound is None or plan.gap is None:
        return f"{cost}. Nothing is proven ({plan.solver})."
    if plan.status == "partial":
        what = "nothing within its settings serves that share for less than"
    else:
        what = "nothing within its settings costs less than"
    proven = f"Proven: {what} {money(plan.bound)} (gap {format_gap(plan.gap)})."
    if plan.status == "feasible" and not plan.notes:
        proven += " The deadline came before the gap asked for."
    return f"{cost}. {proven}"


def shortage(plan: Plan, problem: Problem) -> str | None:
    """Say which share of demand a partial plan serves, and what binds."""
    if plan.status != "partial":
        return None
    served = share(served_share(plan, problem))
    least = {role: s for role, s in plan.served_fraction.items() if s < 1.0}
    roles = ", ".join(f"{role} {share(s)}" for role, s in least.items())
    said = f"PARTIAL: serves {served} of the demand ({roles})."
    return f"{said} What binds: {'; '.join(plan.reasons)}." if plan.reasons else said


def draw_plan(
    plan: Plan, problem: Problem, compared: Sequence[Compared], width: int
) -> RenderableType:
    """Return everything about a plan for a terminal of so many columns."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    short = shortage(plan, problem)
    if short is not None:
        parts.append(Text(short, style="bold red"))
    parts += [
        *_instances(plan, problem, width),
        _roles(plan, problem),
        _costs(plan, problem, width),
    ]
    if compared:
        parts.append(_comparison(plan, problem, compared))
    parts.append(Text(f"{plan.problem_name}: {headline(plan)}", style="bold"))
    if plan.reasons and plan.bound is not None and plan.status != "partial":
        parts.append(Text(f"What keeps it from being cheaper: {'; '.join(plan.reasons)}."))
    parts += [Text(f"Simulated: {note}.") for note in plan.notes]
    return Group(*parts)


def _instances(plan: Plan, problem: Problem, width: int) -> list[Table]:
    """One table, or where that leaves no room for the layouts one for each region."""
    own = rows(plan)
    regions = sorted({row.region for row in own})
    state = bool(problem.running)
    if len(regions) > 1 and _room(own, width, region=True, state=state) >= _GOOD_LAYOUT:
        return [_instance_table(own, "Instances", width, region=True, state=state)]
    return [
        _instance_table(
            [row for row in own if row.region == region],
            f"Instances in {region}",
            width,
            region=False,
            state=state,
        )
        for region in regions
    ]


def _cells(own: Sequence[Row], *, region: bool, state: bool) -> list[dict[str, str]]:
    """The cells of each row by column, all but the layout's."""
    return [
        {
            "": f"{row.number}x",
            "service": row.service,
            "phase": str(row.phase),
            **({"region": row.region} if region else {}),
            "layers": row.layout,
            "carries": rate(row.per_s),
            "$/h": f"{row.usd_per_hour:,.2f}",
            **({"state": "kept" if row.kept else "new"} if state else {}),
        }
        for row in own
    ]


def _room(own: Sequence[Row], width: int, *, region: bool, state: bool) -> int:
    """The columns left for layouts."""
    cells = _cells(own, region=region, state=state)
    others = [name for name in cells[0] if name != "layers"]
    taken = sum(max(len(name), *(len(cell[name]) for cell in cells)) + 2 for name in others)
    return max(_LEAST_LAYOUT, width - taken - 3)


def _instance_table(
    own: Sequence[Row], title: str, width: int, *, region: bool, state: bool
) -> Table:
    room = _room(own, width, region=region, state=state)
    cells = _cells(own, region=region, state=state)
    for cell in cells:
        cell["layers"] = wrap_layout(cell["layers"], room)
    lines = [list(cell.values()) for cell in cells]
    return _tight(table(list(cells[0]), lines, title=title, right=("", "carries", "$/h")))


def wrap_layout(layout: str, width: int) -> str:
    """Break a layout into lines between stages, and inside one only if it must."""
    lines: list[str] = []
    for stage in layout.split(" | "):
        if lines and len(lines[-1]) + 3 + len(stage) <= width:
            lines[-1] += f" | {stage}"
        else:
            lines.append(stage)
    return "\n".join(lines)


def _roles(plan: Plan, problem: Problem) -> Table:
    cost = {
        (service.service, phase.phase): phase
        for service in cost_report(plan, problem).services
        for phase in service.phases
    }
    short = plan.status == "partial"
    lines = []
    for slack, role in zip(slacks(plan, problem), problem.roles, strict=True):
        own = cost[role.model, role.phase]
        use = slack.demand_per_s / slack.capacity_per_s if slack.capacity_per_s > 0 else None
        lines.append(
            (
                role.model,
                role.phase,
                rate(slack.demand_per_s),
                rate(slack.capacity_per_s),
                None if use is None else share(min(use, 1.0)),
                *([share(slack.served)] if short else []),
                f"{own.usd_per_hour:,.2f}",
                _per_million(own.usd_per_million_tokens),
            )
        )
    columns = ["service", "phase", "demand", "capacity", "in use", "served", "$/h", "$/M tok"]
    if not short:
        columns.remove("served")
    made = table(columns, lines, title="Demand and capacity", right=columns[2:], caption=_UNITS)
    return _tight(made)


def _per_million(usd: float | None) -> str | None:
    return None if usd is None else f"{usd:.3f}" if usd < 10 else f"{usd:.2f}"


def by_service_and_region(plan: Plan) -> dict[tuple[str, str], float]:
    """Return what each service costs in each region, in USD per hour."""
    usd: dict[tuple[str, str], float] = {}
    for instance in plan.instances:
        key = (instance.service, instance.region)
        usd[key] = usd.get(key, 0.0) + instance.usd_per_hour
    return usd


def _costs(plan: Plan, problem: Problem, width: int) -> RenderableType:
    usd = by_service_and_region(plan)
    regions = sorted({region for _, region in usd})
    services = [service.name for service in problem.services]
    names = max(map(len, [*services, "service"]))
    if len(regions) > 1 and names + 12 + sum(len(region) + 2 for region in regions) > width:
        from rich.console import Group

        lines = [(r, _usd(sum(usd.get((s, r), 0.0) for s in services))) for r in regions]
        by_region = _tight(table(("region", "$/h"), lines, title="Cost by region", right=("$/h",)))
        return Group(_cost_table(usd, services, [], "Cost by service"), by_region)
    return _cost_table(usd, services, regions if len(regions) > 1 else [], "Cost per hour")


def _cost_table(
    usd: dict[tuple[str, str], float], services: list[str], regions: list[str], title: str
) -> Table:
    def total(service: str | None = None, region: str | None = None) -> float:
        return sum(
            value for (s, r), value in usd.items() if service in (None, s) and region in (None, r)
        )

    lines = [
        [service, *(_usd(usd.get((service, r), 0.0)) for r in regions), _usd(total(service))]
        for service in services
    ]
    lines.append(["total", *(_usd(total(region=r)) for r in regions), _usd(total())])
    columns = ["service", *regions, "all" if regions else "$/h"]
    return _tight(table(columns, lines, title=title, right=columns[1:]))


def _usd(value: float) -> str:
    return f"{value:,.2f}" if value else "-"


def _comparison(plan: Plan, problem: Problem, compared: Sequence[Compared]) -> Table:
    own = serves(served_share(plan, problem), served_share(plan, problem, mean=True))
    lines: list[tuple[object, ...]] = [
        (plan.solver, f"{plan.usd_per_hour:,.2f}", "x1.00", plan.nodes, own)
    ]
    for other in compared:
        if other.broken:
            lines.append((other.solver, None, None, None, f"breaks {', '.join(other.broken)}"))
            continue
        ratio = None if other.ratio is None else f"x{other.ratio:.2f}"
        usd = f"{other.usd_per_hour or 0.0:,.2f}"
        served = serves(other.served or 0.0, other.served_mean or 0.0)
        lines.append((other.solver, usd, ratio, other.nodes, served))
    columns = ("solver", "$/h", "ratio", "nodes", "serves")
    return _tight(table(columns, lines, title="Next to the baselines", right=columns[1:4]))


def serves(least: float, mean: float) -> str:
    """Write which share of demand is served: by the least served role, and on average."""
    return share(least) if least >= 1.0 else f"{share(least)}, on average {share(mean)}"


def _tight(made: Table) -> Table:
    """Less space between columns, and no row folded where it need not be."""
    made.padding, made.pad_edge = (0, 1, 0, 0), False
    for column in made.columns:
        column.no_wrap = column.header != "layers"
        if not column.no_wrap:
            column.min_width = _LEAST_LAYOUT
    return made


def many(number: int, what: str) -> str:
    """Write a number of things: "1 node", "3 nodes"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
