"""A plan on rented nodes in a terminal: instances, roles, where the money goes, what is known of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.core.units import format_price, format_share, format_throughput, format_usd, pluralize
from atoll.plan.cost import cost_report, idle_by_region
from atoll.plan.engine_layout import describe_engine
from atoll.plan.footprint import DRAWN, DrawnObjective, PowerUse
from atoll.plan.measured_service import describe_measured
from atoll.plan.plan import Instance, Node, Plan, format_gpus
from atoll.plan.problem import Problem
from atoll.plan.proof import (
    CAPACITY,
    NO_BOUND,
    binding_reasons,
    format_gap,
    proof_of,
    say_bound,
)
from atoll.report.plan.mixes import describe_mixes, list_mixes
from atoll.report.promises import draw_verdicts, judge_plan, list_plan_groups
from atoll.report.render import Grid
from atoll.report.robustness_report import draw_robustness, judge_robustness
from atoll.report.terminal import table, tighten
from atoll.solve.comparison import Compared
from atoll.solve.explain.plan_explanation import served_share
from atoll.solve.simplicity import SAID

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from atoll.catalog.catalog import Catalog

_PHASES = tuple(Phase)
_MIN_LAYOUT = 18
_GOOD_LAYOUT = 30
"""Columns that two stages take; with less, each region gets a table of its own."""
MAX_PAIRS = 120
"""Pairs of prefill and decode instances listed one by one."""
_SLICE_COLUMNS = ("region", "machine", "market", "GPUs", "instance")
_HOLDS = ("layers", "runs")
"""Heads of the last column of slices: layers of plain models, or also parts of others."""
IDLE = "idle GPUs"
_PRICE = "the price of "
"""Beginning of a note that compares plans and simulates none."""
_UNITS = "Per second: prompt tokens (prefill), generated tokens (decode), requests (both)."


@dataclass(frozen=True)
class InstanceGroup:
    """Equal instances together: same role, region, layout and markets, all kept or all new."""

    example: Instance
    layout: str
    number: int
    per_s: float
    usd_per_hour: float
    run_by: str | None
    """Engine, tensor parallel size and standing; None where layouts are free."""

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


def group_instances(plan: Plan, catalog: Catalog) -> list[InstanceGroup]:
    """Return the instances of a plan with equal ones folded, by service, phase, region and layout.

    Executors of any-to-any models have tables of their own (`executor_tables`).
    """

    def key(instance: Instance) -> tuple[str, int, str, str, str, bool]:
        phase = _PHASES.index(instance.phase)
        run_by = describe_engine(instance, catalog) or ""
        here = (instance.region, instance.describe(), run_by)
        return (instance.service, phase, *here, not instance.kept)

    groups: dict[tuple[str, int, str, str, str, bool], list[Instance]] = {}
    for instance in sorted(plan.plain_instances, key=key):
        groups.setdefault(key(instance), []).append(instance)
    return [
        InstanceGroup(
            example=group[0],
            layout=group[0].describe(),
            number=len(group),
            per_s=sum(i.throughput_per_s for i in group),
            usd_per_hour=sum(i.usd_per_hour for i in group),
            run_by=describe_engine(group[0], catalog),
        )
        for group in groups.values()
    ]


def describe_plan(plan: Plan) -> str:
    """Say in a line or two what the plan costs and what is known of how good it is."""
    size = f"{pluralize(plan.nodes, 'node')}, {plan.describe_gpus()}"
    cost = f"{format_price(plan.usd_per_hour)} on {size}"
    if plan.idle_gpus:
        idle = format_price(plan.idle_usd)
        nodes = [node for one in plan.instances for node in one.nodes if node.gpu_ids is not None]
        cut = "share" if nodes and all(node.gpu_shares > 1 for node in nodes) else "GPU"
        cost += f" and {pluralize(plan.idle_gpus, cut)} idle ({idle})"
    if plan.init_usd > 0:
        cost += f", and {format_price(plan.init_usd)} for starting new instances"
    if plan.power is not None:
        cost += f". {describe_power(plan.power)}".removesuffix(".")
    return f"{cost}. {proof_of(plan).text}".rstrip()


def describe_shortage(plan: Plan, problem: Problem) -> str | None:
    """Say which share of demand a plan serves, and what binds, unless it serves all."""
    if plan.status == "infeasible":
        text = "INFEASIBLE: no plan meets the demand."
    elif plan.status == "partial":
        served = format_share(served_share(plan, problem))
        short = {name: part for name, part in plan.served_fraction.items() if part < 1.0}
        services = ", ".join(f"{name} {format_share(part)}" for name, part in short.items())
        text = f"PARTIAL: serves {served} of the demand ({services})."
        if not short:
            text = "PARTIAL: serves all of the demand, but not after every loss."
    else:
        return None
    reasons = binding_reasons(plan)
    return f"{text} What binds: {'; '.join(reasons)}." if reasons else text


def draw_rented_plan(
    plan: Plan, problem: Problem, compared: Sequence[Compared], width: int
) -> RenderableType:
    """Return everything about a plan on rented nodes for a terminal of so many columns."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [*draw_verdicts([*judge_plan(plan), *judge_robustness(plan)])]
    groups = list_plan_groups(plan)
    if groups.rows:
        parts.append(groups.draw("Promises by group of requests"))
    shortage = describe_shortage(plan, problem)
    if shortage is not None:
        parts.append(Text(shortage, style="bold red"))
    if plan.mixes:
        parts.append(_tighten(list_mixes(plan).draw("Which model answers")))
        parts += [Text(line) for line in describe_mixes(plan)]
    parts += _draw_instances(plan, problem, width)
    if problem.graph_services:
        from atoll.plan.executor_use import executor_use
        from atoll.report.plan.executor_tables import draw_services

        parts += draw_services(plan, problem, executor_use(plan, problem, problem.catalog()))
    if any(node.gpu_ids is not None for i in plan.instances for node in i.nodes):
        parts.append(_draw_slices(plan, width))
    if _varies(plan):
        parts.append(_tighten(list_ways(plan).draw("Ways of requests")))
    if problem.roles:
        roles = list_phases(plan, problem, costs=True)
        parts.append(_tighten(roles.draw("Demand and capacity", _UNITS)))
    parts.append(_draw_costs(plan, problem, width))
    parts += draw_robustness(plan)
    if compared:
        parts.append(_draw_comparison(plan, problem, compared))
    parts.append(Text(f"{plan.problem_name}: {describe_plan(plan)}", style="bold"))
    measured = describe_measured(problem, problem.catalog(), plan.instances)
    parts += [Text(f"Times of {line}.") for line in measured]
    reasons = binding_reasons(plan)
    if reasons and plan.bound is not None and shortage is None:
        parts.append(Text(f"What keeps it from being cheaper: {'; '.join(reasons)}."))
    planned = [note for note in plan.notes if note.startswith((SAID, _PRICE))]
    parts += [Text(f"Simulated: {note}.") for note in plan.notes if note not in planned]
    parts += [Text(f"{note[0].upper()}{note[1:]}.") for note in planned]
    return Group(*parts)


