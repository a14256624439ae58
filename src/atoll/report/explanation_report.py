"""Why a plan is as it is: limits that bind it, what would help, why node types are used or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.core.units import format_price, format_share, format_throughput, pluralize
from atoll.report.render import Grid, render_fragment
from atoll.solve.explain.plan_explanation import FITS, Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_TEMPLATE = "explanation.html.j2"
_BINDS = "What binds"
_FULL = "Any one of these meets all demand"
_HELPS = "These help, without meeting all demand"
_CHEAPER = "Any one of these is cheaper, or takes fewer machines"
_CARRIES = "Any one of these carries more"
_NO_REPAIR = "no single change was found that serves more"
_NO_SAVING = "no single change was found that is cheaper"
_NOTHING_MORE = "no single change was found that carries more"
_NOTHING_BINDS = "nothing: no offer is used up and no limit is set"
_LOSSES = "What surviving costs"
_QUALITY = "What right answers cost"
_WAYS = "Ways to deploy that have a name"
_UNSIMULATED = "; promises of others than this plan were not simulated"
_PARTS = "Executors by part, the bottleneck first"
_MISFITS = "Parts that do not run on a kind of node, alone there"
_ENGINES = "What running costs, for capacity alone"
LEFT_OUT = "Not asked (allow more with --plans or --deadline)"


def describe_explanation(explanation: Explanation) -> str:
    """Say in a line what the plan is worth, and whether a better one is known."""
    price = format_price(explanation.usd_per_hour)
    served = format_share(explanation.served)
    cluster = explanation.goal != "cost"
    carried = f"{explanation.objective or 0.0:,.0f} tokens/s" if cluster else price
    text = f"{explanation.problem_name}: {explanation.status}"
    if explanation.status == "infeasible":
        text += f"; {served} of the demand could be served, for {price}"
    else:
        text += f", {carried}"
    if explanation.status == "partial":
        text += f", serves {served} of the demand"
    again = explanation.again
    if again is not None and not again.nothing:
        # What is planned again is the cheapest, or on a cluster what carries the most; a simple plan is not.
        how = "for the least cost" if explanation.simple else "again"
        how = how if explanation.goal in ("cost", "latency") else "for the most tokens/s"
        text += f"; planning {how} would {again.text}"
    return f"{text}. Planned again {pluralize(explanation.plans, 'time')}."


def list_constraints(explanation: Explanation) -> list[str]:
    """Return a sentence for each constraint that binds, those worth loosening first."""
    order = sorted(
        explanation.constraints,
        key=lambda c: (c.worth is None or c.worth.nothing, c.kind == "availability", c.where),
    )
    return [constraint.text for constraint in order] or [_NOTHING_BINDS]


def list_losses(explanation: Explanation) -> list[str]:
    """Return a sentence for each kind of loss that the plan survives, the worst first."""
    return [loss.text for loss in explanation.losses]


def list_qualities(explanation: Explanation) -> list[str]:
    """Return sentences about each choice between models: errors, their price, and who answers nothing."""
    return [line for choice in explanation.choices for line in choice.lines]


def list_engines(explanation: Explanation) -> list[str]:
    """Return what the plan would cost with other engines, and with layouts that no engine runs."""
    return [cost.text for cost in explanation.engines]


def _list_demand(explanation: Explanation) -> Grid:
    columns = ("role", "demand", "capacity", "served", "to spare")
    rows = [
        (
            slack.role,
            format_throughput(slack.demand_per_s),
            format_throughput(slack.capacity_per_s),
            format_share(slack.served),
            format_share(slack.spare) if slack.spare > 0 else None,
        )
        for slack in explanation.demand
    ]
    return Grid(columns, rows, columns[1:])


def _list_executors(explanation: Explanation) -> list[tuple[str, Grid]]:
    """Tables of any-to-any models: other ways to deploy, and how busy parts keep executors."""
    found = []
    if explanation.ways:
        rows: list[tuple[object, ...]] = [("this plan", format_price(explanation.usd_per_hour))]
        rows += [(way.name, way.text) for way in explanation.ways]
        estimated = any(way.estimated for way in explanation.ways)
        title = f"{_WAYS}{_UNSIMULATED}" if estimated else _WAYS
        found.append((title, Grid(("executors", "best plan"), rows)))
    if explanation.parts:
        columns = ("service", "part", "executors", "busy", "with it")
        lines = [
            (use.service, use.part, use.executors, f"{use.busy:.0%}", f"{use.own:.0%}")
            for use in explanation.parts
        ]
        found.append((_PARTS, Grid(columns, lines, columns[2:])))
    return found


def list_misfits(explanation: Explanation) -> Grid:
    """Return a row for each reason with the parts and the kinds of nodes that do not go together for it."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for fit in explanation.fits:
        if fit.reason != FITS:
            why = f"{fit.reason} (other classes do)" if fit.carries else fit.reason
            kinds.setdefault((fit.service, fit.part, why), []).append(fit.kind)
    parts: dict[tuple[str, str, str], list[str]] = {}
    for (service, part, why), names in kinds.items():
        parts.setdefault((service, why, ", ".join(names)), []).append(part)
    rows = [(service, ", ".join(some), on, why) for (service, why, on), some in parts.items()]
    return Grid(("service", "parts", "not on", "why"), rows)


