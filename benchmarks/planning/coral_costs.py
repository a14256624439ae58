"""Coral's figures 7 to 12: plans of Atoll, Homo and Cauchy in its set-ups, beside the paper's ratios.

Every method gets the same problem, the same exact layouts and the same validator. Baselines are run as
strong as their definition allows (replicas may be pipelines over several equal nodes), with single-node
replicas, and in figures 7 and 11 as published: a replica is one tensor-parallel node, of Homo the one with
the most throughput per dollar, as many as cover demand (docs/measurements.md goes from there step by step).
Under scarcity (8 to 10) goodput is the mean share of demand served over all models, and beside it stands the
share of every demand that is met, which is what the paper scales down to. Figure 12 is Helix's
cluster of 64 GPUs, which Helix uses whole, against what a plan rents of it.

Layouts are free, as in the paper; keys that begin with `run_` are of layouts that an engine runs, for all
methods: what of the saving can be had. `--quick` leaves those out, and scarcity in the core set-up. A full
run keeps every plan's cost in `benchmarks/results/coral.csv`. What figure 13 asks, how far templates must
reach, was measured once (docs/measurements.md).
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np

from atoll.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.sim.api import simulate
from atoll.sim.problem_demand import demand_of
from atoll.sim.sim_options import SimOptions
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.rent_baselines import plan_cauchy, replicas
from atoll.solve.templates.generate import EngineSearch, generate
from atoll.solve.templates.library import Libraries, libraries, role_tables
from atoll.solve.templates.template_cache import TemplateCache
from atoll.workload.requests import collect
from benchmarks.planning.allocation import EDGES, edge_margin, gpu_memory
from benchmarks.planning.coral import (
    HELIX_POOL,
    LARGE,
    SMALL,
    as_it_runs,
    core,
    extended,
    heavy,
    helix_cluster,
    scaled,
    scarce,
)
from benchmarks.report import RESULTS, Figure, finish, options

KEPT = RESULTS / "coral.csv"
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
LONG = {method: short for short, method in SHORT.items()}
HELIX_TOKENS_PER_S = 645.6
"""Decode tokens/s of Helix offline on its cluster, as published; online it has 459.8."""
HELIX_PAPER = (0.79, 1.26)
"""Figure 12: Coral's cost and tokens/s over Helix's."""
SIMULATED_S = 1200.0
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Row:
    """A method's plan in a set-up of a figure; `paper` is what the paper has over Coral (or Coral over it).

    `goodput` and `common` are shares of demand; dollars are None where demand is not met.
    """

    figure: str
    setup: str
    layouts: str
    method: str
    usd_per_hour: float | None
    goodput: float
    common: float
    paper: float | None = None


def one_replica_per_node(problem: Problem, catalog: Catalog) -> Libraries:
    """Return single nodes whose GPUs hold one tensor-parallel replica."""
    search = EngineSearch(None, tuple(range(len(problem.kinds))), tp="all", max_nodes=1)
    roles = {
        str(role): generate(role_tables(problem, catalog, role, search), 1)
        for role in problem.roles
    }
    return Libraries(problem.kinds, roles)


def literal_usd(problem: Problem, libraries: Libraries) -> float:
    """Return Homo's cost by its text in USD per hour: the most efficient replica of each role, so many."""
    usd = 0.0
    for role, choices in replicas(problem, libraries, 1).items():
        usd += choices[0].usd * math.ceil(problem.demand(role) / choices[0].throughput - 1e-9)
    return usd


def costs(name: str, problem: Problem, catalog: Catalog, published: bool) -> list[Row]:
    """Return every method's dollars per hour, beside those of the baselines as published where asked."""
    found: dict[str, float | None] = {}
    start = time.process_time()
    for method in METHODS:
        plan = solve(problem, PlanRequest(solver=method, deadline_s=DEADLINE_S, catalog=catalog))
        met = plan.instances and min(plan.served_fraction.values()) >= 1.0
        found[method] = plan.usd_per_hour if met else None
    if published:
        nodes = one_replica_per_node(problem, catalog)
        found["homogeneous-published"] = literal_usd(problem, nodes)
        found["cauchy-published"] = plan_cauchy(problem, catalog, nodes, max_nodes=1).usd_per_hour
    own = found["optimal"]
    cells = "".join(f"{_cost(usd):>12s}{_ratio(usd, own):>7s}" for usd in list(found.values())[1:])
    seconds = time.process_time() - start
    print(f"  {name:16s}{_cost(own):>10s}{cells}  {seconds:6.1f} CPU-s", flush=True)
    layouts = "free" if published else "engines"
    figure = "11" if name.endswith(("large", "small")) else "7"
    return [
        Row(figure, name, layouts, method, usd, float(usd is not None), float(usd is not None),
            None if method == "optimal" else PAPER[name][method.startswith("cauchy")])
        for method, usd in found.items()
    ]  # fmt: skip


