"""Random cases by seed: which are asked for, which a file has already, and what was found of each."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

Thing = TypeVar("Thing")


class Draw:
    """Random things by a key of numbers."""

    def __init__(self, *key: int) -> None:
        self.rng = np.random.default_rng(key)

    def chance(self, probability: float) -> bool:
        """Return true with a probability."""
        return bool(self.rng.random() < probability)

    def pick(self, things: tuple[Thing, ...], weights: tuple[float, ...] | None = None) -> Thing:
        """Return one of some things, by weights if there are any."""
        return things[int(self.rng.choice(len(things), p=weights))]

    def uniform(self, low: float, high: float) -> float:
        """Return a number between two."""
        return float(self.rng.uniform(low, high))

    def between(self, low: float, high: float) -> float:
        """Return a number whose logarithm is uniform, to three digits."""
        return float(f"{np.exp(self.rng.uniform(np.log(low), np.log(high))):.3g}")


@dataclass
class CaseOutcome:
    """What was found of a case: `faults` in words by name."""

    seed: int
    kind: str
    status: str = ""
    usd_per_hour: float | None = None
    bound: float | None = None
    faults: dict[str, list[str]] = field(default_factory=dict)

    def fault(self, name: str, text: str) -> None:
        """Note that something is false."""
        self.faults.setdefault(name, []).append(text)


Found = TypeVar("Found", bound=CaseOutcome)


@dataclass(frozen=True)
class CaseCounts:
    """How many cases a full run has, and a quick one, which begins none after so many seconds."""

    full: int
    quick: int
    quick_s: float


def case_options(description: str) -> argparse.ArgumentParser:
    """Return the options of a check with cases by seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases, under three minutes")
    parser.add_argument("--cases", type=int, help="so many, from seed 0 on")
    parser.add_argument("--seeds", help="only these, as in 7,100:200")
    parser.add_argument("--results", type=Path, help="go on from what this file has, and add to it")
    return parser


def run_cases(
    chosen: argparse.Namespace,
    counts: CaseCounts,
    kind: type[Found],
    run_case: Callable[[int], Found],
    row: Callable[[Found], str],
) -> dict[int, Found]:
    """Run cases, those that are known left out, tell of each as it ends, and return all by seed."""
    outcomes, began_s = read_known(chosen.results, kind), time.perf_counter()
    wanted = chosen.cases or (counts.quick if chosen.quick else counts.full)
    for seed in list_seeds(chosen.seeds, wanted):
        if seed in outcomes:
            continue
        if chosen.quick and time.perf_counter() - began_s > counts.quick_s:
            break
        one = outcomes[seed] = run_case(seed)
        usd, bound = (
            "-" if value is None else f"{value:.3f}" for value in (one.usd_per_hour, one.bound)
        )
        told = f"{seed:5d} {one.kind:11s} {one.status:10s} {usd:>8s} {bound:>8s} {row(one)}"
        print(f"  {told}", flush=True)
        for name, texts in one.faults.items():
            for text in texts:
                print(f"        {name}: {text}", flush=True)
        if chosen.results is not None:
            with chosen.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(one)) + "\n")
    return outcomes


def read_known(path: Path | None, kind: type[Found]) -> dict[int, Found]:
    """Return by seed what a file of results has; nothing where there is no file."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {one.seed: one for one in (kind(**json.loads(line)) for line in lines)}


def list_seeds(text: str | None, cases: int) -> Iterable[int]:
    """Return the seeds that "7", "100:200" or both with commas between name, else so many from 0 on."""
    if text is None:
        return range(cases)
    spans = (part.partition(":") for part in text.split(","))
    return [
        seed
        for first, _, last in spans
        for seed in range(int(first), int(last) if last else int(first) + 1)
    ]
