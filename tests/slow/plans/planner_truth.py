"""Renting against the truth: random small fleets, planned and held against an independent integer program.

Every case is made from its seed: 1-3 services (phases apart, together or auto), 1-3 regions (some joined by
links over which KV may travel), on-demand, spot and owned machines, whole or cut, limits, an initialisation
penalty, and what runs now: the plan of a varied problem, some of its layouts moved by 4-12 layers. Each is
planned with `atoll.solve.solve` and compared with `tests.reference.rent_ilp`, which shares no solver code.

worse_than_optimum   dearer than the optimum by more than 0.1 %, or serves less than can be served
false_infeasible     no plan, where there is one
bound_invalid        the bound is above the optimum
budget_broken        costs more than the budget
plans_rejected       the validator (or an error) refuses the plan
better_than_reference  says less than it costs or more than can be served: one of the two is wrong

Cases that the reference cannot prove within its time are left out and counted as `unproved`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.core.errors import AtollError
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.solve import solve
from atoll.solve.plan_request import PlanRequest
from benchmarks.report import Figure
from tests.reference.rent_ilp import STANDS, Optimum, RentReference
from tests.slow.plans.case_runs import list_seeds
from tests.slow.plans.planner_cases import DEADLINE_S, REFERENCE_S, CaseMaker
from tests.slow.verdict import conclude

CASES, QUICK_CASES = 300, 45
QUICK_S = 150.0
DEARER = 1e-3
"""A plan may cost this share more than the optimum: the default gap."""
_CENT = 1e-6
_ROUNDING = 2e-6

FAULTS = (
    "worse_than_optimum",
    "false_infeasible",
    "bound_invalid",
    "budget_broken",
    "plans_rejected",
)


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a plan, by name, in words; None where the reference has no proof."""

    faults: dict[str, str] | None
    kind: str = ""


# Judging plans


def judge(problem: Problem, plan: Plan, reference: RentReference) -> Verdict:
    """Hold a plan against the optimum of its problem."""
    faults: dict[str, str] = {}
    budget = problem.limits.budget_usd_per_hour
    if budget is not None and plan.usd_per_hour > budget * (1.0 + 1e-6) + _CENT:
        faults["budget_broken"] = f"${plan.usd_per_hour:g}/h of ${budget:g}/h"
    broken = validate(plan, problem, reference.catalog)
    if broken:
        faults["plans_rejected"] = str(broken[0])
    everything = reference.min_cost()
    if everything.value is not None:
        found = _judge_cost(plan, everything, needs_all=True)
        kind = "met"
    elif not everything.proved:
        return Verdict(None)
    elif problem.settings.on_shortage == "fail":
        kind, found = "fail", {}
        if plan.instances:
            found["better_than_reference"] = "serves all that nothing can serve"
    else:
        judged = _judge_shortage(problem, plan, reference)
        if judged is None:
            return Verdict(None)
        kind, found = f"short ({problem.settings.on_shortage})", judged
    if found is None:
        return Verdict(None)
    return Verdict({**faults, **found}, kind)


def _judge_cost(plan: Plan, optimum: Optimum, *, needs_all: bool = False) -> dict[str, str] | None:
    """Compare cost and bound with the least cost of what is served; None where that is not known."""
    least = optimum.value
    if least is None:
        return None
    if plan.status == "infeasible" or plan.objective is None:
        return {"false_infeasible": f"there is a plan for ${least:g}/h"}
    faults: dict[str, str] = {}
    slack = DEARER * least + _CENT
    short = min(plan.served_fraction.values(), default=1.0)
    if needs_all and short < 1.0 - 1e-6:
        faults["worse_than_optimum"] = f"serves {short:.4%} where all can be"
        return faults
    if plan.objective > least + slack:
        dearer = plan.objective / least - 1.0 if least > 0.0 else np.inf
        faults["worse_than_optimum"] = f"${plan.objective:.6g} for ${least:.6g} (+{dearer:.2%})"
    if plan.bound is not None and plan.bound > least + 1e-6 * abs(least) + _CENT:
        faults["bound_invalid"] = f"bound ${plan.bound:.6g}, the optimum is ${least:.6g}"
    if not optimum.proved and not faults:
        return None
    if optimum.bound is not None and plan.objective < optimum.bound - slack:
        faults["better_than_reference"] = f"${plan.objective:.6g} for at least ${optimum.bound:.6g}"
    return faults


def _judge_shortage(
    problem: Problem, plan: Plan, reference: RentReference
) -> dict[str, str] | None:
    """Compare what is served, and what that costs, where demand cannot be met."""
    served = {s.name: plan.served_fraction.get(s.name, 0.0) for s in reference.wanted}
    if plan.status == "infeasible":
        number = reference.max_standing()
        if not number.proved:
            return None
        could = number.value is not None and number.value >= 0.5
        return {"false_infeasible": f"{number.value:g} services can be served"} if could else {}
    if problem.settings.on_shortage == "priority":
        return _judge_weighted(plan, reference, served)
    names = sorted(served)
    common = reference.most_common()
    if common.proved and common.value is not None and common.value <= STANDS:
        # Not all can stand at once: as many as can, and their largest common share.
        standing = reference.max_standing()
        names = sorted(name for name, share in served.items() if share > STANDS)
        if standing.value is None or not standing.proved:
            return None
        if len(names) < round(standing.value):
            text = f"serves {len(names)} services, {standing.value:g} can be"
            return {"worse_than_optimum": text}
        common = reference.most_common(names)
    best = common.value
    if best is None or not common.proved:
        return None
    least = min(served[name] for name in names)
    if least < best * (1.0 - DEARER) - _CENT:
        return {"worse_than_optimum": f"serves {least:.4%} of all, {best:.4%} can be"}
    faults: dict[str, str] = {}
    if common.bound is not None and least > common.bound * (1.0 + DEARER) + _CENT:
        faults["better_than_reference"] = f"serves {least:.4%} of at most {common.bound:.4%}"
    # The least of what is served is what every one of them is asked for.
    share = min(least, best) * (1.0 - _ROUNDING)
    cost = _judge_cost(plan, reference.min_cost(dict.fromkeys(names, share)))
    return None if cost is None else {**cost, **faults}


