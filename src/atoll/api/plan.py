"""A plan that knows the fleet it is for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import PrivateAttr

from atoll.api.shown import Shown
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.units import format_price
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.progress import SolveStats

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.api.diff import FleetDiff
    from atoll.api.explanation import FleetExplanation
    from atoll.api.report import FleetReport
    from atoll.api.tasks import FleetTaskReport
    from atoll.plan.executor_use import ClassUse, ExecutorPlanUse, ExecutorUse, PartHandover
    from atoll.plan.validate.violation import Violation
    from atoll.sim.api import Progress as OnSimulated
    from atoll.sim.options import SimOptions
    from atoll.sim.tasks.run import Routing
    from atoll.solve.progress import OnProgress
    from atoll.workload.requests import Requests, Workload


class FleetPlan(Shown, Plan):
    """A plan with its problem at hand: it can be checked, explained, compared and simulated.

    Fields are those of `Plan`, and so is its JSON.
    """

    _problem: Problem | None = PrivateAttr(None)
    _asked: Problem | None = PrivateAttr(None)
    _stats: SolveStats = PrivateAttr(default_factory=SolveStats)
    _executor_use: ExecutorPlanUse | None = PrivateAttr(None)

    @classmethod
    def of(cls, plan: Plan, problem: Problem, stats: SolveStats | None = None) -> FleetPlan:
        """Return a plan as one for this problem, with what it took to make it.

        A problem with choices between models is taken as the mixes of the plan settle it.
        """
        fields = dict(plan)
        asked = problem
        if problem.choices and {c.name for c in problem.choices} <= {m.name for m in plan.mixes}:
            problem = problem.settled(plan.mixes)
        if not plan.models and plan.problem_hash == problem.content_hash():
            # Who serves the plan later must know which weights it is for.
            fields["models"] = {service.name: service.model for service in problem.services}
        made = cls.model_construct(**fields)
        made._problem, made._asked = problem, asked
        if stats is not None:
            made._stats = stats
        return made

    @property
    def stats(self) -> SolveStats:
        """What it took to make the plan, nothing where it was read from a file; no part of its JSON."""
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
        """What goes from executors of one kind to those of another: requests/s and bytes/s."""
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

        return validate(self, self._asked or self.problem)

    def validate(self) -> None:  # type: ignore[override]  # pydantic's method of this name is deprecated
        """Check the plan independently of the solver that made it; InvalidPlanError names what is wrong."""
        from atoll.plan.validate.check import check

        check(self, self._asked or self.problem)

    def explain(
        self,
        *,
        node_types: Sequence[str] | None = None,
        repairs: bool | None = None,
        deadline_s: float = 120.0,
        most_plans: int | None = None,
        best_effort: bool = False,
        on_progress: OnProgress | None = None,
    ) -> FleetExplanation:
        """Say what binds the plan, what loosening it is worth and what would help; see `Fleet.explain`."""
        from atoll.api.explanation import FleetExplanation
        from atoll.solve.explain.explain import explain_problem

        return FleetExplanation.of(
            explain_problem(
                self.problem,
                self,
                node_types=node_types,
                repairs=repairs,
                deadline_s=deadline_s,
                most_plans=most_plans,
                best_effort=best_effort,
                on_progress=on_progress,
            )
        )

    def diff(self, other: Plan) -> FleetDiff:
        """Return what changes from this plan to another: instances, nodes, cost, capacity."""
        from atoll.api.diff import FleetDiff
        from atoll.plan.diff import diff

        return FleetDiff.of(diff(self, other))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        from atoll.core.files import atomic_write

        atomic_write(path, self.to_json(indent=2) + "\n")

    def simulate(
        self,
        trace: str | os.PathLike[str] | Workload | Requests | None = None,
        *,
        service: str | None = None,
        seed: int = 0,
        duration_s: float = 600.0,
        options: SimOptions | None = None,
        on_progress: OnSimulated | None = None,
    ) -> FleetReport:
        """Run the plan under a workload, event by event, and return what happened.

        `trace` is a file or a workload in words ("azure-conv@10/s for=10min"), or one made in Python;
        without it the fleet's own demand lasts `duration_s` seconds. Requests that name no model go to all
        services, by what is asked of each; with `service` the whole trace goes to that one. The same
        arguments give the same bits. `options` hold everything else (policy, failures, warm-up); their seed
        counts if given.
        """
        from dataclasses import replace

        from atoll.api.report import FleetReport
        from atoll.sim.api import simulate
        from atoll.sim.options import SimOptions

        if any(instance.is_executor for instance in self.instances):
            raise UsageError(
                "this plan serves any-to-any models", hint="simulate it with simulate_tasks"
            )
        chosen = options or SimOptions(seed=seed)
        if options is not None and seed:
            chosen = replace(options, seed=seed)
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

    def simulate_tasks(
        self,
        *,
        seed: int = 0,
        duration_s: float = 600.0,
        routing: Routing = "dealt",
        query_s: float = 0.0,
        options: SimOptions | None = None,
        on_progress: OnSimulated | None = None,
    ) -> FleetTaskReport:
        """Run a plan with any-to-any services under its own demand, plain services beside them.

        Demand lasts `duration_s` seconds and is waited for. `routing` says how requests find executors:
        "static" and "dealt" when they come, "dynamic" at every hand-over, which costs `query_s` seconds of
        the control plane for each executor that it asks (`sim.tasks.run`). Of `options`, when to start
        measuring and when to stop hold for all, the rest for plain services.
        """
        from dataclasses import replace

        from atoll.api.tasks import FleetTaskReport
        from atoll.prove.executors import plain_plan, plain_problem
        from atoll.sim.options import SimOptions
        from atoll.sim.tasks.from_plan import simulate_plan

        chosen = options or SimOptions(seed=seed)
        if options is not None and seed:
            chosen = replace(options, seed=seed)
        plain, own = None, plain_problem(self.problem)
        instances = plain_plan(self)
        if own is not None and instances.instances:
            plain = FleetPlan.of(instances, own).simulate(
                duration_s=duration_s, options=chosen, on_progress=on_progress
            )
        tasks = simulate_plan(
            self,
            self.problem,
            self.problem.catalog(),
            duration_s=duration_s,
            seed=chosen.seed,
            routing=routing,
            query_s=query_s,
            warm_up_s=chosen.from_s,
            until_s=chosen.until_s,
            constants=chosen.constants,
        )
        return FleetTaskReport(
            plan_name=self.problem_name,
            problem=self.problem,
            usd_per_hour=self.usd_per_hour,
            tasks=tasks,
            plain=plain,
            routing=routing,
            query_s=query_s,
            seed=chosen.seed,
        )

    def _requests(
        self,
        trace: str | os.PathLike[str] | Workload | Requests | None,
        duration_s: float,
        seed: int,
    ) -> Requests:
        from atoll.sim.demand import demand_of
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
