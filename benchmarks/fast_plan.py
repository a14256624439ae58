"""The fast solver: how long a plan takes, and how much dearer it is than the proven optimum.

fast_cpu_s_48x3 is a whole `solve(problem, solver="fast")`, assembly and independent validation included, for
48 models in three regions (Coral's extended set-up with every model eight times, as in
`benchmarks.allocation`), compiled code loaded. No template comes from a cache on disk. It is measured three
times: for a fleet that was planned before and has other rates now, which is what a re-plan asks
(`fast_cpu_s_48x3`); for the very same fleet again (`fast_again_cpu_s_48x3`); and for one of which nothing is
known, all promises and lengths being new (`fast_cold_cpu_s_48x3`).

Gaps are per cent above the optimum that the default solver proves (to 0.1 %), or above its bound where it
proves less, over the rented examples and 100 random fleets (seeds 0 to 99): machines whole and cut, spot,
limits, scarce nodes, phases apart, together or as is best. Where not all can be served the gap is in the
share that is served. `fast_over_baseline` is the most that the fast plan costs above a homogeneous baseline
that serves everything, in per cent; below 0 it is cheaper everywhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from atoll.catalog import Catalog
from atoll.core.compiling import compile_entries
from atoll.plan.files.fleet import load_fleet
from atoll.plan.plan import Plan
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
from atoll.plan.validate.violation import InvalidPlanError
from atoll.solve import solve
from atoll.workload.lengths import LengthMix
from benchmarks.coral import core, extended, many_models
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


def timed(problem: Problem, catalog: Catalog, solver: str) -> tuple[Plan, float]:
    """Return a plan and the CPU seconds that it took."""
    start = time.process_time()
    plan = solve(problem, solver=solver, catalog=catalog, deadline_s=DEADLINE_S)
    return plan, time.process_time() - start


def served(plan: Plan) -> float:
    """Return the share of demand that all services get at least."""
    return min(plan.served_fraction.values(), default=1.0)


def measure(problem: Problem, catalog: Catalog) -> Gap:
    """Compare the fast plan of a fleet with the optimum and with the baselines; print a line."""
    fast, cpu = timed(problem, catalog, "fast")
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
            plain = solve(problem, solver=name, catalog=catalog, deadline_s=DEADLINE_S)
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


def with_other_promises(problem: Problem, by: float) -> Problem:
    """Return a fleet whose promises and lengths are a hair other: nothing that is known fits it."""
    services = tuple(
        s.model_copy(
            update={
                "ttft_s": s.ttft_s * (1.0 + by),
                "tpot_s": s.tpot_s * (1.0 + by),
                "lengths": s.lengths.model_copy(
                    update={
                        "input_mean": s.lengths.input_mean * (1.0 + by),
                        "input_mean_square": s.lengths.input_mean_square * (1.0 + by) ** 2,
                    }
                ),
            }
        )
        for s in problem.services
    )
    return problem.replace(services=services)


def measure_48x3(catalog: Catalog) -> list[Figure]:
    """Time the fast solver on 48 models in three regions, and compare its cost."""
    problem = many_models(extended(), 8)
    solve(core(), solver="fast", catalog=catalog)  # loads and warms compiled code
    cold = [
        timed(with_other_promises(problem, 1e-6 * (1 + i)), catalog, "fast")[1] for i in range(3)
    ]
    timed(problem, catalog, "fast")
    known = [
        timed(with_rates_of(problem, 1.0 + 0.02 * (1 + i)), catalog, "fast")[1] for i in range(5)
    ]
    again = [timed(problem, catalog, "fast")[1] for _ in range(5)]
    fast, _ = timed(problem, catalog, "fast")
    best, cpu = timed(problem, catalog, "optimal")
    gap = 100.0 * (fast.usd_per_hour / best.usd_per_hour - 1.0)
    print(
        f"  48 x 3: fast ${fast.usd_per_hour:.2f}/h in {min(known):.3f} CPU-s (known),"
        f" {min(cold):.3f} (nothing known); {best.status} ${best.usd_per_hour:.2f}/h in {cpu:.1f};"
        f" gap {gap:.2f} %"
    )
    return [
        Figure("fast_cpu_s_48x3", float(np.median(known)), 0.2, note="planned before, other rates"),
        Figure("fast_again_cpu_s_48x3", float(np.median(again)), note="the same fleet again"),
        Figure("fast_cold_cpu_s_48x3", float(np.median(cold)), note="nothing known of it"),
        Figure("fast_gap_48x3", gap, 10.0),
        Figure("fast_served_48x3", served(fast), 1.0, at_least=True),
    ]


def main() -> None:
    """Measure time, then gaps."""
    arguments = options(__doc__ or "")
    catalog = Catalog.default()
    for rooms in ("atoll.solve.templates", "atoll.solve.cover", "atoll.solve.rent"):
        compile_entries(rooms)
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
