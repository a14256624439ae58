"""A fleet: models, promises, demand and the nodes that can be had, ready to be planned."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from atoll.api.plan import FleetPlan
from atoll.core.errors import InputError, UsageError
from atoll.solve.effort import DEADLINE_S
from atoll.solve.progress import SolveStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.api.explanation import FleetExplanation
    from atoll.api.pareto import FleetPareto
    from atoll.catalog.catalog import Catalog
    from atoll.plan.footprint import ObjectiveWeights
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.plan.robustness import RiskModel
    from atoll.prove.pareto import Scaled
    from atoll.solve.comparison import Compared
    from atoll.solve.effort import Effort
    from atoll.solve.progress import OnProgress
    from atoll.workload.classes import RequestClass

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

    @property
    def classes(self) -> dict[str, tuple[RequestClass, ...]]:
        """Classes of requests by any-to-any service; plain services have none and are left out."""
        return {s.name: s.classes for s in self.problem.services if s.is_graph}

    def plan(
        self,
        *,
        solver: str | None = None,
        effort: Effort | None = None,
        deadline_s: float = DEADLINE_S,
        on_progress: OnProgress | None = None,
        rank: bool = True,
        attainment: float | None = None,
        capacity_only: bool = False,
        error_bars: bool = True,
        weights: ObjectiveWeights | None = None,
        robust: float | Literal["curve"] | None = None,
        risk: RiskModel | None = None,
        unserved_usd: float | None = None,
    ) -> FleetPlan:
        """Find the cheapest plan that keeps its promises; on a cluster, the best placement.

        Capacities are found by simulation, so that the share of requests that each service asks for (or
        `attainment` for all of them) keeps both promises; the plan's `promises` say what requests keep on
        other arrivals. With `capacity_only` capacity is what keeps them for half of all requests. With
        `error_bars` they also say how likely that is, the performance model being off as far as it may be.

        What counts is what the fleet says, or `weights`: rent, energy, carbon. Where more than rent does,
        the plan's `power` says what it draws.

        `solver` is one of `solvers`. The search ends as close to the optimum as `effort` asks (a tenth of
        a per cent) or when the work that it allows is done, so equal fleets get equal plans; `deadline_s`
        is a safety net, and a plan says whether it was `cut_short`. `on_progress` is told how far it is.
        On a fixed cluster, with `rank`, the best few placements are simulated and the one that generates
        most is taken. Whether all demand is met is in the plan's `status`, what it took in its `stats`.

        With `robust` the plan holds in that share of scenarios (0.95, say) in which demand, spot prices, spot
        machines and the performance model turn out otherwise, as `risk` has it (by default the fleet's, or
        the usual one); its `robustness` is the curve of what certainty costs. "curve" takes the level of the
        least expected rent and broken promises, where 1000 requests that do not keep theirs have a price
        (`unserved_usd`), and 95 % otherwise.
        """
        asked = self._asked(attainment, weights)
        stats = SolveStats()
        if robust is None and (risk is not None or unserved_usd is not None):
            raise UsageError("risk and unserved_usd are for robust plans", hint="give robust=0.95")
        if robust is not None:
            if capacity_only or solver is not None:
                raise UsageError(
                    "a robust plan is simulated, by the solver of its own",
                    hint="leave out capacity_only and solver, or robust",
                )
            from atoll.prove.robust.plan import plan_robust

            made = plan_robust(
                asked,
                asked=None if robust == "curve" else robust,
                risk=risk,
                unserved_usd=unserved_usd,
                effort=effort,
                deadline_s=deadline_s,
                on_progress=on_progress,
                catalog=self.catalog,
                stats=stats,
            )
            return self._own(made, asked, stats)
        from atoll.prove.plan import plan

        made = plan(
            asked,
            solver=solver,
            effort=effort,
            deadline_s=deadline_s,
            on_progress=on_progress,
            catalog=self.catalog,
            rank=rank,
            capacity_only=capacity_only,
            error_bars=error_bars,
            stats=stats,
        )
        return self._own(made, asked, stats)

    def _own(self, made: Plan, asked: Problem, stats: SolveStats) -> FleetPlan:
        """A plan for what was asked as one for this fleet."""
        if asked is not self.problem:
            # The share and weights decide what is rented, not whether the plan is one for this fleet.
            settled = self.problem.settled(made.mixes)
            made = made.model_copy(update={"problem_hash": settled.content_hash()})
        return FleetPlan.of(made, self.problem, stats)

    def _asked(self, attainment: float | None, weights: ObjectiveWeights | None = None) -> Problem:
        """The problem, with another share of requests that must keep their promises, or other weights."""
        problem = self.problem
        if weights is not None and weights != problem.weights:
            problem = problem.replace(weights=weights)
        if attainment is None:
            return problem
        if not 0 < attainment < 1:
            raise UsageError(
                f"attainment {attainment} is no share between 0 and 1",
                hint="write 95% as 0.95",
                field="attainment",
            )
        services = (
            service.model_copy(update={"attainment": attainment}) for service in problem.services
        )
        return problem.replace(services=tuple(services))

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

    def pareto(
        self,
        against: Sequence[str] = ("latency",),
        *,
        points: int = 7,
        promises: bool = False,
        scaled: Scaled = "both",
        effort: Effort | None = None,
        deadline_s: float = DEADLINE_S,
        on_progress: OnProgress | None = None,
    ) -> FleetPareto:
        """Return what a dollar buys: plans along sweeps against latency, error, energy or carbon.

        Each sweep has `points` plans for capacity, or with `promises` ones that keep them in simulation.
        Latency scales the promises of `scaled` from half to four times today's. Points that another one
        beats in both are marked as dominated.
        """
        from atoll.api.pareto import FleetPareto
        from atoll.prove.pareto import find_pareto

        return FleetPareto.of(
            find_pareto(
                self.problem,
                against,
                points=points,
                promises=promises,
                scaled=scaled,
                effort=effort,
                deadline_s=deadline_s,
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
