"""A what-if: a fleet as it is and as it would be, both planned and simulated, side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from atoll.api.fleet_plan import FleetPlan
from atoll.core.units import format_price, format_share
from atoll.plan.cost import price_again
from atoll.plan.plan_diff import ChangedInstance
from atoll.plan.problem import Problem
from atoll.plan.proof import proof_of
from atoll.plan.validate.check import validate
from atoll.planner.change import apply_change
from atoll.planner.plan_drawing import draw_plan
from atoll.planner.questions import AskedFleet, WhatIfAsk
from atoll.planner.source import read_sent
from atoll.planner.worker import Report, Said
from atoll.prove.headroom import Tell, short_services
from atoll.prove.quick_plan import QuickPlan, plan_exactly, plan_quickly, simulate_demand
from atoll.prove.warm import warm

# Prices per hour that differ by less than half a cent count as the same.
_NEAR_USD = 0.005
_WARM_FLEET = """
services: {chat: {model: llama-3.1-8b, ttft: 2s, tpot: 100ms, rate: 1/s, lengths: 512x128}}
pool: {cloud: {regions: [aws/us-east-2], gpus: [L4, L40S], available: 4}}
"""
"""A fleet whose plan takes the same code as any other's."""


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """A plan that is shown, what it keeps by service, and the share of demand that it is for.

    `headroom` is what it took to keep that, where it was made soon.
    """

    plan: FleetPlan
    kept: Mapping[str, float | None]
    served: float
    headroom: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, found: QuickPlan) -> PlannedFleet:
        """Return a quick plan as one of its fleet."""
        plan = FleetPlan.of(found.plan, found.problem)
        return cls(plan, found.kept, found.served, found.headroom)


def prepare() -> None:
    """Load what planning and simulating need, so that the first who asks does not wait for it."""
    import scipy.optimize  # noqa: F401 - placements on clusters take a second to load it

    warm()
    problem = read_sent(_WARM_FLEET).problem
    plan_quickly(problem, simulate_s=10.0, seed=0)


def plan_beforehand(arguments: Said, report: Report) -> Said:
    """Plan a fleet (`place`, a AskedFleet) before anybody asks (`worker.Job`).

    What-ifs find in this worker what executors take then, and where no plan is in force that plan. Those of
    rented machines are soon made without.
    """
    problem = AskedFleet.parse(arguments["place"]).read().problem
    is_slow = problem.family == "graph" or bool(problem.hosts)
    if is_slow:
        _plan(problem, WhatIfAsk(file=""), lambda text: report({"text": text, "share": None}))
    return {"planned": is_slow}


def find_whatif(arguments: Said, report: Report) -> Said:
    """Answer a what-if (`worker.Job`): `place` is a AskedFleet, `ask` a WhatIfAsk."""
    began_s = time.monotonic()
    place, ask = AskedFleet.parse(arguments["place"]), WhatIfAsk.parse(arguments["ask"])
    source = place.read()
    edited = source if ask.edit is None else place.read_edited(ask.edit)
    changed = apply_change(edited, ask.change)

    def tell(when: str, share: float) -> Tell:
        return lambda text: report({"text": f"{when}: {text}", "share": share})

    now = _plan_now(place, source.problem, ask, tell("now", 0.1))
    # What comes to the same problem is not planned a second time.
    if changed.problem.content_hash() == source.problem.content_hash():
        then = now
    else:
        then = _plan(changed.problem, ask, tell("then", 0.5), now.headroom)
        if not ask.exact and (stays := _stay(now, then, changed.problem, ask)) is not None:
            then = stays
    return {
        "now": _draw(now),
        "then": _draw(then),
        "diff": _draw_diff(now.plan, then.plan),
        "change": ask.describe(),
        "verdict": judge(now, then),
        "notes": list(_notes(now, then)),
        "fleet_file": changed.text,
        "fleet_file_name": changed.file_name,
        "simulate_s": ask.simulate_s,
        "exact": ask.exact,
        "seconds": time.monotonic() - began_s,
        "made": None if place.plan is not None else _write_made(now.plan),
    }


def _write_made(plan: FleetPlan) -> dict[str, str]:
    """Return what is shown of a fleet that nobody operates: the plan that was made of it last."""
    return {"plan": plan.to_json(), "problem": plan.problem.to_json()}


def _plan_now(place: AskedFleet, problem: Problem, ask: WhatIfAsk, tell: Tell) -> PlannedFleet:
    """The plan in force with what it keeps; where there is none, one as of what would be."""
    in_force = place.read_plan(problem)
    if in_force is not None:
        tell("simulating the plan in force")
        served = min(in_force.served_fraction.values(), default=1.0)
        kept = simulate_demand(
            in_force,
            in_force.problem,
            share=served,
            simulate_s=ask.simulate_s,
            seed=ask.seed,
        )
        return PlannedFleet(in_force, kept, served)
    return _plan(problem, ask, tell)


