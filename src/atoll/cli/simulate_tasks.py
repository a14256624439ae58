"""`atoll simulate` of plans with any-to-any services: which options make sense, and what is shown."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.core.errors import UnknownNameError, UsageError
from atoll.report.terminal import emit, note

if TYPE_CHECKING:
    from atoll.plan.problem import Problem
    from atoll.sim.tasks.mixed import MixedReport
    from atoll.sim.tasks.run import Routing

_TASK_OPTIONS = ("--routing", "--query-ms")
_REFUSED = {
    "--trace": "a trace does not say what requests of any-to-any services bring and want",
    "--service": "any-to-any services run under their own classes",
    "--fail": "failures of executors of any-to-any services are not simulated",
    "--then": "changes of plan with any-to-any services are not simulated",
    "--startup": "executors of any-to-any services are there from the start",
}
_PLAIN_ONLY = ("--policy", "--batching")
_ROUTINGS: tuple[Routing, ...] = ("static", "dealt", "dynamic")


def check_options(given: Collection[str], problem: Problem) -> None:
    """Raise UsageError for an option on the command line that none of the services has a use for."""
    if not problem.has_graphs:
        for option in _TASK_OPTIONS:
            if option in given:
                raise UsageError(
                    f"{option} is for any-to-any services, and the fleet has none",
                    hint="leave it out, or say --policy",
                )
        return
    for option, why in _REFUSED.items():
        if option in given:
            raise UsageError(f"{option}: {why}", hint="leave it out")
    if all(service.is_graph for service in problem.services):
        for option in _PLAIN_ONLY:
            if option in given:
                raise UsageError(
                    f"{option} is for plain services, and the fleet has none",
                    hint="leave it out, or say --routing",
                )


def parse_routing(name: str | None, *, queries: bool = False) -> Routing:
    """Return how requests find executors; `queries` is whether it is said what asking executors takes."""
    for routing in _ROUTINGS:
        if routing == (name or "dealt"):
            if queries and routing != "dynamic":
                raise UsageError(
                    "--query-ms: nobody is asked unless routing is dynamic",
                    hint="add --routing dynamic, or leave it out",
                )
            return routing
    raise UnknownNameError("routing", str(name), _ROUTINGS, field="--routing")


def show_tasks(
    simulated: MixedReport, requests_out: Path | None, report: Path | None, *, as_json: bool
) -> None:
    """Print what was found, and write the files that were asked for."""
    from atoll.report.simulation.task_tables import draw_tasks, summarize_tasks

    if requests_out is not None:
        from atoll.sim.files import write_requests

        write_requests(simulated, requests_out)
    if report is not None:
        from atoll.core.files import atomic_write
        from atoll.report.simulation.task_page import render_tasks_page

        atomic_write(report, render_tasks_page(simulated))
    emit(summarize_tasks(simulated), as_json, lambda: draw_tasks(simulated))
    for path in (requests_out, report):
        if path is not None:
            note(f"wrote {path}")
    if simulated.attainment is None:
        note("note: no request was judged: nothing is promised, or none had ended or was late")
