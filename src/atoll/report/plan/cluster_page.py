"""Data of the HTML report of a plan on a fixed cluster, for `pages/cluster_plan.html.j2`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.catalog.catalog import Catalog
from atoll.core.units import format_bandwidth, format_duration, format_throughput, pluralize
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.measured_service import describe_measured
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.proof import binding_reasons, proof_of
from atoll.report.plan.cluster_tables import (
    describe_plan,
    describe_shortage,
    describe_unused,
    find_bottlenecks,
    list_unrun,
    sum_site_flows,
    tabulate_machines,
)
from atoll.report.plan.placement_svg import PlacementDrawing, colour_gpus, draw_placement
from atoll.report.plan.rented_page import list_services
from atoll.report.promises import judge_plan, list_plan_groups
from atoll.report.render import Bar, Grid, scale_bars
from atoll.solve.comparison import Compared
from atoll.solve.place.bottleneck import node_use

TEMPLATE = "cluster_plan.html.j2"
_MAX_RULES = 60


@dataclass(frozen=True)
class DrawnPlacement:
    """The placement of one service, and what flows between its sites."""

    service: str
    colours: dict[str, str]
    drawing: PlacementDrawing
    site_flows: list[Bar]


def gather_cluster_plan(
    plan: Plan, problem: Problem, catalog: Catalog, compared: Sequence[Compared]
) -> dict[str, object]:
    """Return everything the report of a plan on a fixed cluster shows; how long planning took is left out."""
    return {
        "title": f"Placement of {plan.problem_name}",
        "headline": describe_plan(plan, problem),
        "verdicts": judge_plan(plan),
        "groups": list_plan_groups(plan),
        "shortage": describe_shortage(plan),
        "cards": _list_figures(plan, problem),
        "placements": list(_draw_placements(plan, problem, catalog)),
        "unrun": list_unrun(plan, problem, catalog),
        "measured": describe_measured(problem, catalog, plan.instances),
        "reasons": "; ".join(binding_reasons(plan)),
        "notes": plan.notes,
        "unused": describe_unused(plan, problem),
        "compared": _chart_comparison(plan, compared),
        "machines": tabulate_machines(plan, problem, catalog, service=True),
        "services": list_services(problem),
        "links": _list_links(problem),
        "more_links": max(0, len(cluster_of(problem).links) - _MAX_RULES),
        "problem_hash": plan.problem_hash,
    }


def _list_figures(plan: Plan, problem: Problem) -> list[tuple[str, str]]:
    requests = sum(instance.throughput_per_s for instance in plan.instances)
    figures = [
        (f"tokens/s, {plan.goal}", f"{plan.objective or 0.0:,.1f}"),
        ("requests/s", format_throughput(requests).removesuffix("/s")),
        ("status", plan.status),
    ]
    figures += proof_of(plan).figures
    there = len(cluster_of(problem).nodes)
    figures += [("machines used", f"{plan.nodes} of {there}"), ("GPUs", f"{plan.gpus}")]
    hops = max((instance.stages for instance in plan.instances), default=0)
    figures.append(("hops at most", f"{hops}"))
    return figures


def _draw_placements(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[DrawnPlacement]:
    for instance, bottleneck in find_bottlenecks(plan, problem, catalog):
        use = node_use(instance, problem, catalog)
        flows = [
            (f"{a} to {b}", value, f"{value:,.0f} tokens/s")
            for (a, b), value in sum_site_flows(instance, problem).items()
        ]
        yield DrawnPlacement(
            service=instance.service,
            colours=colour_gpus(instance),
            drawing=draw_placement(instance, use, bottleneck),
            site_flows=scale_bars(flows),
        )


def _chart_comparison(plan: Plan, compared: Sequence[Compared]) -> list[Bar]:
    if not compared:
        return []
    tokens_per_s = plan.objective or 0.0
    lines = [(plan.solver, tokens_per_s, f"{tokens_per_s:,.1f} tokens/s")]
    for other in compared:
        value = other.tokens_per_s
        label = "no placement"
        if value is not None:
            label = f"{value:,.1f} tokens/s, {pluralize(other.hops, 'hop')}"
        lines.append((other.solver, value or 0.0, label))
    return scale_bars(lines)


def _list_links(problem: Problem) -> Grid:
    return Grid.of(
        cluster_of(problem).links[:_MAX_RULES],
        {
            "from": lambda rule: rule.src,
            "to": lambda rule: rule.dst,
            "both ways": lambda rule: "no" if rule.one_way else "yes",
            "bandwidth": lambda rule: format_bandwidth(rule.bytes_per_s),
            "latency": lambda rule: format_duration(rule.latency_s),
        },
        right=("bandwidth", "latency"),
    )
