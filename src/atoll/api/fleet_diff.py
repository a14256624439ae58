"""Changes from one plan to the next, ready to be shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.api.shown import Shown
from atoll.plan.plan_diff import PlanDiff

if TYPE_CHECKING:
    from rich.console import RenderableType


class FleetDiff(Shown, PlanDiff):
    """A `PlanDiff` that shows itself."""

    @classmethod
    def of(cls, change: PlanDiff) -> FleetDiff:
        """Return changes as ones that show themselves."""
        return cls.model_construct(**dict(change))

    def _draw(self, width: int) -> RenderableType:
        from atoll.report.diff_report import draw_diff

        del width
        return draw_diff(self)

    def _to_html(self) -> str:
        from atoll.report.diff_report import render_diff_fragment

        return render_diff_fragment(self)

    def __repr__(self) -> str:
        return f"<FleetDiff {self.before} -> {self.after}: {'nothing changes' if self.empty else 'changes'}>"
