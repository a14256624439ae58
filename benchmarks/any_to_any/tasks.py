"""What tasks cost beside the components they run: `python -m benchmarks.tasks`.

- record_replay_us: CPU time of recording and replaying a graph of 20 invocations (`benchmarks.task_graphs`).
- overhead_ms_per_hop: a call of an executor in another process with 1 MB in and 1 MB out.
- bytes_per_s_shm: arrays from one process to another through shared memory (`benchmarks.task_hops`).
- static_vs_dynamic_throughput: requests/s of a graph server that assigns paths over those of one that asks
  all executors for their queues before every invocation (`benchmarks.task_routing`).
"""

from __future__ import annotations

from typing import Any

from benchmarks.any_to_any.task_graphs import measure_record_replay
from benchmarks.any_to_any.task_hops import measure_hops
from benchmarks.any_to_any.task_routing import BLOCK_S, REPEATS, SERVERS, measure_routing
from benchmarks.report import Figure, finish, options


def _print_routing(found: dict[str, Any]) -> None:
    print(
        f"\n{'work':<9}{'routing':<15}{'requests/s':>12}{'CPU ms/request':>16}{'of the server':>14}"
        f"{'static over it':>30}"
    )
    for kind in ("cpu", "device"):
        for server in SERVERS:
            row, ratio = found[kind][server], found[kind].get(f"static_vs_{server}")
            shown = (
                f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"
                if ratio
                else ""
            )
            print(
                f"{kind:<9}{server:<15}{row['per_s']:>12.1f}{row['cpu_ms']:>16.2f}"
                f"{row['server_cpu_ms']:>14.2f}{shown:>30}"
            )
    print(
        f"{found['clients']} clients, {found['executors']} executors, "
        f"{found['invocations_per_request']} invocations a request; -20ms: an executor says that late how "
        f"long its queue is; load average {found['load_average']}"
    )


def main() -> None:
    """Print tables, then one line of JSON."""
    quick = options("What tasks cost beside the components they run.").quick
    graphs = measure_record_replay(500) if quick else measure_record_replay()
    print(
        f"recording and replaying 20 invocations: {graphs['record_replay_us']} us of CPU",
        flush=True,
    )
    hops = measure_hops(200) if quick else measure_hops()
    print(
        f"a hop with 1 MB each way: {hops['overhead_ms_per_hop']} ms "
        f"({hops['cpu_ms_per_hop']} ms of CPU at both ends); "
        f"through shared memory: {hops['bytes_per_s_shm'] / 1e9:.2f} GB/s",
        flush=True,
    )
    routing = measure_routing(2, 1.0) if quick else measure_routing(REPEATS, BLOCK_S)
    _print_routing(routing)
    figures = [
        Figure("record_replay_us", graphs["record_replay_us"], 200.0, "CPU, 20 invocations"),
        Figure("overhead_ms_per_hop", hops["overhead_ms_per_hop"], 2.0, "1 MB in, 1 MB out"),
        Figure("bytes_per_s_shm", hops["bytes_per_s_shm"], 1e9, "at least", at_least=True),
        Figure(
            "static_vs_dynamic_throughput",
            routing["cpu"]["static_vs_dynamic"]["median"],
            note="work on shared cores",
        ),
        Figure(
            "static_vs_dynamic_cpu",
            round(routing["cpu"]["dynamic"]["cpu_ms"] / routing["cpu"]["static"]["cpu_ms"], 3),
            note="CPU of a request, dynamic over static",
        ),
        *(
            Figure(
                f"static_vs_dynamic_throughput_{late}",
                routing["cpu"][f"static_vs_dynamic-{late}"]["median"],
                note=f"queues asked in {late}",
            )
            for late in ("20ms", "100ms")
        ),
    ]
    finish(figures, graphs=graphs, hops=hops, routing=routing)


if __name__ == "__main__":
    main()
