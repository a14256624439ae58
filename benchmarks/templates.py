"""Serving templates of Coral's extended set-up: how fast, and are they really optimal?

All node multisets of up to six nodes over 20 node types within 12 times the model's memory, for six
models and two phases, each solved exactly. A sample is solved again with the paper's integer programme
through HiGHS (scipy), CP-SAT (a process of its own) and Gurobi (the size-limited licence of its package),
and random small cases by trying everything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from atoll.catalog import Catalog
from atoll.core.errors import MissingDependencyError
from atoll.core.rng import stream
from atoll.solve.templates.generate import RoleTables, best_layout, generate
from atoll.solve.templates.library import role_tables
from benchmarks.coral import extended
from benchmarks.report import Figure, finish, options
from tests.reference import template_ilp as ilp
from tests.reference.template_brute import brute_force

GUROBI_LIMIT = 2000
TIMED_SIZES = (2, 3, 4)
# Which model sizes the reference solvers can take: more layers and nodes, more minutes.
CHECKED = {2: 80, 3: 64, 4: 40, 5: 24, 6: 24}


def optimum(tables: RoleTables, nodes: list[int]) -> int:
    """Return our own optimum in integer units."""
    counts = np.bincount(nodes, minlength=len(tables.node_types))
    return round(best_layout(tables, counts).throughput * tables.scale)


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
    """Return whether every programme of a multiset is within the size-limited licence."""
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
        print(f"  not run: {error}")
        return None
    except TimeoutError:
        return time.perf_counter() - wall
    assert found == optimum(tables, nodes), (tables.name, nodes)
    # CP-SAT works in another process, whose time process_time does not see.
    return max(time.process_time() - start, time.perf_counter() - wall)


def check_ilp(roles: list[RoleTables], quick: bool) -> tuple[int, int]:
    """Compare with the integer programme on random multisets of 2 to 6 nodes; (checked, equal)."""
    checked = equal = 0
    small = [t for t in roles if t.layers <= 40]
    solver = _available()
    if solver is None:
        return 0, 0
    for size, number in CHECKED.items():
        own = small if size <= 4 else [t for t in small if t.layers <= 24]
        cases = (c for c in samples(own, size, 10**6, "check") if fits_gurobi(*c))
        for _ in range(max(2, number // 12) if quick else number):
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
            print(f"  not run: {error}")
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


def main() -> None:
    """Generate, time and check."""
    arguments = options(__doc__ or "")
    catalog = Catalog.default()
    problem = extended()
    roles = [role_tables(problem, catalog, role) for role in problem.roles]
    start = time.perf_counter()
    generate(roles[0], 2)
    compile_s = time.perf_counter() - start
    print(
        f"compiled or loaded in {compile_s:.1f} s\n  {'role':28s} multisets  templates    CPU-s   wall-s"
    )
    multisets = kept = 0
    cpu_total = wall_total = 0.0
    for tables in roles:
        cpu, wall = time.process_time(), time.perf_counter()
        library = generate(tables, 6)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        multisets, kept = multisets + library.multisets, kept + len(library)
        cpu_total, wall_total = cpu_total + cpu, wall_total + wall
        print(
            f"  {tables.name:28s} {library.multisets:9,d} {len(library):10,d} {cpu:8.2f} {wall:8.2f}"
        )
    print(f"  {'all':28s} {multisets:9,d} {kept:10,d} {cpu_total:8.2f} {wall_total:8.2f}")
    peers = reference_times(roles, arguments.quick)
    own = cpu_total / multisets
    print(f"\n  our mean over all multisets: {own * 1e6:.1f} us")
    brute_checked, brute_equal = check_brute(200 if arguments.quick else 1500)
    ilp_checked, ilp_equal = check_ilp(roles, arguments.quick)

    def ratio(seconds: float | None) -> float | None:
        return None if seconds is None else seconds / own

    finish(
        [
            Figure("multisets", float(multisets)),
            Figure("templates_cpu_s", cpu_total, 15),
            Figure("templates_wall_s", wall_total),
            Figure("compile_s", compile_s),
            Figure("ratio_highs", ratio(peers["highs"]), note="bar: at least 1e5"),
            Figure("ratio_gurobi", ratio(peers["gurobi"]), note="bar: at least 1e4"),
            Figure("ratio_cpsat", ratio(peers["cpsat"])),
            Figure("ilp_checked", float(ilp_checked), note="bar: at least 200 in the full run"),
            Figure("ilp_equal", float(ilp_equal), note="bar: all"),
            Figure(
                "brute_checked", float(brute_checked), note="bar: at least 1000 in the full run"
            ),
            Figure("brute_equal", float(brute_equal), note="bar: all"),
        ]
    )


if __name__ == "__main__":
    main()
