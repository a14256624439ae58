"""Placement of one model on 200, 1,000 and 10,000 machines, for every goal, with its proven bound.

A fleet of 200 has two equal sites of A100, L4 and T4; larger ones have sites of 250 machines, each with a
mix of its own. More is asked for than the machines can serve. `small-sites` is the largest flow of a model of
80 layers on seven kinds of machines, in unlike sites of 20 on average; it is left out for 10,000. The gap is
the largest of all goals, measured on the plan after the validator has passed it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from atoll.core.rng import stream
from atoll.plan.plan import Goal
from benchmarks.placement.flow_cases import site_fleet

SMALL = "small-sites"
"""The goal that is measured on many small sites."""
GOALS: tuple[tuple[str, Goal, bool], ...] = (
    ("promised", "sustained", True),
    ("max-flow", "max-flow", False),
    (SMALL, "max-flow", False),
)
_KINDS = (("A100-80:1", 0.25), ("L4:1", 0.4), ("T4:1", 0.35))
_SITE = 250
_SMALL_SITE = 20
_MAX_SMALL = 1_000
"""Machines up to which small sites are measured."""


def fleet(n: int, seed: int = 0) -> str:
    """Return a fleet file of n machines: at most 200 in two equal sites, more in unlike ones of 250."""
    random = stream(seed, "scale", str(n))
    sites = 2 if n <= 200 else n // _SITE
    lines = [
        "services:",
        "  chat:",
        "    model: qwen3-32b",
        "    ttft: 10s",
        "    tpot: 200ms",
        f"    rate: {2 * n}/s",
        "    lengths: azure-conv",
        "cluster:",
        "  nodes:",
    ]
    for site in range(sites):
        machines = n // sites + (site < n % sites)
        shares = [share for _, share in _KINDS]
        if sites > 2:
            shares = random.dirichlet([12.0 * share for share in shares]).tolist()
        numbers = [int(share * machines) for share in shares[:-1]]
        numbers.append(machines - sum(numbers))
        lines.append(f"    site-{site}:")
        lines += [
            f"      {kind}: {number}"
            for (kind, _), number in zip(_KINDS, numbers, strict=True)
            if number
        ]
    lines.append("  links:")
    lines.append('    - {between: ["*", "*"], bandwidth: 1Gbit/s, latency: 20ms}')
    for site in range(sites):
        inside = f"[site-{site}, site-{site}], bandwidth: 10Gbit/s, latency: 200us"
        lines.append(f"    - {{between: {inside}}}")
    return "\n".join(lines) + "\n"


def place(text: str, goal: Goal, *, promised: bool) -> tuple[float, float, float, float, float]:
    """Place on a fleet; return flow, bound, gap in per cent, CPU-seconds and the most MB in use."""
    from atoll.plan.files.fleet_file import parse_fleet
    from atoll.plan.validate.check import check, goal_value
    from atoll.solve.place.place_service import FlowEffort
    from atoll.solve.place.place_solver import solve

    problem = parse_fleet(text)
    catalog = problem.catalog()
    began = time.process_time()
    # Counted work ends it, not the clock.
    effort = FlowEffort(seconds=1e6, objective=goal, promise=promised)
    plan = solve("flow.search", problem, catalog, effort)
    cpu_s = time.process_time() - began
    check(plan, problem, catalog)
    value, bound = goal_value(plan, problem), plan.bound or 0.0
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return value, bound, 100.0 * (1.0 - value / bound), cpu_s, memory_mb


def run(quick: bool) -> dict[str, float | None]:
    """Return the figures of placement at scale by key; with `quick` fewer machines."""
    figures: dict[str, float | None] = {}
    print("machines goal           tokens/s       bound    gap  CPU-s     MB")
    for n in (200, 1000) if quick else (200, 1000, 10000):
        results = []
        for name, _, _ in GOALS:
            if name == SMALL and n > (200 if quick else _MAX_SMALL):
                continue
            # Each in a process of its own, so that the memory of one is not counted for another.
            command = [sys.executable, "-m", __spec__.name, str(n), name]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            value, bound, gap, cpu_s, memory_mb = map(float, said.split()[-5:])
            results.append((gap, cpu_s, memory_mb))
            print(
                f"{n:8d} {name:11s} {value:11.0f} {bound:11.0f} {gap:5.1f}% {cpu_s:6.1f} {memory_mb:6.0f}",
                flush=True,
            )
        for key, worst in zip(
            ("gap", "cpu_s", "mb"), map(max, zip(*results, strict=True)), strict=True
        ):
            figures[f"n{n}_{key}"] = round(worst, 2)
    return figures


if __name__ == "__main__":
    _name, _goal, _promised = next(own for own in GOALS if own[0] == sys.argv[2])
    _n = int(sys.argv[1])
    _fleet = site_fleet(_n, sites=_n // _SMALL_SITE) if _name == SMALL else fleet(_n)
    print(*place(_fleet, _goal, promised=_promised))
