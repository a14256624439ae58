"""Results of a simulation of a whole plan: any-to-any services, and plain ones beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.plan.kept_groups import KeptGroup
from atoll.plan.problem import Problem
from atoll.sim.sim_result import RequestTable, SimReport
from atoll.sim.tasks.simulate_tasks import Routing
from atoll.sim.tasks.task_result import ClassResult, TaskResult

PROMISES = ("ttft", "tpot", "ahead", "image")
"""Promises of classes, in the order in which they fall due."""
_TIMES = ("arrival_s", "ttft_s", "tpot_s", "first_audio_s", "ahead_s", "image_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class ServiceKept:
    """One any-to-any service: requests, and the shares of them that kept all promises and each of them.

    `kept` is None where nothing is promised, or nothing was judged. `groups` are its classes.
    """

    name: str
    target: float
    requests: int
    finished: int
    kept: float | None
    each: Mapping[str, float] = field(hash=False)
    groups: tuple[KeptGroup, ...] = ()


@dataclass(frozen=True)
class MixedReport(RequestTable):
    """A plan with executors under its own demand: `tasks` is what any-to-any services did.

    `plain` is what the others did in a run of their own: they share no GPUs with executors, and what they
    send over the interfaces of machines that they share is not counted. `problem` says what was promised.
    """

    plan_name: str
    problem: Problem
    usd_per_hour: float
    tasks: TaskResult
    plain: SimReport | None
    routing: Routing
    query_s: float
    seed: int

    @property
    def services(self) -> tuple[ServiceKept, ...]:
        """Any-to-any services in the order of the problem, as far as the plan serves them."""
        found = []
        for service in self.problem.services:
            own = [klass for klass in self.tasks.classes if klass.service == service.name]
            if not own:
                continue
            promised = [klass for klass in own if klass.kept_all is not None]
            each = {
                name: share
                for name in PROMISES
                if (share := _weigh([(k, k.kept.get(name)) for k in promised])) is not None
            }
            found.append(
                ServiceKept(
                    service.name,
                    service.target,
                    sum(klass.arrived for klass in own),
                    sum(klass.finished for klass in own),
                    _weigh([(klass, klass.kept_all) for klass in promised]),
                    each,
                    self.tasks.judge_classes(service),
                )
            )
        return tuple(found)

    @property
    def kept(self) -> dict[str, float | None]:
        """The share of requests that kept all promises, by service; None where none was judged."""
        plain = () if self.plain is None else self.plain.services
        return {
            **{service.name: service.kept for service in self.services},
            **{service.name: service.attainment for service in plain},
        }

    @property
    def attainment(self) -> float | None:
        """The share of all requests with promises that kept them; None where none was judged."""
        counted = [(s.requests, s.kept) for s in self.services]
        if self.plain is not None:
            counted += [(s.requests, s.attainment) for s in self.plain.services]
        known = [(count, kept) for count, kept in counted if kept is not None and count]
        total = sum(count for count, _ in known)
        return sum(count * kept for count, kept in known) / total if total else None

    @property
    def finished(self) -> int:
        """Requests of all services that were answered."""
        return self.tasks.finished + (0 if self.plain is None else self.plain.finished)

    @property
    def clock_s(self) -> float:
        """Seconds that were simulated, until the last request was answered."""
        return max(self.tasks.clock_s, 0.0 if self.plain is None else self.plain.clock_s)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the requests of the run, a column an array; times in seconds, NaN where there is none.

        Plain requests come after the others and have no class.
        """
        own, classes = self.tasks.columns, self.tasks.classes
        table: dict[str, NDArray[Any]] = {
            "service": np.array([klass.service for klass in classes])[own.klass],
            "class": np.array([klass.name for klass in classes])[own.klass],
            **{name: getattr(own, name) for name in _TIMES},
            "retries": own.retries,
        }
        if self.plain is None:
            return table
        plain = self.plain.columns()
        nothing = np.full(len(plain["service"]), np.nan)
        plain["class"] = np.full(len(nothing), "")
        return {
            name: np.concatenate([column, plain.get(name, nothing)])
            for name, column in table.items()
        }


def _weigh(shares: list[tuple[ClassResult, float | None]]) -> float | None:
    """The mean over classes, each with as many requests as it has."""
    known = [(klass.arrived, share) for klass, share in shares if share is not None]
    total = sum(count for count, _ in known)
    return sum(count * share for count, share in known) / total if total else None
