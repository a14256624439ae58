"""Why there is no placement: links that are missing, or a promise that no pipeline keeps."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.catalog.catalog import Catalog
from atoll.core.units import format_duration
from atoll.plan.problem import Problem, Service
from atoll.solve.place.deadline import Deadline
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.instance import FlowInstance, Placement
from atoll.solve.place.latency import flow_within
from atoll.solve.place.service import RULES, FlowEffort, starts

_LOOSEST = 64.0
_STEPS = 12


def say_why(
    name: str, problem: Problem, catalog: Catalog, service: Service, effort: FlowEffort
) -> str:
    """Say in a line why a solver found no placement of a service."""
    instance = flow_instance(
        problem, catalog, service, partial=effort.partial, promised=effort.promise
    )
    placements = starts(instance, problem.settings.seed, Deadline(effort.seconds))
    flowing = [p for p in placements if max_flow(instance, p).value > 0]
    if flowing and effort.promise:
        return _broken_promise(problem, catalog, service, flowing)
    if flowing:
        return f"the rule of {name} puts no whole model on these nodes"
    cut = _missing_link(instance)
    if cut is None and name in RULES:
        return f"the rule of {name} puts no whole model on these nodes"
    return cut or "no links lead from source over all layers to sink"


def _missing_link(instance: FlowInstance) -> str | None:
    if not (instance.enter > 0).any():
        return "no link leads from source to any node that can hold the model"
    if not (instance.leave > 0).any():
        return "no link leads to sink from any node that can hold the model"
    if (instance.most < instance.layers).all() and not (instance.link > 0).any():
        return "no node holds all layers, and no link joins any two nodes"
    return None


def _broken_promise(
    problem: Problem, catalog: Catalog, service: Service, placements: Sequence[Placement]
) -> str:
    """Say how much looser the promise would have to be for the quickest pipeline of some placements."""

    def keeps(times: float) -> bool:
        looser = service.model_copy(
            update={"ttft_s": service.ttft_s * times, "tpot_s": service.tpot_s * times}
        )
        instance = flow_instance(problem, catalog, looser, promised=True)
        return any(flow_within(instance, placement).value > 0 for placement in placements)

    asked = (
        f"no pipeline keeps ttft {format_duration(service.ttft_s)} and tpot "
        f"{format_duration(service.tpot_s)}"
    )
    if not keeps(_LOOSEST):
        return f"{asked}, nor {_LOOSEST:g} times that"
    low, high = 1.0, _LOOSEST
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return (
        f"{asked}: the quickest found needs {high:.2f} times that; promise less, or take what these "
        "machines give (--best-effort)"
    )
