"""Largest flows on Helix's clusters, against brute force on small ones, and how the search scales.

Every value is that of the library's max flow over the placement found, not what the search says of itself.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np

from atoll.core.rng import stream
from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.files.helix import helix_problem
from atoll.solve.place.bound.bounds import upper_bound
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, PlacementResult
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.search.flow_search import WORK, search
from benchmarks.placement.flow_cases import large_cluster, site_fleet, small_cluster
from benchmarks.report import Figure, finish, leave_out, options
from tests.reference.flow_brute import brute

# Key, cluster file, model, bar in tokens/s, published Helix in tokens/s.
CLUSTERS = (
    ("single24", "single24", "LLaMA-2-70B", 1754.0, 1289.6),
    ("geo24", "3cluster24", "LLaMA-2-70B", 1515.0, 1212.2),
    ("cluster42", "cluster42", "LLaMA-2-70B", 5441.0, 4137.5),
    ("cluster10", "cluster10", "LLaMA-1-30B", 286.5, 286.6),
)
SAME = 1e-6


def helix(data: Path, name: str, model: str, *, partial: bool = False) -> FlowInstance:
    problem = helix_problem(data / "helix" / "clusters" / f"{name}.ini", model=model)
    return flow_instance(problem, problem.catalog(), problem.services[0], partial=partial)


class Clock:
    """CPU-seconds at which the search reached each of its values."""

    def __init__(self) -> None:
        self.began = time.process_time()
        self.seen: list[tuple[float, float]] = []

    def log(self, _seconds: float, value: float, _bound: float) -> None:
        self.seen.append((time.process_time() - self.began, value))

    def reached(self, value: float) -> float | None:
        return next((at for at, own in self.seen if own >= value), None)


def clusters(data: Path) -> tuple[list[Figure], dict[str, object]]:
    """Find the largest flows on Helix's clusters, beside the bounds and what Helix found."""
    if not (data / "helix").is_dir():
        leave_out("no data of Helix here")
        names = [name for key, *_ in CLUSTERS for name in (key, f"{key}_bound")]
        nothing = [Figure(name, None) for name in (*names, "cpu_s_max")]
        return nothing, {"cluster10_proved": None}
    figures: list[Figure] = []
    more: dict[str, object] = {}
    cpu = []
    print("cluster        flow    bound    gap  helix  CPU-s  to bar  evaluations")
    for key, name, model, bar, published in CLUSTERS:
        instance = helix(data, name, model)
        clock = Clock()
        found = search(instance, seed=1, log=clock.log)
        value = max_flow(instance, found.placement).value
        bound = upper_bound(instance, value=value).value
        cpu.append(found.cpu_seconds)
        at = clock.reached(bar)
        print(
            f"{key:10s} {value:8.1f} {bound:8.1f} {(bound - value) / bound:6.2%} {published:6.1f} "
            f"{found.cpu_seconds:6.1f} {'-' if at is None else f'{at:.2f}':>7s} {found.evaluations:12,d}"
        )
        figures.append(Figure(key, value, bar, at_least=True))
        figures.append(Figure(f"{key}_bound", bound))
        more[f"{key}_cpu_s_to_bar"] = at
        if key == "cluster10":
            more["cluster10_proved"] = bool(bound <= value * (1.0 + SAME))
        if key in ("single24", "cluster42"):
            more[f"{key}_partial_gap_percent"] = partial_gap(data, key, name, model, found)
    figures.append(Figure("cpu_s_max", max(cpu), 60))
    return figures, more


