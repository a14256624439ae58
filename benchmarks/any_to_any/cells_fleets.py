"""Fleets of any-to-any and plain models on mixed GPUs: what mixing saves, and how long planning takes.

Prices are the catalog's, on demand, in one region of AWS or GCP; promises are those of
`examples/any-to-any.yaml`. A plan on one GPU type alone is asked of the same solver with the other offers
left out. The large fleet has sixteen boxes of eight GPUs, four of each of four types, and four services, at
several loads up to one that the boxes cannot carry. Every such plan is made in a process of its own, with
nothing in memory and no templates read from disk; `python -m benchmarks.cells_fleets LOAD` makes one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from atoll.api.fleet import Fleet
from atoll.core.ids import parse_node_type
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from benchmarks.report import ROOT

GPUS = ("A100-80", "L40S", "L4", "T4")
PATIENT_S = 3600.0
"""Time to plan: work is what is measured, and a busy machine must not cut it short."""
BOXES = 4
"""Boxes of eight of each GPU type in the large fleet."""
LOADS = (1.0, 12.0, 20.0, 40.0)
"""Multiples of demand in the large fleet; the last is more than the boxes carry."""

Entry = dict[str, object]

ASSISTANT: Entry = {
    "model": "qwen2.5-omni-7b",
    "rate": "2/s",
    "ttft": "3s",
    "tpot": "100ms",
    "classes": {
        "text": {"share": 0.4, "input": 400, "output": 150},
        "image+text": {"share": 0.3, "input": 200, "output": 150, "images": {"size": "1280x720"}},
        "audio -> audio": {
            "share": 0.2,
            "input": 50,
            "output": 60,
            "audio": "8s",
            "speech": "12s",
            "ahead": "1s",
        },
        "image+audio -> audio": {
            "share": 0.1,
            "input": 50,
            "output": 60,
            "audio": "8s",
            "speech": "12s",
            "ahead": "1s",
            "images": {"size": "1280x720"},
        },
    },
}
DOCUMENTS: Entry = {
    "model": "internvl3-38b",
    "rate": "0.6/s",
    "ttft": "6s",
    "tpot": "150ms",
    "classes": {
        "text": {"share": 0.2, "input": 800, "output": 300},
        "image+text": {
            "share": 0.8,
            "input": 300,
            "output": 300,
            "images": {"count": 2, "size": "1680x1050"},
        },
    },
}
VISION: Entry = {
    "model": "qwen2.5-vl-7b",
    "rate": "3/s",
    "ttft": "3s",
    "tpot": "100ms",
    "classes": {
        "text": {"share": 0.3, "input": 300, "output": 150},
        "image+text": {"share": 0.6, "input": 200, "output": 150, "images": {"size": "1280x720"}},
        "video+text": {
            "share": 0.1,
            "input": 200,
            "output": 200,
            "video": {"frames": 16, "size": "640x360"},
        },
    },
}
CHAT: Entry = {
    "model": "qwen3-8b",
    "rate": "6/s",
    "ttft": "1s",
    "tpot": "60ms",
    "lengths": "azure-conv",
}
PICTURES: Entry = {
    "model": "qwen-image",
    "rate": "0.1/s",
    "classes": {
        "text -> image": {
            "share": 1.0,
            "input": 300,
            "image": {"size": "1024x1024", "steps": 20},
            "image_within": "60s",
        }
    },
}

FLEETS: dict[str, dict[str, Entry]] = {
    "speech, documents, chat": {"assistant": ASSISTANT, "documents": DOCUMENTS, "chat": CHAT},
    "speech, vision, chat": {"assistant": ASSISTANT, "vision": VISION, "chat": CHAT},
    "documents, pictures": {"documents": DOCUMENTS, "pictures": PICTURES},
}
REGIONS = {"aws/us-east-1": GPUS, "gcp/us-central1": ("A100-80", "L4", "T4")}
"""Where GPUs are rented, and which of them there are."""


@dataclass(frozen=True)
class Saving:
    """A fleet's cost on mixed GPUs, in USD/h, and on each GPU type alone; None where it cannot be served."""

    name: str
    mixed: float
    gap: float
    alone: dict[str, float | None]

    @property
    def ratio(self) -> float | None:
        """The best GPU type's cost over that of the mix; None where no type serves the fleet alone."""
        known = [cost for cost in self.alone.values() if cost is not None]
        return min(known) / self.mixed if known else None


