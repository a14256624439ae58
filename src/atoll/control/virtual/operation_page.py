"""A fleet in virtual time as a table and as one HTML page: who paid what, and how it went over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from atoll.control.virtual.operator_comparison import summarize_operations
from atoll.control.virtual.virtual_demand import MINUTE_S
from atoll.control.virtual.virtual_run import OperationResult
from atoll.core.units import format_usd
from atoll.report.render import Grid, render_page
from atoll.report.simulation.plots_svg import LinePlot, Values, plot_over_time

if TYPE_CHECKING:
    from rich.table import Table

MAX_CHART_POINTS = 240
"""Points of a line over time, at most."""
COLUMNS = (
    "who",
    "cost",
    "a day",
    "kept",
    "points above",
    "short",
    "preventable",
    "starts",
    "atoll saves",
)


def list_contenders(results: Sequence[OperationResult]) -> Grid:
    """Return contenders in rows, with what each cost and kept."""
    rows: list[tuple[object, ...]] = []
    for row in summarize_operations(results):
        saves = row.atoll_saves_usd
        rows.append(
            (
                row.name,
                format_usd(row.usd),
                format_usd(row.usd_per_day),
                None if row.kept_share is None else f"{row.kept_share:.2%}",
                None if row.points_above_target is None else f"{row.points_above_target:+.2f}",
                None if row.short_s is None else f"{row.short_s:,.0f}s",
                None if row.below_demand_s is None else f"{row.below_demand_s:,.0f}s",
                None if row.starts is None else f"{row.starts:,}",
                None if row.name == "atoll" or saves is None else _format_saving(saves),
            )
        )
    return Grid(COLUMNS, rows, COLUMNS[1:])


def _format_saving(usd: float) -> str:
    return f"{'-' if usd < 0 else ''}{format_usd(abs(usd))}"


def draw_contenders(results: Sequence[OperationResult]) -> Table:
    """Return the same for a terminal."""
    from atoll.report.terminal import table

    grid = list_contenders(results)
    days = results[0].days
    return table(grid.columns, grid.rows, title=f"{days:g} days in virtual time", right=grid.right)


def render_operation_page(results: Sequence[OperationResult], fleet: str) -> str:
    """Return the report as the text of one HTML file; the same results give the same bytes."""
    first = results[0]
    return render_page(
        "operation.html.j2",
        {
            "title": f"Operating {fleet} in virtual time",
            "headline": f"{first.days:g} days, {int(first.series.arrived.sum()):,} requests",
            "contenders": list_contenders(results),
            "costs": _plot_costs(results),
            "loads": [plot for one in results[:1] for plot in _plot_loads(one)],
            "of": first.name,
            "kept": _plot_kept([one for one in results if one.name != "oracle"]),
        },
    )


def _thin(values: Values) -> tuple[Values, Values]:
    """Return times and means over equal parts, few enough to draw."""
    step = max(1, -(-len(values) // MAX_CHART_POINTS))
    whole = len(values) // step * step
    means: Values = values[:whole].reshape(-1, step).mean(axis=1)
    times: Values = (np.arange(len(means), dtype=np.float64) + 0.5) * step * MINUTE_S
    return times, means


def _plot_costs(results: Sequence[OperationResult]) -> list[LinePlot]:
    end_s = len(results[0].series.usd_per_hour) * MINUTE_S
    lines = {one.name: _thin(one.series.usd_per_hour)[1] for one in results}
    times, _ = _thin(results[0].series.usd_per_hour)
    total = {
        one.name: _thin(np.cumsum(one.series.usd_per_hour) * MINUTE_S / 3600.0)[1]
        for one in results
    }
    return [
        plot_over_time("dollars per hour", times, end_s, lines),
        plot_over_time("dollars so far", times, end_s, total),
    ]


def _plot_loads(one: OperationResult) -> list[LinePlot]:
    """Plot demand and capacity of every service."""
    end_s = len(one.series.usd_per_hour) * MINUTE_S
    plots = []
    for at, name in enumerate(one.services):
        times, asked = _thin(one.series.arrived[at] / MINUTE_S)
        lines = {"asked": asked, "capacity": _thin(one.series.capacity_per_s[at])[1]}
        plots.append(plot_over_time(f"{name}, requests/s", times, end_s, lines))
    return plots


def _plot_kept(results: Sequence[OperationResult]) -> list[LinePlot]:
    if not results:
        return []
    end_s = len(results[0].series.usd_per_hour) * MINUTE_S
    lines: dict[str, Values] = {}
    times = np.zeros(0)
    for one in results:
        times, kept = _thin(one.series.kept.sum(axis=0))
        _, arrived = _thin(one.series.arrived.sum(axis=0))
        lines[one.name] = 100.0 * kept / np.maximum(arrived, 1e-9)
    return [plot_over_time("kept their promises, %", times, end_s, lines)]
