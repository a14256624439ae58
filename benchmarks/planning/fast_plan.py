"""The fast solver: how long a plan takes, and how much dearer it is than the proven optimum.

Times are CPU seconds of a whole `solve(problem, solver="fast")`, assembly and independent validation
included, for 48 models in three regions (Coral's extended set-up with every model eight times, as in
`benchmarks.allocation`). They are measured in processes that have imported the package, read fleet, catalog
and constants, and loaded compiled code, and that have planned nothing before:

- `fast_cold_cpu_s_48x3`: the cache folder is empty, nothing is known of the fleet. A new user's first plan.
- `fast_cpu_s_48x3`: the fleet was planned by another process before, at other rates; capacities and templates
  come from disk. What whoever runs the planner again meets, and what is held against the bar.
- `fast_warm_cpu_s_48x3`: the same process plans again at other rates, as a controller does.
- `fast_again_cpu_s_48x3`: the same process plans the very same problem again.

Gaps are per cent above the optimum that the default solver proves (to 0.1 %), or above its bound where it
proves less, over the rented examples and 100 random fleets (seeds 0 to 99): machines whole and cut, spot,
limits, scarce nodes, phases apart, together or as is best. Where not all can be served the gap is in the
share that is served. `fast_over_baseline` is the most that the fast plan costs above a homogeneous baseline
that serves everything, in per cent; below 0 it is cheaper everywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from atoll.catalog import Catalog
from atoll.perf.constants import default_constants
from atoll.plan.files.fleet_file import load_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
from atoll.plan.validate.violation import InvalidPlanError
from atoll.prove.warm import entries
from atoll.solve import solve
from atoll.solve.effort import Effort
from atoll.solve.family import family_of
from atoll.solve.plan_request import PlanRequest
from atoll.workload.lengths import LengthMix
from benchmarks.planning.coral import extended, many_models
from benchmarks.report import ROOT, Figure, finish, options

FLEETS = 100
EXAMPLES = ("quickstart", "coral-core", "coral-extended")
BASELINES = ("homogeneous", "homogeneous-node")
DEADLINE_S = 600.0
_MODELS = ("llama-3.1-8b", "qwen3-8b", "phi-4-14b", "gpt-oss-20b", "qwen3-32b", "llama-3-70b")
_MACHINES = {
    "L4:1": 0.8, "L4:4": 3.4, "A10G:1": 1.0, "A10G:4": 4.2, "L40S:1": 1.9, "L40S:4": 8.0,
    "A100-80:1": 3.7, "A100-80:8": 28.0, "H100:1": 6.9, "H100:8": 52.0,
}  # fmt: skip
"""USD per hour of machines, about what they cost on demand."""
_LENGTHS = ((512.0, 128.0), (1200.0, 250.0), (2500.0, 60.0))


def random_fleet(seed: int) -> Problem:
    """Return a fleet of one to six services on two to four kinds of machines in up to three regions."""
    rng = np.random.default_rng(seed)
    names = [str(n) for n in rng.choice(list(_MACHINES), int(rng.integers(2, 5)), replace=False)]
    regions = [f"r{g}" for g in range(int(rng.integers(1, 4)))]
    # One fleet in three has few machines of each kind.
    most = int(rng.choice([3, 64, 64]))
    offers = []
    for region in regions:
        factor = float(rng.uniform(0.9, 1.3))
        for name in names:
            usd = round(_MACHINES[name] * factor * float(rng.uniform(0.9, 1.1)), 3)
            number, whole = int(rng.integers(1, most + 1)), bool(rng.random() < 0.4)
            offers.append(
                Offer(
                    region=region, node_type=name, usd_per_hour=usd, available=number, whole=whole
                )
            )
            if rng.random() < 0.3:
                offers.append(
                    offers[-1].model_copy(
                        update={"market": "spot", "usd_per_hour": round(usd * 0.4, 3)}
                    )
                )
    services = []
    for m in range(int(rng.integers(1, 7))):
        prompt, answer = _LENGTHS[int(rng.integers(len(_LENGTHS)))]
        services.append(
            Service(
                name=f"s{m}",
                model=str(rng.choice(_MODELS)),
                ttft_s=float(rng.choice([1.5, 4.0])),
                tpot_s=float(rng.choice([0.06, 0.12])),
                rate_per_s=round(float(np.exp(rng.uniform(np.log(0.3), np.log(40.0)))), 3),
                lengths=Lengths.of(LengthMix.fixed(prompt, answer)),
                phases=str(rng.choice(["auto", "apart", "together"])),
            )
        )
    limits = Limits(
        spot_share=float(rng.choice([0.0, 0.3, 0.6])) if rng.random() < 0.3 else None,
        max_nodes=int(rng.integers(20, 80)) if rng.random() < 0.15 else None,
        spread=2 if len(regions) > 1 and rng.random() < 0.1 else 1,
    )
    return Problem(
        name=f"random-{seed}",
        services=tuple(services),
        offers=tuple(offers),
        limits=limits,
        settings=Settings(max_nodes_per_instance=4, seed=seed),
    )


@dataclass(frozen=True)
class Gap:
    """By how many per cent a fast plan is behind, what it took, and how it compares to the baselines."""

    gap: float
    cpu_s: float
    proven: bool
    over_baseline: float | None


def timed(
    problem: Problem, catalog: Catalog, solver: str, effort: Effort | None = None
) -> tuple[Plan, float]:
    """Return a plan and the CPU seconds that it took."""
    start = time.process_time()
    plan = solve(
        problem,
        PlanRequest(
            solver=solver, catalog=catalog, deadline_s=DEADLINE_S, effort=effort or Effort()
        ),
    )
    return plan, time.process_time() - start


def served(plan: Plan) -> float:
    """Return the share of demand that all services get at least."""
    return min(plan.served_fraction.values(), default=1.0)


def measure(problem: Problem, catalog: Catalog) -> Gap:
    """Compare the fast plan of a fleet with the optimum and with the baselines; print a line."""
    fast, cpu = timed(problem, catalog, "fast", Effort(cached=False))
    best, _ = timed(problem, catalog, "optimal")
    gap = 100.0 * max(0.0, served(best) - served(fast)) / max(served(best), 1e-9)
    proven = best.status == "optimal"
    if served(fast) >= 1.0 - 1e-9 and served(best) >= 1.0 - 1e-9:
        against = best.objective if proven else best.bound
        gap = 100.0 * (float(fast.objective or 0.0) / max(float(against or 0.0), 1e-9) - 1.0)
    if served(best) <= 0.0:
        gap = 0.0
    over = None
    for name in BASELINES:
        try:
            plain = solve(problem, PlanRequest(solver=name, catalog=catalog, deadline_s=DEADLINE_S))
        except InvalidPlanError:
            continue  # baselines know no limits
        if served(plain) >= 1.0 - 1e-9 and plain.usd_per_hour > 0.0:
            more = 100.0 * (fast.usd_per_hour / plain.usd_per_hour - 1.0)
            more = more if served(fast) >= 1.0 - 1e-9 else np.inf
            over = more if over is None else max(over, more)
    print(
        f"  {problem.name:18s} fast ${fast.usd_per_hour:9.2f}/h {served(fast):7.2%} {cpu:6.3f} CPU-s"
        f"   {best.status:8s} ${best.usd_per_hour:9.2f}/h {served(best):7.2%}   gap {gap:6.2f} %",
        flush=True,
    )
    return Gap(gap, cpu, proven, over)


def with_rates_of(problem: Problem, factor: float) -> Problem:
    """Return the fleet with all rates scaled."""
    services = tuple(
        s.model_copy(update={"rate_per_s": s.rate_per_s * factor}) for s in problem.services
    )
    return problem.replace(services=services)


def fresh(factor: float) -> None:
    """Plan for 48 models in three regions, in a process that has planned nothing yet; print CPU seconds."""
    problem = with_rates_of(many_models(extended(), 8), factor)
    family_of(problem)  # imports its solvers; the validator follows
    import_module("atoll.plan.validate.check")
    catalog = Catalog.default()
    for facts in (
        catalog.models,
        catalog.nodes,
        catalog.links,
        default_constants(),
    ):
        assert facts
    for one in entries():
        one.compile()
    _, first = timed(problem, catalog, "fast")
    _, other = timed(with_rates_of(problem, 1.03), catalog, "fast")
    timed(problem, catalog, "fast")
    _, again = timed(problem, catalog, "fast")
    print(json.dumps([first, other, again]))


def in_fresh_process(cache: str, factor: float = 1.0) -> list[float]:
    """Return what `fresh` measures, with caches in a folder and all rates scaled."""
    code = f"from benchmarks.fast_plan import fresh; fresh({factor!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "ATOLL_CACHE": cache},
        cwd=ROOT,
    )
    return [float(value) for value in json.loads(done.stdout.splitlines()[-1])]


def measure_48x3(catalog: Catalog) -> list[Figure]:
    """Time the fast solver on 48 models in three regions, and compare its cost."""
    problem = many_models(extended(), 8)
    with tempfile.TemporaryDirectory() as folder:
        cold = [in_fresh_process(f"{folder}/{i}")[0] for i in range(3)]
        kept = [in_fresh_process(f"{folder}/0", 1.0 + 0.02 * (i + 1)) for i in range(5)]
    known, warm, again = (float(np.median([one[i] for one in kept])) for i in range(3))
    fast, _ = timed(problem, catalog, "fast")
    best, cpu = timed(problem, catalog, "optimal")
    gap = 100.0 * (fast.usd_per_hour / best.usd_per_hour - 1.0)
    print(
        f"  48 x 3: fast ${fast.usd_per_hour:.2f}/h in {known:.3f} CPU-s (known on disk),"
        f" {np.median(cold):.3f} (nothing known), {warm:.3f} (in memory);"
        f" {best.status} ${best.usd_per_hour:.2f}/h in {cpu:.1f}; gap {gap:.2f} %",
        flush=True,
    )
    return [
        Figure("fast_cpu_s_48x3", known, 0.2, note="a new process, known on disk"),
        Figure("fast_warm_cpu_s_48x3", warm, 0.2, note="the same process, other rates"),
        Figure("fast_again_cpu_s_48x3", again, note="the same process, the same fleet"),
        Figure(
            "fast_cold_cpu_s_48x3", float(np.median(cold)), note="a new process, nothing on disk"
        ),
        Figure("fast_gap_48x3", gap, 10.0),
        Figure("fast_served_48x3", served(fast), 1.0, at_least=True),
    ]


def main() -> None:
    """Measure time, then gaps."""
    arguments = options(__doc__ or "")
    catalog = Catalog.default()
    for one in entries():
        one.compile()
    figures = measure_48x3(catalog)
    fleets = [load_fleet(ROOT / "examples" / f"{name}.yaml") for name in EXAMPLES]
    fleets += [random_fleet(seed) for seed in range(15 if arguments.quick else FLEETS)]
    found = [measure(fleet, catalog) for fleet in fleets]
    gaps = [each.gap for each in found]
    over = [each.over_baseline for each in found if each.over_baseline is not None]
    figures += [
        Figure("fast_gap_median", float(np.median(gaps)), 5.0, note="per cent"),
        Figure("fast_gap_max", max(gaps), 15.0, note="per cent"),
        Figure("fast_gap_mean", float(np.mean(gaps)), note="per cent"),
        Figure("fast_over_baseline", max(over, default=0.0), 0.0, note="per cent, most"),
        Figure("fast_fleets", float(len(found))),
        Figure("fast_fleets_proven", float(sum(each.proven for each in found))),
        Figure("fast_cpu_s_max", max(each.cpu_s for each in found), note="random fleets, cold"),
    ]
    finish(figures)


if __name__ == "__main__":
    main()