@dataclass(frozen=True)
class Timed:
    """A plan of the large fleet: what it costs in USD/h, how much it serves, and the seconds that it took.

    `cpu_s` and `wall_s` are those of the solver alone, `process_cpu_s` also those of starting Python.
    """

    load: float
    status: str
    usd_per_hour: float
    gap: float
    served: float
    cpu_s: float
    wall_s: float
    process_cpu_s: float


def mixed_cases(quick: bool) -> Iterator[tuple[str, Problem]]:
    """Yield fleets to plan on mixed and on equal GPUs: services, a region's GPUs, and how much demand."""
    for (region, gpus), (name, services), load in itertools.product(
        REGIONS.items(), FLEETS.items(), (4.0,) if quick else (1.0, 4.0)
    ):
        cloud = {"regions": [region], "gpus": list(gpus), "available": 32}
        yield f"{name}, {region}, x{load:g}", fleet(services, {"cloud": cloud}, load)


def large_fleet(load: float) -> Problem:
    """Return four services on sixteen boxes, at a multiple of their demand."""
    boxes = [f"{gpu}:8" for gpu in GPUS]
    cloud = {"regions": ["aws/us-east-1"], "node_types": boxes, "available": BOXES}
    services = {"assistant": ASSISTANT, "documents": DOCUMENTS, "vision": VISION, "chat": CHAT}
    return fleet(services, {"cloud": cloud}, load)


def fleet(services: Mapping[str, Entry], pool: Entry, load: float = 1.0) -> Problem:
    """Return the problem of services on a pool, at a multiple of their demand."""
    problem = Fleet.from_dict({"services": dict(services), "pool": pool}).problem
    return problem.replace(
        services=tuple(
            s.model_copy(update={"rate_per_s": s.rate_per_s * load}) for s in problem.services
        )
    )


def saving(name: str, problem: Problem) -> Saving:
    """Plan a fleet on all GPUs and on each type alone."""
    mixed = _plan(problem)
    if not _serves_all(mixed):
        raise RuntimeError(f"{name}: not served by all GPUs together: {mixed.reasons}")
    alone: dict[str, float | None] = {}
    gpus = {o.node_type: parse_node_type(o.node_type).gpu for o in problem.offers}
    for gpu in sorted(set(gpus.values())):
        offers = tuple(o for o in problem.offers if gpus[o.node_type] == gpu)
        plan = _plan(problem.replace(offers=offers))
        alone[gpu] = plan.usd_per_hour if _serves_all(plan) else None
    return Saving(name, mixed.usd_per_hour, mixed.gap or 0.0, alone)


def _serves_all(plan: Plan) -> bool:
    shares = plan.served_fraction.values()
    return plan.status != "infeasible" and min(shares, default=0.0) >= 1.0 - 1e-9


def _plan(problem: Problem) -> Plan:
    return solve(problem, PlanRequest(deadline_s=PATIENT_S))


def time_plan(load: float) -> Timed:
    """Plan the large fleet, templates and all, and take the time; nothing is read from caches on disk."""
    problem = large_fleet(load)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = solve(problem, PlanRequest(deadline_s=PATIENT_S, effort=Effort(cached=False)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    served = min(plan.served_fraction.values(), default=0.0)
    usd, gap = plan.usd_per_hour, plan.gap or 0.0
    return Timed(load, plan.status, usd, gap, served, cpu, wall, time.process_time())


def time_fresh(load: float) -> Timed:
    """Return `time_plan` of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cells_fleets", str(load)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return Timed(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(asdict(time_plan(float(sys.argv[1])))))