def _judge_weighted(
    plan: Plan, reference: RentReference, served: dict[str, float]
) -> dict[str, str] | None:
    weighted = reference.max_weighted()
    if weighted.value is None or not weighted.proved:
        return None
    total = sum(service.priority for service in reference.wanted)
    mean = sum(s.priority * served[s.name] for s in reference.wanted) / total
    if mean < weighted.value * (1.0 - DEARER) - _CENT:
        return {"worse_than_optimum": f"serves {mean:.4%} weighted, {weighted.value:.4%} can be"}
    faults: dict[str, str] = {}
    if weighted.bound is not None and mean > weighted.bound * (1.0 + DEARER) + _CENT:
        faults["better_than_reference"] = f"serves {mean:.4%} of at most {weighted.bound:.4%}"
    cost = _judge_cost(
        plan,
        reference.min_cost({name: share * (1.0 - _ROUNDING) for name, share in served.items()}),
    )
    return None if cost is None else {**cost, **faults}


# Running


def run_case(problem: Problem) -> tuple[Verdict, Plan | None, RentReference]:
    """Plan a problem and judge the plan."""
    catalog = problem.catalog()
    reference = RentReference(problem, catalog, time_limit_s=REFERENCE_S)
    try:
        plan = solve(problem, PlanRequest(deadline_s=DEADLINE_S))
    except AtollError as error:
        return Verdict({"plans_rejected": str(error)}), None, reference
    except Exception as error:  # noqa: BLE001 - whatever breaks is what is looked for
        return Verdict({"plans_rejected": f"{type(error).__name__}: {error}"}), None, reference
    return judge(problem, plan, reference), plan, reference


def _keep(folder: Path, problem: Problem, plan: Plan | None, verdict: Verdict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{problem.name}.json"
    path.write_text(problem.model_dump_json(indent=1), encoding="utf-8")
    if plan is not None:
        (folder / f"{problem.name}-plan.json").write_text(
            plan.model_dump_json(indent=1), encoding="utf-8"
        )
    lines = [f"{name}: {text}" for name, text in (verdict.faults or {}).items()]
    (folder / f"{problem.name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Plan and judge cases until there are enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under three minutes")
    parser.add_argument("--seeds", help="only these, as in 7 or 100:200")
    parser.add_argument("--keep", type=Path, help="write problems whose plans are wrong here")
    parser.add_argument("--explain", action="store_true", help="print the optimum of wrong ones")
    parser.add_argument("--problem", type=Path, help="only the problem in this file")
    arguments = parser.parse_args()
    wanted = QUICK_CASES if arguments.quick else CASES
    start, counts, kinds = time.perf_counter(), Counter[str](), Counter[str]()
    cpu_plan = 0.0
    problems: Iterator[Callable[[], Problem]]
    if arguments.problem:
        text = arguments.problem.read_text(encoding="utf-8")
        problems = iter([lambda: Problem.model_validate_json(text)])
    else:
        problems = (CaseMaker(seed).problem for seed in list_seeds(arguments.seeds, 10**9))
    for make in problems:
        if counts["cases"] >= wanted and not arguments.seeds:
            break
        if arguments.quick and time.perf_counter() - start > QUICK_S:
            break
        problem = make()
        before = time.process_time()
        verdict, plan, reference = run_case(problem)
        cpu_plan += time.process_time() - before
        if verdict.faults is None:
            counts["unproved"] += 1
            print(f"  {problem.name}: the reference has no proof", flush=True)
            continue
        counts["cases"] += 1
        kinds[verdict.kind] += 1
        counts.update(verdict.faults.keys())
        for name, text in verdict.faults.items():
            print(f"  {problem.name}: {name}: {text}", flush=True)
        if verdict.faults and arguments.keep:
            _keep(arguments.keep, problem, plan, verdict)
        if arguments.explain and (verdict.faults or arguments.problem):
            _explain(plan, reference)
    print(f"  {counts['cases']} cases: " + ", ".join(f"{n} {k}" for k, n in sorted(kinds.items())))
    conclude(
        [
            Figure("cases", counts["cases"], note="bar: at least 300 in a full run"),
            *(Figure(name, counts[name], 0) for name in FAULTS),
            Figure(
                "better_than_reference",
                counts["better_than_reference"],
                note="layouts count a kind as its slowest source, plans as what it is",
            ),
            Figure("unproved", counts["unproved"]),
            Figure("cpu_s", cpu_plan),
        ]
    )


def _explain(plan: Plan | None, reference: RentReference) -> None:
    everything = reference.min_cost()
    best = everything if everything.value is not None else reference.most_common()
    print(f"    reference: {best.value}, proved {best.proved}")
    for line in best.chosen:
        print(f"      {line}")
    if plan is not None:
        print(f"    plan: {plan.status}, objective {plan.objective}, bound {plan.bound}")
        print(f"      served {plan.served_fraction}")
        for i in plan.instances:
            kept = " (kept)" if i.kept else ""
            print(
                f"      {i.role} in {i.region}: {i.describe()}, {i.throughput_per_s:g}/s"
                f" ${i.usd_per_hour:g}/h{kept}"
            )


if __name__ == "__main__":
    main()