def partial_gap(data: Path, key: str, name: str, model: str, found: PlacementResult) -> float:
    """Return the proven gap with partial inference, from the placement without it."""
    instance = helix(data, name, model, partial=True)
    best = search(instance, work=WORK // 3, seed=1, start=[found.placement])
    value = max_flow(instance, best.placement).value
    bound = upper_bound(instance, value=value).value
    gap = 100.0 * (bound - value) / bound
    print(f"{key:10s} {value:8.1f} {bound:8.1f} {gap:5.2f}% with partial inference")
    return gap


def against_brute(count: int) -> list[Figure]:
    random = stream(4, "small clusters")
    equal = flowing = 0
    for case in range(count):
        instance = small_cluster(random)
        found = search(instance, evaluations=200_000, seed=case)
        own = max_flow(instance, found.placement).value
        best = brute(instance, above=own * (1.0 - SAME)).value
        equal += abs(best - own) <= 2 * SAME * max(own, best)
        flowing += best > 0.0
    print(f"\nbrute force: {equal} of {count} equal, {flowing} of them with a flow")
    return [
        Figure("brute_checked", count),
        Figure("brute_equal", equal, count, at_least=True),
        Figure("brute_with_flow", float(flowing)),
    ]


def many_sites() -> list[Figure]:
    """Place a model on hundreds of unlike machines at several sites; the gap is to the proven bound.

    CPU-seconds are those of everything: bound, lanes, annealing.
    """
    figures = []
    print("\nmachines sites      flow     bound    gap  CPU-s")
    for n, max_gap, max_cpu_s in ((200, 0.05, 20.0), (1000, 0.10, 60.0)):
        problem = parse_fleet(site_fleet(n))
        instance = flow_instance(problem, problem.catalog(), problem.services[0])
        began = time.process_time()
        found = search(instance, seed=1)
        cpu_s = time.process_time() - began
        value = max_flow(instance, found.placement).value
        gap = (found.bound - value) / found.bound
        sites = len(set(instance.regions))
        print(f"{n:8d} {sites:5d} {value:9.0f} {found.bound:9.0f} {gap:6.2%} {cpu_s:6.1f}")
        figures.append(Figure(f"n{n}_gap", gap, max_gap))
        figures.append(Figure(f"n{n}_cpu_s", cpu_s, max_cpu_s))
    return figures


def scale(sizes: tuple[int, ...], work: int) -> list[Figure]:
    """Time the search to 5 % below the best known: its own best, or another seed's with twice the work."""
    figures = []
    times: list[float] = []
    print("\nnodes      flow best known     bound    gap  CPU-s to 5 %  evaluations    MB")
    for n in sizes:
        instance = large_cluster(n, stream(n, "large clusters"))
        clock = Clock()
        found = search(instance, work=work, seed=1, log=clock.log)
        other = search(instance, work=2 * work, seed=2)
        value = max_flow(instance, found.placement).value
        known = max(value, max_flow(instance, other.placement).value)
        at = clock.reached(0.95 * known)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        gap = (found.bound - known) / found.bound
        print(
            f"{n:5d} {value:9.0f} {known:10.0f} {found.bound:9.0f} {gap:6.2%} "
            f"{'-' if at is None else f'{at:.2f}':>13s} {found.evaluations:12,d} {memory:5.0f}"
        )
        times += [] if at is None else [at]
        figures.append(Figure(f"scale{n}_cpu_s_to_5_percent", at))
        figures.append(Figure(f"scale{n}_gap_percent", 100 * gap, note="of the best known"))
        figures.append(Figure(f"scale{n}_rss_mb", memory))
    slope = None
    if len(times) == len(sizes):
        slope = float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
    figures.append(
        Figure("growth_exponent_nodes", slope, 1.5, note="best known is by this search alone")
    )
    return figures


def main() -> None:
    own = options(__doc__ or "")
    began = time.process_time()
    search(large_cluster(20, stream(0, "compile")), evaluations=2_000)
    print(f"compiled or loaded in {time.process_time() - began:.1f} CPU-s\n")
    found, more = clusters(own.data)
    figures = [*found, *against_brute(60 if own.quick else 500)]
    figures += many_sites()
    figures += scale(
        (100, 300) if own.quick else (100, 300, 1000), WORK // 4 if own.quick else WORK
    )
    finish(figures, **more)


if __name__ == "__main__":
    main()
