"""A problem with machines that may be cut, and a plan for it made by hand."""

from __future__ import annotations

from functools import cache

from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.assembly import NewInstance, Source
from tests.plan.builders import EAST, LAYERS, WEST, layout, offer, plan_of, service

BOX, USD = "L40S:8", 16.0


def cut(size: int, *, box: str = BOX) -> dict[Source, int]:
    return {(f"L40S:{size}", box, "on-demand"): 1}


CHOSEN = (
    NewInstance("chat/llm/prefill", EAST, layout((0, LAYERS, ("L40S:2",))), cut(2)),
    NewInstance("chat/llm/decode", EAST, layout((0, LAYERS, ("L40S:4",))), cut(4)),
    NewInstance("chat/llm/both", EAST, layout((0, LAYERS, ("L40S:1",))), cut(1)),
    NewInstance("chat/llm/both", EAST, layout((0, LAYERS, ("L40S:8",))), cut(8)),
    NewInstance("chat/llm/both", EAST, layout((0, LAYERS, ("L40S:1",))), cut(1, box="L40S:1")),
)


def problem(**changes: object) -> Problem:
    offers = (
        offer(EAST, BOX, USD, available=3),
        offer(EAST, "L40S:1", 2.5),
        offer(WEST, BOX, USD, available=3, whole=True),
    )
    values: dict[str, object] = {
        "name": "boxes",
        "services": (service(phases="auto"),),
        "offers": offers,
    }
    return Problem.model_validate(values | changes)


@cache
def boxes() -> tuple[Problem, Plan]:
    """Two boxes and a machine of one GPU; of one box seven GPUs are used, in three slices."""
    asked = problem()
    return asked, plan_of(asked, *CHOSEN)
