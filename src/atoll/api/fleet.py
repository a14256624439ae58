"""A fleet: models, promises, demand and the nodes that can be had, ready to be planned."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from atoll.api.fleet_plan import FleetPlan
from atoll.core.errors import InfeasibleError, InputError, UsageError
from atoll.core.extras import require_extras
from atoll.engines.table import read_engines, settle_placed
from atoll.solve.effort import DEADLINE_S, LEVELS, Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.solve_progress import SolveStats

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from atoll.api.fleet_explanation import FleetExplanation
    from atoll.api.fleet_pareto import FleetPareto
    from atoll.api.running import FleetOperations, RunningFleet
    from atoll.catalog.catalog import Catalog
    from atoll.control.operation.fleet_change import FleetChange
    from atoll.control.operation.live_operation import LiveOperation
    from atoll.control.operation.options import OperationListener, OperationOptions
    from atoll.core.listener import Listener
    from atoll.plan.files.choice_schema import GridSpec, ObjectiveSpec
    from atoll.plan.files.fleet_schema import (
        ClusterSpec,
        LimitsSpec,
        PoolSpec,
        RiskSpec,
        ServiceSpec,
        SettingsSpec,
    )
    from atoll.plan.footprint import ObjectiveWeights
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem, Router
    from atoll.plan.robustness import RiskModel
    from atoll.prove.pareto_sweep import Scaled
    from atoll.solve.comparison import Compared
    from atoll.solve.solve_progress import OnProgress
    from atoll.workload.classes import RequestClass


class Fleet:
    """Services, promises and machines: a problem, and everything one can ask of it.

        fleet = Fleet.load("fleet.yaml")
        plan = fleet.plan()

    `Fleet.of` makes one of typed objects instead. A fleet never changes; `Fleet(fleet.problem.replace(...))`
    is another one.
    """

    def __init__(self, problem: Problem, *, source: str | os.PathLike[str] | None = None) -> None:
        self.problem = problem
        """The problem behind the fleet: complete, frozen, JSON."""
        self.source = None if source is None else Path(source)
        """The file that says all of it, which `up` and `operate` follow; None where there is no such file."""

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

        overlays = tuple(overlays)
        if isinstance(running, Plan):
            return cls(read_problem(path, overlays=overlays).replace(running=running.instances))
        problem = read_problem(path, overlays=overlays, running=running)
        # With overlays, or a plan that runs, the file alone does not say all of it.
        return cls(problem, source=None if overlays or running is not None else path)

    @classmethod
    def find(cls, fleet: str | os.PathLike[str], *, state: Path | None = None) -> Fleet:
        """Read a fleet file, or that of a fleet that was brought up under this name or from `state`."""
        from atoll.control.operation.fleet_home import FleetHome, find_home

        if Path(fleet).is_file():
            return cls.load(fleet)
        name = os.fspath(fleet)
        record = None if state is None else FleetHome(state).read()
        if record is None or record.name != name:
            _, record = find_home(name, None)
        return cls.load(record.source)

    @classmethod
    def here(cls) -> Fleet:
        """Return a fleet of this machine alone, with the largest of a few models that it can serve.

        `atoll init --here` writes it as a file to change. GPUs that the catalog does not know are an error.
        """
        from atoll.api.this_machine import read_machine, write_fleet
        from atoll.catalog.load import load_catalog

        file = write_fleet(read_machine(), load_catalog())
        if file.missing:
            raise UsageError(
                f"the catalog does not know {', '.join(file.missing)}",
                hint="`atoll init --here` writes a file with a place for what is missing",
            )
        return cls.read(file.text, name="here")

    @classmethod
    def read(cls, text: str, *, name: str = "fleet.yaml") -> Fleet:
        """Read the text of a fleet file; `name` is what errors call it, and the fleet if it has none."""
        from atoll.plan.files.fleet_file import parse_fleet

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

    @classmethod
    def of(
        cls,
        name: str,
        services: Mapping[str, ServiceSpec],
        *,
        pool: PoolSpec | None = None,
        cluster: ClusterSpec | None = None,
        limits: LimitsSpec | None = None,
        settings: SettingsSpec | None = None,
        objective: str | ObjectiveSpec | None = None,
        grid: GridSpec | None = None,
        risk: RiskSpec | None = None,
        share_instances: bool = False,
        catalog: Mapping[str, object] | None = None,
        running: Plan | None = None,
    ) -> Fleet:
        """Return the fleet of typed objects: the sections of a fleet file, by the same names.

        Numbers are in base units (seconds, requests/s, USD/h); text with a unit ("1600ms", "10/s") is read
        as in a file. There is a `pool` or a `cluster`. `catalog` adds or changes facts; what of `running`
        can stay is kept.
        """
        from atoll.plan.files.fleet_file import build_problem

        sections = {
            "pool": pool,
            "cluster": cluster,
            "limits": limits,
            "settings": settings,
            "objective": objective,
            "grid": grid,
            "risk": risk,
            "catalog": catalog,
        }
        given = {key: value for key, value in sections.items() if value is not None}
        problem = build_problem(
            {"name": name, "services": services, "share_instances": share_instances, **given}
        )
        return cls(problem if running is None else problem.replace(running=running.instances))

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
        from atoll.solve.family import solvers

        return solvers(self.problem)

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of those solvers that are simple rules to compare with."""
        from atoll.solve.family import baselines

        return baselines(self.problem)

    @property
    def classes(self) -> dict[str, tuple[RequestClass, ...]]:
        """Classes of requests by any-to-any service; plain services have none and are left out."""
        return {s.name: s.classes for s in self.problem.graph_services}

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
        engines: Sequence[str] | None = None,
        router: Router | None = None,
    ) -> FleetPlan:
        """Find the cheapest plan that keeps its promises; on a cluster, the best placement.

        Capacities are found by simulation, so that the share of requests that each service asks for (or
        `attainment` for all of them) keeps both promises; the plan's `promises` say what requests keep on
        other arrivals. With `capacity_only` capacity is what keeps them for half of all requests. With
        `error_bars` they also say how likely that is, the performance model being off as far as it may be.

        What counts is what the fleet says, or `weights`: rent, energy, carbon. Where more than rent does,
        the plan's `power` says what it draws.

        Instances are run by the engines that the fleet allows, or `engines`, the preferred first; "free" is
        for any layout, also one that no engine runs.

        `solver` is one of `solvers`. The search ends as close to the optimum as `effort` asks (a tenth of
        a per cent) or when the work that it allows is done, so equal fleets get equal plans; `deadline_s`
        is a safety net, and a plan says whether it was `cut_short`. `on_progress` is told how far it is.
        On a fixed cluster, with `rank`, the best few placements are simulated and the one that generates
        most is taken: with the `router` "atoll" or "plain", that of the fleet's settings, or by the worse of
        both. Whether all demand is met is in the plan's `status`, what it took in its `stats`.

        With `robust` the plan holds in that share of scenarios (0.95, say) in which demand, spot prices, spot
        machines and the performance model turn out otherwise, as `risk` has it (by default the fleet's, or
        the usual one); its `robustness` is the curve of what certainty costs. "curve" takes the level of the
        least expected rent and broken promises, where 1000 requests that do not keep theirs have a price
        (`unserved_usd`), and 95 % otherwise.
        """
        asked = self._asked(attainment, weights, engines, router)
        stats = SolveStats()
        request = PlanRequest(
            solver=solver,
            effort=effort or Effort(),
            deadline_s=deadline_s,
            on_progress=on_progress,
            catalog=self.catalog,
            stats=stats,
            rank=rank,
            capacity_only=capacity_only,
            error_bars=error_bars,
        )
        if robust is None and (risk is not None or unserved_usd is not None):
            raise UsageError("risk and unserved_usd are for robust plans", hint="give robust=0.95")
        if robust is not None:
            if capacity_only or solver is not None:
                raise UsageError(
                    "a robust plan is simulated, by the solver of its own",
                    hint="leave out capacity_only and solver, or robust",
                )
            from atoll.prove.robust.robust_plan import plan_robust

            made = plan_robust(
                asked,
                request,
                asked=None if robust == "curve" else robust,
                risk=risk,
                unserved_usd=unserved_usd,
            )
            return self._own(made, asked, stats)
        from atoll.prove.planning import plan

        return self._own(plan(asked, request), asked, stats)

    def plan_to_serve(
        self, *, deadline_s: float = 60.0, on_progress: OnProgress | None = None
    ) -> FleetPlan:
        """Find a plan with little effort, as `atoll serve` does; InfeasibleError where none meets demand."""
        effort = Effort(work=LEVELS["low"])
        plan = self.plan(effort=effort, deadline_s=deadline_s, on_progress=on_progress, rank=False)
        if plan.status == "infeasible":
            raise InfeasibleError(
                f"no plan meets the demand of {self.name}",
                hint=f"`atoll plan {self.source or self.name}` says why",
            )
        return plan

    def _own(self, made: Plan, asked: Problem, stats: SolveStats) -> FleetPlan:
        """A plan for what was asked as one for this fleet."""
        other = asked is not self.problem
        if other:
            # The share and weights decide what is rented, not whether the plan is one for this fleet.
            settled = self.problem.settled(made.mixes)
            made = made.model_copy(update={"problem_hash": settled.content_hash()})
        planned_for = asked if other else None
        return FleetPlan.of(made, self.problem, stats, source=self.source, planned_for=planned_for)

    def _asked(
        self,
        attainment: float | None,
        weights: ObjectiveWeights | None = None,
        engines: Sequence[str] | None = None,
        router: Router | None = None,
    ) -> Problem:
        """The problem, with another share of requests that keep promises, weights, engines or router."""
        problem = self.problem
        if router is not None:
            if problem.cluster is None:
                raise UsageError("--router is for fixed clusters", hint="leave it out")
            problem = problem.replace(settings={**dict(problem.settings), "router": router})
        if engines is not None:
            names = read_engines(engines, field="engines")
            settings = {**dict(problem.settings), "engines": names}
            if problem.cluster is not None:
                one = settle_placed(names, problem.settings.engine, field="engines")
                settings |= {"engine": one, "engines": ()}
            problem = problem.replace(settings=settings)
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
        services = tuple(service.with_attainment(attainment) for service in problem.services)
        return problem.replace(services=services)

    def compare(
        self,
        plan: Plan,
        *,
        effort: Effort | None = None,
        deadline_s: float = DEADLINE_S,
        on_progress: OnProgress | None = None,
    ) -> tuple[Compared, ...]:
        """Return what simple rules make of the same fleet, beside a plan; those there is time for."""
        from atoll.solve.comparison import compare_solvers

        request = PlanRequest(
            effort=effort or Effort(),
            deadline_s=deadline_s,
            on_progress=on_progress,
            catalog=self.catalog,
        )
        return tuple(compare_solvers(plan, self.problem, request))

    def explain(
        self,
        plan: Plan | None = None,
        *,
        node_types: Sequence[str] | None = None,
        repairs: bool | None = None,
        deadline_s: float = 120.0,
        max_plans: int | None = None,
        best_effort: bool = False,
        cached: bool = True,
        on_progress: OnProgress | None = None,
    ) -> FleetExplanation:
        """Say why a plan (by default the cheapest) is what it is, by planning again.

        What binds, what loosening it is worth, which single change would serve more or cost less, and why
        each node type is used or not; with `node_types` only the last. Planning again is done at most
        `max_plans` times and within `deadline_s`; `best_effort` is for clusters, as in `plan`.
        """
        from atoll.api.fleet_explanation import FleetExplanation
        from atoll.solve.explain.explain_plan import explain_problem

        request = PlanRequest(
            effort=Effort(cached=cached, promise=not best_effort),
            deadline_s=deadline_s,
            on_progress=on_progress,
            catalog=self.catalog,
        )
        return FleetExplanation.of(
            explain_problem(
                self.problem,
                plan,
                request,
                node_types=node_types,
                repairs=repairs,
                max_plans=max_plans,
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
        from atoll.api.fleet_pareto import FleetPareto
        from atoll.prove.pareto_sweep import find_pareto

        request = PlanRequest(
            effort=effort or Effort(),
            deadline_s=deadline_s,
            on_progress=on_progress,
            catalog=self.catalog,
            capacity_only=not promises,
        )
        return FleetPareto.of(
            find_pareto(self.problem, against, request, points=points, scaled=scaled)
        )

    def load_plan(self, path: str | os.PathLike[str]) -> FleetPlan:
        """Read a plan.json as a plan for this fleet; `FleetPlan.validate` says whether it holds."""
        from atoll.plan.files.read import read_plan

        return FleetPlan.of(read_plan(path), self.problem, source=self.source, file=path)

    def up(
        self,
        target: str | None = None,
        *,
        options: OperationOptions | None = None,
        deadline_s: float = 60.0,
        wait_s: float = 1800.0,
        listener: OperationListener | None = None,
    ) -> RunningFleet:
        """Plan the fleet and bring it up on its target, as `atoll up` does; see `FleetPlan.up`."""
        from atoll.api.running import bring_fleet_up, request_up

        request = request_up(
            self.problem, self.source, target, options, deadline_s=deadline_s, wait_s=wait_s
        )
        return bring_fleet_up(request, listener)

    def preview_up(
        self,
        target: str | None = None,
        *,
        options: OperationOptions | None = None,
        deadline_s: float = 60.0,
        folder: Path | None = None,
        listener: OperationListener | None = None,
    ) -> FleetChange:
        """Return what `up` would change, with its cost; scripts, manifests or tasks go into `folder`."""
        from atoll.api.running import request_up
        from atoll.control.operation.options import OperationListener
        from atoll.control.operation.rollout import preview

        request = request_up(self.problem, self.source, target, options, deadline_s=deadline_s)
        return preview(request, listener or OperationListener(), folder)

    def operate(
        self,
        target: str | None = None,
        *,
        options: OperationOptions | None = None,
        every_s: float = 900.0,
        look_s: float = 10.0,
        deadline_s: float = 60.0,
        once: bool = False,
        stop: threading.Event | None = None,
        listener: OperationListener | None = None,
    ) -> None:
        """Keep the fleet as its file says until `stop` is set, as `atoll operate` does.

        Targets and gateways are asked every `look_s` seconds, and a plan is made anew every `every_s` at
        least, in `deadline_s` at most; with `once` there is one turn. What is not in `options` is as the
        fleet was last brought up. The `listener` is told what happens and agrees to changes; without one all
        are made. When it ends the fleet goes on serving.
        """
        operation = self.controller(
            target,
            options=options,
            every_s=every_s,
            look_s=look_s,
            deadline_s=deadline_s,
            once=once,
            listener=listener,
        )
        operation.run(stop)

    def controller(
        self,
        target: str | None = None,
        *,
        options: OperationOptions | None = None,
        every_s: float = 900.0,
        look_s: float = 10.0,
        deadline_s: float = 60.0,
        once: bool = False,
        on_page: bool = False,
        listener: OperationListener | None = None,
    ) -> LiveOperation:
        """Return what `operate` runs, not running yet: `preview` says what it would change.

        With `on_page` changes are agreed to on the plan page of the dashboard, not by the listener.
        """
        from atoll.api.running import choose_options, find_source, keep_source
        from atoll.control.operation.live_operation import LiveOperation, OperateRequest
        from atoll.control.operation.options import OperationListener

        require_extras("serve", "fabric")
        chosen = choose_options(target, options)
        source = find_source(self.problem, self.source, chosen)
        keep_source(self.problem, source, chosen)
        request = OperateRequest(
            source,
            every_s=every_s,
            look_s=look_s,
            deadline_s=deadline_s,
            once=once,
            on_page=on_page,
            options=chosen,
        )
        return LiveOperation(request, listener or OperationListener())

    def simulate_operation(
        self,
        trace: str = "generated",
        *,
        days: float | None = None,
        prices: str | None = None,
        failures: str | float | None = None,
        mix: str | float | None = None,
        seed: int = 0,
        listener: Listener | None = None,
    ) -> FleetOperations:
        """Operate the fleet in virtual time, days in seconds, beside other ways to do so.

        `trace` is a file, a workload in words or "generated"; `days` of it, all unless given. `prices` are a
        CSV file, "generated", or None for prices that stay; `failures` of a node as "0.001/h". `mix` is how
        far shares of classes of any-to-any services move: a standard deviation, as "30%".
        """
        from atoll.api.running import FleetOperations
        from atoll.control.virtual.operation import simulate_operation

        results = simulate_operation(
            self.problem,
            trace,
            days=days,
            prices=prices,
            failures=failures,
            mix=mix,
            seed=seed,
            listener=listener,
        )
        return FleetOperations(self.name, results)

    def __repr__(self) -> str:
        services = ", ".join(service.name for service in self.problem.services)
        return f"<Fleet {self.name}: {services}>"
