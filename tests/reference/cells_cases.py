"""Random small any-to-any programs, and how the solver compares with trying everything on them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Literal

from atoll.plan.plan import Market
from atoll.solve.graph.executor_program import solve_program
from atoll.solve.graph.graph_types import (
    Chain,
    ClassDemand,
    ExecutorType,
    GraphAnswer,
    GraphProgram,
    Machines,
    StandingExecutors,
)
from tests.reference import cells_brute

MAX_CANDIDATES = 6_000
"""Vectors of counts that a case may have for trying everything to stay quick."""
_SAME = 1e-6
_SIZES = (1, 2, 4, 8)
_MARKETS: tuple[Market, ...] = ("on-demand", "spot", "owned")


@dataclass(frozen=True)
class Checked:
    """One case: what was asked, found, and what is best; `error` is the relative difference."""

    program: GraphProgram
    answer: GraphAnswer
    best: cells_brute.Best
    error: float


def make_case(
    seed: int, *, max_candidates: int = MAX_CANDIDATES, shared: bool = False
) -> GraphProgram:
    """Return the small program of a seed: among draws the first that can be tried out.

    With `shared` it has two services or more, and some of its executors work for several of them.
    """
    for draw in range(1000):
        rng = random.Random(1_000 * seed + draw)
        program = _draw(rng)
        if shared:
            program = _share(rng, program)
            if not any(executor.guests for executor in program.executors):
                continue
        if 1 < cells_brute.count_candidates(program) <= max_candidates:
            return program
    raise RuntimeError(f"seed {seed}: no small program in 1000 draws")


def _draw(rng: random.Random) -> GraphProgram:
    regions = ["east", "west"][: rng.choice((1, 1, 2))]
    gpus = ["P", "Q", "R"][: rng.choice((1, 2, 2, 3))]
    machines = _draw_machines(rng, regions, gpus)
    services = ["s", "t"][: rng.choice((1, 1, 2))]
    classes: list[ClassDemand] = []
    executors: list[ExecutorType] = []
    for service in services:
        parts = ["a", "b", "c", "d"][
            : rng.choice((2, 2, 3, 4) if len(services) == 1 else (2, 2, 3))
        ]
        mine = _draw_classes(rng, service, parts)
        classes += mine
        executors += _draw_executors(rng, service, parts, mine, machines)
    goal: Literal["cost", "most"] = rng.choice(("cost", "cost", "most"))
    shortage: Literal["fail", "fraction", "priority"] = rng.choice(("fraction", "priority", "fail"))
    rent = sum(m.usd_per_hour * m.available for m in machines)
    program = GraphProgram(
        machines=tuple(machines),
        executors=tuple(executors),
        classes=tuple(classes),
        goal=goal,
        budget_usd_per_hour=round(rng.uniform(0.3, 1.0) * rent, 2) if rng.random() < 0.3 else None,
        spot_share=rng.choice((0.3, 0.5)) if rng.random() < 0.2 else None,
        max_machines=rng.randint(1, 4) if rng.random() < 0.2 else None,
        shortage=shortage,
    )
    return _add_standing(rng, program) if rng.random() < 0.3 else program


def _draw_machines(rng: random.Random, regions: list[str], gpus: list[str]) -> list[Machines]:
    machines = []
    for region in regions:
        for gpu in gpus:
            size = rng.choice(_SIZES)
            for market in rng.sample(_MARKETS, rng.choice((1, 1, 1, 2))):
                price = 0.0 if market == "owned" else round(rng.uniform(0.5, 3.0) * size, 2)
                if market == "spot":
                    price = round(0.5 * price, 2)
                sizes = tuple(s for s in _SIZES if s <= size)
                key = (region, f"{size}x{gpu}", market)
                machines.append(Machines(key, gpu, size, rng.randint(1, 3), price, sizes))
    return machines


def _draw_classes(rng: random.Random, service: str, parts: list[str]) -> list[ClassDemand]:
    classes = []
    for name in ["x", "y", "z"][: rng.choice((1, 1, 2, 3))]:
        ways = [tuple(parts)]
        if len(parts) > 2 and rng.random() < 0.5:
            ways.append(tuple(parts[1:]))
        chains = []
        if rng.random() < 0.4:
            chains.append(Chain(parts[0], parts[1], round(rng.uniform(0.7, 1.8), 2)))
            if len(parts) > 2 and rng.random() < 0.5:
                chains.append(Chain(parts[1], parts[2], round(rng.uniform(0.7, 1.8), 2)))
        rate = round(rng.uniform(0.2, 3.0), 2)
        classes.append(
            ClassDemand(
                service,
                name,
                rate,
                tuple(ways),
                tuple(chains),
                dict.fromkeys(pairwise(parts), 1e6),
                priority=rng.choice((1.0, 2.0, 5.0)),
            )
        )
    return classes


def _draw_executors(
    rng: random.Random,
    service: str,
    parts: list[str],
    classes: list[ClassDemand],
    machines: list[Machines],
) -> list[ExecutorType]:
    kinds = sorted({f"{m.gpu}:{size}" for m in machines for size in m.sizes})
    groups = [group for size in range(1, len(parts) + 1) for group in combinations(parts, size)]
    single = [(part,) for part in parts]
    chosen = single + rng.sample(groups, min(len(groups), rng.choice((0, 1, 2, 3, 4))))
    executors = []
    for k, group in enumerate(chosen):
        kind = rng.choice(kinds)
        counts = {kind: 1}
        if rng.random() < 0.1:
            other = rng.choice(kinds)
            counts[other] = counts.get(other, 0) + 1
        uses = tuple(sorted(counts.items()))
        size = sum(int(name.rsplit(":", 1)[1]) * n for name, n in uses)
        speed = rng.uniform(0.5, 1.5) * size**0.9
        seconds = {
            (*klass.key, part): round(rng.uniform(0.1, 0.8) / speed, 4)
            for klass in classes
            for part in group
        }
        latency = {key: round(rng.choice((0.2, 0.4, 0.6, 0.8, 1.0)), 2) for key in seconds}
        executors.append(ExecutorType(service, group, uses, seconds, latency, label=str(k)))
    return executors


def _share(rng: random.Random, program: GraphProgram) -> GraphProgram:
    """Let executors take requests of other services, too, for the parts that have one name there."""

    def share(executor: ExecutorType) -> ExecutorType:
        keys = [
            (*klass.key, part)
            for klass in program.classes
            if klass.service != executor.service
            for part in dict.fromkeys(part for route in klass.routes for part in route)
            if part in executor.parts
        ]
        if not keys or rng.random() < 0.3:
            return executor
        own = list(executor.seconds.values())
        return replace(
            executor,
            seconds={
                **executor.seconds,
                **{key: round(rng.choice(own) * rng.uniform(0.7, 1.3), 4) for key in keys},
            },
            latency_s={
                **executor.latency_s,
                **{key: round(rng.choice((0.2, 0.4, 0.6, 0.8, 1.0)), 2) for key in keys},
            },
            guests=tuple(sorted({service for service, _, _ in keys})),
        )

    return replace(program, executors=tuple(share(one) for one in program.executors))


def _add_standing(rng: random.Random, program: GraphProgram) -> GraphProgram:
    """Let some executors run already, on offers that have room for them."""
    left = {m.key: m.gpus * m.available for m in program.machines}
    standing = []
    for e in rng.sample(range(len(program.executors)), min(2, len(program.executors))):
        executor = program.executors[e]
        region = rng.choice(program.machines).region
        offers = []
        for kind, count in executor.uses:
            gpu, size = kind.rsplit(":", 1)
            for _ in range(count):
                room = [
                    m.key
                    for m in program.machines
                    if m.region == region
                    and m.gpu == gpu
                    and int(size) in m.sizes
                    and left[m.key] >= int(size)
                ]
                if room:
                    offers.append(rng.choice(room))
                    left[offers[-1]] -= int(size)
        if len(offers) == sum(count for _, count in executor.uses):
            standing.append(StandingExecutors(e, tuple(offers), 1))
    return replace(program, standing=tuple(standing), init_penalty=rng.choice((0.0, 0.5, 1.0)))


def check_case(program: GraphProgram) -> Checked:
    """Solve a program to the end, try everything, and compare."""
    answer = solve_program(program, gap=1e-7)
    best = cells_brute.solve(program)
    if program.goal == "most":
        error = _differ(answer.objective, best.share)
    elif answer.status == "infeasible" or best.share <= _SAME:
        same = answer.status == "infeasible" and best.share <= _SAME
        error = 0.0 if same else float("inf")
    else:
        error = max(_differ(answer.share, best.share), _differ(answer.objective, best.cost))
    return Checked(program, answer, best, error)


def _differ(value: float, other: float) -> float:
    return abs(value - other) / max(1.0, abs(other))


def check_exact(count: int, seed: int = 0, *, shared: bool = False) -> tuple[int, int, float]:
    """Return how many random cases were checked, how many are equal, and the worst relative error."""
    errors = [check_case(make_case(seed + i, shared=shared)).error for i in range(count)]
    return count, sum(error <= _SAME for error in errors), max(errors, default=0.0)


_PARTS = {"image": 0.2, "audio": 0.1, "video": 0.6, "llm": 1.0, "speech": 1.5}
"""Seconds of a part on a slow GPU, before a random factor."""
_WAYS = {
    "text": ("llm",),
    "look": ("image", "llm"),
    "talk": ("audio", "llm", "speech"),
    "watch": ("image", "video", "llm", "speech"),
}
_GPUS = {"P": (2.0, 1.0), "Q": (4.0, 2.2), "R": (1.0, 0.45), "S": (6.0, 3.4)}
"""USD/h and speed."""


def make_large(seed: int, goal: Literal["cost", "most"], *, options: int = 25) -> GraphProgram:
    """Return 16 machines of 8 GPUs of 4 types, and 4 services with `options` sets of parts on 16 kinds.

    Seconds go with part, GPU and size; parts that need memory are slower in company.
    """
    rng = random.Random(seed)
    machines = tuple(
        Machines(("east", f"8x{gpu}", "on-demand"), gpu, 8, 4, 8 * usd, _SIZES)
        for gpu, (usd, _) in _GPUS.items()
    )
    groups = [g for n in range(1, 6) for g in combinations(_PARTS, n)][:options]
    executors: list[ExecutorType] = []
    classes: list[ClassDemand] = []
    for service in ("s", "t", "u", "v"):
        base = {(c, p): rng.uniform(0.5, 2.0) * s for c in _WAYS for p, s in _PARTS.items()}
        scaling = {part: rng.uniform(0.6, 0.98) for part in _PARTS}
        fit = {(part, gpu): rng.uniform(0.7, 1.2) for part in _PARTS for gpu in _GPUS}
        for group in groups:
            for gpu, (_, speed) in _GPUS.items():
                for size in _SIZES:
                    if "llm" in group and size < 2 and gpu in "PR":
                        continue
                    company = 1.0 + 0.08 * (len(group) - 1) / size
                    seconds = {
                        (service, c, p): base[c, p]
                        / (fit[p, gpu] * speed * size ** scaling[p])
                        * (company if p in ("llm", "speech") else 1.0)
                        for c, way in _WAYS.items()
                        for p in group
                        if p in way
                    }
                    latency = {key: 3.0 * value for key, value in seconds.items()}
                    uses = ((f"{gpu}:{size}", 1),)
                    executors.append(ExecutorType(service, group, uses, seconds, latency))
        classes += [
            ClassDemand(service, c, 0.6 * rng.uniform(1.0, 4.0), (way,)) for c, way in _WAYS.items()
        ]
    return GraphProgram(machines, tuple(executors), tuple(classes), goal=goal)