def _draw_slices(plan: Plan, width: int) -> Table:
    """Which GPUs of cut machines each instance has; market and layers only where there is room."""
    grid = list_slices(plan)
    widths = [max(len(str(cell)) for cell in column) for column in zip(*grid.rows, strict=True)]
    wide = sum(max(w, len(name)) + 2 for w, name in zip(widths, grid.columns, strict=True)) + 2
    keep = [
        at
        for at, name in enumerate(grid.columns)
        if wide <= width or name not in ("market", *_HOLDS)
    ]
    columns = [grid.columns[at] for at in keep]
    rows = [[row[at] for at in keep] for row in grid.rows]
    return _tighten(table(columns, rows, title="Machines that are cut"))


def _varies(plan: Plan) -> bool:
    """Whether requests of one service take ways of different kinds, or in several regions."""
    return len(list_ways(plan).rows) > len({route.service for route in plan.routes})


def _draw_instances(plan: Plan, problem: Problem, width: int) -> list[Table]:
    """One table, or where that leaves no room for the layouts one for each region."""
    groups = group_instances(plan, problem.catalog())
    regions = sorted({group.region for group in groups})
    state = bool(problem.running)
    if len(regions) > 1:
        grid = list_instances(groups, region=True, state=state)
        if _measure_room(grid, width) >= _GOOD_LAYOUT:
            return [_draw_layouts(grid, "Instances", width)]
    return [
        _draw_layouts(
            list_instances(
                [group for group in groups if group.region == region], region=False, state=state
            ),
            f"Instances in {region}",
            width,
        )
        for region in regions
    ]


