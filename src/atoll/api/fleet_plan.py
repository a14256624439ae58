"""A plan that knows the fleet it is for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PrivateAttr

from atoll.api.shown import Shown
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.extras import require_extras
from atoll.core.listener import Listener
from atoll.core.units import format_price
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.solve_progress import SolveStats

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.api.fleet_diff import FleetDiff
    from atoll.api.fleet_explanation import FleetExplanation
    from atoll.api.fleet_report import FleetReport, FleetTaskReport
    from atoll.api.running import RunningFleet
    from atoll.api.served_plan import ServedPlan, ServeOptions
    from atoll.control.operation.fleet_change import FleetChange
    from atoll.control.operation.options import OperationListener, OperationOptions
    from atoll.control.operation.rollout import UpRequest
    from atoll.plan.executor_use import ClassUse, ExecutorPlanUse, ExecutorUse, PartHandover
    from atoll.plan.validate.violation import Violation
    from atoll.sim.api import Progress as OnSimulated
    from atoll.sim.sim_options import SimOptions
    from atoll.sim.tasks.simulate_tasks import Routing
    from atoll.solve.solve_progress import OnProgress
    from atoll.workload.requests import Requests, Workload


@dataclass(frozen=True)
class _PlanFile:
    """File that a plan was read from; plans are equal whatever file they come from."""

    name: str = field(default="a plan", compare=False)


class FleetPlan(Shown, Plan):
    """A plan with its problem at hand: it can be checked, explained, compared and simulated.

    Fields are those of `Plan`, and so is its JSON.
    """

    _problem: Problem | None = PrivateAttr(None)
    _source: Path | None = PrivateAttr(None)
    _file: _PlanFile = PrivateAttr(default_factory=_PlanFile)
    _asked: Problem | None = PrivateAttr(None)
    _planned_for: Problem | None = PrivateAttr(None)
    _stats: SolveStats = PrivateAttr(default_factory=SolveStats)
    _executor_use: ExecutorPlanUse | None = PrivateAttr(None)

    @classmethod
    def of(
        cls,
        plan: Plan,
        problem: Problem,
        stats: SolveStats | None = None,
        *,
        source: Path | None = None,
        file: str | os.PathLike[str] | None = None,
        planned_for: Problem | None = None,
    ) -> FleetPlan:
        """Return a plan as one for this problem, with what it took to make it.

        `source` is the fleet's file, `file` the plan's own. A problem with choices between models is taken
        as the mixes of the plan settle it. `planned_for` is the problem with the share, weights and engines
        that it was planned with, where they are not the fleet's.
        """
        fields = dict(plan)
        asked = problem
        if problem.variants.keys() <= {mix.name for mix in plan.mixes}:
            problem = problem.settled(plan.mixes)
        if not plan.models and plan.problem_hash == problem.content_hash():
            # Who serves the plan later must know which weights it is for.
            fields["models"] = {service.name: service.model for service in problem.services}
            fields["checkpoints"] = problem.checkpoints()
        # The fields were validated with the plan that they come from.
        made = cls.model_construct(**fields)
        made._problem, made._asked, made._source = problem, asked, source
        made._planned_for = planned_for
        if file is not None:
            made._file = _PlanFile(os.fspath(file))
        if stats is not None:
            made._stats = stats
        return made

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], fleet: str | os.PathLike[str] | None = None
    ) -> FleetPlan:
        """Read a plan.json with the fleet file it was made for; without one, as it was last brought up."""
        from atoll.api.running import find_plans_fleet
        from atoll.plan.files.read import read_plan, read_problem

        plan = read_plan(path)
        source = find_plans_fleet(path, plan) if fleet is None else Path(fleet)
        problem = read_problem(source)
        strange = {*plan.served_services} - {one.name for one in problem.services}
        if strange:
            raise UsageError(
                f"{source} has no {', '.join(sorted(strange))}, which {os.fspath(path)} serves",
                field="fleet",
                hint="name the fleet file that the plan was made for",
            )
        return cls.of(plan, problem, source=source, file=path)

    @property
    def stats(self) -> SolveStats:
        """Work that making the plan took, None where it was read from a file; no part of its JSON."""
        return self._stats

    @property
    def problem(self) -> Problem:
        """The problem this plan answers; choices between models are as its mixes settle them."""
        if self._problem is None:
            # Its JSON is that of a plan, without the problem.
            raise UsageError(
                "this plan does not know its fleet", hint="read it with Fleet.load_plan"
            )
        return self._problem

    @property
    def executors(self) -> Sequence[ExecutorUse]:
        """The executors of its any-to-any services: parts, kind of node, requests/s, how busy with what."""
        return self._use().executors

    @property
    def classes(self) -> Sequence[ClassUse]:
        """The classes of requests of those services: promises beside what they take, and their paths.

        `paths`, a field of every plan, are the same paths as the router gets them.
        """
        return self._use().classes

    @property
    def handovers(self) -> Sequence[PartHandover]:
        """Traffic from executors of one kind to those of another: requests/s and bytes/s."""
        return self._use().handovers

    def _use(self) -> ExecutorPlanUse:
        if self._executor_use is None:
            from atoll.plan.executor_use import executor_use

            # A frozen plan has one answer; it is worked out when somebody asks.
            self._executor_use = executor_use(self, self.problem, self.problem.catalog())
        return self._executor_use

    def violations(self) -> Sequence[Violation]:
        """Return what is wrong with the plan, by the independent validator; nothing if it holds."""
        from atoll.plan.validate.check import validate

        if self._planned_for is not None:
            # It has the fleet's hash: another share does not make it a plan for another fleet.
            return validate(self, self._planned_for, same_problem=False)
        return validate(self, self._asked or self.problem)

    def validate(self) -> None:  # type: ignore[override]  # pydantic's method of this name is deprecated
        """Check the plan independently of the solver that made it; InvalidPlanError names what is wrong."""
        from atoll.plan.validate.violation import InvalidPlanError

        found = self.violations()
        if found:
            raise InvalidPlanError(self.problem_name, found)

    def explain(
        self,
        *,
        node_types: Sequence[str] | None = None,
        repairs: bool | None = None,
        deadline_s: float = 120.0,
        max_plans: int | None = None,
        best_effort: bool = False,
        on_progress: OnProgress | None = None,
    ) -> FleetExplanation:
        """Say what binds the plan, what loosening it is worth and what would help; see `Fleet.explain`."""
        from atoll.api.fleet_explanation import FleetExplanation
        from atoll.solve.effort import Effort
        from atoll.solve.explain.explain_plan import explain_problem
        from atoll.solve.plan_request import PlanRequest

        return FleetExplanation.of(
            explain_problem(
                self._asked or self.problem,
                self,
                PlanRequest(
                    effort=Effort(promise=not best_effort),
                    deadline_s=deadline_s,
                    on_progress=on_progress,
                ),
                node_types=node_types,
                repairs=repairs,
                max_plans=max_plans,
            )
        )

    def diff(self, other: Plan) -> FleetDiff:
        """Return what changes from this plan to another: instances, nodes, cost, capacity."""
        from atoll.api.fleet_diff import FleetDiff
        from atoll.plan.plan_diff import diff

        return FleetDiff.of(diff(self, other))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        from atoll.core.files import atomic_write

        atomic_write(path, self.to_json(indent=2) + "\n")

    def serve(
        self, options: ServeOptions | None = None, *, listener: Listener | None = None
    ) -> ServedPlan:
        """Start the plan's nodes as processes on this machine, behind one address, as `atoll serve` does.

        It returns when all of them serve; leaving the context, or `stop`, finishes what runs and ends them.

            with plan.serve(ServeOptions(stand_in=True, port=0)) as served:
                print(served.url)
        """
        from atoll.api.served_plan import ServedPlan, ServeOptions, prepare_serving

        require_extras("serve")
        listener, options = listener or Listener(), options or ServeOptions()
        # What cannot be served so is refused before anything is fetched.
        options.check()
        options.local()
        asked = self._asked or self.problem
        return ServedPlan(prepare_serving(self, asked, options, listener), listener)

    def up(
        self,
        target: str | None = None,
        *,
        options: OperationOptions | None = None,
        deadline_s: float = 60.0,
        wait_s: float = 1800.0,
        listener: OperationListener | None = None,
    ) -> RunningFleet:
        """Bring the plan up on a target (local, slurm, kubernetes, ...), as `atoll up` does.

        Hub, gateway and instances are started, or what runs of the fleet is changed into this plan; it
        returns when all of it serves, after `wait_s` seconds at most (0: at once). Choosing models
        that the plan leaves open takes `deadline_s` at most. `options` have weights, engine, fabric, settings
        of the target; what is not in them is as the fleet was last brought up. The `listener` is told what
        happens and agrees to the change; without one it is made.

            fleet = plan.up("local", options=OperationOptions(stand_in=True))
            ...
            fleet.down()
        """
        from atoll.api.running import bring_fleet_up

        return bring_fleet_up(self._request_up(target, options, deadline_s, wait_s), listener)

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
        from atoll.control.operation.options import OperationListener
        from atoll.control.operation.rollout import preview

        request = self._request_up(target, options, deadline_s, 0.0)
        return preview(request, listener or OperationListener(), folder)

    def _request_up(
        self,
        target: str | None,
        options: OperationOptions | None,
        deadline_s: float,
        wait_s: float,
    ) -> UpRequest:
        from atoll.api.running import request_up

        return request_up(
            self._asked or self.problem,
            self._source,
            target,
            options,
            plan=self,
            plan_name=self._file.name,
            deadline_s=deadline_s,
            wait_s=wait_s,
        )

    def simulate(
        self,
        trace: str | os.PathLike[str] | Workload | Requests | None = None,
        *,
        service: str | None = None,
        seed: int = 0,
        duration_s: float = 600.0,
        options: SimOptions | None = None,
        routing: Routing = "dealt",
        query_s: float = 0.0,
        on_progress: OnSimulated | None = None,
    ) -> FleetReport | FleetTaskReport:
        """Run the plan under a workload, event by event, and return what happened.

        `trace` is a file or a workload in words ("azure-conv@10/s for=10min"), or one made in Python;
        without it the fleet's own demand lasts `duration_s` seconds. Requests that name no model go to all
        services, by what is asked of each; with `service` the whole trace goes to that one. The same
        arguments give the same bits. `options` hold everything else (policy, failures, warm-up); their seed
        counts if given.

        Any-to-any services run under their own demand, which is waited for, and plain ones beside them.
        `routing` says how their requests find executors: "static" and "dealt" when they come, "dynamic" at
        every hand-over, which costs `query_s` seconds of the control plane for each executor that it asks
        (`sim.tasks.simulate_tasks`). Of `options`, when to start measuring and when to stop hold for all,
        the rest for plain services.
        """
        from dataclasses import replace

        from atoll.api.fleet_report import FleetReport
        from atoll.sim.api import simulate
        from atoll.sim.sim_options import SimOptions

        chosen = options or SimOptions(seed=seed)
        if options is not None and seed:
            chosen = replace(options, seed=seed)
        if self.executor_instances:
            if trace is not None or service is not None:
                raise UsageError(
                    "a trace does not say what requests of any-to-any services bring and want",
                    hint="simulate the plan under its own demand",
                    field="service" if trace is None else "trace",
                )
            return self._simulate_tasks(chosen, duration_s, routing, query_s, on_progress)
        requests = self._requests(trace, duration_s, chosen.seed)
        if service is not None:
            known = [each.name for each in self.problem.services]
            if service not in known:
                raise UnknownNameError("service", service, known, field="service")
            requests = requests.rename_models(service)
        found = simulate(
            self, self.problem, self.problem.catalog(), requests, chosen, progress=on_progress
        )
        return FleetReport.of(found, self.problem)

    def _simulate_tasks(
        self,
        options: SimOptions,
        duration_s: float,
        routing: Routing,
        query_s: float,
        on_progress: OnSimulated | None,
    ) -> FleetTaskReport:
        from dataclasses import fields

        from atoll.api.fleet_report import FleetReport, FleetTaskReport
        from atoll.prove.graph_kept import plain_problem, simulate_mixed

        found = simulate_mixed(
            self,
            self.problem,
            self.problem.catalog(),
            options,
            duration_s=duration_s,
            routing=routing,
            query_s=query_s,
            progress=on_progress,
        )
        told = {field.name: getattr(found, field.name) for field in fields(found)}
        own = plain_problem(self.problem)
        if found.plain is not None and own is not None:
            told["plain"] = FleetReport.of(found.plain, own)
        return FleetTaskReport(**told)

    def _requests(
        self,
        trace: str | os.PathLike[str] | Workload | Requests | None,
        duration_s: float,
        seed: int,
    ) -> Requests:
        from atoll.sim.problem_demand import demand_of
        from atoll.workload.requests import Requests, collect
        from atoll.workload.spec import workload_of

        if isinstance(trace, Requests):
            return trace
        if trace is None:
            return collect(demand_of(self.problem, duration_s), seed)
        if isinstance(trace, str | os.PathLike):
            return collect(workload_of(os.fspath(trace)), seed)
        if not hasattr(trace, "chunks"):
            raise UsageError(
                f"a trace of type {type(trace).__name__}",
                hint='name a file, or write it in words: "azure-conv@10/s for=10min"',
            )
        return collect(trace, seed)

    def _draw(self, width: int) -> RenderableType:
        from atoll.report.plan.show import draw_plan

        return draw_plan(self, self.problem, width=width)

    def _to_html(self) -> str:
        from atoll.report.plan.show import render_plan_fragment

        return render_plan_fragment(self, self.problem)

    def __repr__(self) -> str:
        return (
            f"<FleetPlan {self.problem_name}: {self.status}, {format_price(self.usd_per_hour)}, "
            f"{self.nodes} nodes, {self.gpus} GPUs>"
        )
