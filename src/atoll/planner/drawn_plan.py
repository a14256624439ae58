"""The types of a drawn plan: services, instances with their stages, and flows between them.

Rates are per second, money is in US dollars, shares are 0 to 1.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict


class ObjectiveDrawing(TypedDict):
    """What a plan is best at, and what is proven of it."""

    goal: str
    unit: str
    value: float | None
    bound: float | None


class DrawnClass(TypedDict):
    """A class of requests and its share of them."""

    name: str
    share: float


class DrawnGroup(TypedDict):
    """Requests that are judged together (`plan.kept_groups.KeptGroup`); `is_kept` is null for too few."""

    name: str
    kind: str
    target: float
    requests: int
    kept: float | None
    low: float
    high: float
    each: dict[str, float]
    is_kept: bool | None


class DrawnService(TypedDict):
    """A service: what is asked and promised, what is kept and served, and what it costs."""

    name: str
    model: str
    requests_per_s: float
    ttft_s: float | None
    tpot_s: float | None
    target: float
    kept: float | None
    cause: str | None
    served: float
    usd_per_hour: float
    usd_per_mtoken: float | None
    input_tokens: float
    output_tokens: float
    choice: str | None
    classes: list[DrawnClass]
    groups: list[DrawnGroup]


class DrawnChoice(TypedDict):
    """A choice between models: shares by model, and the error that comes of them."""

    name: str
    shares: dict[str, float]
    error: float | None
    max_error: float | None


class DrawnStage(TypedDict):
    """A node of an instance: its machine, and the layers that it runs (null: parts of a model)."""

    node: str
    machine: str
    host: str | None
    region: str
    market: str
    gpu: str
    gpus: int
    of_gpus: int
    layers: list[int] | None
    tp: int


class InstanceDrawing(TypedDict):
    """An instance with its stages; `share` of its service's requests, null where no routes say."""

    id: str
    service: str
    guests: list[str]
    phase: str
    parts: list[str]
    region: str
    market: str
    layout: str
    usd_per_hour: float
    share: float | None
    capacity_per_s: float
    kept: float | None
    engine: str | None
    standing: str | None
    stages: list[DrawnStage]


DrawnFlow = TypedDict(
    "DrawnFlow",
    {
        "from": str,
        "to": str,
        "share": float,
        "per_s": float | None,
        "instance": NotRequired[str],
        "bytes_per_s": NotRequired[float],
        "network": NotRequired[bool],
    },
)
"""Requests that go from one end to another."""


class DrawnBind(TypedDict):
    """What keeps a plan from being better, and what it would save without (null: not known)."""

    what: str
    price: str | None


class Drawn(TypedDict):
    """A plan; `binds` is null until it is known."""

    hash: str
    fleet: str
    solver: str
    status: str
    kind: str
    usd_per_hour: float
    idle_usd_per_hour: float
    start_usd_per_hour: float
    bound_usd_per_hour: float | None
    gap: float | None
    objective: ObjectiveDrawing
    cut_short: bool
    proof: dict[str, str | None]
    nodes: int
    gpus: int
    served: float
    services: list[DrawnService]
    choices: list[DrawnChoice]
    instances: list[InstanceDrawing]
    flows: list[DrawnFlow]
    reasons: list[str]
    notes: list[str]
    binds: list[DrawnBind] | None
