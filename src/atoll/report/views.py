"""Plans and simulations as people look at them, whatever kind of fleet they are for.

The one place that asks whether a plan is for a fixed cluster or for nodes to rent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.core.errors import UsageError
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.report.flow_tables import ComparedFlow
    from atoll.sim.result import SimReport
    from atoll.solve.comparison import Compared


def draw_plan(
    plan: Plan, problem: Problem, compared: Sequence[Compared] = (), *, width: int
) -> RenderableType:
    """Return everything about a plan for a terminal of so many columns."""
    if problem.cluster is not None:
        from atoll.report.flow_tables import draw_flow_plan

        return draw_flow_plan(plan, problem, problem.catalog(), _flows(compared))
    from atoll.report import plan_tables

    return plan_tables.draw_plan(plan, problem, compared, width)


def plan_page(plan: Plan, problem: Problem, compared: Sequence[Compared] = ()) -> str:
    """Return a report on a plan as one HTML file."""
    if problem.cluster is not None:
        from atoll.report.flow_page import flow_page

        return flow_page(plan, problem, problem.catalog(), _flows(compared))
    from atoll.report.plan_page import page

    return page(plan, problem, compared)


def _flows(compared: Sequence[Compared]) -> list[ComparedFlow]:
    from atoll.report.flow_tables import ComparedFlow

    return [ComparedFlow(c.solver, c.tokens_per_s, c.nodes or 0, c.hops or 0) for c in compared]


def report_endings(problem: Problem) -> tuple[str, ...]:
    """Return the endings that a report on a plan may have."""
    return (".html",) if problem.cluster is None else (".html", ".svg")


def plan_svg(plan: Plan, problem: Problem) -> str:
    """Return the placement of one model on a fixed cluster as an SVG file."""
    from atoll.report.flow_svg import svg_file
    from atoll.report.flow_tables import cuts
    from atoll.solve.place.bottleneck import node_use

    if len(plan.instances) > 1:
        raise UsageError("one .svg holds one model", hint="name an .html file for the report")
    catalog = problem.catalog()
    ((instance, cut),) = cuts(plan, problem, catalog)
    return svg_file(instance, node_use(instance, problem, catalog), cut)


def draw_report(report: SimReport, problem: Problem) -> RenderableType:
    """Return what a simulation found for a terminal."""
    from atoll.report import sim_tables

    return sim_tables.draw_report(report, problem)


def report_page(report: SimReport, problem: Problem) -> str:
    """Return what a simulation found as one HTML file."""
    from atoll.report.sim_page import page

    return page(report, problem)


def plan_html(plan: Plan, problem: Problem) -> str:
    """Return a plan as a piece of HTML."""
    return as_html(draw_plan(plan, problem, width=_WIDTH))


def report_html(report: SimReport, problem: Problem) -> str:
    """Return what a simulation found as a piece of HTML."""
    return as_html(draw_report(report, problem))


def as_html(drawn: RenderableType) -> str:
    """Return what a terminal would show as a piece of HTML."""
    import io

    from rich.console import Console

    out = Console(file=io.StringIO(), record=True, width=_WIDTH)
    out.print(drawn)
    return out.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


_WIDTH = 120
