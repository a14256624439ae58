"""Plans judged by Helix's own event rules (`tests/reference/helix_events.py`), over Helix's own placements.

Both have all links of the cluster and the same requests, seeds 0 to 9. Offline another request always waits;
online as much arrives as Helix's files ask of its placement. `*_iwrr` are plans for a runtime with plain
round robin, judged with Helix's scheduler on the plan's flows; `*_ours` plans for Atoll's router, judged with
it. Helix's placement always has its own scheduler. `latency_ratio_max` is the largest ratio of median
latencies online.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.plan.files.helix import helix_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Router
from atoll.prove.rank import Simulated
from atoll.solve.place.place_service import FlowEffort
from atoll.solve.place.place_solver import solve
from benchmarks.placement.helix_runs import lengths, online_work
from benchmarks.placement.judged import Judge
from benchmarks.report import Figure, finish, options
from tests.reference.helix_events import IWRR, OURS, Placed, Run, Work, run

MODEL = "LLaMA-2-70B"
ONLINE_S = 1800.0
_SAFETY_S = 3600.0
"""Seconds after which a search is cut short: work is what ends it."""
_FLOWS = 8
"""Numberings of vertices that are tried for the flow behind a published figure."""
_REQUESTS = 30_000
ROUTERS: tuple[tuple[str, Router, int], ...] = (("iwrr", "plain", IWRR), ("ours", "atoll", OURS))


@dataclass(frozen=True)
class Case:
    """A cluster, the published decode tokens/s of Helix's placement, tokens/s that arrive online, bars."""

    name: str
    cluster: str
    published: float
    arrives: float
    bars: tuple[float, float]

    @property
    def solution(self) -> str:
        """The file of Helix's placement."""
        return f"{self.cluster}/llama70b/ilp/ilp_sol.ini"


CASES = (
    Case("single24", "single24", 252.08, 700.0, (1.15, 1.2)),
    Case("geo", "3cluster24", 97.98, 320.0, (1.5, 1.8)),
    Case("cluster42", "cluster42", 645.57, 2150.0, (1.1, 1.2)),
)


@dataclass(frozen=True)
class Side:
    """A placement as the rules take it, by which router, and when its clock begins."""

    placed: Placed
    begin_s: float
    router: int

    def offline(self, data: Path, seed: int) -> Run:
        """What it does when there is always another request."""
        return run(self.placed, _waiting(data, seed), router=self.router, begin_s=self.begin_s)

    def online(self, data: Path, seed: int, tokens_per_s: float) -> Run:
        """What it does when so much arrives by the clock."""
        drawn = online_work(data, tokens_per_s, seed)
        work = Work(
            np.asarray(drawn.arrival_s, np.float64),
            np.asarray(drawn.input, np.int64),
            np.asarray(drawn.output, np.int64),
        )
        return run(
            self.placed,
            work,
            router=self.router,
            online=True,
            begin_s=self.begin_s,
            from_s=0.0,
            until_s=ONLINE_S,
        )


def main() -> None:
    """Judge all cases and print them."""
    arguments = options(__doc__ or "")
    data: Path = arguments.data
    if not (data / "helix").is_dir():
        finish([Figure("single24_iwrr", None, note="no data of Helix here")])
        return
    began = time.process_time()
    figures: list[Figure] = []
    latencies: list[float] = []
    for case in CASES:
        figures += _case(case, data, latencies, quick=arguments.quick)
    figures.append(Figure("latency_ratio_max", max(latencies), 1.05))
    figures.append(Figure("cpu_s", time.process_time() - began))
    finish(figures)


