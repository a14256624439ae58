"""What plans cost: Atoll against Homo and Cauchy in Coral's set-ups, beside the paper's ratios.

Every method gets the same problem, the same exact layouts and the same validator. Each baseline is run twice:
as strong as its definition allows (replicas may be pipelines over several equal nodes), and with single-node
replicas, which is what the paper's runs of both show. Under scarcity goodput is the mean share of demand
served over all models.

Layouts are free, as in the paper; keys that begin with `run_` are of layouts that an engine runs, for all
methods: what of the saving can be had. `--quick` leaves those out, and scarcity in the core set-up.
"""

from __future__ import annotations

import time

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.templates.library import libraries
from atoll.solve.templates.template_cache import TemplateCache
from benchmarks.planning.allocation import edge_margin, gpu_memory
from benchmarks.planning.coral import (
    LARGE,
    SMALL,
    as_it_runs,
    core,
    extended,
    heavy,
    scaled,
    scarce,
)
from benchmarks.report import Figure, finish, options

METHODS = ("optimal", "homogeneous", "cauchy", "homogeneous-node", "cauchy-node")
PAPER = {
    "core": (1.62, 1.60),
    "extended": (3.14, 2.66),
    "core_large": (1.82, 1.78),
    "large": (2.79, 3.47),
    "core_small": (1.1, 1.1),
    "small": (2.34, 1.64),
}
GOODPUT = {"core": (1.24, 1.0), "extended": (7.64, 2.39)}
MARGIN = {"core": 1.25, "extended": 1.75}
SHORT = {
    "homo": "homogeneous",
    "cauchy": "cauchy",
    "homo_node": "homogeneous-node",
    "cauchy_node": "cauchy-node",
}
DEADLINE_S = 600.0


def costs(name: str, problem: Problem, catalog: Catalog) -> dict[str, float | None]:
    """Return dollars per hour of every method; None where it cannot meet demand."""
    found: dict[str, float | None] = {}
    start = time.perf_counter()
    for method in METHODS:
        plan = solve(problem, PlanRequest(solver=method, deadline_s=DEADLINE_S, catalog=catalog))
        met = plan.instances and min(plan.served_fraction.values()) >= 1.0
        found[method] = plan.usd_per_hour if met else None
    own = found["optimal"]
    cells = "".join(f"{_cost(found[m]):>12s}{_ratio(found[m], own):>7s}" for m in METHODS[1:])
    seconds = time.perf_counter() - start
    print(f"  {name:16s}{_cost(own):>10s}{cells}  {seconds:6.1f} s", flush=True)
    return found


def _cost(usd: float | None) -> str:
    return "-" if usd is None else f"${usd:,.2f}"


def _ratio(usd: float | None, own: float | None) -> str:
    return "" if usd is None or not own else f"x{usd / own:.2f}"


def ratio(found: dict[str, float | None], method: str) -> float | None:
    """Return how many times dearer a method is than Atoll."""
    own, other = found["optimal"], found[method]
    return None if own is None or other is None else other / own


def goodput(plan: Plan, problem: Problem) -> float:
    """Return the mean over services of the share of their demand that is served."""
    shares = [plan.served_fraction.get(service.name, 0.0) for service in problem.services]
    return sum(shares) / len(shares)


def served(method: str, problem: Problem, catalog: Catalog) -> tuple[float, float, Plan]:
    """Return the goodput of a method, the common share of every demand it meets, and its plan.

    Goodput is the better of two: as it is, or with all demands scaled down. Scaling down together until
    everything is met is what the paper does, and the common share is that; where one model cannot be
    carried at all it is nothing, so serving what can be served counts for goodput too.
    """
    best = solve(problem, PlanRequest(solver=method, deadline_s=DEADLINE_S, catalog=catalog))
    most = goodput(best, problem)
    low, high = (1.0 if most >= 1.0 else 0.0), 1.0
    if method == "optimal":
        low = min(best.served_fraction.values(), default=0.0)
    while method != "optimal" and most < 1.0 and high - low > 0.01:
        middle = (low + high) / 2.0
        plan = solve(
            scaled(problem, middle),
            PlanRequest(solver=method, deadline_s=DEADLINE_S, catalog=catalog),
        )
        if min(plan.served_fraction.values(), default=0.0) >= 1.0:
            low = middle
            if middle > most:
                most, best = middle, plan
        else:
            high = middle
    return most, low, best


