"""A fleet: models, promises, demand and the nodes that can be had, ready to be planned."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from atoll.api.plan import FleetPlan
from atoll.core.errors import InputError, UsageError
from atoll.solve.effort import DEADLINE_S, Countdown
from atoll.solve.progress import SolveStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.api.explanation import FleetExplanation
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.comparison import Compared
    from atoll.solve.effort import Effort
    from atoll.solve.progress import OnProgress

ATTAINMENT = 0.95
"""Share of requests that should keep both promises, unless said otherwise."""


class Fleet:
    """What is to be served and what with: a problem, and everything one can ask of it.

        fleet = Fleet.load("fleet.yaml")
        plan = fleet.plan()

    A fleet never changes; `Fleet(fleet.problem.replace(...))` is another one.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        """The problem behind the fleet: complete, frozen, JSON."""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        overlays: Iterable[str | os.PathLike[str]] = (),
        running: str | os.PathLike[str] | Plan | None = None,
    ) -> Fleet:
        """Read a fleet file (YAML or JSON) or a problem.json.

        `overlays` are YAML files that add or change facts of the catalog. `running` is the plan that runs
        now, or its file: what of it can stay is kept.
        """
        from atoll.plan.files.read import read_problem
        from atoll.plan.plan import Plan

        if isinstance(running, Plan):
            return cls(read_problem(path, overlays=overlays).replace(running=running.instances))
        return cls(read_problem(path, overlays=overlays, running=running))

    @classmethod
    def read(cls, text: str, *, name: str = "fleet.yaml") -> Fleet:
        """Read the text of a fleet file; `name` is what errors call it, and the fleet if it has none."""
        from atoll.plan.files.fleet import parse_fleet

        return cls(parse_fleet(text, path=name))

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Fleet:
        """Return the fleet of a fleet file's content as plain data."""
        try:
            text = json.dumps(data, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"this is no plain data: {error}", hint="use dicts, lists, text and finite numbers"
            ) from error
        return cls.read(text, name="fleet")

    @property
    def name(self) -> str:
        """The name of the fleet."""
        return self.problem.name

    @cached_property
    def catalog(self) -> Catalog:
        """The facts the fleet is planned with: the shipped catalog and the fleet's own."""
        return self.problem.catalog()

    @property
    def solvers(self) -> tuple[str, ...]:
        """Names of the solvers that fit this fleet, the default first."""
        from atoll.solve.registry import solvers

        return solvers(self.problem)

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of those solvers that are simple rules to compare with."""
        from atoll.solve.registry import baselines

        return baselines(self.problem)

    def plan(
        self,
        *,
        solver: str | None = None,
        effort: Effort | None = None,
        deadline_s: float = DEADLINE_S,
        on_progress: OnProgress | None = None,
        rank: bool = True,
    ) -> FleetPlan:
        """Find the cheapest plan that has capacity for the demand; on a cluster, the best placement.

        `solver` is one of `solvers`. The search ends as close to the optimum as `effort` asks (a tenth of
        a per cent) or when the work that it allows is done, so equal fleets get equal plans; `deadline_s`
        is a safety net, and a plan says whether it was `cut_short`. `on_progress` is told how far it is.
        On a fixed cluster, with `rank`, the best few placements are simulated and the one that generates
        most is taken. Whether all demand is met is in the plan's `status`, what it took in its `stats`.
        """
        from atoll.prove.plan import plan

        stats = SolveStats()
        made = plan(
            self.problem,
            solver=solver,
            effort=effort,
            deadline_s=deadline_s,
            on_progress=on_progress,
            catalog=self.catalog,
            rank=rank,
            stats=stats,
        )
        return FleetPlan.of(made, self.problem, stats)

    def verify(
        self,
        *,
        attainment: float = ATTAINMENT,
        solver: str | None = None,
        effort: Effort | None = None,
        deadline_s: float = DEADLINE_S,
        on_progress: OnProgress | None = None,
    ) -> FleetPlan:
        """Plan, simulate, and plan with more headroom until a share of requests keeps both promises.

        `attainment` is that share, of every service; the other arguments are those of `plan`, with
        `deadline_s` for all of it. Where no headroom helps, UnverifiedError says what does; its `plan` is
        the one that comes closest. A plan that the deadline left unverified is `cut_short`.
        """
        from atoll.prove.verify import PLANNING, UnverifiedError, refuse_cluster, verify
        from atoll.solve.progress import Progress
        from atoll.solve.registry import solve

        refuse_cluster(self.problem)
        if not 0 <= attainment <= 1:
            raise UsageError(
                f"attainment {attainment} is not a share",
                hint="write 95% as 0.95",
                field="attainment",
            )

        if not deadline_s > 0:
            raise UsageError(
                f"a deadline of {deadline_s:g} s", hint="give it some time, as in 30.0"
            )
        stats = SolveStats()

        def plan(problem: Problem, seconds: float) -> Plan:
            return solve(
                problem,
                solver=solver,
                effort=effort,
                deadline_s=seconds,
                on_progress=on_progress,
                catalog=self.catalog,
                stats=stats,
            )

        def say(text: str) -> None:
            if on_progress is not None:
                on_progress(Progress("verifying", text))

        _compile_simulator()
        deadline = Countdown(deadline_s)
        first = plan(self.problem, deadline.share(PLANNING))
        try:
            verified = verify(
                first, self.problem, self.catalog, plan, attainment, deadline=deadline, say=say
            )
        except UnverifiedError as error:
            error.plan = FleetPlan.of(error.plan, self.problem, stats)
            raise
        return FleetPlan.of(verified, self.problem, stats)

    def compare(
        self,
        plan: Plan,
        *,
        effort: Effort | None = None,
        deadline_s: float = DEADLINE_S,
        on_progress: OnProgress | None = None,
    ) -> tuple[Compared, ...]:
        """Return what simple rules make of the same fleet, beside a plan; those there is time for."""
        from atoll.solve.registry import compare_solvers

        return tuple(
            compare_solvers(
                plan,
                self.problem,
                effort=effort,
                deadline_s=deadline_s,
                on_progress=on_progress,
                catalog=self.catalog,
            )
        )

    def explain(
        self,
        plan: Plan | None = None,
        *,
        node_types: Sequence[str] | None = None,
        repairs: bool | None = None,
        deadline_s: float = 120.0,
        most_plans: int | None = None,
        best_effort: bool = False,
        cached: bool = True,
        on_progress: OnProgress | None = None,
    ) -> FleetExplanation:
        """Say why a plan (by default the cheapest) is what it is, by planning again.

        What binds, what loosening it is worth, which single change would serve more or cost less, and why
        each node type is used or not; with `node_types` only the last. Planning again is done at most
        `most_plans` times and within `deadline_s`; `best_effort` is for clusters, as in `plan`.
        """
        from atoll.api.explanation import FleetExplanation
        from atoll.solve.explain.explain import explain_problem

        return FleetExplanation.of(
            explain_problem(
                self.problem,
                plan,
                node_types=node_types,
                repairs=repairs,
                deadline_s=deadline_s,
                most_plans=most_plans,
                best_effort=best_effort,
                cached=cached,
                on_progress=on_progress,
                catalog=self.catalog,
            )
        )

    def load_plan(self, path: str | os.PathLike[str]) -> FleetPlan:
        """Read a plan.json as a plan for this fleet; `FleetPlan.validate` says whether it holds."""
        from atoll.plan.files.read import read_plan

        return FleetPlan.of(read_plan(path), self.problem)

    def __repr__(self) -> str:
        services = ", ".join(service.name for service in self.problem.services)
        return f"<Fleet {self.name}: {services}>"


def _compile_simulator() -> None:
    """Compile what simulates, once on a machine, before a deadline begins."""
    from atoll.core.compiling import compile_entries
    from atoll.sim import loop

    compile_entries(loop.__name__)