def _plan(
    problem: Problem,
    ask: WhatIfAsk,
    tell: Tell,
    like: Mapping[str, float] = MappingProxyType({}),
) -> PlannedFleet:
    """Plan soon, or as `atoll plan` does, and simulate which share of requests keeps its promises."""
    fields: dict[str, Any] = {"simulate_s": ask.simulate_s, "seed": ask.seed, "tell": tell}
    if ask.exact:
        return PlannedFleet.of(plan_exactly(problem, **fields))
    return PlannedFleet.of(plan_quickly(problem, **fields, like=like))


def _stay(
    now: PlannedFleet, then: PlannedFleet, problem: Problem, ask: WhatIfAsk
) -> PlannedFleet | None:
    """Return the plan that there is now at the prices of then, where it is the better answer to the change.

    Plans that are made soon differ by chance as well: none is shown that does worse than changing nothing.
    """
    short = short_services(problem, then.kept)
    if now.served < 1.0 or now.plan.goal != "cost":
        return None
    services = tuple(
        one.model_copy(update={"headroom": max(one.headroom, now.headroom.get(one.name, 1.0))})
        for one in problem.services
    )
    own = problem.replace(services=services)
    # A plan is one for the problem that its mixes of models settle.
    own = own.settled(now.plan.mixes) if now.plan.mixes else own
    plan = price_again(now.plan, own)
    if plan is None or validate(plan, own, same_problem=False):
        return None
    dearer = then.plan.usd_per_hour > plan.usd_per_hour + _NEAR_USD
    if not (dearer or short or then.served < 1.0):
        return None
    kept = simulate_demand(plan, own, simulate_s=ask.simulate_s, seed=ask.seed)
    if short_services(problem, kept):
        return None
    return PlannedFleet(FleetPlan.of(plan, own), kept, 1.0, now.headroom)


def _draw(found: PlannedFleet) -> dict[str, Any]:
    drawn = draw_plan(found.plan)
    for service in drawn["services"]:
        service["kept"] = found.kept.get(service["name"])
    drawn["served"] = found.served
    return {
        "plan": drawn,
        "kept": dict(found.kept),
        "usd_per_hour": found.plan.usd_per_hour,
        "served": found.served,
    }


def _draw_diff(now: FleetPlan, then: FleetPlan) -> dict[str, Any]:
    changes = now.diff(then)
    return {
        "starts": [_draw_change(instance) for instance in changes.started],
        "goes": [_draw_change(instance) for instance in changes.stopped],
        "stays": len(changes.kept),
        "text": changes.text().splitlines(),
    }


def _draw_change(instance: ChangedInstance) -> dict[str, Any]:
    return {
        "instance": instance.id,
        "role": instance.role,
        "region": instance.region,
        "layout": instance.layout,
        "usd_per_hour": instance.usd_per_hour,
    }


def judge(now: PlannedFleet, then: PlannedFleet) -> str:
    """Say in a sentence what a change does to costs, to who is served and to promises."""
    if not then.plan.instances:
        why = f": {then.plan.reasons[0]}" if then.plan.reasons else ""
        return f"nothing can be served{why}"
    more = then.plan.usd_per_hour - now.plan.usd_per_hour
    if abs(more) < _NEAR_USD:
        cost = f"costs the same, {format_price(then.plan.usd_per_hour)}"
    elif more > 0:
        cost = f"costs {format_price(more)} more"
    else:
        cost = f"saves {format_price(-more)}"
    short = short_services(then.plan.problem, then.kept)
    said = [cost]
    if then.served < 1.0:
        said.append(f"serves {format_share(then.served)} of the demand")
    if not short:
        said.append("keeps every promise")
        return f"{', '.join(said[:-1])} and {said[-1]}"
    # The one that falls short by most is named.
    name = min(short, key=lambda each: short[each] - then.plan.problem.service(each).target)
    asked = then.plan.problem.service(name).target
    more_short = "1 more falls" if len(short) == 2 else f"{len(short) - 1} more fall"
    others = f", and {more_short} short" if len(short) > 1 else ""
    return (
        f"{' and '.join(said)}, but only {format_share(short[name])} of the requests for {name} keep their "
        f"promises ({format_share(asked)} asked){others}"
    )


def _notes(now: PlannedFleet, then: PlannedFleet) -> list[str]:
    found: list[str] = []
    if any(proof_of(planned.plan).may_improve for planned in (now, then)):
        found.append("cut short to answer soon: an exact plan may be better")
    return found
