"""Simplicity of plans: what an operator has to look after, and how long requests wait beside it.

*Pieces* of a plan are machines, hops (nodes of an instance beyond its first), slices of machines that are
cut, shapes (unlike sets of nodes that serve one phase of a service) and services whose phases run apart.

Machines that cost nothing may carry more than is asked. A queue for c servers at load 1 / z makes requests
take about f(z) = 1 + z^(2 - sqrt(2 c + 2)) / (c (z - 1)) times as long as without any (Sakasegawa's
approximation); c = 4 stands for engines that work on several requests at a time. Integer programs know f by
its tangents at a few loads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.core.units import format_price, format_share, pluralize

if TYPE_CHECKING:
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

LOADS = (0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Loads at whose tangents programs count how long requests take."""
SAID = "simplicity: "
"""What a plan's note of what simplicity costs begins with."""
_SERVERS = 4
_EXPONENT = 2.0 - math.sqrt(2.0 * _SERVERS + 2.0)
_TOLERANCE = 1e-6
"""Share of their time by which requests must differ to be told apart."""


def slowdown(capacity: float) -> float:
    """Return how many times longer requests take than without a queue, by the tangents of the programs.

    `capacity` is in multiples of the demand.
    """
    return max(base + slope * capacity for base, slope in tangents())


def tangents() -> list[tuple[float, float]]:
    """Return the lines (value at z = 0, slope) below f, a convex function that falls to 1."""
    lines = [(1.0, 0.0)]
    for load in LOADS:
        z = 1.0 / load
        wait = z**_EXPONENT / (_SERVERS * (z - 1.0))
        slope = wait * (_EXPONENT / z - 1.0 / (z - 1.0))
        lines.append((1.0 + wait - slope * z, slope))
    return lines


@dataclass(frozen=True)
class Pieces:
    """What there is to look after in a plan; `apart` are services whose phases run apart."""

    machines: int
    hops: int
    slices: int
    shapes: int
    apart: int

    @property
    def total(self) -> int:
        """All pieces."""
        return self.machines + self.hops + self.slices + self.shapes + self.apart

    def describe(self) -> str:
        """Return it in words: "2 machines, 1 hop, 1 shape, phases apart"."""
        told = [pluralize(self.machines, "machine")]
        counts = {"hop": self.hops, "slice": self.slices}
        told += [pluralize(number, name) for name, number in counts.items() if number]
        told.append(pluralize(self.shapes, "shape"))
        return ", ".join([*told, *(["phases apart"] if self.apart else [])])


def pieces_of(plan: Plan) -> Pieces:
    """Return the pieces of a plan."""
    nodes = [node for instance in plan.instances for node in instance.nodes]
    return Pieces(
        machines=plan.nodes,
        hops=len(nodes) - len(plan.instances),
        slices=sum(node.gpu_ids is not None for node in nodes),
        shapes=len({instance.template_key for instance in plan.instances}),
        apart=len({one.service for one in plan.instances if one.phase is Phase.PREFILL}),
    )


def _capacities(plan: Plan, problem: Problem) -> list[float]:
    """By service with demand, what instances carry of it, in multiples of the demand."""
    found = []
    for service in problem.services:
        carried = dict.fromkeys(Phase, 0.0)
        for role in service.roles:
            if (asked := problem.demand(role)) > 0.0:
                rates = (one.throughput_per_s for one in plan.of_role(role))
                carried[role.phase] = sum(rates) / asked
        if service.demand_per_s > 0.0:
            apart = min(carried[Phase.PREFILL], carried[Phase.DECODE])
            found.append(carried[Phase.BOTH] + apart)
    return found


def is_simpler(plan: Plan, other: Plan, problem: Problem) -> bool:
    """Return whether a plan has fewer pieces than another one.

    Where something runs already, what is started anew counts as one, too. Where there are machines that cost
    nothing, so is one with fewer hops and phases apart, and one with pieces more that each shorten requests
    by the share `settings.simplicity` of their time.
    """
    simplicity = problem.settings.simplicity
    if plan is other or simplicity <= 0.0:
        return False
    now, then = pieces_of(plan), pieces_of(other)
    more = now.total - then.total
    if problem.running:
        more += sum(not one.kept for one in plan.instances)
        more -= sum(not one.kept for one in other.instances)
    if more < 0 or all(offer.usd_per_hour > 0.0 for offer in problem.offers if offer.available):
        return more < 0
    if now.hops + now.apart < then.hops + then.apart:
        return True
    slower = sum(map(slowdown, _capacities(plan, problem)))
    slower -= sum(map(slowdown, _capacities(other, problem)))
    return more * simplicity + slower < -_TOLERANCE


def describe_simplicity(plan: Plan, cheapest: Plan, problem: Problem) -> str:
    """Return what a plan costs more than the cheapest one found, and the pieces and loads of both."""
    more = max(0.0, plan.usd_per_hour - cheapest.usd_per_hour)
    share = more / cheapest.usd_per_hour if cheapest.usd_per_hour > 0.0 else 0.0
    now, then = (
        f"{pieces_of(one).describe()}, at most {format_share(_load(one, problem))} loaded"
        for one in (plan, cheapest)
    )
    return (
        f"{SAID}{format_price(more)}, {format_share(share)} above the cheapest plan found: {now}, "
        f"instead of {then}"
    )


def _load(plan: Plan, problem: Problem) -> float:
    return 1.0 / min(_capacities(plan, problem), default=math.inf)
