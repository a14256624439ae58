"""What plans cost: Atoll against Homo and Cauchy in Coral's set-ups, beside the paper's ratios.

Every method gets the same problem, the same exact layouts and the same validator. Each baseline is run twice:
as strong as its definition allows (replicas may be pipelines over several equal nodes), and with single-node
replicas, which is what the paper's runs of both show. Under scarcity goodput is the mean share of demand
served over all models.
"""

from __future__ import annotations

import time

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.templates.library import Libraries, libraries
from atoll.solve.templates.template_cache import TemplateCache
from benchmarks.planning.allocation import edge_margin, gpu_memory
from benchmarks.planning.coral import LARGE, SMALL, core, extended, heavy, scaled, scarce
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


def main() -> None:
    """Compare all set-ups."""
    arguments = options(__doc__ or "")
    catalog, cache = Catalog.default(), TemplateCache()
    figures: list[Figure] = []
    library: dict[str, Libraries] = {}
    print(f"  {'set-up':16s}{'Atoll':>10s}" + "".join(f"{m:>19s}" for m in METHODS[1:]))
    for setup, problem in (("core", core()), ("extended", extended())):
        library[setup] = libraries(problem, catalog, cache=cache)
        prefix = "core_" if setup == "core" else ""
        cases = {
            setup: problem,
            f"{prefix}large": heavy(problem, LARGE[problem.name]),
            f"{prefix}small": heavy(problem, SMALL[problem.name]),
        }
        for name, case in cases.items():
            found = costs(name, case, catalog)
            homo, cauchy = PAPER[name]
            figures += [
                Figure(f"{name}_vs_homo", ratio(found, "homogeneous"), note=f"paper {homo}"),
                Figure(f"{name}_vs_cauchy", ratio(found, "cauchy"), note=f"paper {cauchy}"),
                Figure(
                    f"{name}_vs_homo_node", ratio(found, "homogeneous-node"), note=f"paper {homo}"
                ),
                Figure(
                    f"{name}_vs_cauchy_node", ratio(found, "cauchy-node"), note=f"paper {cauchy}"
                ),
            ]
    print("\nScarce: goodput (mean share of demand served over models), common share, $/h")
    for setup, problem, margin in (("core", core(), 1.25), ("extended", extended(), 1.75)):
        if setup == "core" and arguments.quick:
            continue
        plenty = solve(
            problem, PlanRequest(solver="optimal", deadline_s=DEADLINE_S, catalog=catalog)
        )
        start = time.perf_counter()
        edge = edge_margin(problem, plenty, catalog, library[setup])
        print(f"  {setup}: edge at {edge:.1f}, {time.perf_counter() - start:6.1f} s", flush=True)
        for kind, factor in (("scarce", margin), ("edge", 1.05)):
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
                    f"  {label:16s} {method:18s} {fraction:6.1%} {together:6.1%} ${plan.usd_per_hour:9.2f}"
                    f"  {seconds:6.1f} s",
                    flush=True,
                )
            own = shares["optimal"]
            name = kind if setup == "extended" else f"core_{kind}"
            paper = (7.64, 2.39) if setup == "extended" else (1.24, 1.0)
            for method, short, figure in zip(
                METHODS[1:],
                ("homo", "cauchy", "homo_node", "cauchy_node"),
                (*paper, *paper),
                strict=True,
            ):
                value = own / shares[method] if shares[method] > 0 else None
                figures.append(Figure(f"{name}_goodput_vs_{short}", value, note=f"paper {figure}"))
                together = common[method]
                value = common["optimal"] / together if together > 0 else None
                figures.append(Figure(f"{name}_common_vs_{short}", value, note=f"paper {figure}"))
    finish(figures)


if __name__ == "__main__":
    main()
