"""A simulation of any-to-any services as one HTML page, or inside a notebook."""

from __future__ import annotations

from atoll.core.units import format_duration, format_price, format_share, format_throughput
from atoll.report.plan.rented_page import list_services
from atoll.report.render import render_fragment, render_page
from atoll.report.simulation.page import plot_latencies
from atoll.report.simulation.plots_svg import LinePlot, choose_colour, plot_distributions
from atoll.report.simulation.simulation_tables import (
    format_part,
    list_nodes,
    list_promises,
    list_run_groups,
)
from atoll.report.simulation.task_tables import (
    MEASURES,
    describe_tasks,
    judge_tasks,
    list_classes,
    list_executors,
    list_latencies,
    list_machines,
    list_parts,
    promises_of,
)
from atoll.sim.tasks.mixed_report import MixedReport

_TEMPLATE = "tasks.html.j2"


def render_tasks_page(report: MixedReport) -> str:
    """Return the report of a run as the text of one HTML file; the same run gives the same bytes."""
    return render_page(_TEMPLATE, _gather(report))


def render_tasks_fragment(report: MixedReport) -> str:
    """Return the report of a run as one HTML element, for a notebook."""
    return render_fragment(_TEMPLATE, _gather(report))


def _gather(report: MixedReport) -> dict[str, object]:
    """Everything that `pages/tasks.html.j2` shows."""
    tasks = report.tasks
    return {
        "title": f"Simulation of {report.plan_name}",
        "headline": describe_tasks(report),
        "verdicts": judge_tasks(report),
        "cards": _list_figures(report),
        "classes": list_classes(report),
        "latencies": list_latencies(report),
        "colours": {
            f"{klass.service}: {klass.name}": choose_colour(at)
            for at, klass in enumerate(tasks.classes)
        },
        "plots": _plot_classes(report),
        "parts": list_parts(tasks.classes),
        "executors": list_executors(tasks.executors),
        "machines": list_machines(report),
        "plain": _gather_plain(report),
        "services": list_services(report.problem),
    }


def _gather_plain(report: MixedReport) -> dict[str, object] | None:
    if report.plain is None:
        return None
    return {
        "promises": list_promises(report.plain, report.problem),
        "groups": list_run_groups(report.plain),
        "colours": {s.name: choose_colour(i) for i, s in enumerate(report.plain.services)},
        "plots": plot_latencies(report.plain, report.problem),
        "nodes": list_nodes(report.plain.nodes),
    }


def _list_figures(report: MixedReport) -> list[tuple[str, str]]:
    figures = [
        ("kept their promises", format_part(report.attainment)),
        ("requests finished", f"{report.finished:,}"),
        ("any-to-any requests", format_throughput(report.tasks.requests_per_s)),
        ("simulated", format_duration(report.clock_s)),
    ]
    if report.usd_per_hour > 0:
        figures.append(("cost", format_price(report.usd_per_hour)))
    busiest = max((executor.busy for executor in report.tasks.executors), default=0.0)
    figures.append(("busiest executor", format_share(busiest)))
    return figures


def _plot_classes(report: MixedReport) -> list[LinePlot]:
    """A distribution of each measure, a line for each class; by how much speech is ahead is no time."""
    tasks = report.tasks
    plots = []
    for words, attribute, promise in MEASURES:
        if promise == "ahead":
            continue
        values = getattr(tasks.columns, attribute)
        groups = [values[tasks.columns.klass == at] for at in range(len(tasks.classes))]
        limits = [promises_of(report, klass).get(promise or "") for klass in tasks.classes]
        plots.append(plot_distributions(words, groups, limits))
    return [plot for plot in plots if plot is not None]
