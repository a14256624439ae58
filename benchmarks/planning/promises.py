"""What is promised is kept: plans sized by simulation, against headroom for whole services.

Fleets are planned as `atoll plan` does. What requests keep is then simulated on arrivals that no plan was
sized with, and set against the target of each service. "headroom" is the blunt way: capacity for half of all
requests, and a tenth more of everything for services that fall short, until enough of their requests keep
both promises by the very test that sized plans must pass. On clusters machines are given, so that there is
nothing to compare.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.resources import files

from atoll.api.fleet import Fleet
from atoll.plan.plan import Plan
from atoll.prove.kept import KeptSample, look_at, sample_kept
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from benchmarks.report import ROOT, Figure, finish, options

SEED = 9_001
RUNS = 20
"""Simulations of every plan with fresh arrivals, and the first of their seeds."""
PATIENT_S = 3600.0
"""Time to plan: work is what is measured, and a busy machine must not cut it short."""
STEP = 1.1
ROUNDS = 24


@dataclass(frozen=True)
class Case:
    """A fleet to plan, and whether it is a cluster."""

    name: str
    fleet: Fleet

    @property
    def is_cluster(self) -> bool:
        """Whether its machines are given."""
        return self.fleet.problem.cluster is not None


def cases(quick: bool) -> list[Case]:
    """Return the fleets; the quick run leaves out the largest and one cluster."""
    examples = ROOT / "examples"
    first = files("atoll.plan.files").joinpath("data", "fleet.yaml").read_text(encoding="utf-8")
    named: list[tuple[str, Fleet]] = [
        ("quickstart", Fleet.load(examples / "quickstart.yaml")),
        ("init", Fleet.read(first)),
        ("coral-core", Fleet.load(examples / "coral-core.yaml")),
        ("cluster-mixed", Fleet.load(examples / "cluster-mixed.yaml")),
    ]
    if not quick:
        named.append(("coral-extended", Fleet.load(examples / "coral-extended.yaml")))
        named.append(("cluster-shared", Fleet.load(examples / "cluster-shared.yaml")))
    return [Case(name, fleet) for name, fleet in named]


def look(case: Case, plan: Plan) -> dict[str, KeptSample]:
    """Return what requests keep on fresh arrivals, by service."""
    problem = case.fleet.problem
    targets = {service.name: service.attainment for service in problem.services}
    return sample_kept(
        plan, problem, case.fleet.catalog, targets, first_seed=SEED, min_runs=RUNS, max_runs=RUNS
    )


def margin(case: Case, kept: dict[str, KeptSample]) -> float:
    """Return by how many points the worst service is above its target."""
    service = case.fleet.problem.service
    return min(100.0 * (one.mean.both - service(name).attainment) for name, one in kept.items())


def blunt(case: Case) -> Plan | None:
    """Return the first plan that keeps enough with more headroom for services that fall short."""
    problem, catalog = case.fleet.problem, case.fleet.catalog
    for _ in range(ROUNDS):
        plan = solve(problem, PlanRequest(catalog=catalog, deadline_s=PATIENT_S))
        if plan.status not in ("optimal", "feasible"):
            return None
        promises = look_at(plan, case.fleet.problem, catalog)
        short = {p.service for p in promises if not p.is_surely_kept}
        if not short:
            return plan
        problem = problem.replace(
            services=tuple(
                s.model_copy(update={"headroom": s.headroom * STEP}) if s.name in short else s
                for s in problem.services
            )
        )
    return None


def main() -> None:
    """Plan every fleet, simulate it, and compare."""
    arguments = options(__doc__ or "")
    print(
        f"  {'fleet':16s} {'$/h':>8s} {'bound':>8s} {'points over':>12s} {'CPU-s':>7s} "
        f"{'headroom $/h':>13s} {'points over':>12s}"
    )
    worst, over, times, seconds = [], [], [], {}
    for case in cases(arguments.quick):
        # The first run compiles and makes templates; the second is what a user sees from then on.
        case.fleet.plan(capacity_only=True, deadline_s=PATIENT_S)
        case.fleet.plan(deadline_s=PATIENT_S)
        began = time.process_time()
        plan = case.fleet.plan(deadline_s=PATIENT_S)
        seconds[case.name] = time.process_time() - began
        above = margin(case, look(case, plan))
        worst.append(above)
        line = f"  {case.name:16s} {plan.usd_per_hour:8.2f}"
        if case.is_cluster:
            print(f"{line} {'-':>8s} {above:+12.2f} {seconds[case.name]:7.1f} {'-':>13s}")
            continue
        if plan.bound and plan.objective:
            over.append(plan.objective / plan.bound)
        other = blunt(case)
        line += f" {plan.bound or 0.0:8.2f} {above:+12.2f} {seconds[case.name]:7.1f}"
        if other is None:
            print(f"{line} {'none found':>13s}")
            continue
        times.append(plan.usd_per_hour / other.usd_per_hour)
        print(f"{line} {other.usd_per_hour:13.2f} {margin(case, look(case, other)):+12.2f}")
    finish(
        [
            Figure("kept_share_min", min(worst), 0.0, "points over the target", at_least=True),
            Figure("cost_over_bound_max", max(over)),
            Figure("cost_vs_headroom_max", max(times), 1.0),
            Figure("cpu_s_quickstart", seconds["quickstart"], 10.0),
            Figure("cpu_s_extended", seconds.get("coral-extended"), 60.0),
        ]
    )


if __name__ == "__main__":
    main()
