"""How fast the performance model answers: all capacity tables of a planner, and one scalar query."""

from __future__ import annotations

import time
import timeit

from atoll.catalog import Catalog
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.capacity import RoleLoad
from atoll.perf.step import analytic, step_seconds
from atoll.workload.lengths import length_mix
from benchmarks.report import Figure, finish, options
from tests.reference.capacity_tables import capacity_table

# Models, latency promises (s) and length mixes of Coral's table 3; BurstGPT's mix is taken as azure-conv.
MODELS = {
    "phi-4-14b": (1.2, 0.060, "azure-conv"),
    "gpt-oss-20b": (0.9, 0.030, "azure-code"),
    "qwen3-32b": (1.6, 0.100, "azure-conv"),
    "llama-3-70b": (1.5, 0.080, "azure-conv"),
    "gpt-oss-120b": (1.0, 0.040, "azure-conv"),
    "qwen3-235b-a22b": (1.8, 0.120, "azure-code"),
}
GPUS = ("L4", "A10G", "L40S", "A100-80", "H100")
STAGES = 6


def main() -> None:
    """Time the tables and the query."""
    arguments = options(__doc__ or "")
    catalog = Catalog.default()
    roles = []
    for name, (ttft_s, tpot_s, lengths) in MODELS.items():
        spec, mix = catalog.model(name).llm, length_mix(lengths)
        roles.append(RoleLoad(f"{name}/llm/prefill", spec, Phase.PREFILL, ttft_s, mix))
        roles.append(RoleLoad(f"{name}/llm/decode", spec, Phase.DECODE, tpot_s, mix))
    nodes = [catalog.node(f"{gpu}:{count}") for gpu in GPUS for count in (1, 2, 4, 8)]
    link = catalog.links.in_region
    first = _timed(lambda: capacity_table(roles, nodes, STAGES, link=link))
    runs = [first] + [
        _timed(lambda: capacity_table(roles, nodes, STAGES, link=link))
        for _ in range(2 if arguments.quick else 6)
    ]
    cpu, wall = min(runs)
    entries = sum(4 * STAGES * (role.spec.layers + 1) for role in roles) * len(nodes)
    print(f"{len(roles)} roles x {len(nodes)} node types, S = 1..{STAGES}: {entries:,} entries")
    print(
        f"  first run {first[0]:.2f} CPU-s ({first[1]:.2f} s wall), best {cpu:.2f} CPU-s ({wall:.2f} s)"
    )

    model = analytic(catalog.model("llama-3-70b").llm, catalog.node("H100:4"))
    batch = Batch.decode(32, 1500.0)
    number = 2_000
    query = timeit.repeat(
        lambda: step_seconds(model, batch, 0, 80),
        number=number,
        repeat=5,
        timer=time.process_time,
    )
    query_us = min(query) / number * 1e6
    # A yardstick of the machine: the same number of float powers that one query takes.
    pows = timeit.repeat(
        "for x in xs: x ** p",
        "xs = [1.1] * 30; p = 1.7",
        number=number,
        repeat=5,
        timer=time.process_time,
    )
    print(
        f"  scalar step query {query_us:.1f} us; 30 float powers {min(pows) / number * 1e6:.1f} us"
    )
    finish(
        [
            Figure("tables_cpu_s", first[0], 2, "first run in the process, after imports"),
            Figure("tables_best_cpu_s", cpu),
            Figure("tables_wall_s", first[1]),
            Figure("scalar_query_us", query_us, 20),
        ],
        entries=entries,
    )


def _timed(call: object) -> tuple[float, float]:
    assert callable(call)
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
