"""Data of the HTML report of a plan on rented nodes, for `pages/rented_plan.html.j2`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.ids import parse_node_type
from atoll.core.units import (
    format_duration,
    format_price,
    format_rate,
    format_share,
    format_throughput,
    pluralize,
)
from atoll.plan.cost import cost_report
from atoll.plan.executor_use import executor_use
from atoll.plan.measured_service import describe_measured
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.proof import binding_reasons, proof_of
from atoll.report.plan.executor_tables import TIMES, ServiceTables
from atoll.report.plan.executor_tables import list_services as list_graph_services
from atoll.report.plan.layout_svg import LayoutDrawing, choose_colours, draw_layout
from atoll.report.plan.machines_svg import MachinesDrawing, draw_machines
from atoll.report.plan.mixes import draw_mixes, list_mixes
from atoll.report.plan.rented_tables import (
    IDLE,
    MAX_PAIRS,
    InstanceGroup,
    describe_plan,
    describe_shortage,
    format_served,
    group_instances,
    list_instances,
    list_pairs,
    list_phases,
    list_slices,
    list_ways,
    sum_costs,
)
from atoll.report.promises import judge_plan, list_plan_groups
from atoll.report.render import Bar, Grid, scale_bars
from atoll.report.robustness_report import (
    CertaintyCurve,
    describe_risk,
    draw_curve,
    judge_robustness,
    list_levels,
)
from atoll.solve.comparison import Compared
from atoll.solve.simplicity import SAID

TEMPLATE = "rented_plan.html.j2"


@dataclass(frozen=True)
class DrawnInstance:
    """Equal instances, named, described in a line and drawn."""

    name: str
    note: str
    drawing: LayoutDrawing


@dataclass(frozen=True)
class ExecutorPages:
    """Any-to-any services: the machines drawn, tables for each service, and what times mean."""

    drawing: MachinesDrawing
    services: Sequence[ServiceTables]
    times: str


@dataclass(frozen=True)
class CertaintyPages:
    """Cost of certainty: the curve drawn, its levels, and which risks were assumed."""

    drawing: CertaintyCurve
    levels: Grid
    note: str


def _gather_certainty(plan: Plan) -> CertaintyPages | None:
    found = plan.robustness
    if found is None:
        return None
    return CertaintyPages(draw_curve(found), list_levels(found), describe_risk(found))


def gather_rented_plan(
    plan: Plan, problem: Problem, compared: Sequence[Compared]
) -> dict[str, object]:
    """Return everything the report of a plan on rented nodes shows; how long planning took is left out."""
    groups = group_instances(plan, problem.catalog())
    colours = choose_colours(
        parse_node_type(node.node_type).gpu for group in groups for node in group.example.nodes
    )
    costs, places, kinds = _chart_costs(plan, problem)
    versus, broken = _chart_comparison(plan, compared)
    return {
        "title": f"Plan of {plan.problem_name}",
        "headline": describe_plan(plan),
        "verdicts": [*judge_plan(plan), *judge_robustness(plan)],
        "groups": list_plan_groups(plan),
        "certainty": _gather_certainty(plan),
        "shortage": describe_shortage(plan, problem),
        "cards": _list_figures(plan),
        "mixes": draw_mixes(plan),
        "mix_rows": list_mixes(plan),
        "compared": versus,
        "broken": broken,
        "service_costs": costs,
        "region_costs": places,
        "node_costs": kinds,
        "graphs": _gather_executors(plan, problem),
        "colours": colours,
        "layouts": [
            DrawnInstance(*_name_group(group), draw_layout(group.example, colours))
            for group in groups
        ],
        "instances": list_instances(groups, region=True, state=bool(problem.running)),
        "slices": list_slices(plan),
        "ways": list_ways(plan),
        "pairs": list_pairs(plan),
        "more_pairs": max(0, len(plan.routes) - MAX_PAIRS),
        "phases": list_phases(plan, problem, costs=False),
        "services": list_services(problem),
        "offers": _list_offers(plan, problem),
        "settings": _list_settings(plan, problem),
        "problem_hash": plan.problem_hash,
    }


def _gather_executors(plan: Plan, problem: Problem) -> ExecutorPages | None:
    """The part of the page about any-to-any services; None where there are none."""
    if not problem.graph_services:
        return None
    catalog = problem.catalog()
    use = executor_use(plan, problem, catalog)
    return ExecutorPages(
        draw_machines(plan, problem, catalog, use), list_graph_services(plan, problem, use), TIMES
    )


def _list_figures(plan: Plan) -> list[tuple[str, str]]:
    figures = [("cost", format_price(plan.usd_per_hour)), ("status", plan.status)]
    if plan.init_usd > 0:
        figures.append(("start of new instances", format_price(plan.init_usd)))
    figures += proof_of(plan).figures
    kept = sum(instance.kept for instance in plan.instances)
    figures += [("instances", f"{len(plan.instances)}"), ("nodes", f"{plan.nodes}")]
    figures += [("GPUs", f"{plan.gpus}")]
    if plan.idle_gpus:
        figures.append(("idle GPUs", f"{plan.idle_gpus}, {format_price(plan.idle_usd)}"))
    if kept:
        figures.append(("instances kept", f"{kept}"))
    return figures


def _name_group(group: InstanceGroup) -> tuple[str, str]:
    number = f"{group.number}x " if group.number > 1 else ""
    state = ", kept" if group.kept else ""
    price = f"{format_throughput(group.per_s)}, {format_price(group.usd_per_hour)}"
    return f"{number}{group.service} {group.phase}", f"in {group.region}: {price}{state}"


def _chart_comparison(plan: Plan, compared: Sequence[Compared]) -> tuple[list[Bar], list[str]]:
    """Cost of each solver's plan, and a sentence for those that break rules."""
    lines = [(plan.solver, plan.usd_per_hour, format_price(plan.usd_per_hour))]
    broken: dict[str, list[str]] = {}
    for other in compared:
        if other.broken:
            broken.setdefault(", ".join(other.broken), []).append(other.solver)
            continue
        usd = other.usd_per_hour or 0.0
        label = format_price(usd)
        if other.ratio is not None:
            label += f" (x{other.ratio:.2f})"
        elif (other.served or 0.0) < 1.0:
            label += f" (serves {format_served(other.served or 0.0, other.served_mean or 0.0)})"
        lines.append((other.solver, usd, label))
    notes = [f"Breaks {rules}: {', '.join(names)}." for rules, names in broken.items()]
    return scale_bars(lines) if compared else [], notes


