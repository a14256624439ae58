"""Fleets of any-to-any and plain models on mixed GPUs: what mixing saves, and how long planning takes.

Prices are the catalog's, on demand, in one region; promises are those of `examples/any-to-any.yaml`. A plan on
one GPU type alone is asked of the same solver with the other offers left out. The large fleet has sixteen
boxes of eight GPUs, four of each of four types, and four services, at several loads up to one that the boxes
cannot carry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from atoll.api.fleet import Fleet
from atoll.core.ids import parse_node_type
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort
from atoll.solve.registry import solve
from benchmarks.report import ROOT

GPUS = ("A100-80", "L40S", "L4", "T4")
PATIENT_S = 3600.0
"""Time to plan: work is what is measured, and a busy machine must not cut it short."""
BOXES = 4
"""Boxes of eight of each GPU type in the large fleet."""
LOADS = (1.0, 4.0, 12.0)
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
    """A plan, and the seconds that it took."""

    name: str
    plan: Plan
    cpu_s: float
    wall_s: float


def mixed_fleets(quick: bool) -> dict[str, Problem]:
    """Return the fleets that are planned on mixed and on equal GPUs."""
    cloud = {"regions": ["aws/us-east-1"], "gpus": list(GPUS), "available": 16}
    found = {
        "speech, documents, chat": Fleet.load(ROOT / "examples" / "any-to-any.yaml").problem,
        "speech, vision, chat": _fleet(
            {"assistant": ASSISTANT, "vision": VISION, "chat": CHAT}, {"cloud": cloud}
        ),
    }
    if not quick:
        found["documents, pictures"] = _fleet(
            {"documents": DOCUMENTS, "pictures": PICTURES}, {"cloud": cloud}
        )
    return found


def large_fleet(load: float) -> Problem:
    """Return four services on sixteen boxes, at a multiple of their demand."""
    offers = Fleet.from_dict(
        {
            "models": {"assistant": ASSISTANT},
            "pool": {
                "cloud": {
                    "regions": ["aws/us-east-1"],
                    "node_types": [f"{gpu}:8" for gpu in GPUS],
                    "available": BOXES,
                }
            },
        }
    ).problem.offers
    services = {"assistant": ASSISTANT, "documents": DOCUMENTS, "vision": VISION, "chat": CHAT}
    problem = _fleet(
        services,
        {"cloud": {"regions": ["aws/us-east-1"], "node_types": ["L4:8"], "available": BOXES}},
    )
    return problem.replace(
        offers=offers,
        services=tuple(
            s.model_copy(update={"rate_per_s": s.rate_per_s * load}) for s in problem.services
        ),
    )


def _fleet(models: Entry, pool: Entry) -> Problem:
    return Fleet.from_dict({"models": models, "pool": pool}).problem


def saving(name: str, problem: Problem) -> Saving:
    """Plan a fleet on all GPUs and on each type alone."""
    mixed = _plan(problem)
    if not _serves_all(mixed):
        raise RuntimeError(f"{name}: not served by all GPUs together: {mixed.reasons}")
    alone: dict[str, float | None] = {}
    for gpu in GPUS:
        offers = tuple(o for o in problem.offers if parse_node_type(o.node_type).gpu == gpu)
        plan = _plan(problem.replace(offers=offers))
        alone[gpu] = plan.usd_per_hour if _serves_all(plan) else None
    return Saving(name, mixed.usd_per_hour, mixed.gap or 0.0, alone)


def _serves_all(plan: Plan) -> bool:
    shares = plan.served_fraction.values()
    return plan.status != "infeasible" and min(shares, default=0.0) >= 1.0 - 1e-9


def _plan(problem: Problem) -> Plan:
    return solve(problem, deadline_s=PATIENT_S)


def time_plan(name: str, problem: Problem) -> Timed:
    """Plan from nothing, templates and all, and take the time; nothing is read from caches on disk."""
    wall, cpu = time.perf_counter(), time.process_time()
    plan = solve(problem, deadline_s=PATIENT_S, effort=Effort(cached=False))
    return Timed(name, plan, time.process_time() - cpu, time.perf_counter() - wall)
