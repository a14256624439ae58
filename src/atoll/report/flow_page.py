"""A plan on a fixed cluster as one HTML page, like `plan_report`, with the placement drawn."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.catalog.catalog import Catalog
from atoll.core.units import format_bandwidth, format_duration
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.report.flow_svg import gpu_colours, placement_drawing
from atoll.report.flow_tables import (
    ComparedFlow,
    cuts,
    describe_served,
    describe_unused,
    headline,
    machine_rows,
    site_flows,
)
from atoll.report.plan_page import bars, cards, document, escaped, html_table, service_table
from atoll.report.plan_tables import format_gap, rate
from atoll.solve.explain.explanation import share
from atoll.solve.place.bottleneck import node_use

_MOST_RULES = 60


def flow_page(
    plan: Plan, problem: Problem, catalog: Catalog, compared: Sequence[ComparedFlow] = ()
) -> str:
    """Return the report of a plan on a fixed cluster as HTML text."""
    title = f"Placement of {plan.problem_name}"
    said = describe_served(plan, problem)
    return document(
        title,
        [
            f"<h1>{escaped(title)}</h1>",
            f'<p class="dim">{escaped(headline(plan, problem))}</p>',
            "" if said is None else f'<p class="warn">{escaped(said)}</p>',
            _cards(plan, problem),
            _drawings(plan, problem, catalog),
            _comparison(plan, compared),
            _machines(plan, problem, catalog),
            service_table(problem),
            _links(problem),
            f'<p class="dim">Problem <code>{escaped(plan.problem_hash)}</code></p>',
        ],
    )


def _cards(plan: Plan, problem: Problem) -> str:
    requests = sum(instance.throughput_per_s for instance in plan.instances)
    facts = [
        (f"tokens/s, {plan.goal}", f"{plan.objective or 0.0:,.1f}"),
        ("requests/s", rate(requests).removesuffix("/s")),
        ("status", plan.status),
    ]
    if plan.bound is not None and plan.gap is not None:
        facts += [("proven upper bound", f"{plan.bound:,.1f}"), ("gap", format_gap(plan.gap))]
    there = len(cluster_of(problem).nodes)
    facts += [("machines used", f"{plan.nodes} of {there}"), ("GPUs", f"{plan.gpus}")]
    hops = max((instance.stages for instance in plan.instances), default=0)
    facts.append(("hops at most", f"{hops}"))
    return cards(facts)


def _drawings(plan: Plan, problem: Problem, catalog: Catalog) -> str:
    note = (
        "Layers from left to right. A box is a machine over the layers it holds, filled as far as it is "
        "busy; lines are as thick as what flows. Outlined: the bottleneck."
    )
    parts = [f'<h2>Placement</h2><p class="dim">{note}</p>']
    for instance, cut in cuts(plan, problem, catalog):
        if len(plan.instances) > 1:
            parts.append(f"<h2>{escaped(instance.service)}</h2>")
        legend = "".join(
            f'<span><i style="background:{value}"></i>{escaped(gpu)}</span>'
            for gpu, value in gpu_colours(instance).items()
        )
        parts.append(f'<p class="legend">{legend}</p>')
        use = node_use(instance, problem, catalog)
        parts.append(f'<div class="wide">{placement_drawing(instance, use, cut)}</div>')
        between = site_flows(instance, problem)
        if between:
            lines = [
                (f"{a} to {b}", value, f"{value:,.0f} tokens/s")
                for (a, b), value in between.items()
            ]
            parts.append(f"<h2>Between sites</h2>{bars(lines)}")
    if plan.reasons:
        parts.append(f"<p><b>What binds</b>: {escaped('; '.join(plan.reasons))}.</p>")
    parts += [f"<p><b>Simulated</b>: {escaped(note)}.</p>" for note in plan.notes]
    idle = describe_unused(plan, problem)
    if idle is not None:
        parts.append(f'<p class="dim">{escaped(idle)}</p>')
    return "\n".join(parts)


def _comparison(plan: Plan, compared: Sequence[ComparedFlow]) -> str:
    if not compared:
        return ""
    own = plan.objective or 0.0
    lines = [(plan.solver, own, f"{own:,.1f} tokens/s")]
    for other in compared:
        value = other.tokens_per_s
        said = "no placement" if value is None else f"{value:,.1f} tokens/s, {other.hops} hops"
        lines.append((other.solver, value or 0.0, said))
    return f'<h2>Next to simple rules</h2><div class="versus">{bars(lines)}</div>'


def _machines(plan: Plan, problem: Problem, catalog: Catalog) -> str:
    columns = ("service", "machine", "type", "site", "layers", "tokens/s", "in use")
    lines = [
        (
            row.service,
            row.machine,
            row.node_type,
            row.site,
            row.layers,
            f"{row.tokens_per_s:,.0f}",
            share(row.use),
        )
        for row in machine_rows(plan, problem, catalog)
    ]
    return f"<h2>Machines</h2>{html_table(columns, lines, columns[4:])}"


def _links(problem: Problem) -> str:
    rules = cluster_of(problem).links
    columns = ("from", "to", "both ways", "bandwidth", "latency")
    lines = [
        (
            rule.src,
            rule.dst,
            "no" if rule.one_way else "yes",
            format_bandwidth(rule.bytes_per_s),
            format_duration(rule.latency_s),
        )
        for rule in rules[:_MOST_RULES]
    ]
    more = len(rules) - _MOST_RULES
    note = f'<p class="dim">and {more} more rules</p>' if more > 0 else ""
    return f"<h2>Links</h2>{html_table(columns, lines, columns[3:])}{note}"
