"""How far templates must reach: more nodes and memory against time and the best tokens/s per dollar.

Coral's figure 13 on the prefill phase of GPT-OSS 120B, and beyond it: up to eight nodes per instance. Layouts
are free, as in the paper, and then those that an engine runs (`run_` keys).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from atoll.catalog import Catalog
from atoll.core.ids import parse_role
from atoll.plan.problem import Problem
from atoll.solve.templates.generate import TemplateLibrary, generate
from atoll.solve.templates.library import engine_tables, role_library, role_tables
from benchmarks.planning.coral import as_it_runs, extended
from benchmarks.report import Figure, finish, options

ROLE = "gpt-oss-120b/llm/prefill"
STEPS = ((2, 4.0), (3, 6.0), (4, 8.0), (5, 10.0), (6, 12.0), (7, 14.0), (8, 16.0))

MakeTemplates = Callable[[int, float], TemplateLibrary]
"""Templates of at most so many nodes, with so many times the model's memory."""


def free_layouts(problem: Problem, catalog: Catalog) -> MakeTemplates:
    """Return what makes templates of any layout; capacities are worked out once."""
    tables = role_tables(problem, catalog, parse_role(ROLE))
    weight = tables.memory_limit / problem.settings.memory_ratio
    generate(replace(tables, memory_limit=2 * weight), 2)
    return lambda nodes, ratio: generate(replace(tables, memory_limit=ratio * weight), nodes)


def layouts_that_run(problem: Problem, catalog: Catalog) -> MakeTemplates:
    """Return what makes templates that an engine runs."""
    run = as_it_runs(problem)
    parts = engine_tables(run, catalog, parse_role(ROLE))

    def make(nodes: int, ratio: float) -> TemplateLibrary:
        limit = ratio / run.settings.memory_ratio
        limited = [
            replace(
                part, tables=replace(part.tables, memory_limit=part.tables.memory_limit * limit)
            )
            for part in parts
        ]
        return role_library(run, limited, nodes)

    return make


def sweep(prefix: str, problem: Problem, make: MakeTemplates, steps: int) -> list[Figure]:
    """Print a sweep over (N_max, rho) and return its figures."""
    cheapest = {
        kind: min(o.usd_per_hour for o in problem.offers if o.node_type == kind)
        for kind in problem.kinds
    }
    price = np.array([cheapest[kind] for kind in problem.kinds])
    print(f"\n  layouts {'that engines run' if prefix else 'free'}")
    print("  N_max   rho   multisets   templates    CPU-s   best tokens/s per $/h")
    best: dict[int, float] = {}
    spent: dict[int, float] = {}
    for nodes, ratio in STEPS[:steps]:
        start = time.process_time()
        library = make(nodes, ratio)
        spent[nodes] = time.process_time() - start
        best[nodes] = float((library.throughput / (library.counts @ price)).max()) * 1.0
        print(
            f"  {nodes:5d} {ratio:5.0f} {library.multisets:11,d} {len(library):11,d} {spent[nodes]:8.2f}"
            f" {best[nodes]:12.1f}",
            flush=True,
        )
    top = max(best)
    return [
        Figure(f"{prefix}best_at_6", best.get(6)),
        Figure(f"{prefix}best_at_{top}", best[top]),
        Figure(f"{prefix}gain_beyond_6_percent", 100 * (best[top] / best.get(6, best[top]) - 1.0)),
        *(Figure(f"{prefix}cpu_s_at_{nodes}", seconds) for nodes, seconds in spent.items()),
    ]


def main() -> None:
    """Sweep (N_max, rho) for both kinds of layouts."""
    arguments = options(__doc__ or "")
    catalog, base = Catalog.default(), extended()
    settings = base.settings.model_copy(update={"max_nodes_per_instance": 8})
    base, steps = base.replace(settings=settings), 6 if arguments.quick else len(STEPS)
    finish(
        [
            *sweep("", base, free_layouts(base, catalog), steps),
            *sweep("run_", base, layouts_that_run(base, catalog), steps),
        ]
    )


if __name__ == "__main__":
    main()
