"""Small fleets with any-to-any models that are planned in a fraction of a second."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from atoll.plan.files.fleet_file import parse_fleet
from atoll.plan.problem import Problem

HERE, THERE = "aws/us-east-2", "aws/us-west-2"

SEEING: dict[str, object] = {
    "model": "qwen2.5-vl-7b",
    "rate": "8/s",
    "ttft": "2s",
    "tpot": "60ms",
    "classes": {
        "text": {"share": "40%", "input": 400, "output": 150},
        "image+text": {"share": "60%", "input": 200, "output": 150, "images": {"count": 3}},
    },
}
"""A model that looks at images."""

DRAWING: dict[str, object] = {
    "model": "qwen-image",
    "rate": "0.05/s",
    "classes": {"text -> image": {"share": 1.0, "image_within": "60s"}},
}
"""A model without an llm."""

SPEAKING: dict[str, object] = {
    "model": "qwen2.5-omni-7b",
    "rate": "1/s",
    "ttft": "3s",
    "tpot": "100ms",
    "classes": {
        "text": {"share": "60%"},
        "audio -> audio": {"share": "40%", "audio": "8s", "speech": "10s", "ahead": "1s"},
    },
}
"""A model that hears and speaks."""


def offer(node_type: str, usd: float, available: int = 8, **more: object) -> dict[str, object]:
    return {
        "region": HERE,
        "node_type": node_type,
        "available": available,
        "usd_per_hour": usd,
        **more,
    }


OFFERS = (offer("L40S:1", 1.9), offer("L4:1", 0.8))


def fleet(
    models: Mapping[str, object],
    offers: tuple[dict[str, object], ...] = OFFERS,
    **sections: object,
) -> Problem:
    """The problem of services by name, each a mapping as in a fleet file, and of offers."""
    data = {"services": dict(models), "pool": {"offers": list(offers)}, **sections}
    return parse_fleet(yaml.safe_dump(data))


def seeing(**changes: object) -> dict[str, object]:
    return {**SEEING, **changes}