def _cost(usd: float | None) -> str:
    return "-" if usd is None else f"${usd:,.2f}"


def _ratio(usd: float | None, own: float | None) -> str:
    return "" if usd is None or not own else f"x{usd / own:.2f}"


def ratio(rows: list[Row], method: str) -> float | None:
    """Return how many times dearer a method is than Atoll."""
    usd = {row.method: row.usd_per_hour for row in rows}
    own, other = usd["optimal"], usd.get(method)
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


def measure_costs(
    prefix: str, setups: dict[str, Problem], catalog: Catalog
) -> tuple[list[Figure], list[Row]]:
    """Figures 7 and 11: what meeting all demand costs."""
    figures, rows = [], []
    published = {"homo_published": "homogeneous-published", "cauchy_published": "cauchy-published"}
    shorts = SHORT if prefix else SHORT | published
    print(f"\nLayouts {'that engines run' if prefix else 'free'}")
    print(f"  {'set-up':16s}{'Atoll':>10s}" + "".join(f"{short:>19s}" for short in shorts))
    for setup, problem in setups.items():
        part = "core_" if setup == "core" else ""
        cases = {
            setup: problem,
            f"{part}large": heavy(problem, LARGE[problem.name]),
            f"{part}small": heavy(problem, SMALL[problem.name]),
        }
        for name, case in cases.items():
            found = costs(name, case, catalog, not prefix)
            rows += found
            for short, method in shorts.items():
                told = PAPER[name][short.startswith("cauchy")]
                figures.append(
                    Figure(f"{prefix}{name}_vs_{short}", ratio(found, method), note=f"paper {told}")
                )
    return figures, rows


def make_pools(
    setups: dict[str, Problem], catalog: Catalog, cache: TemplateCache, *, quick: bool
) -> dict[str, Problem]:
    """Return the set-ups on too few nodes: the fewest that carry all with free layouts, and some more."""
    pools = {}
    for setup, problem in setups.items():
        library = libraries(problem, catalog, cache=cache)
        plenty = solve(
            problem, PlanRequest(solver="optimal", deadline_s=DEADLINE_S, catalog=catalog)
        )
        start = time.process_time()
        edge = EDGES[setup] if quick else edge_margin(problem, plenty, catalog, library)
        print(
            f"\n{setup}: edge at {edge:.1f}, {time.process_time() - start:6.1f} CPU-s", flush=True
        )
        for kind, factor in (("scarce", MARGIN[setup]), ("edge", 1.05)):
            memory = gpu_memory(plenty, catalog)
            pools[f"{setup}-{kind}"] = scarce(problem, memory, edge * factor)
    return pools


def measure_goodput(
    prefix: str, pools: dict[str, Problem], catalog: Catalog
) -> tuple[list[Figure], list[Row]]:
    """Figures 8 to 10: what is served where there are too few nodes, and what that costs.

    Pools are the same for all layouts.
    """
    figures, rows = [], []
    layouts = "engines" if prefix else "free"
    print(
        f"\nScarce, layouts {layouts}: mean share of demand served over models, common share, $/h"
    )
    for label, tight in pools.items():
        setup, _, kind = label.partition("-")
        shares: dict[str, float] = {}
        common: dict[str, float] = {}
        usd: dict[str, float] = {}
        for method in METHODS:
            start = time.process_time()
            fraction, together, plan = served(method, tight, catalog)
            seconds = time.process_time() - start
            shares[method], common[method] = fraction, together
            usd[method] = plan.usd_per_hour
            print(
                f"  {label:16s} {method:18s} {fraction:6.1%} {together:6.1%}"
                f" ${plan.usd_per_hour:9.2f}  {seconds:6.1f} CPU-s",
                flush=True,
            )
            figure = "8, 9" if setup == "core" else "8, 10"
            told = None
            if method != "optimal" and kind == "scarce":
                told = GOODPUT[setup][method.startswith("cauchy")]
            rows.append(
                Row(figure, label, layouts, method, plan.usd_per_hour, fraction, together, told)
            )
        name = prefix + (kind if setup == "extended" else f"core_{kind}")
        for short, method in SHORT.items():
            note = f"paper {GOODPUT[setup][short.startswith('cauchy')]}"
            for what, of in (("goodput", shares), ("common", common)):
                value = of["optimal"] / of[method] if of[method] > 0 else None
                figures.append(Figure(f"{name}_{what}_vs_{short}", value, note=note))
            figures.append(
                Figure(f"{name}_usd_vs_{short}", usd[SHORT[short]] / usd["optimal"], note="cost")
            )
    return figures, rows


