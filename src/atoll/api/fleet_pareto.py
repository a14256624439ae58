"""Costs of a fleet against latency, error, energy or carbon, ready to be shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.api.shown import Shown
from atoll.prove.front import ParetoReport

if TYPE_CHECKING:
    from rich.console import RenderableType


class FleetPareto(Shown, ParetoReport):
    """A `ParetoReport` that shows itself: a table for each sweep, or a page with its curve."""

    @classmethod
    def of(cls, report: ParetoReport) -> FleetPareto:
        """Return sweeps as ones that show themselves."""
        return cls.model_construct(**dict(report))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a self-contained .html page with all curves."""
        from atoll.core.files import atomic_write, check_target
        from atoll.report.pareto_report import render_pareto_page

        target = Path(path)
        check_target(target, (".html",))
        atomic_write(target, render_pareto_page(self))

    def _draw(self, width: int) -> RenderableType:
        from atoll.report.pareto_report import draw_pareto

        del width
        return draw_pareto(self)

    def _to_html(self) -> str:
        from atoll.report.pareto_report import render_pareto_fragment

        return render_pareto_fragment(self)