def list_repairs(explanation: Explanation) -> list[tuple[str, list[str]]]:
    """Return titles and the repairs under each; nothing where none were looked for.

    Where demand is not met, those that meet all of it come under a title of their own.
    """
    repairs = explanation.repairs
    if repairs is None:
        return []
    cluster = explanation.goal != "cost"
    if not explanation.short:
        title = _CARRIES if cluster else _CHEAPER
        nothing = _NOTHING_MORE if cluster else _NO_SAVING
        return [(title, [r.text for r in repairs])] if repairs else [("Repairs", [nothing])]
    full = [repair.text for repair in repairs if repair.meets_demand]
    helps = [repair.text for repair in repairs if not repair.meets_demand]
    lists = [(_FULL, full), (_HELPS, helps)]
    return [pair for pair in lists if pair[1]] or [("Repairs", [_NO_REPAIR])]


def draw_explanation(
    explanation: Explanation, notes: Sequence[str] = (), *, only_nodes: bool = False
) -> RenderableType:
    """Return an explanation for a terminal, with `notes` under its first line.

    With `only_nodes` only why node types are used or not, which is all that was asked.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(describe_explanation(explanation), style="bold")]
    parts += [Text(note) for note in notes]
    if not only_nodes:
        demand = _list_demand(explanation)
        parts.append(_draw_list(_BINDS, list_constraints(explanation)))
        if explanation.losses:
            parts.append(_draw_list(_LOSSES, list_losses(explanation)))
        if explanation.choices:
            parts.append(_draw_list(_QUALITY, list_qualities(explanation)))
        if explanation.engines:
            parts.append(_draw_list(_ENGINES, list_engines(explanation)))
        if demand.rows or not explanation.parts:
            parts += [Text(""), demand.draw("Demand")]
        for title, grid in _list_executors(explanation):
            parts += [Text(""), grid.draw(title)]
    parts += [_draw_list(title, lines) for title, lines in list_repairs(explanation)]
    if explanation.node_types:
        parts += [Text(""), _draw_nodes(explanation)]
    misfits = list_misfits(explanation)
    if misfits.rows:
        parts += [Text(""), misfits.draw(_MISFITS)]
    if explanation.left_out:
        parts.append(_draw_list(LEFT_OUT, explanation.left_out))
    return Group(*parts)


def _list_node_types(explanation: Explanation) -> Grid:
    rows = [(use.node_type, use.text) for use in explanation.node_types]
    return Grid(("node type", "why"), rows)


def _draw_nodes(explanation: Explanation) -> Table:
    drawn = _list_node_types(explanation).draw("Node types")
    drawn.columns[0].no_wrap = True
    return drawn


def _draw_list(title: str, lines: Sequence[str]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    body = (Padding(Text(line), (0, 0, 0, 2), expand=False) for line in lines)
    return Group(Text(f"\n{title}", style="italic"), *body)


def render_explanation_fragment(explanation: Explanation, notes: Sequence[str] = ()) -> str:
    """Return an explanation as one HTML element, for a notebook."""
    return render_fragment(_TEMPLATE, _gather(explanation, notes))


def _gather(explanation: Explanation, notes: Sequence[str]) -> dict[str, object]:
    """Everything that `pages/explanation.html.j2` shows."""
    lists = [(_BINDS, list_constraints(explanation))]
    if explanation.losses:
        lists.append((_LOSSES, list_losses(explanation)))
    if explanation.choices:
        lists.append((_QUALITY, list_qualities(explanation)))
    if explanation.engines:
        lists.append((_ENGINES, list_engines(explanation)))
    lists += list_repairs(explanation)
    return {
        "title": f"Explanation of {explanation.problem_name}",
        "headline": describe_explanation(explanation),
        "notes": notes,
        "lists": lists,
        "demand": _list_demand(explanation),
        "executors": _list_executors(explanation),
        "node_types": _list_node_types(explanation),
        "misfits": list_misfits(explanation),
        "misfits_title": _MISFITS,
        "left_out": explanation.left_out,
        "left_out_title": LEFT_OUT,
    }
