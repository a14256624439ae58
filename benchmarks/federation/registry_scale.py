"""How the registry grows: convergence, messages, bytes and memory at 100, 1,000 and 10,000 members.

A simulation (`benchmarks.registry_world`): the real registry code, a virtual network and clock. At 100
members every replica is real; above that all hubs and a sample of the members are, and stand for the others.
Figures of a node are means over the real replicas. At rest nobody comes or goes, but owners sign again; under
churn 2 % of the members an hour leave (half of them without a word) and as many come.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
import tracemalloc
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from atoll.fabric.identity.fabric_keys import is_hub
from atoll.fabric.registry import sync
from atoll.fabric.registry.records import SessionState, decode_metadata, encode_metadata
from atoll.fabric.registry.replica import Replica
from benchmarks.federation.registry_world import (
    HEADER_BYTES,
    VERIFY_S,
    RegistryWorld,
    SampledMember,
    describe,
    shared_records,
    sign,
)
from benchmarks.report import Figure, finish

SAMPLES = {100: (2, 100), 1000: (3, 48), 10_000: (5, 24)}
"""Members -> hubs, and members that are real replicas."""
CHURN = 0.02
LOAD_EVERY_S = 15.0
LOAD_BYTES = 40
_START_S = 10.0
_MAX_S = 300.0


@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """Of one node in one hour."""

    messages: float
    bytes: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """What was measured with so many members; None: not within five minutes."""

    members: int
    join_s: float | None
    mass_join_s: float | None
    hub_loss_s: float | None
    partition_s: float | None
    rest: NodeTraffic
    churn: NodeTraffic
    memory_bytes: float


def grow(world: RegistryWorld) -> float | None:
    """Have everybody start within ten seconds; return how long after the last one all agree."""
    for slot in world.hub_slots:
        world.start(slot)
    world.pass_time(1.0)
    for slot in world.slots:
        world.later(world.rng.uniform(0.0, _START_S), partial(world.start, slot))
    world.pass_time(_START_S)
    return world.until(world.agreed, _MAX_S)


def measure_traffic(world: RegistryWorld, seconds: float, churn: float = 0.0) -> NodeTraffic:
    """Let time pass and return what a node of the sample sent and received, scaled to an hour."""
    nodes = [node for node in world.living if not is_hub(node.slot)]
    before = {node.registry.sid: (node.messages, node.bytes, node.verified) for node in nodes}
    began = time.process_time()
    for _ in range(round(world.members * churn * seconds / 3600)):
        at_s = world.rng.uniform(0.0, seconds)
        world.later(at_s, partial(one_leaves, world))
        world.later(at_s, world.newcomer)
    world.pass_time(seconds)
    cpu_s = (time.process_time() - began) / max(1, len(world.living))
    stayed: list[SampledMember] = [
        node for node in nodes if node.up and node.registry.sid in before
    ]
    per_hour = 3600 / seconds / len(stayed)
    messages, size, verified = (
        sum(now[at] - before[node.registry.sid][at] for node, now in figures)
        for at in range(3)
        for figures in [[(n, (n.messages, n.bytes, n.verified)) for n in stayed]]
    )
    loads = 3600 / LOAD_EVERY_S
    return NodeTraffic(
        messages * per_hour + loads,
        size * per_hour + loads * (LOAD_BYTES + HEADER_BYTES),
        cpu_s * 3600 / seconds + verified * per_hour * VERIFY_S,
    )


def one_leaves(world: RegistryWorld) -> None:
    """End a member, with a word or without."""
    sid = world.rng.choice(list(world.extras) or [sid for sid in world.by_sid if not is_hub(sid)])
    if world.rng.random() < 0.5:
        world.leave(sid)
    else:
        world.kill(sid)


def joins(world: RegistryWorld) -> float | None:
    """Return how long after a newcomer's start all agree, the newcomer included."""
    slot = f"m{world.members + 5000:03d}"
    world.chosen.add(slot)
    world.start(slot)
    return world.until(world.agreed, _MAX_S, 0.01)


def loses_hub(world: RegistryWorld) -> float | None:
    """Return how long after a hub's death all agree on what was said meanwhile."""
    began_s = world.now_s
    world.lose_hub("while the hub is gone")
    world.pass_time(0.2)
    took_s = world.until(world.agreed, _MAX_S)
    return None if took_s is None else world.now_s - began_s


def heals(world: RegistryWorld) -> float | None:
    """Cut the network in two for 20 s, in which each 50th member speaks; return how long the cure takes."""
    world.divide()
    world.pass_time(10.0)
    for sid in world.truth_sids()[::50]:
        world.announce(sid, "while it is divided")
    world.pass_time(10.0)
    world.join_again()
    return world.until(world.agreed, _MAX_S)