def list_instances(groups: Sequence[InstanceGroup], *, region: bool, state: bool) -> Grid:
    """Return a row for each group of equal instances, with its region and its state if asked for."""
    known = any(group.run_by for group in groups)
    columns = [
        *("", "service", "phase", *(["region"] if region else []), "layers"),
        *(*(["run by"] if known else []), "carries", "$/h", *(["state"] if state else [])),
    ]
    return Grid(
        columns,
        [
            [
                f"{group.number}x",
                group.service,
                str(group.phase),
                *([group.region] if region else []),
                group.layout,
                *([group.run_by or "-"] if known else []),
                format_throughput(group.per_s),
                format_usd(group.usd_per_hour, sign=False),
                *(["kept" if group.kept else "new"] if state else []),
            ]
            for group in groups
        ],
        right=("", "carries", "$/h"),
    )


def _measure_room(grid: Grid, width: int) -> int:
    """The columns left for layouts."""
    taken = sum(
        max(len(name), *(len(str(row[at])) for row in grid.rows)) + 2
        for at, name in enumerate(grid.columns)
        if name != "layers"
    )
    return max(_MIN_LAYOUT, width - taken - 3)


def _draw_layouts(grid: Grid, title: str, width: int) -> Table:
    room, at = _measure_room(grid, width), list(grid.columns).index("layers")
    rows = [[*row[:at], wrap_layout(str(row[at]), room), *row[at + 1 :]] for row in grid.rows]
    return _tighten(table(grid.columns, rows, title=title, right=grid.right))


def wrap_layout(layout: str, width: int) -> str:
    """Break a layout into lines between stages, and inside one only if it must."""
    lines: list[str] = []
    for stage in layout.split(" | "):
        if lines and len(lines[-1]) + 3 + len(stage) <= width:
            lines[-1] += f" | {stage}"
        else:
            lines.append(stage)
    return "\n".join(lines)


def list_phases(plan: Plan, problem: Problem, *, costs: bool) -> Grid:
    """Return what is asked of every phase of a service, what it carries, and with `costs` what it costs.

    Where some requests run apart and others together, each has its share of the demand.
    """
    short = plan.status in ("partial", "infeasible")
    rows: list[tuple[object, ...]] = []
    for service in cost_report(plan, problem).services:
        for phase in service.phases:
            if phase.phase is Phase.SERVE:
                continue  # executors carry parts of requests, not tokens
            tokens_usd = phase.usd_per_million_tokens
            use = phase.utilisation  # by what is asked, without what is planned for beyond it
            served = None if plan.status == "infeasible" else format_share(service.served)
            money = (
                format_usd(phase.usd_per_hour, sign=False),
                None if tokens_usd is None else format_usd(tokens_usd, sign=False, decimals=3),
            )
            rows.append(
                (
                    service.service,
                    str(phase.phase),
                    format_throughput(phase.demand_per_s),
                    format_throughput(phase.capacity_per_s),
                    None if use is None else format_share(min(use, 1.0)),
                    *([served] if short else []),
                    *(money if costs else []),
                )
            )
    columns = ["service", "phase", "demand", "capacity", "in use"]
    columns += (["served"] if short else []) + (["$/h", "$/M tok"] if costs else [])
    return Grid(columns, rows, columns[2:])


