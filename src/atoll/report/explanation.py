"""What binds a plan, what would help, and why node types are used or not: in the terminal and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.core.units import format_price, format_share, format_throughput, pluralize
from atoll.report.render import Grid, render_fragment
from atoll.report.terminal import table
from atoll.solve.explain.explanation import Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_TEMPLATE = "explanation.html.j2"
_BINDS = "What binds"
_REPAIRS = "Any one of these meets all demand"
_NO_REPAIR = "no single change was found that meets all demand"
_NOTHING_BINDS = "nothing: no offer is used up and no limit is set"


def describe_explanation(explanation: Explanation) -> str:
    """Say in a line what the plan is worth, and whether a cheaper one is known."""
    price = format_price(explanation.usd_per_hour)
    served = format_share(explanation.served)
    text = f"{explanation.problem_name}: {explanation.status}"
    if explanation.status == "infeasible":
        text += f"; {served} of the demand could be served, for {price}"
    else:
        text += f", {price}"
    if explanation.status == "partial":
        text += f", serves {served} of the demand"
    best, objective = explanation.best_usd_per_hour, explanation.objective
    if not explanation.short and best is not None and objective is not None:
        saved = objective - best
        if saved > 1e-4 * max(1.0, best):
            less = format_share(saved / objective)
            text += f"; another plan costs {format_price(best)}, {less} less"
    return f"{text}. Planned again {pluralize(explanation.plans, 'time')}."


def list_constraints(explanation: Explanation) -> list[str]:
    """Return a sentence for each constraint that binds, those worth loosening first."""
    order = sorted(
        explanation.constraints,
        key=lambda c: (c.worth is None or c.worth.nothing, c.kind == "availability", c.where),
    )
    return [constraint.text for constraint in order] or [_NOTHING_BINDS]


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


def _list_repairs(explanation: Explanation) -> tuple[str, list[str]] | None:
    """A title and the repairs under it; None where none were looked for."""
    if explanation.repairs is None:
        return None
    if not explanation.repairs:
        return "Repairs", [_NO_REPAIR]
    return _REPAIRS, [repair.text for repair in explanation.repairs]


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
        parts += [
            _draw_list(_BINDS, list_constraints(explanation)),
            Text(""),
            table(demand.columns, demand.rows, title="Demand", right=demand.right),
        ]
    repairs = _list_repairs(explanation)
    if repairs is not None:
        parts.append(_draw_list(*repairs))
    if explanation.node_types:
        parts += [Text(""), _draw_nodes(explanation)]
    if explanation.left_out:
        title = "Left out for lack of time (give a longer --deadline)"
        parts.append(_draw_list(title, explanation.left_out))
    return Group(*parts)


def _draw_nodes(explanation: Explanation) -> Table:
    rows = [(use.node_type, use.text) for use in explanation.node_types]
    drawn = table(("node type", "why"), rows, title="Node types")
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
    repairs = _list_repairs(explanation)
    lists = [(_BINDS, list_constraints(explanation)), *([] if repairs is None else [repairs])]
    return {
        "title": f"Explanation of {explanation.problem_name}",
        "headline": describe_explanation(explanation),
        "notes": notes,
        "lists": lists,
        "demand": _list_demand(explanation),
        "node_types": Grid(
            ("node type", "why"), [(use.node_type, use.text) for use in explanation.node_types]
        ),
        "left_out": explanation.left_out,
    }
