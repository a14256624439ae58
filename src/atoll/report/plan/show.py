"""Any plan in the terminal, as one HTML page, inside a notebook, or as a drawing.

Callers need not know whether a plan stands on rented nodes or on a fixed cluster: that is asked here, and
nowhere else in the reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.comparison import Compared


def draw_plan(
    plan: Plan,
    problem: Problem,
    compared: Sequence[Compared] = (),
    *,
    catalog: Catalog | None = None,
    width: int | None = None,
) -> RenderableType:
    """Return everything about a plan for a terminal of `width` columns; unless given, of the one there is.

    `compared` are other solvers' plans beside it. `catalog` spares reading the problem's once more.
    """
    if problem.cluster is not None:
        from atoll.report.plan.cluster_tables import draw_cluster_plan

        facts = catalog or problem.catalog()
        return draw_cluster_plan(plan, problem, facts, compared)
    from atoll.report.plan.rented_tables import draw_rented_plan
    from atoll.report.terminal import console

    return draw_rented_plan(plan, problem, compared, width or console().width)


def render_plan_page(
    plan: Plan,
    problem: Problem,
    compared: Sequence[Compared] = (),
    *,
    catalog: Catalog | None = None,
) -> str:
    """Return the report of a plan as the text of one HTML file, the same for the same plan and problem."""
    from atoll.report.render import render_page

    return render_page(*_gather(plan, problem, compared, catalog))


def render_plan_fragment(
    plan: Plan,
    problem: Problem,
    compared: Sequence[Compared] = (),
    *,
    catalog: Catalog | None = None,
) -> str:
    """Return the report of a plan as one HTML element, for a notebook."""
    from atoll.report.render import render_fragment

    return render_fragment(*_gather(plan, problem, compared, catalog))


def list_endings(problem: Problem) -> tuple[str, ...]:
    """Return the endings that a report of a plan may have: drawings are of fixed clusters and executors."""
    drawn = problem.cluster is not None or problem.has_graphs
    return (".html", ".svg") if drawn else (".html",)


def render_plan_svg(plan: Plan, problem: Problem, *, catalog: Catalog | None = None) -> str:
    """Return a plan as the text of an SVG file: its one service on a fixed cluster, or its executors."""
    if ".svg" not in list_endings(problem):
        raise UsageError("a .svg is for fixed clusters", hint="name an .html file for the report")
    if problem.cluster is None:
        from atoll.plan.executor_use import executor_use
        from atoll.report.plan.machines_svg import draw_machines, render_machines_svg

        known = catalog or problem.catalog()
        return render_machines_svg(
            draw_machines(plan, problem, known, executor_use(plan, problem, known))
        )
    if len(plan.instances) != 1:
        raise UsageError("one .svg holds one model", hint="name an .html file for the report")
    from atoll.report.plan.placement_svg import render_placement_svg
    from atoll.solve.place.bottleneck import bottleneck, node_use

    facts, instance = catalog or problem.catalog(), plan.instances[0]
    use = node_use(instance, problem, facts)
    return render_placement_svg(instance, use, bottleneck(instance, problem, facts))


def _gather(
    plan: Plan,
    problem: Problem,
    compared: Sequence[Compared],
    catalog: Catalog | None,
) -> tuple[str, dict[str, object]]:
    """The template of a plan's report, and the data it shows."""
    if problem.cluster is not None:
        from atoll.report.plan import cluster_page

        facts, flows = catalog or problem.catalog(), compared
        data = cluster_page.gather_cluster_plan(plan, problem, facts, flows)
        return cluster_page.TEMPLATE, data
    from atoll.report.plan import rented_page

    data = rented_page.gather_rented_plan(plan, problem, compared)
    return rented_page.TEMPLATE, data
