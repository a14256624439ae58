"""A plan as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.

The same plan, problem and comparison give the same bytes; how long planning took is left out.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from atoll.core.ids import parse_node_type
from atoll.core.units import format_duration, format_rate
from atoll.plan.cost import cost_report
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Service
from atoll.report.layout_svg import colours, draw_instance
from atoll.report.plan_tables import (
    by_service_and_region,
    format_gap,
    headline,
    many,
    rate,
    rows,
    serves,
    shortage,
)
from atoll.solve.comparison import Compared
from atoll.solve.explain.explanation import money, share, slacks

_STYLE = """
:root { color-scheme: light dark; --text: #1d2430; --dim: #5d6675; --back: #fff; --line: #dfe3ea;
  --soft: #f4f6f9; --bar: #3567a8; --warn: #a3261b; --warn-back: #fdeeec; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ef; --dim: #9aa4b5; --back: #14181f;
  --line: #303846; --soft: #1c222c; --bar: #6d9ad6; --warn: #ff9d92; --warn-back: #3a1d1a; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 1040px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; } .dim { color: var(--dim); }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.card { background: var(--soft); border-radius: 8px; padding: .6rem .9rem; min-width: 6rem; }
.card b { display: block; font-size: 1.25rem; } .card span { color: var(--dim); font-size: .85rem; }
.warn { background: var(--warn-back); color: var(--warn); border-radius: 8px; padding: .6rem 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; font-size: .85rem; }
th, td { padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.n, th.n { text-align: right; }
td.bar { width: 45%; min-width: 160px; padding-right: 0; }
.bars { width: 100%; } .bar i { display: block; height: 14px; border-radius: 3px; background: var(--bar); }
.versus tr + tr i { background: var(--dim); }
.instance { margin: 1rem 0 1.3rem; } .instance p { margin: 0 0 .35rem; }
svg.layout { display: block; width: 100%; max-width: 720px; height: auto; }
svg text { font: 12px system-ui, sans-serif; text-anchor: middle; }
svg .node { fill: #fff; } svg .range { fill: var(--dim); font-size: 11px; }
svg .arrow { stroke: var(--dim); stroke-width: 1.2; }
svg .spot { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 4 3; }
svg.flow { display: block; } svg .line { stroke: var(--dim); stroke-opacity: .55; fill: none; }
svg .line.full, svg rect.full { stroke: var(--warn); stroke-opacity: 1; } svg rect.full { stroke-width: 2.5; }
svg .end { fill: var(--soft); stroke: var(--line); } svg .rule { stroke: var(--line); }
svg .small { font-size: 10px; }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.1rem; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: .35rem; }
code { font-size: .85rem; word-break: break-all; }
"""


def page(plan: Plan, problem: Problem, compared: Sequence[Compared] = ()) -> str:
    """Return the report of a plan as HTML text."""
    title = f"Plan of {plan.problem_name}"
    parts = [
        f"<h1>{escaped(title)}</h1>",
        f'<p class="dim">{escaped(headline(plan))}</p>',
        _warning(plan, problem),
        _cards(plan),
        _comparison(plan, compared),
        _costs(plan, problem),
        _layouts(plan),
        _instances(plan, bool(problem.running)),
        _roles(plan, problem),
        service_table(problem),
        _offers(plan, problem),
        _search(plan, problem),
    ]
    return document(title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page with the house style; empty parts are left out."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def escaped(value: object) -> str:
    """Return a value as text that is safe in HTML."""
    return html.escape(str(value))


def _warning(plan: Plan, problem: Problem) -> str:
    said = shortage(plan, problem)
    return "" if said is None else f'<p class="warn">{escaped(said)}</p>'


def _cards(plan: Plan) -> str:
    facts = [("cost", money(plan.usd_per_hour)), ("status", plan.status)]
    if plan.init_usd > 0:
        facts.append(("start of new instances", money(plan.init_usd)))
    if plan.bound is not None and plan.gap is not None:
        facts += [("proven lower bound", money(plan.bound)), ("gap", format_gap(plan.gap))]
    kept = sum(instance.kept for instance in plan.instances)
    facts += [("instances", f"{len(plan.instances)}"), ("nodes", f"{plan.nodes}")]
    facts += [("GPUs", f"{plan.gpus}")]
    if kept:
        facts.append(("instances kept", f"{kept}"))
    return cards(facts)


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """Return facts, names and values, as cards beside each other."""
    own = "".join(
        f'<div class="card"><b>{escaped(value)}</b><span>{escaped(name)}</span></div>'
        for name, value in facts
    )
    return f'<div class="cards">{own}</div>'


def html_table(
    columns: Sequence[str], lines: Iterable[Sequence[object]], numbers: Sequence[str] = ()
) -> str:
    """Return a table; the columns in `numbers` are right-aligned."""
    right = [' class="n"' if name in numbers else "" for name in columns]
    head = "".join(
        f"<th{kind}>{escaped(name)}</th>" for kind, name in zip(right, columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{'-' if value is None else escaped(value)}</td>"
            for kind, value in zip(right, line, strict=True)
        )
        + "</tr>\n"
        for line in lines
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def bars(lines: Sequence[tuple[str, float, str]]) -> str:
    """Return names, values and what is said of each, with bars as long as the values."""
    most = max((value for _, value, _ in lines), default=0.0) or 1.0
    body = "".join(
        f'<tr><td>{escaped(name)}</td><td class="n">{escaped(said)}</td>'
        f'<td class="bar"><i style="width:{100 * value / most:.1f}%"></i></td></tr>\n'
        for name, value, said in lines
    )
    return f'<div class="wide"><table class="bars">{body}</table></div>'


def _comparison(plan: Plan, compared: Sequence[Compared]) -> str:
    if not compared:
        return ""
    lines = [(plan.solver, plan.usd_per_hour, money(plan.usd_per_hour))]
    broken: dict[str, list[str]] = {}
    for other in compared:
        if other.broken:
            broken.setdefault(", ".join(other.broken), []).append(other.solver)
            continue
        usd = other.usd_per_hour or 0.0
        said = money(usd)
        if other.ratio is not None:
            said += f" (x{other.ratio:.2f})"
        elif (other.served or 0.0) < 1.0:
            said += f" (serves {serves(other.served or 0.0, other.served_mean or 0.0)})"
        lines.append((other.solver, usd, said))
    notes = (f"Breaks {rules}: {', '.join(names)}." for rules, names in broken.items())
    told = "".join(f'<p class="dim">{escaped(note)}</p>' for note in notes)
    return f'<h2>Next to the baselines</h2><div class="versus">{bars(lines)}</div>{told}'


def _costs(plan: Plan, problem: Problem) -> str:
    usd = by_service_and_region(plan)
    regions = sorted({region for _, region in usd})
    services = []
    for service in problem.services:
        total = sum(value for (name, _), value in usd.items() if name == service.name)
        services.append((service.name, total, money(total)))
    places = []
    for region in regions:
        total = sum(value for (_, place), value in usd.items() if place == region)
        places.append((region, total, money(total)))
    kinds = [
        (line.name, line.usd_per_hour, f"{many(line.nodes, 'node')}, {money(line.usd_per_hour)}")
        for line in cost_report(plan, problem).node_types
    ]
    return (
        f"<h2>Cost per service</h2>{bars(services)}"
        f"<h2>Cost per region</h2>{bars(places)}"
        f"<h2>Cost per node type</h2>{bars(kinds)}"
    )


def _layouts(plan: Plan) -> str:
    gpus = [parse_node_type(n.node_type).gpu for i in plan.instances for n in i.nodes]
    colour = colours(gpus)
    legend = "".join(
        f'<span><i style="background:{value}"></i>{escaped(gpu)}</span>'
        for gpu, value in colour.items()
    )
    drawn = []
    for row in rows(plan):
        number = f"{row.number}x " if row.number > 1 else ""
        state = ", kept" if row.kept else ""
        drawn.append(
            f'<div class="instance"><p><b>{number}{escaped(row.service)} {escaped(row.phase)}</b> '
            f'<span class="dim">in {escaped(row.region)}: {rate(row.per_s)}, '
            f"{money(row.usd_per_hour)}{state}</span></p>{draw_instance(row.example, colour)}</div>\n"
        )
    note = (
        "Stages from left to right, as wide as the layers they hold; nodes of a stage share its load. "
        "A dashed edge is a spot node."
    )
    return (
        f'<h2>Layouts</h2><p class="dim">{note}</p><p class="legend">{legend}</p>\n{"".join(drawn)}'
    )


def _instances(plan: Plan, state: bool) -> str:
    columns = ["", "service", "phase", "region", "layers", "carries", "$/h"]
    lines = [
        [
            f"{row.number}x",
            row.service,
            row.phase,
            row.region,
            row.layout,
            rate(row.per_s),
            f"{row.usd_per_hour:,.2f}",
            *(["kept" if row.kept else "new"] if state else []),
        ]
        for row in rows(plan)
    ]
    shown = [*columns, "state"] if state else columns
    return f"<h2>Instances</h2>{html_table(shown, lines, ('', 'carries', '$/h'))}"


def _roles(plan: Plan, problem: Problem) -> str:
    columns = ("role", "demand", "capacity", "in use", "served")
    lines = [
        (
            slack.role,
            rate(slack.demand_per_s),
            rate(slack.capacity_per_s),
            share(min(1.0, slack.demand_per_s / slack.capacity_per_s))
            if slack.capacity_per_s > 0
            else None,
            share(slack.served),
        )
        for slack in slacks(plan, problem)
    ]
    note = (
        "Per second: prompt tokens for prefill, generated tokens for decode, requests where both run "
        "together. Headroom is part of the demand."
    )
    return f'<h2>Demand and capacity</h2><p class="dim">{note}</p>{html_table(columns, lines, columns[1:])}'


def service_table(problem: Problem) -> str:
    """Return what was asked of every service as a table."""
    columns = ("service", "model", "TTFT", "TPOT", "rate", "prompt", "answer", "phases", "headroom")
    lines = [_service(service) for service in problem.services]
    return f"<h2>What was asked</h2>{html_table(columns, lines, columns[2:7])}"


def _service(service: Service) -> tuple[object, ...]:
    return (
        service.name,
        service.model,
        format_duration(service.ttft_s),
        format_duration(service.tpot_s),
        format_rate(service.rate_per_s),
        f"{service.lengths.input_mean:,.0f}",
        f"{service.lengths.output_mean:,.0f}",
        service.phases,
        f"{service.headroom:g}",
    )


def _offers(plan: Plan, problem: Problem) -> str:
    rented = plan.rented()
    columns = ("region", "node type", "market", "$/h", "available", "used")
    lines = [
        (
            offer.region,
            offer.node_type,
            offer.market,
            f"{offer.usd_per_hour:,.4g}",
            offer.available,
            rented[offer.key] or None,
        )
        for offer in problem.offers
    ]
    return f"<h2>Nodes on offer</h2>{html_table(columns, lines, columns[3:])}"


def _search(plan: Plan, problem: Problem) -> str:
    limits, settings = problem.limits, problem.settings
    facts = {
        "solver": plan.solver,
        "what binds": "; ".join(plan.reasons) or None,
        "simulated": "; ".join(plan.notes) or None,
        "budget": None if limits.budget_usd_per_hour is None else money(limits.budget_usd_per_hour),
        "largest spot share": None if limits.spot_share is None else share(limits.spot_share),
        "most nodes": limits.max_nodes,
        "regions per role, at least": limits.spread if limits.spread > 1 else None,
        "most nodes per instance": settings.max_nodes_per_instance,
        "most memory of an instance": f"{settings.memory_ratio:g} times the model",
        "start penalty": f"{settings.init_penalty:g}" if settings.init_penalty else None,
        "engine": settings.engine,
        "when demand cannot be met": settings.on_shortage,
    }
    lines = [(name, value) for name, value in facts.items() if value is not None]
    return (
        f"<h2>Limits and settings</h2>{html_table(('', ''), lines)}"
        f'<p class="dim">Problem <code>{escaped(plan.problem_hash)}</code></p>'
    )
