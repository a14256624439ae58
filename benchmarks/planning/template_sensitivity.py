"""How far templates must reach: more nodes and memory against time and the best tokens/s per dollar.

Coral's figure 13 on the prefill phase of GPT-OSS 120B, and beyond it: up to eight nodes per instance.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from atoll.catalog import Catalog
from atoll.core.ids import parse_role
from atoll.solve.templates.generate import generate
from atoll.solve.templates.library import role_tables
from benchmarks.planning.coral import extended
from benchmarks.report import Figure, finish, options

ROLE = "gpt-oss-120b/llm/prefill"
STEPS = ((2, 4.0), (3, 6.0), (4, 8.0), (5, 10.0), (6, 12.0), (7, 14.0), (8, 16.0))


def main() -> None:
    """Sweep (N_max, rho)."""
    arguments = options(__doc__ or "")
    catalog = Catalog.default()
    base = extended()
    settings = base.settings.model_copy(update={"max_nodes_per_instance": 8})
    tables = role_tables(base.replace(settings=settings), catalog, parse_role(ROLE))
    weight = tables.memory_limit / base.settings.memory_ratio
    prices = {}
    for node_type in tables.node_types:
        offers = [o.usd_per_hour for o in base.offers if o.node_type == node_type]
        prices[node_type] = min(offers)
    price = np.array([prices[node_type] for node_type in tables.node_types])
    generate(replace(tables, memory_limit=2 * weight), 2)
    print("  N_max   rho   multisets   templates    CPU-s   best tokens/s per $/h")
    best: dict[int, float] = {}
    spent: dict[int, float] = {}
    for nodes, ratio in STEPS[: 6 if arguments.quick else 7]:
        start = time.process_time()
        library = generate(replace(tables, memory_limit=ratio * weight), nodes)
        spent[nodes] = time.process_time() - start
        best[nodes] = float((library.throughput / (library.counts @ price)).max()) * 1.0
        print(
            f"  {nodes:5d} {ratio:5.0f} {library.multisets:11,d} {len(library):11,d} {spent[nodes]:8.2f}"
            f" {best[nodes]:12.1f}",
            flush=True,
        )
    top = max(best)
    finish(
        [
            Figure("best_at_6", best[6]),
            Figure(f"best_at_{top}", best[top]),
            Figure("gain_beyond_6_percent", 100 * (best[top] / best[6] - 1.0)),
            *(Figure(f"cpu_s_at_{nodes}", seconds) for nodes, seconds in spent.items()),
        ]
    )


if __name__ == "__main__":
    main()
