"""Pipelines free and paced: every stage runs what waits, against as many batches as `routing.pacing` says.

Simulated: an instance that only decodes, prompts short, Poisson arrivals at 90 % of what the analytic model
says it carries within 100 ms per token; as many requests in flight all the time as it has at that capacity;
and paced at its capacity with even arrivals, which must show the promise: near-equal stages within 2 %, and
uneven ones must not be above it. Stages are near equal if none carries over a tenth more than the slowest.
"Best" is the closed form of as many equal batches as are best (`tests.sim.pipelines.best_tpot`): where that
is hardly below free batches no pacing gains much.
Real: `benchmarks.pacing_engine`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.sim.api import simulate
from atoll.sim.sim_options import Pacing, SimOptions
from benchmarks.report import Figure, finish, options
from benchmarks.stage_engine.pacing_engine import (
    CLIENTS,
    ENGINE_LAYOUTS,
    EngineRound,
    cpu_timed_ratio,
    engine_rounds,
)
from tests.sim.builders import CATALOG
from tests.sim.pipelines import (
    ANSWER,
    FROM_S,
    LAYERS,
    MODEL,
    PROMISE_S,
    Stages,
    best_tpot,
    build_plan,
    build_problem,
    capacities,
    draw,
    mean_tpot,
)

LOAD = 0.9
NEAR = 1.1
_TURN_S = 4.0


@dataclass(frozen=True, slots=True)
class SimLayout:
    """A pipeline: what each stage runs on, and the layers at which it is cut."""

    kinds: tuple[str, ...]
    cuts: tuple[int, ...]

    @property
    def name(self) -> str:
        ends = (0, *self.cuts, LAYERS)
        return " | ".join(f"{kind} {end - at}" for kind, at, end in self._stages(ends))

    @property
    def stages(self) -> Stages:
        """As builders of plans want them."""
        ends = (0, *self.cuts, LAYERS)
        return tuple((at, end, (kind,)) for kind, at, end in self._stages(ends))

    def _stages(self, ends: tuple[int, ...]) -> zip[tuple[str, int, int]]:
        return zip(self.kinds, ends[:-1], ends[1:], strict=True)


A, L, S = "A10G:4", "L4:4", "L40S:1"
# The first of each number of stages are cut for the largest capacity, the last for the least even stages.
LAYOUTS = (
    SimLayout((A,), ()),
    SimLayout((A, L), (40,)),
    SimLayout((L, A), (27,)),
    SimLayout((L, L), (33,)),
    SimLayout((A, A), (34,)),
    SimLayout((A, S), (37,)),
    SimLayout((A, A), (44,)),
    SimLayout((A, A), (22,)),
    SimLayout((A, A, A), (22, 45)),
    SimLayout((L, L, L), (22, 44)),
    SimLayout((A, L, A), (25, 42)),
    SimLayout((A, A, A), (10, 40)),
    SimLayout((A, A, A, A), (17, 34, 51)),
    SimLayout((L, L, L, L), (16, 33, 50)),
    SimLayout((A, A, A, A), (8, 24, 48)),
)


def saturated(own: Problem, plan: Plan, sequences: int, seconds: float, pacing: Pacing) -> float:
    """Tokens/s with so many requests in flight all the time."""
    work = draw(100.0, seconds, 0)
    chosen = SimOptions(
        feed="closed",
        concurrency=sequences,
        from_s=FROM_S,
        until_s=seconds,
        pacing=pacing,
    )
    return simulate(plan, own, CATALOG, work, chosen).tokens_per_s


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a layout shows: paced over free, and per cent over its promise at its capacity."""

    layout: SimLayout
    near_equal: bool
    capacity: float
    free_s: float
    paced_s: float
    best_s: float
    loaded_ratio: float
    saturated_ratio: float
    over_promise: float

    @property
    def promise_error(self) -> float:
        """Per cent off the promise; stages that are not equal may well be faster."""
        return abs(self.over_promise) if self.near_equal else max(0.0, self.over_promise)

    @property
    def tpot_ratio(self) -> float:
        return self.paced_s / self.free_s

    @property
    def best_ratio(self) -> float:
        """What the ratio would be in closed form."""
        return self.best_s / self.free_s


def compare(own: Problem, layout: SimLayout, seconds: float, seeds: int) -> SimResult:
    """Simulate a layout in every way."""
    plan = build_plan(own, layout.stages)
    rates = capacities(own, layout.stages)
    most = min(rates)
    near_equal = max(rates) <= NEAR * most
    if most <= 0.0:
        raise SystemExit(f"{layout.name} cannot keep {PROMISE_S} s")
    rate = LOAD * most / ANSWER
    tpot_s: dict[Pacing, list[float]] = {"free": [], "paced": []}
    tokens: dict[Pacing, list[float]] = {"free": [], "paced": []}
    full: dict[Pacing, float] = {}
    for pacing, found in tpot_s.items():
        for seed in range(seeds):
            each_s, per_s = mean_tpot(own, plan, draw(rate, seconds, seed), seconds, pacing)
            found.append(each_s)
            tokens[pacing].append(per_s)
        full[pacing] = saturated(own, plan, round(most * PROMISE_S), seconds, pacing)
    even_s, _ = mean_tpot(own, plan, draw(most / ANSWER, seconds, None), seconds, "paced")
    over = 100.0 * (even_s / PROMISE_S - 1.0)
    return SimResult(
        layout,
        near_equal,
        most,
        float(np.mean(tpot_s["free"])),
        float(np.mean(tpot_s["paced"])),
        best_tpot(own, plan, float(np.mean(tokens["paced"]))),
        sum(tokens["paced"]) / sum(tokens["free"]),
        full["paced"] / full["free"],
        over,
    )


