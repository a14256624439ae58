"""Plans judged by Helix's own event rules (`tests/reference/helix_events.py`), over Helix's own placements.

Both have all links of the cluster and the same requests, seeds 0 to 9. Offline another request always waits;
online as much arrives as Helix's files ask of its placement. `*_iwrr` are plans for a runtime with plain
round robin, judged with Helix's scheduler on the plan's flows; `*_ours` plans for Atoll's router, judged with
it. Helix's placement always has its own scheduler, and no plan was told of it; with `--given` there are
`*_given` figures as well, of plans that had it as a known placement (`atoll plan --known`).
`latency_ratio_max` is the largest ratio of median latencies online.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atoll.plan.files.helix import helix_problem
from atoll.plan.files.read import read_placement
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Router
from atoll.prove.rank import Simulated
from atoll.solve.effort import KnownPlacement
from atoll.solve.place.place_service import FlowEffort
from atoll.solve.place.place_solver import solve
from benchmarks.placement.helix_runs import lengths, online_work
from benchmarks.placement.judged import Judge
from benchmarks.report import DATA, Figure, finish, leave_out
from tests.reference.helix_events import IWRR, OURS, Placed, Run, Work, run

MODEL = "LLaMA-2-70B"
ONLINE_S = 1800.0
_SAFETY_S = 3600.0
"""Seconds after which a search is cut short: work is what ends it."""
_FLOWS = 8
"""Numberings of vertices that are tried for the flow behind a published figure."""
_SAME = 0.01
"""Tokens/s by which a published figure and one found here may differ."""
_REQUESTS = 30_000
_NAMES = ("single24", "geo", "cluster42")
KEYS = (
    *(f"{name}_{router}" for router in ("iwrr", "ours") for name in _NAMES),
    "latency_ratio_max",
)
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
class Told:
    """Of one run: decode tokens/s, median latencies, and how often something had no room."""

    tokens_per_s: float
    prompt_s: float
    decode_s: float
    turned_away: int
    waited: int
    overflows: int

    @classmethod
    def of(cls, found: Run) -> Told:
        """Read off a run what is kept of it."""
        return cls(
            found.tokens_per_s,
            float(np.median(found.prompt_s)),
            float(np.median(found.decode_s)),
            found.turned_away,
            found.waited,
            found.overflows,
        )


@dataclass(frozen=True)
class Side:
    """A placement as the rules take it, by which router, and when its clock begins."""

    placed: Placed
    begin_s: float
    router: int

    def offline(self, data: Path, seed: int) -> Told:
        """What it does when there is always another request."""
        work = _waiting(data, seed)
        return Told.of(run(self.placed, work, router=self.router, begin_s=self.begin_s))

    def online(self, data: Path, seed: int, tokens_per_s: float) -> Told:
        """What it does when so much arrives by the clock."""
        drawn = online_work(data, tokens_per_s, seed)
        work = Work(
            np.asarray(drawn.arrival_s, np.float64),
            np.asarray(drawn.input, np.int64),
            np.asarray(drawn.output, np.int64),
        )
        found = run(
            self.placed,
            work,
            router=self.router,
            online=True,
            begin_s=self.begin_s,
            from_s=0.0,
            until_s=ONLINE_S,
        )
        return Told.of(found)


@dataclass(frozen=True)
class Kept:
    """A folder with the plans and runs so far (None: nothing is kept), which several processes may share.

    `cpu_s` is what each of those that were asked for took, whichever process made it.
    """

    folder: Path | None
    cpu_s: dict[str, float] = field(default_factory=dict)

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was kept under a name, or what is made now."""
        path = None if self.folder is None else self.folder / f"{name}.json"
        if path is not None and path.is_file():
            kept = json.loads(path.read_text("utf-8"))
        else:
            began = time.process_time()
            kept = {"made": make(), "cpu_s": time.process_time() - began}
            if path is not None:
                # Written whole: a run that is ended leaves no half of a file.
                part = path.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps(kept), "utf-8")
                part.replace(path)
        self.cpu_s[name] = kept["cpu_s"]
        made: dict[str, Any] = kept["made"]
        return made

    def told(self, name: str, look: Callable[[], Told]) -> Told:
        """A run by its name."""
        return Told(**self.get(name, lambda: asdict(look())))