def measure_costs(prefix: str, setups: dict[str, Problem], catalog: Catalog) -> list[Figure]:
    """Figures 7 and 11: what meeting all demand costs."""
    figures = []
    layouts = "that engines run" if prefix else "free"
    print(f"\nLayouts {layouts}")
    print(f"  {'set-up':16s}{'Atoll':>10s}" + "".join(f"{m:>19s}" for m in METHODS[1:]))
    for setup, problem in setups.items():
        part = "core_" if setup == "core" else ""
        cases = {
            setup: problem,
            f"{part}large": heavy(problem, LARGE[problem.name]),
            f"{part}small": heavy(problem, SMALL[problem.name]),
        }
        for name, case in cases.items():
            found = costs(name, case, catalog)
            for short, method in SHORT.items():
                told = PAPER[name][short.startswith("cauchy")]
                figures.append(
                    Figure(f"{prefix}{name}_vs_{short}", ratio(found, method), note=f"paper {told}")
                )
    return figures


def measure_goodput(
    prefix: str, setups: dict[str, Problem], catalog: Catalog, cache: TemplateCache
) -> list[Figure]:
    """Figures 8 to 10: what is served where there are too few nodes."""
    figures = []
    print("\nScarce: goodput (mean share of demand served over models), common share, $/h")
    for setup, problem in setups.items():
        library = libraries(problem, catalog, cache=cache)
        plenty = solve(
            problem, PlanRequest(solver="optimal", deadline_s=DEADLINE_S, catalog=catalog)
        )
        start = time.perf_counter()
        edge = edge_margin(problem, plenty, catalog, library)
        print(f"  {setup}: edge at {edge:.1f}, {time.perf_counter() - start:6.1f} s", flush=True)
        for kind, factor in (("scarce", MARGIN[setup]), ("edge", 1.05)):
            tight = scarce(problem, gpu_memory(plenty, catalog), edge * factor)
            shares: dict[str, float] = {}
            common: dict[str, float] = {}
            for method in METHODS:
                start = time.perf_counter()
                fraction, together, plan = served(method, tight, catalog)
                seconds = time.perf_counter() - start
                shares[method], common[method] = fraction, together
                label = f"{setup}-{kind}"
                print(
                    f"  {label:16s} {method:18s} {fraction:6.1%} {together:6.1%}"
                    f" ${plan.usd_per_hour:9.2f}  {seconds:6.1f} s",
                    flush=True,
                )
            name = prefix + (kind if setup == "extended" else f"core_{kind}")
            for short, method in SHORT.items():
                told = f"paper {GOODPUT[setup][short.startswith('cauchy')]}"
                for what, of in (("goodput", shares), ("common", common)):
                    value = of["optimal"] / of[method] if of[method] > 0 else None
                    figures.append(Figure(f"{name}_{what}_vs_{short}", value, note=told))
    return figures


def main() -> None:
    """Compare all set-ups."""
    arguments = options(__doc__ or "")
    catalog, cache = Catalog.default(), TemplateCache()
    figures: list[Figure] = []
    kinds = ("",) if arguments.quick else ("", "run_")
    for kind in kinds:
        setups = {"core": core(), "extended": extended()}
        if kind:
            setups = {name: as_it_runs(problem) for name, problem in setups.items()}
        figures += measure_costs(kind, setups, catalog)
        if arguments.quick:
            del setups["core"]
        figures += measure_goodput(kind, setups, catalog, cache)
    finish(figures)


if __name__ == "__main__":
    main()
