"""Any plan in the terminal, as one HTML page, inside a notebook, or as a drawing.

Callers need not know of which family a problem is (`Problem.family`): it is looked up in a table here, and
nowhere else in the reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from atoll.core.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Family, Problem
    from atoll.solve.comparison import Compared


@dataclass(frozen=True)
class _RentedPlan:
    """Shows a plan of plain llms on rented nodes; base of the others."""

    plan: Plan
    problem: Problem
    compared: Sequence[Compared] = ()
    catalog: Catalog | None = None
    endings: ClassVar[tuple[str, ...]] = (".html",)

    @property
    def facts(self) -> Catalog:
        return self.catalog or self.problem.catalog()

    def draw(self, width: int | None) -> RenderableType:
        from atoll.report.plan.rented_tables import draw_rented_plan
        from atoll.report.terminal import console

        columns = width or console().width
        return draw_rented_plan(self.plan, self.problem, self.compared, columns)

    def gather(self) -> tuple[str, dict[str, object]]:
        """Return the template of the report, and the data it shows."""
        from atoll.report.plan import rented_page as page

        return page.TEMPLATE, page.gather_rented_plan(self.plan, self.problem, self.compared)

    def render_svg(self) -> str:
        raise UsageError("a .svg is for fixed clusters", hint="name an .html file for the report")


class _GraphPlan(_RentedPlan):
    """Shows a plan with any-to-any models: as on rented nodes, and its executors can be drawn."""

    endings = (".html", ".svg")

    def render_svg(self) -> str:
        from atoll.plan.executor_use import executor_use
        from atoll.report.plan.machines_svg import draw_machines, render_machines_svg

        facts = self.facts
        use = executor_use(self.plan, self.problem, facts)
        return render_machines_svg(draw_machines(self.plan, self.problem, facts, use))


class _ClusterPlan(_RentedPlan):
    """Shows a placement on a fixed cluster; one service of it can be drawn."""

    endings = (".html", ".svg")

    def draw(self, width: int | None) -> RenderableType:
        from atoll.report.plan.cluster_tables import draw_cluster_plan

        del width
        return draw_cluster_plan(self.plan, self.problem, self.facts, self.compared)

    def gather(self) -> tuple[str, dict[str, object]]:
        from atoll.report.plan import cluster_page as page

        data = page.gather_cluster_plan(self.plan, self.problem, self.facts, self.compared)
        return page.TEMPLATE, data

    def render_svg(self) -> str:
        if len(self.plan.instances) != 1:
            raise UsageError("one .svg holds one model", hint="name an .html file for the report")
        from atoll.report.plan.placement_svg import render_placement_svg
        from atoll.solve.place.bottleneck import bottleneck, node_use

        facts, instance = self.facts, self.plan.instances[0]
        use = node_use(instance, self.problem, facts)
        return render_placement_svg(instance, use, bottleneck(instance, self.problem, facts))


_FAMILIES: Mapping[Family, type[_RentedPlan]] = {
    "rent": _RentedPlan,
    "graph": _GraphPlan,
    "place": _ClusterPlan,
}


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
    return _FAMILIES[problem.family](plan, problem, compared, catalog).draw(width)


def render_plan_page(
    plan: Plan,
    problem: Problem,
    compared: Sequence[Compared] = (),
    *,
    catalog: Catalog | None = None,
) -> str:
    """Return the report of a plan as the text of one HTML file, the same for the same plan and problem."""
    from atoll.report.render import render_page

    return render_page(*_FAMILIES[problem.family](plan, problem, compared, catalog).gather())


def render_plan_fragment(plan: Plan, problem: Problem, compared: Sequence[Compared] = ()) -> str:
    """Return the report of a plan as one HTML element, for a notebook."""
    from atoll.report.render import render_fragment

    return render_fragment(*_FAMILIES[problem.family](plan, problem, compared).gather())


def list_endings(problem: Problem) -> tuple[str, ...]:
    """Return the endings that a report of a plan may have: drawings are of fixed clusters and executors."""
    return _FAMILIES[problem.family].endings


def render_plan_svg(plan: Plan, problem: Problem, *, catalog: Catalog | None = None) -> str:
    """Return a plan as the text of an SVG file: its one service on a fixed cluster, or its executors."""
    return _FAMILIES[problem.family](plan, problem, catalog=catalog).render_svg()
