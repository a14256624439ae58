"""How long one decision takes for 1,000 instances on 10,000 machines: `python -m tests.control.large`."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

from atoll.control.decision.control_view import (
    ControlPolicy,
    Memory,
    ObservedInstance,
    TrafficSeen,
    TrafficWindow,
    View,
)
from atoll.control.decision.decide import decide
from atoll.deploy.labels import Labels
from atoll.deploy.target import InstanceStatus
from atoll.plan.plan import Instance, Node, Plan
from atoll.plan.problem import Offer, Problem
from tests.control.world import LENGTHS, service

INSTANCES, NODES, SERVICES, ROUNDS = 1000, 10, 10, 20


def keep_all(asked: Problem) -> Plan:
    return Plan(
        problem_hash="",
        problem_name=asked.name,
        instances=asked.running,
        usd_per_hour=0.0,
        status="feasible",
        solver="what runs",
    )


def make_view() -> View:
    services = tuple(service(f"s{k}", rate=60.0) for k in range(SERVICES))
    offers = tuple(
        Offer(region=f"r{k}", node_type="H100:8", available=2000, usd_per_hour=20.0 + k)
        for k in range(10)
    )
    window = TrafficWindow(60.0, LENGTHS)
    traffic = tuple(
        TrafficSeen(one.name, window, window, window, (1.0,) * 1008, 604_800.0) for one in services
    )
    seen = tuple(make_instance(k) for k in range(INSTANCES))
    asked = Problem(name="large", services=services, offers=offers)
    return View(1e9, asked, offers, traffic, (), seen)


def make_instance(number: int) -> ObservedInstance:
    name = f"s{number % SERVICES}"
    one = Instance(
        id=f"{name}-both-{number}-tabcdef",
        service=name,
        role=f"{name}/llm/both",
        region=f"r{number // 10 % 10}",
        stages=NODES,
        nodes=tuple(
            Node(
                id=f"n{k}", node_type="H100:8", market="on-demand", start=8 * k, end=8 * k + 8, tp=8
            )
            for k in range(NODES)
        ),
        flows=(),
        throughput_per_s=1.0,
        usd_per_hour=200.0,
    )
    labels = Labels(
        fleet="large", instance=one.id, plan="", placement="", service=name, role=one.role
    )
    hosts = tuple(f"h{number}-{k}" for k in range(NODES))
    return ObservedInstance(
        InstanceStatus(f"job-{number}", labels, "ready", 1e9 - 1e4, hosts=hosts), one
    )


def measure_rss_mb() -> float:
    """The most memory that this process held; `ru_maxrss` may be that of who started it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 1024.0
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def main() -> None:
    view, policy = make_view(), ControlPolicy()
    _, memory = decide(view, Memory(), policy, keep_all)
    spent = []
    for k in range(ROUNDS):
        later = replace(view, time_s=view.time_s + 10.0 * (k + 1))
        started = time.process_time()
        decision, memory = decide(later, memory, policy, keep_all)
        spent.append(1000.0 * (time.process_time() - started))
        assert not decision.planned
    rss_mb = measure_rss_mb()
    middle = sorted(spent)[ROUNDS // 2]
    sys.stdout.write(f"decide_ms_1000 {middle:.1f} (least {min(spent):.1f})\n")
    sys.stdout.write(f"rss_mb_1000 {rss_mb:.0f}\n")


if __name__ == "__main__":
    main()