def memory_of(members: int) -> float:
    """Return how many bytes a replica with so many records takes, none of it shared."""
    packed = [
        sync.encode_message(
            (
                sign(
                    f"m{number:03d}",
                    f"m{number:03d}-{number:016x}",
                    SessionState.SERVING,
                    1,
                    1.8e9,
                    encode_metadata(describe(f"m{number:03d}")),
                ),
            )
        )
        for number in range(members)
    ]
    gc.collect()
    tracemalloc.start()
    replica = Replica()
    for data in packed:
        (record,) = sync.decode_records(data)
        replica.put(record, decode_metadata(record.body), 1.8e9)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float(used)


def measure(members: int, seconds: float, *, flat: bool = False, seed: int = 1) -> ScaleResult:
    """Run it all with so many members."""
    hubs, sample = SAMPLES.get(members, (2, min(members, 48)))
    with shared_records():
        world = RegistryWorld(members, hubs=hubs, sample=sample, seed=seed, flat=flat)
        mass_join_s = grow(world)
        join_s = joins(world)
        world.age()
        world.pass_time(30.0)
        rest = measure_traffic(world, seconds)
        hub_loss_s = loses_hub(world)
        partition_s = heals(world)
        churn = measure_traffic(world, seconds, CHURN)
    result = ScaleResult(
        members, join_s, mass_join_s, hub_loss_s, partition_s, rest, churn, memory_of(members)
    )
    show(result)
    return result


def show(result: ScaleResult) -> None:
    """Print one size."""
    times = (result.join_s, result.mass_join_s, result.hub_loss_s, result.partition_s)
    agree = ", ".join("never" if one is None else f"{one:.2f}" for one in times)
    print(
        f"{result.members} members: all agree after join, mass join, hub loss, partition: {agree} s"
    )
    for name, traffic in (("at rest", result.rest), ("under churn", result.churn)):
        print(
            f"  {name:12s} per node and hour: {traffic.messages:8.0f} messages, "
            f"{traffic.bytes / 1e6:7.2f} MB, {traffic.cpu_s:6.2f} s of CPU"
        )
    print(f"  memory of a replica: {result.memory_bytes / 1e6:.2f} MB", flush=True)


def exponent(small: float, large: float, times: float = 10.0) -> float:
    """Return e where a figure grows as n^e."""
    return math.log(large / small) / math.log(times)


def figures_of(results: list[ScaleResult]) -> list[Figure]:
    """Return everything for the report."""
    figures: list[Figure] = []
    for one in results:
        n = one.members
        figures += [
            Figure(f"convergence_s_{n}", one.join_s, None, "a newcomer and all others agree"),
            Figure(f"mass_join_s_{n}", one.mass_join_s, None, "all within 10 s; after the last"),
            Figure(f"hub_loss_s_{n}", one.hub_loss_s, None, "from its death"),
            Figure(f"partition_s_{n}", one.partition_s, None, "from its end"),
            Figure(f"messages_per_node_hour_{n}", one.rest.messages),
            Figure(f"bytes_per_node_hour_{n}", one.rest.bytes),
            Figure(f"churn_messages_per_node_hour_{n}", one.churn.messages),
            Figure(f"churn_bytes_per_node_hour_{n}", one.churn.bytes),
            Figure(f"cpu_s_per_node_hour_{n}", one.rest.cpu_s, None, "simulated, on this machine"),
            Figure(f"memory_bytes_per_node_{n}", one.memory_bytes),
            Figure(f"load_messages_per_gateway_hour_{n}", n * 3600 / LOAD_EVERY_S, None, "idle"),
        ]
    for small, large in pairwise(results):
        times = large.members / small.members
        most = times * math.log(large.members) / math.log(small.members)
        label = f"{small.members}_{large.members}"
        for name, before, after in (
            ("bytes_growth", small.rest.bytes, large.rest.bytes),
            ("churn_bytes_growth", small.churn.bytes, large.churn.bytes),
            ("messages_growth", small.rest.messages, large.rest.messages),
            ("churn_messages_growth", small.churn.messages, large.churn.messages),
            ("memory_growth", small.memory_bytes, large.memory_bytes),
        ):
            figures.append(Figure(f"{name}_{label}", after / before, round(most, 2), "n log n"))
            figures.append(
                Figure(f"{name}_exponent_{label}", exponent(before, after, times), None, "n^e")
            )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 and 1,000 members only")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="virtual, at rest and in churn"
    )
    parser.add_argument("--flat", action="store_true", help="without the tree of hashes, as before")
    given = parser.parse_args()
    sizes = (100, 1000) if given.quick else tuple(SAMPLES)
    finish(figures_of([measure(size, given.seconds, flat=given.flat) for size in sizes]))


if __name__ == "__main__":
    main()
