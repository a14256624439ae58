"""What a simulation found, beside what was promised."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from atoll.api.shown import Shown
from atoll.plan.problem import Problem
from atoll.sim.result import SimReport

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class FleetReport(Shown, SimReport):
    """A `SimReport` that knows what was promised: `problem` is the one the plan was made for."""

    problem: Problem

    @classmethod
    def of(cls, report: SimReport, problem: Problem) -> FleetReport:  # type: ignore[override]
        """Return what was found of a plan as a report on this problem."""
        return cls(**{f.name: getattr(report, f.name) for f in fields(SimReport)}, problem=problem)

    @property
    def kept(self) -> dict[str, float | None]:
        """The share of requests that kept both promises, by service; None where none was judged."""
        return {service.name: service.attainment for service in self.services}

    def _draw(self, width: int) -> RenderableType:
        from atoll.report.simulation.tables import draw_simulation

        del width
        return draw_simulation(self, self.problem)

    def _to_html(self) -> str:
        from atoll.report.simulation.page import render_simulation_fragment

        return render_simulation_fragment(self, self.problem)

    def __repr__(self) -> str:
        kept = ", ".join(
            f"{name} {'-' if share is None else f'{share:.1%}'}"
            for name, share in self.kept.items()
        )
        return f"<FleetReport {self.plan_name}: {self.finished:,} requests, promises kept: {kept}>"
