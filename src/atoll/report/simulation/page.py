"""A simulation as one HTML page, or inside a notebook: distributions, timeline, heat map, tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.core.units import format_duration, format_price, format_usd
from atoll.plan.problem import Problem
from atoll.report.plan.rented_page import list_services
from atoll.report.promises import judge_run
from atoll.report.render import Grid, render_fragment, render_page
from atoll.report.simulation.plots_svg import (
    LinePlot,
    Values,
    choose_colour,
    map_heat,
    plot_distributions,
    plot_over_time,
)
from atoll.report.simulation.simulation_tables import (
    describe_run,
    format_part,
    format_time,
    list_losses,
    list_nodes,
    list_promises,
    list_run_groups,
)
from atoll.sim.sim_result import SimReport

_TEMPLATE = "simulation.html.j2"


def render_simulation_page(report: SimReport, problem: Problem) -> str:
    """Return the report of a run as the text of one HTML file; the same run gives the same bytes."""
    return render_page(_TEMPLATE, _gather(report, problem))


def render_simulation_fragment(report: SimReport, problem: Problem) -> str:
    """Return the report of a run as one HTML element, for a notebook."""
    return render_fragment(_TEMPLATE, _gather(report, problem))


def _gather(report: SimReport, problem: Problem) -> dict[str, object]:
    """Everything that `pages/simulation.html.j2` shows."""
    return {
        "title": f"Simulation of {report.plan_name}",
        "headline": describe_run(report),
        "measured": report.measured,
        "verdicts": judge_run(report, problem),
        "cards": _list_figures(report),
        "promises": list_promises(report, problem),
        "groups": list_run_groups(report),
        "losses": list_losses(report),
        "colours": {s.name: choose_colour(i) for i, s in enumerate(report.services)},
        "latencies": plot_latencies(report, problem),
        "timelines": _plot_timelines(report),
        "bin": format_duration(report.series.bin_s),
        "heat": map_heat(
            "how busy nodes are",
            [
                f"{node.instance} {node.node}{f'.{node.group}' if node.group else ''}"
                f" {node.node_type}"
                for node in report.nodes
            ],
            report.series.busy.astype(np.float64),
            report.series.bin_s,
        ),
        "nodes": list_nodes(report.nodes),
        "instances": _list_instances(report),
        "links": Grid(
            ("link", "sending"),
            [(name, format_part(share)) for name, share in report.link_busy.items()],
            ("sending",),
        ),
        "services": list_services(problem),
    }


def _list_figures(report: SimReport) -> list[tuple[str, str]]:
    figures = [
        ("kept their promises", format_part(report.attainment)),
        ("requests finished", f"{report.finished:,}"),
        ("tokens/s", f"{report.tokens_per_s:,.0f}"),
        ("simulated", format_duration(report.clock_s)),
    ]
    if report.usd > 0:
        figures.append(("cost", format_price(report.usd_per_hour)))
    if report.usd_per_million_tokens:
        figures.append(("per million tokens", format_usd(report.usd_per_million_tokens)))
    if report.retries:
        figures.append(("started over", f"{report.retries:,}"))
    return figures


def plot_latencies(report: SimReport, problem: Problem) -> list[LinePlot]:
    """Return the distributions of latencies, a line for each service."""
    requests = report.requests
    promises = [problem.service(service.name) for service in report.services]
    none: list[float | None] = [None for _ in promises]
    plotted: tuple[tuple[str, Values, list[float | None]], ...] = (
        ("time to first token", requests.ttft_s, [p.ttft_s for p in promises]),
        ("time per token, mean", requests.tpot_s, [p.tpot_s for p in promises]),
        ("largest gap between tokens", requests.largest_gap_s, none),
        ("whole request", requests.e2e_s, none),
    )
    plots = (
        plot_distributions(title, _split(values, requests.service), promised)
        for title, values, promised in plotted
    )
    return [plot for plot in plots if plot is not None]


def _split(values: Values, service: NDArray[np.int16]) -> list[Values]:
    """The values of each service."""
    count = int(service.max(initial=0)) + 1
    return [values[service == at] for at in range(count)]


def _plot_timelines(report: SimReport) -> list[LinePlot]:
    series = report.series
    bins, width_s = _count_whole_bins(report), series.bin_s
    if bins == 0:  # a run shorter than a bin is one
        bins, width_s = 1, max(report.clock_s, 1e-9)
    lines: tuple[tuple[str, dict[str, Values]], ...] = (
        (
            "requests/s",
            {
                "arrived": series.arrived.sum(axis=1)[:bins] / width_s,
                "finished": series.finished.sum(axis=1)[:bins] / width_s,
            },
        ),
        ("tokens/s", {"generated": series.tokens.sum(axis=1)[:bins] / width_s}),
        (
            "requests",
            {
                "in flight": series.flying[:bins].astype(np.float64),
                "waiting for a place": series.waiting[:bins].astype(np.float64),
            },
        ),
    )
    times_s = (np.arange(bins, dtype=np.float64) + 0.5) * width_s
    return [plot_over_time(title, times_s, bins * width_s, named) for title, named in lines]


def _count_whole_bins(report: SimReport) -> int:
    """The bins that are as long as they should be.

    The last one ends where the run does, and holds all that happens until then: what runs out after the last
    arrival, or a moment that looks like a spike when it is divided by its length.
    """
    series = report.series
    bins = len(series.waiting)
    last_s = report.clock_s - (bins - 1) * series.bin_s
    is_whole = abs(last_s - series.bin_s) <= 1e-6 * series.bin_s
    return bins if is_whole else bins - 1


def _list_instances(report: SimReport) -> Grid:
    return Grid.of(
        report.instances,
        {
            "instance": lambda instance: instance.instance,
            "phase": lambda instance: instance.phase,
            "region": lambda instance: instance.region,
            "rented": lambda instance: format_time(instance.rented_s),
            "ready": lambda instance: format_time(instance.ready_s),
            "gone": lambda instance: format_time(instance.gone_s),
            "tokens": lambda instance: f"{instance.tokens:,}",
            "cost": lambda instance: format_usd(instance.usd),
        },
        right=("rented", "ready", "gone", "tokens", "cost"),
    )
