"""What a simulation of a plan with any-to-any services found, beside what was promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.api.shown import Shown
from atoll.sim.tasks.mixed import MixedReport

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class FleetTaskReport(Shown, MixedReport):
    """A `MixedReport` that shows itself."""

    @property
    def kept(self) -> dict[str, float | None]:
        """The share of requests that kept all promises, by service; None where none was judged."""
        plain = () if self.plain is None else self.plain.services
        return {
            **{service.name: service.kept for service in self.services},
            **{service.name: service.attainment for service in plain},
        }

    def _draw(self, width: int) -> RenderableType:
        from atoll.report.simulation.task_tables import draw_tasks

        del width
        return draw_tasks(self)

    def _to_html(self) -> str:
        from atoll.report.simulation.task_page import render_tasks_fragment

        return render_tasks_fragment(self)

    def __repr__(self) -> str:
        kept = ", ".join(
            f"{name} {'-' if share is None else f'{share:.1%}'}"
            for name, share in self.kept.items()
        )
        return (
            f"<FleetTaskReport {self.plan_name}: {self.finished:,} requests, promises kept: {kept}>"
        )