def measure_helix(
    prefix: str, problem: Problem, catalog: Catalog
) -> tuple[list[Figure], list[Row]]:
    """Figure 12: what is rented of the machines of Helix's cluster to carry more than Helix does on all."""
    whole = sum(count * usd for count, usd in HELIX_POOL.values())
    asked = problem.services[0].rate_per_s * problem.services[0].lengths.output_mean
    layouts = "engines" if prefix else "free"
    print(
        f"\nHelix's cluster, layouts {layouts}: all 64 GPUs ${whole:.2f}/h, {asked:.0f} tokens/s asked"
    )
    rows = [
        Row(
            "12",
            "helix",
            layouts,
            "helix",
            whole,
            HELIX_TOKENS_PER_S / asked,
            1.0,
            1.0 / HELIX_PAPER[0],
        )
    ]
    figures = []
    for method in ("optimal", "homogeneous", "cauchy"):
        plan = solve(problem, PlanRequest(solver=method, deadline_s=DEADLINE_S, catalog=catalog))
        share = goodput(plan, problem)
        usd = plan.usd_per_hour if share >= 1.0 else None
        rows.append(Row("12", "helix", layouts, method, usd, share, share))
        print(f"  {method:12s} {_cost(usd):>8s} {share:6.1%} of demand")
        if method != "optimal":
            name = f"{prefix}helix_pool_vs_{LONG[method]}"
            figures.append(Figure(name, ratio(rows, method), note="not in the paper"))
            continue
        requests = collect(demand_of(problem, SIMULATED_S), 1)
        seen = simulate(plan, problem, catalog, requests, SimOptions(seed=1)).requests
        ends = seen.arrival_s + seen.e2e_s
        warm_s = SIMULATED_S / 4.0
        ended = (ends > warm_s) & (ends <= SIMULATED_S)
        tokens = float(requests.output[ended].sum()) / (SIMULATED_S - warm_s)
        first_s, token_s = (float(np.nanmedian(v)) for v in (seen.ttft_s, seen.tpot_s))
        nodes = sum(len(instance.nodes) for instance in plan.instances)
        print(
            f"    {nodes} machines; simulated: {tokens:.0f} tokens/s, median of the first token"
            f" {first_s:.2f} s, of further ones {token_s:.2f} s"
        )
        figures += [
            Figure(
                f"{prefix}helix_usd", plan.usd_per_hour / whole, None, f"paper {HELIX_PAPER[0]}"
            ),
            Figure(
                f"{prefix}helix_tokens",
                tokens / HELIX_TOKENS_PER_S,
                None,
                f"paper {HELIX_PAPER[1]}; simulated over published",
            ),
            Figure(f"{prefix}helix_ttft_s", first_s, 2.09, "median, Helix's online"),
            Figure(f"{prefix}helix_tpot_s", token_s, 0.73, "median, Helix's online"),
        ]
    return figures, rows


def write(rows: list[Row], path: Path) -> None:
    """Write the rows; figures to six digits."""
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([field.name for field in fields(Row)])
        for row in rows:
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in astuple(row)])


def main() -> None:
    """Compare all set-ups."""
    arguments = options(__doc__ or "")
    catalog, cache = Catalog.default(), TemplateCache()
    figures: list[Figure] = []
    rows: list[Row] = []

    def keep(found: tuple[list[Figure], list[Row]]) -> None:
        figures.extend(found[0])
        rows.extend(found[1])

    scarce_in = {"core": core(), "extended": extended()}
    if arguments.quick:
        del scarce_in["core"]
    pools = make_pools(scarce_in, catalog, cache, quick=arguments.quick)
    for prefix in ("",) if arguments.quick else ("", "run_"):
        change: Callable[[Problem], Problem] = as_it_runs if prefix else lambda problem: problem
        setups = {"core": change(core()), "extended": change(extended())}
        keep(measure_costs(prefix, setups, catalog))
        tight = {label: change(problem) for label, problem in pools.items()}
        keep(measure_goodput(prefix, tight, catalog))
        keep(measure_helix(prefix, change(helix_cluster()), catalog))
    if not arguments.quick:
        write(rows, KEPT)
    finish(figures)


if __name__ == "__main__":
    main()
