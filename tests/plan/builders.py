"""A small problem and a plan for it made by hand, so that a test can break one thing at a time."""

from __future__ import annotations

from functools import cache

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Flow, Instance, Market, Node, Plan
from atoll.plan.problem import Lengths, Limits, Offer, Problem, Service, Settings
from atoll.plan.validate.check import validate
from atoll.solve.assembly import (
    NewInstance,
    PlainLayout,
    PlainStage,
    Source,
    plan_from_layouts,
)
from atoll.workload.lengths import LengthMix
from tests.seeds import examples

# Enough to hit every branch; HYPOTHESIS_PROFILE=explore still looks further.
few = examples(15)
EAST, WEST = "aws/us-east-2", "lab"
LAYERS = 32
"""Layers of llama-3.1-8b."""
BOUND = 6.706
"""A hair below what the plan made by hand costs, so that it may be called optimal."""


def lengths(prompt: float = 512.0, answer: float = 128.0) -> Lengths:
    return Lengths.of(LengthMix.fixed(prompt, answer))


def service(name: str = "chat", **changes: object) -> Service:
    values: dict[str, object] = {
        "name": name,
        "model": "llama-3.1-8b",
        "ttft_s": 1.5,
        "tpot_s": 0.08,
        "rate_per_s": 4.0,
        "lengths": lengths(),
        "phases": "apart",
    }
    return Service.model_validate(values | changes)


def offer(region: str, node_type: str, usd: float, **changes: object) -> Offer:
    values: dict[str, object] = {
        "region": region,
        "node_type": node_type,
        "available": 3,
        "usd_per_hour": usd,
    }
    return Offer.model_validate(values | changes)


SERVICES = (
    service("chat", avoid=("A10G",)),
    service("mini", model="llama-3.2-1b", phases="together", rate_per_s=2.0),
)
OFFERS = (
    offer(EAST, "L4:1", 0.8),
    offer(EAST, "L40S:1", 1.9),
    offer(EAST, "L40S:1", 0.9, market="spot"),
    offer(EAST, "T4:1", 0.5),
    offer(EAST, "A10G:1", 1.0),
    offer(WEST, "L40S:1", 0.0, market="owned", available=2),
    offer(WEST, "L4:1", 0.7),
)


def problem(**changes: object) -> Problem:
    values: dict[str, object] = {
        "name": "small",
        "services": SERVICES,
        "offers": OFFERS,
        "settings": Settings(init_penalty=0.1),
    }
    return Problem.model_validate(values | changes)


def layout(*stages: tuple[int, int, tuple[str, ...]]) -> PlainLayout:
    return PlainLayout(tuple(PlainStage(*stage) for stage in stages))


def rent(market: Market = "on-demand", **kinds: int) -> dict[Source, int]:
    """So many whole machines of one GPU each: rent(L4=2)."""
    return {(f"{gpu}:1", f"{gpu}:1", market): n for gpu, n in kinds.items()}


CHOSEN = (
    NewInstance(
        "chat/llm/prefill",
        EAST,
        layout((0, 14, ("L4:1", "L4:1")), (14, LAYERS, ("L40S:1",))),
        rent(L4=2, L40S=1),
    ),
    NewInstance("chat/llm/decode", EAST, layout((0, LAYERS, ("L40S:1",))), rent(L40S=1)),
    NewInstance("chat/llm/decode", WEST, layout((0, LAYERS, ("L40S:1",)))),
    NewInstance("mini/llm/both", WEST, layout((0, 16, ("L4:1",)))),
    NewInstance("chat/llm/prefill", WEST, layout((0, LAYERS, ("L40S:1",)))),
)


@cache
def catalog() -> Catalog:
    return Catalog.default()


def plan_of(asked: Problem, *chosen: NewInstance, **facts: object) -> Plan:
    """The plan of these layouts, called feasible and unproven unless said otherwise."""
    values: dict[str, object] = {"status": "feasible", "solver": "by hand"} | facts
    return plan_from_layouts(asked, catalog(), chosen, **values)  # type: ignore[arg-type]


@cache
def small() -> tuple[Problem, Plan]:
    """The problem and a valid plan: a mixed pipeline, single nodes, two regions, both phases."""
    asked = problem()
    made = plan_of(asked, *CHOSEN, status="optimal", bound=BOUND)
    return asked, made


def rules(made: Plan, asked: Problem) -> set[str]:
    """The rules that a plan breaks."""
    return {violation.rule for violation in validate(made, asked, catalog())}


def edit(made: Plan, instance_id: str, **changes: object) -> Plan:
    """The plan with other values in one instance, nothing else put right."""
    return made.model_copy(
        update={
            "instances": tuple(
                i.model_copy(update=changes) if i.id == instance_id else i for i in made.instances
            )
        }
    )


def find(made: Plan, instance_id: str) -> Instance:
    return next(instance for instance in made.instances if instance.id == instance_id)


def edit_node(made: Plan, instance_id: str, node_id: str, **changes: object) -> Plan:
    nodes: tuple[Node, ...] = tuple(
        n.model_copy(update=changes) if n.id == node_id else n
        for n in find(made, instance_id).nodes
    )
    return edit(made, instance_id, nodes=nodes)


def edit_flow(made: Plan, instance_id: str, index: int, **changes: object) -> Plan:
    flows: list[Flow] = list(find(made, instance_id).flows)
    flows[index] = flows[index].model_copy(update=changes)
    return edit(made, instance_id, flows=tuple(flows))


def within(asked: Problem, made: Plan, **limits: object) -> tuple[Problem, Plan]:
    """The same plan as an answer to the problem with other limits."""
    tighter = asked.replace(limits=Limits.model_validate(limits))
    return tighter, made.model_copy(update={"problem_hash": tighter.content_hash()})
