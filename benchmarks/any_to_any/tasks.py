"""What tasks cost beside the components they run: `python -m benchmarks.tasks`.

- record_replay_us: CPU time of recording and replaying a graph of 20 invocations (`benchmarks.task_graphs`).
- overhead_ms_per_hop: a call of an executor in another process with 1 MB in and 1 MB out.
- bytes_per_s_shm: arrays from one process to another through shared memory (`benchmarks.task_hops`).
- static_vs_dynamic_throughput: requests/s of a graph server that assigns paths over those of one that asks
  all executors for their queues before every invocation (`benchmarks.task_routing`).
"""

from __future__ import annotations

from benchmarks.any_to_any.task_graphs import measure_record_replay
from benchmarks.any_to_any.task_hops import measure_hops
from benchmarks.any_to_any.task_routing import BLOCK_S, REPEATS, SERVERS, measure_routing
from benchmarks.report import Figure, finish, options


def main() -> None:
    """Print tables, then one line of JSON."""
    quick = options("What tasks cost beside the components they run.").quick
    graphs = measure_record_replay(500) if quick else measure_record_replay()
    print(
        f"20 invocations, recorded and replayed: {graphs['record_replay_us']} us of CPU; driven by an event "
        f"loop {graphs['driven_us']}, of which 20 bare tasks take {graphs['bare_tasks_us']}",
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
    print(f"\n{'routing':<12}{'requests/s':>12}{'CPU ms/request':>16}{'of the server':>14}")
    for server in SERVERS:
        row = routing[server]
        print(
            f"{server:<12}{row['per_s']:>12.1f}{row['cpu_ms']:>16.2f}{row['server_cpu_ms']:>14.2f}"
        )
    ratio, cpu_ms = routing["static_vs_dynamic"], [routing[each]["cpu_ms"] for each in SERVERS]
    print(f"static over dynamic {ratio['median']} ({ratio['least']} to {ratio['most']})")
    finish(
        [
            Figure("record_replay_us", graphs["record_replay_us"], 200.0, "CPU, 20 invocations"),
            Figure("overhead_ms_per_hop", hops["overhead_ms_per_hop"], 2.0, "1 MB in, 1 MB out"),
            Figure("bytes_per_s_shm", hops["bytes_per_s_shm"], 1e9, "at least", at_least=True),
            Figure("static_vs_dynamic_throughput", ratio["median"], note="work on shared cores"),
            Figure(
                "static_vs_dynamic_cpu", cpu_ms[1] / cpu_ms[0], note="of a request, dynamic over"
            ),
        ],
        graphs=graphs,
        hops=hops,
        routing=routing,
    )


if __name__ == "__main__":
    main()