def sum_costs(plan: Plan, problem: Problem) -> dict[tuple[str, str], float]:
    """Return what each service costs in each region, and what idle GPUs do, in USD per hour."""
    usd: dict[tuple[str, str], float] = {}
    for instance in plan.instances:
        for service in instance.services:
            key = (service, instance.region)
            usd[key] = usd.get(key, 0.0) + instance.usd_per_hour * instance.part_of(service)
    return usd | {(IDLE, region): idle for region, idle in idle_by_region(plan, problem).items()}


def _draw_costs(plan: Plan, problem: Problem, width: int) -> RenderableType:
    usd = sum_costs(plan, problem)
    regions = sorted({region for _, region in usd})
    services = [service.name for service in problem.services]
    services += [IDLE] * any(name == IDLE for name, _ in usd)
    names = max(map(len, [*services, "service"]))
    if len(regions) > 1 and names + 12 + sum(len(region) + 2 for region in regions) > width:
        from rich.console import Group

        lines = [(r, _format_cell(sum(usd.get((s, r), 0.0) for s in services))) for r in regions]
        by_region = _tighten(
            table(("region", "$/h"), lines, title="Cost by region", right=("$/h",))
        )
        return Group(_draw_cost_table(usd, services, [], "Cost by service"), by_region)
    return _draw_cost_table(usd, services, regions if len(regions) > 1 else [], "Cost per hour")


def _draw_cost_table(
    usd: dict[tuple[str, str], float], services: list[str], regions: list[str], title: str
) -> Table:
    def total(service: str | None = None, region: str | None = None) -> float:
        return sum(
            value for (s, r), value in usd.items() if service in (None, s) and region in (None, r)
        )

    lines = [
        [
            service,
            *(_format_cell(usd.get((service, r), 0.0)) for r in regions),
            _format_cell(total(service)),
        ]
        for service in services
    ]
    lines.append(
        ["total", *(_format_cell(total(region=r)) for r in regions), _format_cell(total())]
    )
    columns = ["service", *regions, "all" if regions else "$/h"]
    return _tighten(table(columns, lines, title=title, right=columns[1:]))


def _format_cell(value: float) -> str | None:
    return format_usd(value, sign=False) if value else None


def _draw_comparison(plan: Plan, problem: Problem, compared: Sequence[Compared]) -> Table:
    served_now = format_served(served_share(plan, problem), served_share(plan, problem, mean=True))
    lines: list[tuple[object, ...]] = [
        (plan.solver, format_usd(plan.usd_per_hour, sign=False), "x1.00", plan.nodes, served_now)
    ]
    for other in compared:
        if other.broken:
            lines.append((other.solver, None, None, None, f"breaks {', '.join(other.broken)}"))
            continue
        ratio = None if other.ratio is None else f"x{other.ratio:.2f}"
        usd = format_usd(other.usd_per_hour or 0.0, sign=False)
        served = format_served(other.served or 0.0, other.served_mean or 0.0)
        lines.append((other.solver, usd, ratio, other.nodes, served))
    columns = ("solver", "$/h", "ratio", "nodes", "serves")
    return _tighten(table(columns, lines, title="Next to the baselines", right=columns[1:4]))


def format_served(min_share: float, mean: float) -> str:
    """Write which share of demand is served: by the least served role, and on average."""
    if min_share >= 1.0:
        return format_share(min_share)
    return f"{format_share(min_share)}, on average {format_share(mean)}"


def _tighten(drawn: Table) -> Table:
    """Less space between columns, and no row folded where it need not be."""
    tighten(drawn)
    for column in drawn.columns:
        column.no_wrap = column.header != "layers"
        if not column.no_wrap:
            column.min_width = _MIN_LAYOUT
    return drawn


# Routes and slices


def list_ways(plan: Plan) -> Grid:
    """Return a row for each service, region and manner with the share of its requests."""
    regions = {instance.id: instance.region for instance in plan.instances}
    shares: dict[tuple[str, str, str], float] = {}
    for route in plan.routes:
        places = [regions.get(name, "?") for name in route.instances]
        manner = "apart" if len(places) > 1 else "together"
        place = places[0] if len(set(places)) == 1 else " to ".join(places)
        key = (route.service, manner, place)
        shares[key] = shares.get(key, 0.0) + route.share
    columns = ("service", "phases", "region", "requests")
    return Grid(columns, [(*key, format_share(shares[key])) for key in sorted(shares)], columns[3:])