def main() -> None:
    """Judge all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds, plans with little effort")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the public data")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument(
        "--results", type=Path, help="keep plans and runs here, and go on from them"
    )
    parser.add_argument(
        "--given", action="store_true", help="also plans that Helix's placement was given to"
    )
    parser.add_argument("--cases", help="only these, as in geo,cluster42")
    arguments = parser.parse_args()
    data: Path = arguments.data
    if not (data / "helix").is_dir():
        leave_out("no data of Helix here")
        finish([Figure(name, None) for name in KEYS])
        return
    if arguments.results is not None:
        arguments.results.mkdir(parents=True, exist_ok=True)
    kept = Kept(arguments.results)
    seeds = range(min(2, arguments.seeds) if arguments.quick else arguments.seeds)
    work = 0.1 if arguments.quick else 1.0
    figures: list[Figure] = []
    latencies: list[float] = []
    asked = None if arguments.cases is None else arguments.cases.split(",")
    for case in CASES:
        if asked is not None and case.name not in asked:
            continue
        figures += _case(case, data, kept, seeds, latencies, work, given=arguments.given)
    figures.append(Figure("latency_ratio_max", max(latencies), 1.05))
    figures.append(Figure("cpu_s", sum(kept.cpu_s.values())))
    finish(figures, seeds=len(seeds))


def _case(
    case: Case,
    data: Path,
    kept: Kept,
    seeds: range,
    latencies: list[float],
    work: float,
    *,
    given: bool,
) -> list[Figure]:
    judge = Judge.read(data, case.cluster, MODEL)
    ranges = judge.published(case.solution)
    figures = [_published(case, data, judge, kept)]
    sides = {"helix": Side(next(judge.with_largest_flow(ranges)), judge.begin_s(ranges), IWRR)}
    asked = [(name, router, code, None) for name, router, code in ROUTERS]
    if given:
        asked += [(f"{name}_given", router, code, case) for name, router, code in ROUTERS]  # type: ignore[misc]
    for name, router, code, known in asked:
        plan_name = f"plan-{case.name}-{name}-{work:g}"
        make = partial(place, data, case.cluster, router, work, known)
        made = kept.get(plan_name, make)
        held, placed = judge.of_plan(Plan.model_validate(made))
        sides[name] = Side(placed, judge.begin_s(held), code)
        figures.append(Figure(f"{case.name}_{name}_plan_cpu_s", kept.cpu_s[plan_name]))
    runs: dict[tuple[str, str], list[Told]] = {}
    for seed in seeds:
        for who, side in sides.items():
            name = (
                f"{case.name}-{who}-{seed}"
                if who == "helix"
                else f"{case.name}-{who}-{work:g}-{seed}"
            )
            looks: dict[str, Callable[[], Told]] = {
                "offline": partial(side.offline, data, seed),
                "online": partial(side.online, data, seed, case.arrives),
            }
            for when, look in looks.items():
                runs.setdefault((who, when), []).append(kept.told(f"{name}-{when}", look))
    for (who, when), told in runs.items():
        _line(case, who, when, told)
    # What was told of Helix's placement has no bar.
    bars = (*case.bars, None, None)
    for (name, _, _, _), bar in zip(asked, bars, strict=False):
        key = f"{case.name}_{name}"
        pairs = zip(runs[name, "offline"], runs["helix", "offline"], strict=True)
        ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs]
        figures += [
            Figure(key, float(np.mean(ratios)), bar, at_least=True),
            Figure(f"{key}_min", min(ratios), note="the worst seed"),
        ]
        for when in ("online", "offline"):
            for what in ("prompt_s", "decode_s"):
                ratio = _mean(runs[name, when], what) / _mean(runs["helix", when], what)
                figures.append(Figure(f"{key}_{when}_{what.removesuffix('_s')}", ratio))
                if when == "online" and bar is not None:
                    latencies.append(ratio)
    return figures


def _published(case: Case, data: Path, judge: Judge, kept: Kept) -> Figure:
    """The published figure again: Helix's placement, on the links it kept, with the flow behind it."""

    def look() -> dict[str, Any]:
        ranges = judge.published(case.solution)
        links = judge.kept_links(case.solution)
        flows = judge.with_largest_flow(ranges, links, _FLOWS)
        begin_s = judge.begin_s(ranges)
        found = (Side(placed, begin_s, IWRR).offline(data, 0).tokens_per_s for placed in flows)
        seen: list[float] = []
        for value in found:
            seen.append(value)
            if abs(value - case.published) < _SAME:
                break
        return {"found": seen}

    found = kept.get(f"{case.name}-published", look)["found"]
    nearest = min(found, key=lambda value: abs(value - case.published))
    every = ", ".join(f"{value:.2f}" for value in sorted(found))
    note = f"published {case.published}; by largest flow {every}"
    return Figure(f"{case.name}_published", nearest, note=note)


def place(
    data: Path, cluster: str, router: Router, work: float, known: Case | None = None
) -> dict[str, Any]:
    """The plan for a cluster of Helix's that carries the most.

    It is given Helix's own placement where that is `known`.
    """
    problem = problem_of(data, cluster, router)
    catalog = problem.catalog()
    given: tuple[KnownPlacement, ...] = ()
    if known is not None:
        given = (read_placement(data / "helix/solutions" / known.solution, problem),)
    rank = Simulated(problem, catalog)
    effort = FlowEffort(seconds=_SAFETY_S, rank=rank, work=work, known=given)
    return solve("flow.search", problem, catalog, effort).model_dump(mode="json")


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


def _mean(runs: Sequence[Told], what: str) -> float:
    return float(np.mean([getattr(one, what) for one in runs]))


def _line(case: Case, who: str, when: str, runs: Sequence[Told]) -> None:
    tokens = [one.tokens_per_s for one in runs]
    print(
        f"  {case.name:9s} {who:5s} {when:7s} {np.mean(tokens):7.1f} tokens/s "
        f"({min(tokens):.1f} to {max(tokens):.1f})   prompt {_mean(runs, 'prompt_s'):6.2f} s   "
        f"decode {_mean(runs, 'decode_s'):5.2f} s   turned away {_mean(runs, 'turned_away'):.0f}   "
        f"waited {_mean(runs, 'waited'):.0f}   overflows {_mean(runs, 'overflows'):.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
