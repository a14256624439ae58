"""Why a plan is what it is, ready to be looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.api.shown import Shown
from atoll.solve.explain.plan_explanation import Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType


class FleetExplanation(Shown, Explanation):
    """An `Explanation` that shows itself."""

    @classmethod
    def of(cls, explanation: Explanation) -> FleetExplanation:
        """Return an explanation as one that shows itself."""
        return cls.model_construct(**dict(explanation))

    def _draw(self, width: int) -> RenderableType:
        from atoll.report.explanation_report import draw_explanation

        del width
        return draw_explanation(self)

    def _to_html(self) -> str:
        from atoll.report.explanation_report import render_explanation_fragment

        return render_explanation_fragment(self)

    def __repr__(self) -> str:
        return (
            f"<FleetExplanation {self.problem_name}: {self.status}, {len(self.constraints)} constraints, "
            f"planned again {self.plans} times>"
        )
