"""Result of simulating a plan, beside its promises.

`FleetPlan.simulate` returns a `FleetReport` for plans of plain llms, and a `FleetTaskReport` for plans with
any-to-any services. Both offer what `SimulatedFleet` declares, so callers need not tell them apart.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from atoll.api.shown import Shown
from atoll.plan.kept_groups import KeptGroup
from atoll.plan.problem import Problem
from atoll.sim.sim_result import SimReport, Spread
from atoll.sim.tasks.mixed_report import MixedReport

if TYPE_CHECKING:
    from rich.console import RenderableType


class ServiceOutcome(NamedTuple):
    """One service of a run: requests, and the share that kept all promises beside the share promised.

    `kept` is None where none was judged; latencies and tokens/s where the service is any-to-any. `groups` are
    what its classes of requests keep, each with a target of its own.
    """

    name: str
    requests: int
    kept: float | None
    target: float
    ttft_s: Spread | None = None
    tpot_s: Spread | None = None
    tokens_per_s: float | None = None
    groups: tuple[KeptGroup, ...] = ()

    def find_short(self, share: float) -> tuple[str, float] | None:
        """Return who keeps its promises for less than `share` of requests, and for how many: the worst.

        Groups count as far as enough of their requests came to tell.
        """
        least = [(self.name, self.kept)]
        least += [
            (f"{self.name}, {group.name}", group.kept)
            for group in self.groups
            if group.model_copy(update={"target": share}).is_kept is not None
        ]
        short = [(name, kept) for name, kept in least if kept is not None and kept < share]
        return min(short, key=lambda one: one[1], default=None)


class SimulatedFleet(Shown):
    """Base of reports on a run: shown in terminals and notebooks, as one page, and as plain data."""

    plan_name: str
    finished: int

    @property
    @abstractmethod
    def outcomes(self) -> tuple[ServiceOutcome, ...]:
        """Promises kept, by service."""

    @abstractmethod
    def summarize(self) -> dict[str, object]:
        """Return the run as plain data in base units, without its single requests."""

    @abstractmethod
    def render_page(self) -> str:
        """Return the report as the text of one HTML file; the same run gives the same bytes."""

    @property
    def kept(self) -> dict[str, float | None]:
        """The share of requests that kept all promises, by service; None where none was judged."""
        return {outcome.name: outcome.kept for outcome in self.outcomes}

    def __repr__(self) -> str:
        kept = ", ".join(
            f"{name} {'-' if share is None else f'{share:.1%}'}"
            for name, share in self.kept.items()
        )
        return (
            f"<{type(self).__name__} {self.plan_name}: {self.finished:,} requests, "
            f"promises kept: {kept}>"
        )


@dataclass(frozen=True, repr=False)
class FleetReport(SimulatedFleet, SimReport):
    """A `SimReport` that knows what was promised: `problem` is the one the plan was made for."""

    problem: Problem

    @classmethod
    def of(cls, report: SimReport, problem: Problem) -> FleetReport:  # type: ignore[override]
        """Return what was found of a plan as a report on this problem."""
        return cls(**{f.name: getattr(report, f.name) for f in fields(SimReport)}, problem=problem)

    @property
    def outcomes(self) -> tuple[ServiceOutcome, ...]:
        """Promises kept, by service."""
        return tuple(
            ServiceOutcome(
                service.name,
                service.requests,
                service.attainment,
                self.problem.service(service.name).target,
                service.ttft_s,
                service.tpot_s,
                service.tokens_per_s,
                service.groups,
            )
            for service in self.services
        )

    def summarize(self) -> dict[str, object]:
        """Return the run as plain data in base units, without its single requests."""
        from atoll.report.simulation.simulation_tables import summarize

        return summarize(self)

    def render_page(self) -> str:
        """Return the report as the text of one HTML file; the same run gives the same bytes."""
        from atoll.report.simulation.page import render_simulation_page

        return render_simulation_page(self, self.problem)

    def _draw(self, width: int) -> RenderableType:
        from atoll.report.simulation.simulation_tables import draw_simulation

        del width
        return draw_simulation(self, self.problem)

    def _to_html(self) -> str:
        from atoll.report.simulation.page import render_simulation_fragment

        return render_simulation_fragment(self, self.problem)


@dataclass(frozen=True, repr=False)
class FleetTaskReport(SimulatedFleet, MixedReport):
    """A `MixedReport` that shows itself: any-to-any services, and plain ones beside them."""

    @property
    def outcomes(self) -> tuple[ServiceOutcome, ...]:
        """Promises kept, by service, any-to-any ones first."""
        plain = () if self.plain is None else self.plain.services
        return (
            *(
                ServiceOutcome(s.name, s.requests, s.kept, s.target, groups=s.groups)
                for s in self.services
            ),
            *(
                ServiceOutcome(
                    s.name,
                    s.requests,
                    s.attainment,
                    self.problem.service(s.name).target,
                    groups=s.groups,
                )
                for s in plain
            ),
        )

    def summarize(self) -> dict[str, object]:
        """Return the run as plain data in base units, without its single requests."""
        from atoll.report.simulation.task_tables import summarize_tasks

        return summarize_tasks(self)

    def render_page(self) -> str:
        """Return the report as the text of one HTML file; the same run gives the same bytes."""
        from atoll.report.simulation.task_page import render_tasks_page

        return render_tasks_page(self)

    def _draw(self, width: int) -> RenderableType:
        from atoll.report.simulation.task_tables import draw_tasks

        del width
        return draw_tasks(self)

    def _to_html(self) -> str:
        from atoll.report.simulation.task_page import render_tasks_fragment

        return render_tasks_fragment(self)