def _chart_costs(plan: Plan, problem: Problem) -> tuple[list[Bar], list[Bar], list[Bar]]:
    """Cost per hour of services, regions and node types."""
    usd = sum_costs(plan, problem)
    by_service = {service.name: 0.0 for service in problem.services}
    by_service |= {name: 0.0 for name, _ in usd if name == IDLE}
    by_region = dict.fromkeys(sorted({region for _, region in usd}), 0.0)
    for (service, region), value in usd.items():
        by_service[service] = by_service.get(service, 0.0) + value
        by_region[region] += value
    kinds = [
        (
            line.name,
            line.usd_per_hour,
            f"{pluralize(line.nodes, 'node')}, {format_price(line.usd_per_hour)}",
        )
        for line in cost_report(plan, problem).node_types
    ]
    services, places = (
        [(name, value, format_price(value)) for name, value in costs.items()]
        for costs in (by_service, by_region)
    )
    return scale_bars(services), scale_bars(places), scale_bars(kinds)


def list_services(problem: Problem) -> Grid:
    """Return what was asked of every service, for a report of any kind."""
    return Grid.of(
        problem.services,
        {
            "service": lambda service: service.name,
            "model": lambda service: service.model,
            "TTFT": lambda service: format_duration(service.ttft_s),
            "TPOT": lambda service: format_duration(service.tpot_s),
            "rate": lambda service: format_rate(service.rate_per_s),
            "prompt": lambda service: f"{service.lengths.input_mean:,.0f}",
            "answer": lambda service: f"{service.lengths.output_mean:,.0f}",
            "phases": lambda service: service.phases,
            "headroom": lambda service: f"{service.headroom:g}",
        },
        right=("TTFT", "TPOT", "rate", "prompt", "answer", "headroom"),
    )


def _list_offers(plan: Plan, problem: Problem) -> Grid:
    rented = plan.count_nodes()
    return Grid.of(
        problem.offers,
        {
            "region": lambda offer: offer.region,
            "node type": lambda offer: offer.node_type,
            "market": lambda offer: offer.market,
            "cut into": lambda o: ", ".join(map(str, o.sizes)) if len(o.sizes) > 1 else None,
            "$/h": lambda offer: f"{offer.usd_per_hour:,.4g}",
            "available": lambda offer: offer.available,
            "used": lambda offer: rented[offer.key] or None,
        },
        right=("$/h", "available", "used"),
    )


def _list_settings(plan: Plan, problem: Problem) -> list[tuple[str, object]]:
    limits, settings = problem.limits, problem.settings
    budget = limits.budget_usd_per_hour
    values = {
        "solver": plan.solver,
        "what binds": "; ".join(binding_reasons(plan)) or None,
        "times": "; ".join(describe_measured(problem, problem.catalog(), plan.instances)) or None,
        "simulated": "; ".join(n for n in plan.notes if not n.startswith(SAID)) or None,
        "simplicity": next((n.removeprefix(SAID) for n in plan.notes if n.startswith(SAID)), None),
        "budget": None if budget is None else format_price(budget),
        "largest spot share": None
        if limits.spot_share is None
        else format_share(limits.spot_share),
        "most nodes": limits.max_nodes,
        "regions per role, at least": limits.spread if limits.spread > 1 else None,
        "most nodes per instance": settings.max_nodes_per_instance,
        "most memory of an instance": f"{settings.memory_ratio:g} times the model",
        "start penalty": f"{settings.init_penalty:g}" if settings.init_penalty else None,
        "engine": settings.engine,
        "when demand cannot be met": settings.on_shortage,
    }
    return [(name, value) for name, value in values.items() if value is not None]