def print_simulated(results: list[SimResult]) -> None:
    print(f"  simulated, {MODEL}, promise {PROMISE_S * 1e3:.0f} ms per token, {LOAD:.0%} load")
    print(
        f"  {'layers on':42s} {'tokens/s':>9s} {'free':>8s} {'paced':>8s} {'best':>8s}"
        f" {'ratio':>6s} {'of best':>7s}"
        f" {'tokens/s':>9s} {'when full':>9s} {'promise':>8s}"
    )
    for r in results:
        name = r.layout.name + ("" if r.near_equal else " (uneven)")
        print(
            f"  {name:42s} {r.capacity:9.0f} {r.free_s * 1e3:6.1f}ms {r.paced_s * 1e3:6.1f}ms"
            f" {r.best_s * 1e3:6.1f}ms {r.tpot_ratio:6.3f} {r.best_ratio:7.3f}"
            f" {r.loaded_ratio:9.3f} {r.saturated_ratio:9.3f} {r.over_promise:+7.2f}%"
        )


def engine_ratio(rounds: dict[str, list[EngineRound]], name: str) -> float:
    """Paced over free: the middle of the blocks' ratios of a figure."""
    return float(np.median(block_ratios(rounds, name)))


def block_ratios(rounds: dict[str, list[EngineRound]], name: str) -> list[float]:
    """Paced over free of every block."""
    pairs = zip(rounds["paced"], rounds["free"], strict=True)
    return [getattr(paced, name) / getattr(free, name) for paced, free in pairs]


def compare_engine(is_quick: bool) -> dict[str, dict[str, float]]:
    """Run the stage engine in every layout; returns ratios by figure and layout."""
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    folder = resolve(DEFAULT_MODEL)
    ratios: dict[str, dict[str, float]] = {f.name: {} for f in fields(EngineRound)}
    print(f"\n  stage engine, SmolLM2-135M, {CLIENTS} clients: TPOT, tokens/s, tokens per CPU-s")
    for name, cuts in ENGINE_LAYOUTS.items():
        blocks = 10 if name == "2stage" else 5
        if is_quick:
            blocks = 3 if name == "2stage" else 1
        found = engine_rounds(folder, cuts, blocks, _TURN_S)
        cells = ""
        for way in ("free", "paced"):
            middle = {f: np.median([getattr(r, f) for r in found[way]]) for f in ratios}
            cells += f"  {way} {middle['tpot_s'] * 1e3:6.1f}ms {middle['tokens_per_s']:5.1f}"
            cells += f" {middle['tokens_per_cpu_s']:5.1f}"
        for figure, by_layout in ratios.items():
            by_layout[name] = engine_ratio(found, figure)
        shown = ", ".join(f"{by_layout[name]:.3f}" for by_layout in ratios.values())
        low, high = np.percentile(block_ratios(found, "tpot_s"), (25, 75))
        print(
            f"  {name:14s}{cells}   ratios {shown}; half of TPOT's in {low:.3f}..{high:.3f}",
            flush=True,
        )
    return ratios


def main() -> None:
    chosen = options(__doc__ or "")
    own = build_problem()
    seconds, seeds = (600.0, 2) if chosen.quick else (1800.0, 5)
    results = [compare(own, layout, seconds, seeds) for layout in LAYOUTS]
    print_simulated(results)
    engine = compare_engine(chosen.quick)
    report(results, engine, None if chosen.quick else compare_cpu_time())


def compare_cpu_time() -> float:
    """Paced over free on two stages of real weights, by CPU-seconds: the middle of three runs."""
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    folder = resolve(DEFAULT_MODEL)
    runs = [cpu_timed_ratio(folder, ENGINE_LAYOUTS["2stage"], 9.0) for _ in range(3)]
    return float(np.median(runs))


def report(
    results: list[SimResult], engine: dict[str, dict[str, float]], cpu_timed: float | None
) -> None:
    """Print the figures against their bars; `cpu_timed` only where it was measured."""
    several = [r for r in results if len(r.layout.kinds) > 1]
    worst = max((r for r in several if r.near_equal), key=lambda r: r.tpot_ratio)
    simulated = min(min(r.loaded_ratio, r.saturated_ratio) for r in several)
    least = min(simulated, *engine["tokens_per_s"].values())
    slowest = max(several, key=lambda r: r.paced_s / r.best_s)
    furthest = max(results, key=lambda r: r.promise_error)
    real = engine["tpot_s"]["2stage"]
    finish(
        [
            Figure("sim_tpot_ratio_max", worst.tpot_ratio, 0.85, worst.layout.name),
            Figure("sim_tpot_ratio_best", worst.best_ratio, None, "of the same, in closed form"),
            Figure(
                "sim_over_best_max", slowest.paced_s / slowest.best_s, None, slowest.layout.name
            ),
            Figure("real_tpot_ratio_2stage", real, 1.0),
            Figure("cpu_timed_tpot_ratio_2stage", cpu_timed, None, "in full runs"),
            Figure("throughput_ratio_min", least, 0.99, at_least=True),
            Figure("capacity_promise_err_max", furthest.promise_error, 2.0, furthest.layout.name),
        ],
        sim_throughput_ratio_min=simulated,
        sim_tpot_ratio={r.layout.name: r.tpot_ratio for r in several},
        sim_best_ratio={r.layout.name: r.best_ratio for r in several},
        over_promise={r.layout.name: r.over_promise for r in results},
        real_tpot_ratio=engine["tpot_s"],
        real_throughput_ratio=engine["tokens_per_s"],
        real_tokens_per_cpu_s_ratio=engine["tokens_per_cpu_s"],
    )


if __name__ == "__main__":
    main()