def _case(case: Case, data: Path, latencies: list[float], *, quick: bool) -> list[Figure]:
    judge = Judge.read(data, case.cluster, MODEL)
    ranges = judge.published(case.solution)
    begin_s = judge.begin_s(ranges)
    figures = [_published(case, data, judge, quick=quick)]
    helix = Side(next(judge.with_largest_flow(ranges)), begin_s, IWRR)
    seeds = range(2 if quick else 10)
    theirs = [helix.offline(data, seed) for seed in seeds]
    their_online = [helix.online(data, seed, case.arrives) for seed in seeds]
    _line(case, "helix", theirs, their_online)
    for (name, router, code), bar in zip(ROUTERS, case.bars, strict=True):
        plan, cpu_s = place(data, case.cluster, router, work=0.1 if quick else 1.0)
        held, placed = judge.of_plan(plan)
        side = Side(placed, judge.begin_s(held), code)
        ours = [side.offline(data, seed) for seed in seeds]
        our_online = [side.online(data, seed, case.arrives) for seed in seeds]
        _line(case, name, ours, our_online)
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)]
        key = f"{case.name}_{name}"
        figures += [
            Figure(key, float(np.mean(ratios)), bar, at_least=True),
            Figure(f"{key}_min", min(ratios), note="the worst seed"),
            Figure(f"{key}_plan_cpu_s", cpu_s),
        ]
        for what in ("prompt_s", "decode_s"):
            for when, one, other in (
                ("online", our_online, their_online),
                ("offline", ours, theirs),
            ):
                ratio = _median(one, what) / _median(other, what)
                figures.append(Figure(f"{key}_{when}_{what.removesuffix('_s')}", ratio))
                if when == "online":
                    latencies.append(ratio)
    return figures


def _published(case: Case, data: Path, judge: Judge, *, quick: bool) -> Figure:
    """The published figure again: Helix's placement, on the links it kept, with the flow behind it."""
    ranges = judge.published(case.solution)
    kept = judge.kept_links(case.solution)
    found = [
        Side(placed, judge.begin_s(ranges), IWRR).offline(data, 0).tokens_per_s
        for placed in judge.with_largest_flow(ranges, kept, 2 if quick else _FLOWS)
    ]
    nearest = min(found, key=lambda value: abs(value - case.published))
    every = ", ".join(f"{value:.2f}" for value in sorted(found))
    note = f"published {case.published}; by largest flow {every}"
    return Figure(f"{case.name}_published", nearest, note=note)


def place(data: Path, cluster: str, router: Router, *, work: float = 1.0) -> tuple[Plan, float]:
    """The default plan for a cluster of Helix's, as much as it carries, and the CPU-seconds it took."""
    problem = problem_of(data, cluster, router)
    catalog = problem.catalog()
    effort = FlowEffort(seconds=_SAFETY_S, rank=Simulated(problem, catalog), work=work)
    began = time.process_time()
    plan = solve("flow.search", problem, catalog, effort)
    return plan, time.process_time() - began


def problem_of(data: Path, cluster: str, router: Router | None, model: str = MODEL) -> Problem:
    """A cluster of Helix's with a model, where the runtime has a router."""
    problem = helix_problem(data / f"helix/clusters/{cluster}.ini", model=model)
    return problem.replace(settings={**dict(problem.settings), "router": router})


def _waiting(data: Path, seed: int) -> Work:
    """Requests that all wait, in the order in which Helix draws their lengths."""
    table = lengths(data)
    draw = random.Random(seed)
    rows = [draw.randint(0, len(table) - 1) for _ in range(_REQUESTS)]
    return Work(
        np.zeros(_REQUESTS), table[rows, 0].astype(np.int64), table[rows, 1].astype(np.int64)
    )


def _median(runs: Sequence[Run], what: str) -> float:
    return float(np.mean([np.median(getattr(one, what)) for one in runs]))


def _line(case: Case, who: str, offline: Sequence[Run], online: Sequence[Run]) -> None:
    for when, runs in (("offline", offline), ("online", online)):
        tokens = [one.tokens_per_s for one in runs]
        print(
            f"  {case.name:9s} {who:5s} {when:7s} {np.mean(tokens):7.1f} tokens/s "
            f"({min(tokens):.1f} to {max(tokens):.1f})   prompt {_median(runs, 'prompt_s'):6.2f} s   "
            f"decode {_median(runs, 'decode_s'):5.2f} s   turned away {sum(r.turned_away for r in runs)}   "
            f"waited {sum(r.waited for r in runs)}   overflows {sum(r.overflows for r in runs)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
