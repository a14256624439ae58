"""An explanation for people: what binds, what it is worth, repairs, node types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.report.terminal import table
from atoll.solve.explain.explanation import Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def draw_explanation(
    explanation: Explanation, notes: Sequence[str] = (), *, only_nodes: bool = False
) -> RenderableType:
    """Return an explanation for a terminal; `only_nodes`: why node types are used or not, and no more."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(_summary(explanation), style="bold")]
    parts += [Text(note) for note in notes]
    if not only_nodes:
        parts += [_constraints(explanation), Text(""), _slacks(explanation)]
    if explanation.repairs:
        parts.append(
            _list("Any one of these meets all demand", [r.text for r in explanation.repairs])
        )
    elif explanation.repairs is not None:
        parts.append(_list("Repairs", ["no single change was explanation that meets all demand"]))
    if explanation.node_types:
        parts += [Text(""), _nodes(explanation)]
    if explanation.left_out:
        parts.append(
            _list(
                "Left out for lack of time (give a longer --deadline)", list(explanation.left_out)
            )
        )
    return Group(*parts)


def _summary(explanation: Explanation) -> str:
    from atoll.solve.explain.explanation import money, share

    said = f"{explanation.problem_name}: {explanation.status}"
    if explanation.status == "infeasible":
        said += f"; {share(explanation.served)} of the demand could be served, for"
    said += f"{'' if explanation.status == 'infeasible' else ','} {money(explanation.usd_per_hour)}"
    if explanation.status == "partial":
        said += f", serves {share(explanation.served)} of the demand"
    best = explanation.best_usd_per_hour
    if (
        explanation.status in ("optimal", "feasible")
        and best is not None
        and explanation.objective is not None
    ):
        saved = explanation.objective - best
        if saved > 1e-4 * max(1.0, best):
            said += (
                f"; another plan costs {money(best)}, {share(saved / explanation.objective)} less"
            )
    return f"{said}. Planned again {explanation.plans} times."


def _constraints(explanation: Explanation) -> RenderableType:
    if not explanation.constraints:
        return _list("What binds", ["nothing: no offer is used up and no limit is set"])
    order = sorted(
        explanation.constraints,
        key=lambda c: (c.worth is None or c.worth.nothing, c.kind == "availability", c.where),
    )
    lines = [constraint.text for constraint in order]
    return _list("What binds", lines)


def _slacks(explanation: Explanation) -> Table:
    from atoll.report.plan_tables import rate
    from atoll.solve.explain.explanation import share

    rows = [
        (
            slack.role,
            rate(slack.demand_per_s),
            rate(slack.capacity_per_s),
            share(slack.served),
            share(slack.spare) if slack.spare > 0 else None,
        )
        for slack in explanation.demand
    ]
    columns = ("role", "demand", "capacity", "served", "to spare")
    return table(columns, rows, title="Demand", right=columns[1:])


def _nodes(explanation: Explanation) -> Table:
    rows = [(use.node_type, use.text) for use in explanation.node_types]
    drawn = table(("node type", "why"), rows, title="Node types")
    drawn.columns[0].no_wrap = True
    return drawn


def _list(title: str, lines: list[str]) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    body = (Padding(Text(line), (0, 0, 0, 2), expand=False) for line in lines)
    return Group(Text(f"\n{title}", style="italic"), *body)


def explanation_html(explanation: Explanation) -> str:
    """Return an explanation as a piece of HTML."""
    from atoll.report.views import as_html

    return as_html(draw_explanation(explanation))