def list_pairs(plan: Plan) -> Grid:
    """Return the largest routes, with prefill and decode instance or the one that runs both."""
    columns = ("service", "prefill", "decode", "requests")
    largest = sorted(plan.routes, key=lambda route: (-route.share, route.service, route.instances))
    shown = sorted(
        largest[:MAX_PAIRS], key=lambda route: (route.service, -route.share, route.instances)
    )
    rows = [
        (route.service, route.instances[0], route.instances[-1], format_share(route.share))
        for route in shown
    ]
    return Grid(columns, rows, columns[3:])


def list_slices(plan: Plan) -> Grid:
    """Return a row for each slice, machine by machine, and one for what is idle of a machine."""
    machines: dict[tuple[str, str, str, str | int], list[tuple[Node, Instance]]] = {}
    for instance in plan.instances:
        for node in instance.nodes:
            if node.gpu_ids is not None:
                machine = node.host if node.host is not None else node.slot or 0
                key = (instance.region_of(node), node.node_type, node.market, machine)
                machines.setdefault(key, []).append((node, instance))
    rows: list[tuple[object, ...]] = []
    for (region, node_type, market, machine), slices in sorted(
        machines.items(), key=lambda entry: (*entry[0][:3], _rank(entry[0][3]))
    ):
        named = machine if isinstance(machine, str) else f"{node_type}, machine {machine}"
        here = (region, named, market)
        taken: set[int] = set()
        for node, instance in sorted(slices, key=lambda entry: entry[0].gpu_ids or ()):
            taken |= set(node.gpu_ids or ())
            rows.append((*here, node.format_slice(), instance.id, instance.holds(node)))
        idle = sorted(set(range(slices[0][0].machine_gpus)) - taken)
        if idle:
            rows.append((*here, format_gpus(idle), "idle", None))
    return Grid((*_SLICE_COLUMNS, _HOLDS[bool(plan.executor_instances)]), rows)


def _rank(machine: str | int) -> tuple[int, str]:
    return (machine, "") if isinstance(machine, int) else (0, machine)


# Power


def describe_power(use: PowerUse) -> str:
    """Say in a line or two what a plan draws, what that counts, and what the cheapest plan does."""
    figures = ((drawn, getattr(use, drawn.figure)) for drawn in DRAWN.values())
    text = "Draws " + ", ".join(drawn.write(value) for drawn, value in figures if value is not None)
    if use.joules_per_token:
        each = ", ".join(f"{name} {joules:.2g}" for name, joules in use.joules_per_token.items())
        text += f"; joules per generated token: {each}"
    text += "."
    text += _describe_weighted(use)
    if use.cheapest_usd_per_hour is not None and use.cheapest_watts is not None:
        text += (
            f" The cheapest plan costs {format_price(use.cheapest_usd_per_hour)} and draws "
            f"{DRAWN['energy'].write(use.cheapest_watts)}."
        )
    return text


def _describe_weighted(use: PowerUse) -> str:
    """Say what was made small, in its own unit where nothing else counts, and its bound."""
    value, bound = use.weighted_usd_per_hour, use.weighted_bound
    if value is None:
        return ""
    alone: DrawnObjective | None = None
    for drawn in DRAWN.values():
        figure = getattr(use, drawn.figure)
        if figure is not None and math.isclose(value, figure / drawn.figure_per_unit):
            alone = drawn
    weighed = "" if alone is not None else f" As weighed: {value:.4g} an hour."
    if bound is None or value <= 0.0:
        return f"{weighed} {NO_BOUND}."
    claim = f"is below {bound:.4g}"
    if alone is not None:
        claim = f"needs less than {alone.write(alone.figure_per_unit * bound)}"
    gap = format_gap(max(0.0, 1.0 - bound / value))
    return f"{weighed} {say_bound(CAPACITY, f'nothing within its settings {claim}', gap)}"
