"""A workload for people: facts, the match with measured statistics, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.units import format_duration, format_rate, format_share
from atoll.perf.step_curves import Picture, PlotLine
from atoll.report.charts import draw_facts, draw_pictures
from atoll.report.render import Grid

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.workload.stats import LengthStats, Summary, TraceStats

_POINTS = 120
_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True)
class Match:
    """One statistic of a built-in workload beside that of the trace it follows."""

    statistic: str
    measured: float
    drawn: float

    @property
    def off_percent(self) -> float | None:
        """How far the drawn value is off, in per cent of the measured one."""
        return None if self.measured == 0 else (self.drawn / self.measured - 1) * 100


def compare_statistics(name: str, summary: Summary) -> tuple[Match, ...]:
    """Return every measured statistic of a built-in beside that of what was drawn."""
    from atoll.workload.builtin import get_builtin

    drawn = _compute_statistics(summary)
    measured = get_builtin(name).measured
    return tuple(Match(key, value, drawn[key]) for key, value in measured.items() if key in drawn)


def _compute_statistics(summary: Summary) -> dict[str, float]:
    stats = summary.stats()
    statistics = {
        "rate_per_s": stats.rate_per_s,
        "iat_cv": stats.iat_cv or 0.0,
        "correlation": stats.correlation or 0.0,
        "tokens_mean": stats.input.mean + stats.output.mean,
    }
    for window in stats.windows:
        statistics[f"fano_{window.window_s}s"] = window.fano or 0.0
    for side, length in (("input", stats.input), ("output", stats.output)):
        statistics |= {
            f"{side}_mean": length.mean,
            f"{side}_mean_square": length.mean_square,
            f"{side}_p50": length.at(0.5),
            f"{side}_p95": length.at(0.95),
            f"{side}_p99": length.at(0.99),
            f"{side}_max": float(length.most),
        }
    days = summary.counts(86_400)
    if len(days) > 2:
        statistics["day_cv"] = float(days.std() / days.mean())
        hours = summary.counts(3600)[: len(days) * 24].reshape(-1, 24).mean(axis=0)
        statistics["peak_hour_to_mean"] = float(hours.max() / hours.mean())
    return statistics


def describe_stats(stats: TraceStats) -> dict[str, str]:
    """Return the statistics of a workload in words, by name."""
    facts = {
        "requests": f"{stats.requests:,} in {format_duration(stats.span_s)}",
        "rate": format_rate(stats.rate_per_s),
    }
    if stats.iat_cv is not None:
        facts["gaps"] = f"CV {stats.iat_cv:.3g} (Poisson: 1)"
    fanos = [f"{w.fano:.3g} in {w.window_s}s" for w in stats.windows if w.fano is not None]
    if fanos:
        facts["Fano factor"] = ", ".join(fanos) + " (Poisson: 1)"
    peaks = [f"{w.peak_to_mean:.3g} in {w.window_s}s" for w in stats.windows if w.peak_to_mean]
    if peaks:
        facts["peak over mean"] = ", ".join(peaks)
    facts["prompts"] = _describe_length(stats.input)
    facts["answers"] = _describe_length(stats.output)
    if stats.correlation is not None:
        facts["correlation"] = f"{stats.correlation:.3f} between prompt and answer"
    for what, counts in (("models", stats.models), ("classes", stats.classes)):
        if len(counts) > 1:
            total = sum(counts.values())
            facts[what] = ", ".join(
                f"{name or '-'} {format_share(n / total)}" for name, n in counts.items()
            )
    if stats.items_mean:
        facts["items"] = f"{stats.items_mean:.3g} per request"
    if stats.shared_blocks is not None:
        facts["prefix blocks"] = f"{format_share(stats.shared_blocks)} were seen before"
    return facts


def _describe_length(length: LengthStats) -> str:
    p50, p95, p99 = (length.at(share) for share in (0.5, 0.95, 0.99))
    return (
        f"mean {length.mean:,.1f}, p50 {p50:,.0f}, p95 {p95:,.0f}, p99 {p99:,.0f}, "
        f"{length.least:,} to {length.most:,} tokens"
    )


def plot_trace(summary: Summary) -> list[Picture]:
    """Return the rate over time, and the distributions of the lengths."""
    min_s = max(summary.span_s / _POINTS, summary.width_s)
    step = next((s for s in _STEPS_S if s >= min_s), float(np.ceil(min_s / 86_400) * 86_400))
    counts = summary.counts(step)
    whole = int(summary.span_s // step)
    if whole > 1:
        # The last one is cut by the end of the trace: it would look like a fall.
        counts = counts[:whole]
    pictures = []
    if len(counts) > 1:
        unit, scale = next(
            (unit, scale)
            for unit, scale in (
                ("days", 86_400.0),
                ("hours", 3600.0),
                ("minutes", 60.0),
                ("seconds", 1.0),
            )
            if summary.span_s >= 3 * scale or scale == 1.0
        )
        middles = (np.arange(len(counts)) + 0.5) * step / scale
        rate = PlotLine("requests/s", tuple(middles.tolist()), tuple((counts / step).tolist()))
        title = f"rate over time, means of {format_duration(step)}"
        pictures.append(Picture(title, unit, "req/s", (rate,)))
    curves = []
    for name, histogram in (("prompts", summary.input), ("answers", summary.output)):
        values, below = histogram.cumulate()
        shares = below / below[-1]
        # As many points as can be seen, spread evenly over the shares.
        kept = np.unique(
            np.searchsorted(shares, np.linspace(0.0, 1.0, 2 * _POINTS)).clip(0, len(values) - 1)
        )
        curves.append(
            PlotLine(name, tuple(map(float, values[kept])), tuple((shares[kept] * 100).tolist()))
        )
    pictures.append(
        Picture("lengths: share of requests up to", "tokens", "%", tuple(curves), log_x=True)
    )
    return pictures


def draw_trace(
    title: str, stats: TraceStats, match: Sequence[Match], pictures: Sequence[Picture]
) -> RenderableType:
    """Return the facts, the match and the pictures of a workload for a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [draw_facts(title, describe_stats(stats))]
    if match:
        statistics = Grid.of(
            match,
            {
                "statistic": lambda m: m.statistic,
                "measured": lambda m: _format_value(m.measured),
                "drawn": lambda m: _format_value(m.drawn),
                "off": lambda m: None if m.off_percent is None else f"{m.off_percent:+.1f} %",
            },
            right=("measured", "drawn", "off"),
        )
        caption = "measured: the public trace this workload follows (docs/internals/workloads.md)"
        parts.append(statistics.draw(caption=caption))
    parts += [Text(""), draw_pictures(pictures)]
    return Group(*parts)


def _format_value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
