"""How many promises are kept by the order in which prompts wait: a prefill instance alone, at rising load.

The instances and promises of examples/quickstart.yaml; load is the share of the analytic capacity for that
promise, arrivals are Poisson. A request counts as kept when its prompt is done in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.catalog import Catalog
from atoll.plan.plan import Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.sim.api import simulate
from atoll.sim.sim_options import Order, SimOptions
from atoll.solve.assembly import NewInstance, PlainLayout, PlainStage, plan_from_layouts
from atoll.workload.lengths import length_mix
from atoll.workload.requests import Requests, collect
from atoll.workload.spec import workload_of
from benchmarks.report import Figure, finish, options

ORDERS: tuple[Order, ...] = ("arrival", "slack", "shortest")
LOADS = (0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class PrefillCase:
    """A service and the layout of one prefill instance of it: nodes of each stage, with their layers."""

    name: str
    model: str
    ttft_s: float
    lengths: str
    stages: tuple[tuple[int, int, str], ...]


CASES = (
    PrefillCase("chat, L40S:4", "qwen3-32b", 4.0, "azure-conv", ((0, 64, "L40S:4"),)),
    PrefillCase(
        "chat, L40S:1 | A10G:4",
        "qwen3-32b",
        4.0,
        "azure-conv",
        ((0, 32, "L40S:1"), (32, 64, "A10G:4")),
    ),
    PrefillCase("code, L40S:1", "gpt-oss-20b", 1.5, "azure-code", ((0, 24, "L40S:1"),)),
)


def prepare(case: PrefillCase, catalog: Catalog) -> tuple[Problem, Plan, float]:
    """Return a problem, a plan with the prefill instance alone, and its capacity in requests/s."""
    service = Service(
        name="m",
        model=case.model,
        ttft_s=case.ttft_s,
        tpot_s=0.1,
        rate_per_s=1.0,
        lengths=Lengths.of(length_mix(case.lengths)),
        phases="auto",
    )
    kinds = sorted({kind for *_, kind in case.stages})
    problem = Problem(
        name="order",
        services=(service,),
        offers=tuple(
            Offer(region="here", node_type=kind, available=64, usd_per_hour=2.0) for kind in kinds
        ),
        settings=Settings(engine="atoll"),
    )
    layout = PlainLayout(tuple(PlainStage(low, high, (kind,)) for low, high, kind in case.stages))
    both = [
        NewInstance(role=f"m/llm/{phase}", region="here", layout=layout)
        for phase in ("prefill", "decode")
    ]
    whole = plan_from_layouts(problem, catalog, both, status="feasible", solver="hand")
    (alone,) = [one for one in whole.instances if str(one.phase) == "prefill"]
    plan = Plan(
        problem_hash=problem.content_hash(),
        problem_name=problem.name,
        instances=(alone,),
        routes=(Route(service="m", instances=(alone.id,), share=1.0),),
        usd_per_hour=0.0,
        status="feasible",
        solver="hand",
    )
    return problem, plan, alone.throughput_per_s / service.lengths.input_mean


def kept_shares(
    case: PrefillCase, catalog: Catalog, load: float, count: int, seeds: Sequence[int]
) -> dict[Order, tuple[float, float]]:
    """Return by order the share of promises kept and the longest time to a first token, over all seeds."""
    problem, plan, rate = prepare(case, catalog)
    found: dict[Order, list[np.ndarray]] = {order: [] for order in ORDERS}
    for seed in seeds:
        work = collect(workload_of(f"{case.lengths}@1/s n={count} curve=none"), seed)
        gaps_s = np.random.default_rng(seed).exponential(1.0 / (load * rate), count)
        prompts = Requests.of(np.cumsum(gaps_s), work.input, np.ones(count, np.int32))
        for order in ORDERS:
            run = simulate(plan, problem, catalog, prompts, SimOptions(seed=seed, order=order))
            found[order].append(run.requests.ttft_s)
    return {
        order: (float(np.mean(np.concatenate(ttft) <= case.ttft_s)), float(np.max(ttft)))
        for order, ttft in found.items()
    }


def main() -> None:
    """Print the table."""
    arguments = options(__doc__ or "")
    catalog = Catalog.default()
    count, seeds = (4_000, (1,)) if arguments.quick else (20_000, (1, 2, 3))
    gains: dict[Order, list[float]] = {order: [] for order in ORDERS}
    for case in CASES:
        for load in LOADS:
            kept = kept_shares(case, catalog, load, count, seeds)
            line = "  ".join(
                f"{order} {share:6.1%} (longest {longest:5.1f} s)"
                for order, (share, longest) in kept.items()
            )
            print(f"{case.name:22s} {load:4.0%}  {line}", flush=True)
            for order in ORDERS:
                gains[order].append(100.0 * (kept[order][0] - kept["arrival"][0]))
    finish(
        [
            Figure("slack_points_mean", float(np.mean(gains["slack"]))),
            Figure("slack_points_min", min(gains["slack"])),
            Figure("shortest_points_mean", float(np.mean(gains["shortest"]))),
            Figure("shortest_points_min", min(gains["shortest"])),
        ]
    )


if __name__ == "__main__":
    main()
