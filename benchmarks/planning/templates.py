"""Serving templates of Coral's extended set-up: how fast, and are they really optimal?

All node multisets of up to six nodes over 20 kinds of nodes within 12 times the model's memory, for six
models and two phases, each solved exactly. A sample is solved again with the paper's integer program
through HiGHS (scipy), CP-SAT (a process of its own) and Gurobi (the size-limited licence of its package),
and random small cases by trying everything.

Then 40 kinds of nodes, for the same models with phases apart and together. There instances are of at most
three kinds; what that may cost is measured over the 20, where all sets are known: the cheapest whole
instances that cover a role's demand, at the list's prices and at prices up to 2x off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from atoll.catalog import Catalog
from atoll.core.errors import MissingDependencyError
from atoll.core.rng import stream
from atoll.plan.problem import Offer, Phases, Problem
from atoll.solve.templates.generate import (
    MIN_KINDS,
    RoleTables,
    TemplateLibrary,
    best_layout,
    generate,
)
from atoll.solve.templates.library import libraries, role_tables
from benchmarks.planning.coral import extended
from benchmarks.report import Figure, finish, leave_out, options
from tests.reference import template_ilp as ilp
from tests.reference.template_brute import brute_force

MANY_GPUS = (
    "T4", "L4", "A10G", "RTX4090", "L40S", "A100-40", "A100-80", "H100", "H200", "B200",
)  # fmt: skip
GUROBI_LIMIT = 2000
TIMED_SIZES = (2, 3, 4)
# Which model sizes the reference solvers can take: more layers and nodes, more minutes.
CHECKED = {2: 80, 3: 64, 4: 40, 5: 24, 6: 24}
QUICK_SIZE = 3
"""HiGHS takes a minute for more nodes, where nothing else is installed."""


def optimum(tables: RoleTables, nodes: list[int]) -> float:
    """Return our own optimum."""
    counts = np.bincount(nodes, minlength=len(tables.node_types))
    return best_layout(tables, counts).throughput


def samples(
    roles: list[RoleTables], size: int, number: int, name: str
) -> Iterator[tuple[RoleTables, list[int]]]:
    """Yield random multisets of `size` nodes that carry something."""
    random = stream(0, "templates", name, str(size))
    while number > 0:
        tables = roles[int(random.integers(len(roles)))]
        nodes = sorted(int(c) for c in random.integers(len(tables.node_types), size=size))
        if optimum(tables, nodes) > 0:
            number -= 1
            yield tables, nodes


def fits_gurobi(tables: RoleTables, nodes: list[int]) -> bool:
    """Return whether every program of a multiset is within the size-limited licence."""
    k, layers = len(nodes), tables.layers
    return 2 * k * layers * k + 2 * k + k + 1 <= GUROBI_LIMIT


def reference_times(roles: list[RoleTables], quick: bool) -> dict[str, float | None]:
    """Return mean CPU seconds per multiset of the reference solvers, and check that they agree."""
    solvers: dict[str, ilp.Solver] = {"highs": ilp.highs, "cpsat": ilp.cpsat, "gurobi": ilp.gurobi}
    print("\nPer multiset, CPU-s (CP-SAT: seconds of its own process, one worker)")
    out: dict[str, float | None] = {}
    each = 1 if quick else 3
    own = [t for t in roles if t.layers <= 64]
    for name, solver in solvers.items():
        spent: list[float] = []
        for size in TIMED_SIZES[: 2 if quick else 3]:
            found = samples(own, size, 200, f"time-{name}")
            picked = [case for case in found if name != "gurobi" or fits_gurobi(*case)][:each]
            for tables, nodes in picked:
                seconds = _timed(solver, tables, nodes)
                if seconds is None:
                    break
                spent.append(seconds)
                print(f"  {name:7s} {tables.name:26s} {size} nodes {seconds:9.2f}", flush=True)
        out[name] = float(np.mean(spent)) if spent else None
    return out


def _timed(solver: ilp.Solver, tables: RoleTables, nodes: list[int]) -> float | None:
    start, wall = time.process_time(), time.perf_counter()
    try:
        found = ilp.best(tables, nodes, solver, time_limit_s=300.0)
    except MissingDependencyError as error:
        leave_out(str(error))
        return None
    except TimeoutError:
        return time.perf_counter() - wall
    assert found == optimum(tables, nodes), (tables.name, nodes)
    # CP-SAT works in another process, whose time process_time does not see.
    return max(time.process_time() - start, time.perf_counter() - wall)


def check_ilp(roles: list[RoleTables], quick: bool) -> tuple[int, int]:
    """Compare with the integer program on random multisets of nodes; (checked, equal)."""
    checked = equal = 0
    small = [t for t in roles if t.layers <= 40]
    solver = _available()
    if solver is None:
        return 0, 0
    for size, number in CHECKED.items():
        if quick and size > QUICK_SIZE:
            break
        own = small if size <= 4 else [t for t in small if t.layers <= 24]
        cases = (c for c in samples(own, size, 10**6, "check") if fits_gurobi(*c))
        for _ in range(number // 16 if quick else number):
            tables, nodes = next(cases)
            try:
                found = ilp.best(tables, nodes, solver, time_limit_s=300.0)
            except TimeoutError:
                print(f"  no proof in time: {tables.name} {nodes}")
                continue
            checked += 1
            equal += found == optimum(tables, nodes)
    return checked, equal


def _available() -> ilp.Solver | None:
    for solver in (ilp.gurobi, ilp.highs):
        try:
            solver(ilp.StageProgram(np.ones((1, 1, 3), np.int64)), 10.0)
        except MissingDependencyError as error:
            leave_out(str(error))
            continue
        return solver
    return None


def check_brute(number: int) -> tuple[int, int]:
    """Compare with trying everything on random small tables; (checked, equal)."""
    random = stream(0, "templates", "brute")
    equal = 0
    for _ in range(number):
        types, layers = int(random.integers(1, 4)), int(random.integers(2, 8))
        rates = np.sort(random.integers(0, 60, (4, 1, types, layers + 1)), axis=-1)[..., ::-1]
        rates = np.repeat(rates, 3, axis=1).astype(np.float64)
        rates[:, 0] -= random.integers(0, 10, rates[:, 0].shape)
        rates[:, 2] -= random.integers(0, 25, rates[:, 2].shape)
        names = tuple(f"t{c}" for c in range(types))
        tables = RoleTables("random", names, np.maximum(rates, 0.0), (1.0,) * types, 100.0)
        nodes = sorted(int(c) for c in random.integers(types, size=int(random.integers(1, 5))))
        equal += optimum(tables, nodes) == brute_force(tables, nodes)
    return number, equal


def with_phases(problem: Problem, phases: Phases) -> Problem:
    """Return a problem whose services all run their phases this way."""
    services = tuple(s.model_copy(update={"phases": phases}) for s in problem.services)
    return problem.replace(services=services)


def many_kinds(catalog: Catalog) -> tuple[float, int]:
    """Return CPU seconds for all templates over 40 kinds of nodes, with tables, and how many there are."""
    offers = tuple(
        Offer(region="r", node_type=f"{gpu}:8", available=9, usd_per_hour=1.0) for gpu in MANY_GPUS
    )
    problem = with_phases(extended().replace(offers=offers), "auto")
    start = time.process_time()
    made = libraries(problem, catalog)
    cpu_s = time.process_time() - start
    kept = sum(map(len, made.roles.values()))
    most = {library.max_kinds for library in made.roles.values()}
    print(
        f"\n{len(made.kinds)} kinds, {len(made.roles)} roles: {kept:,} templates of at most {max(most)} "
        f"kinds, {cpu_s:.1f} CPU-s"
    )
    return cpu_s, kept


def few_kinds_loss(
    problem: Problem, found: list[TemplateLibrary], quick: bool
) -> tuple[float, float]:
    """Return by how much covers get dearer with instances of at most three kinds: on average, at worst."""
    random = stream(0, "templates", "prices")
    listed = np.array(
        [min(o.usd_per_hour for o in problem.offers if o.node_type == k) for k in problem.kinds]
    )
    losses = []
    for library in found:
        few = (library.counts > 0).sum(axis=1) <= MIN_KINDS
        for attempt in range(2 if quick else 5):
            usd = listed * (np.exp2(random.uniform(-1, 1, len(listed))) if attempt else 1.0)
            price = library.counts @ usd
            for times in (0.4, 1.1, 3.4):
                demand = times * float(library.throughput.max())
                every = cheapest_cover(price, library.throughput, demand)
                some = cheapest_cover(price[few], library.throughput[few], demand)
                losses.append(some / every - 1.0)
    print(
        f"\nat most {MIN_KINDS} kinds per instance: covers dearer by {np.mean(losses):.3%} on average, "
        f"{max(losses):.3%} at worst of {len(losses)}"
    )
    return float(np.mean(losses)), float(max(losses))


def cheapest_cover(
    price: NDArray[np.float64], rate: NDArray[np.float64], demand: float, grid: int = 4000
) -> float:
    """Return the least price of templates, each any number of times, that carry the demand together."""
    order = np.lexsort((-rate, price))
    rising = np.maximum.accumulate(rate[order])
    best = order[np.concatenate([[True], rising[1:] > rising[:-1]])]
    part = np.minimum(np.floor(rate[best] / demand * grid + 1e-9).astype(np.int64), grid)
    usd, part = price[best][part > 0], part[part > 0]
    least = np.zeros(grid + 1)
    for d in range(1, grid + 1):
        least[d] = (usd + least[np.maximum(d - part, 0)]).min()
    return float(least[grid])


def main() -> None:
    """Generate, time and check."""
    arguments = options(__doc__ or "")
    catalog = Catalog.default()
    problem = with_phases(extended(), "apart")
    roles = [role_tables(problem, catalog, role) for role in problem.roles]
    start = time.perf_counter()
    generate(roles[0], 2)
    compile_s = time.perf_counter() - start
    print(
        f"compiled or loaded in {compile_s:.1f} s\n  {'role':28s} multisets  templates    CPU-s   wall-s"
    )
    multisets = kept = 0
    cpu_total = wall_total = 0.0
    found: list[TemplateLibrary] = []
    for tables in roles:
        cpu, wall = time.process_time(), time.perf_counter()
        library = generate(tables, 6)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        found.append(library)
        multisets, kept = multisets + library.multisets, kept + len(library)
        cpu_total, wall_total = cpu_total + cpu, wall_total + wall
        print(
            f"  {tables.name:28s} {library.multisets:9,d} {len(library):10,d} {cpu:8.2f} {wall:8.2f}"
        )
    print(f"  {'all':28s} {multisets:9,d} {kept:10,d} {cpu_total:8.2f} {wall_total:8.2f}")
    loss = few_kinds_loss(problem, found, arguments.quick)
    many_cpu_s, many_kept = many_kinds(catalog)
    whole = [ilp.whole_rates(tables) for tables in roles]
    peers = reference_times(whole, arguments.quick)
    own = cpu_total / multisets
    print(f"\n  our mean over all multisets: {own * 1e6:.1f} us")
    brute_checked, brute_equal = check_brute(200 if arguments.quick else 1500)
    ilp_checked, ilp_equal = check_ilp(whole, arguments.quick)

    def ratio(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / own

    finish(
        [
            Figure("multisets", float(multisets)),
            Figure("templates_cpu_s", cpu_total, 15),
            Figure("templates_wall_s", wall_total),
            Figure("compile_s", compile_s),
            Figure(
                "kinds40_cpu_s", many_cpu_s, 90, "40 kinds, 6 models, phases apart and together"
            ),
            Figure("kinds40_templates", float(many_kept)),
            Figure(
                "few_kinds_loss", loss[0], 0.001, "covers by sets of three kinds: dearer on average"
            ),
            Figure("few_kinds_worst_loss", loss[1], 0.01),
            Figure("ratio_highs", ratio(peers["highs"]), 1e5, at_least=True),
            Figure("ratio_gurobi", ratio(peers["gurobi"]), 1e4, at_least=True),
            Figure("ratio_cpsat", ratio(peers["cpsat"])),
            Figure("ilp_checked", ilp_checked, None if arguments.quick else 200, at_least=True),
            Figure("ilp_equal", ilp_equal, ilp_checked, at_least=True),
            Figure(
                "brute_checked", brute_checked, None if arguments.quick else 1000, at_least=True
            ),
            Figure("brute_equal", brute_equal, brute_checked, at_least=True),
        ]
    )


if __name__ == "__main__":
    main()
