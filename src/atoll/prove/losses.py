"""Nodes that are lost while a plan serves: which ones to try, and how much is held ready for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core.ids import parse_role
from atoll.core.rng import stream
from atoll.sim.sim_options import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

BACK_S = 300.0
"""Seconds until a lost spot node has been replaced and serves."""


def spot_losses(plan: Plan, problem: Problem, seconds: float, seed: int) -> tuple[Failure, ...]:
    """Return losses of spot nodes at random, each as often as the problem says, in so many seconds."""
    rate_per_s = problem.limits.spot_loss_per_h / 3600.0
    if rate_per_s <= 0.0:
        return ()
    luck = stream(seed, "spot losses")
    losses: list[Failure] = []
    for instance in plan.instances:
        for node in instance.nodes:
            if node.market != "spot":
                continue
            at = float(luck.exponential(1.0 / rate_per_s))
            while at < seconds:
                losses.append(Failure(at, instance=instance.id, node=node.id, back_s=at + BACK_S))
                at += BACK_S + float(luck.exponential(1.0 / rate_per_s))
    return tuple(
        sorted(losses, key=lambda loss: (loss.time_s, loss.instance or "", loss.node or ""))
    )


def single_losses(plan: Plan, time_s: float) -> Iterator[Failure]:
    """Yield the loss of one node for good: of instances that are alike only one, and its first node.

    A pipeline without one of its nodes serves as little as without another, where nodes share no stage.
    """
    seen: set[object] = set()
    for instance in plan.instances:
        alike = (instance.region, instance.template_key)
        if alike in seen:
            continue
        seen.add(alike)
        thinnest = min(instance.layout(), key=lambda stage: (len(stage.nodes), stage.start))
        yield Failure(time_s, instance=instance.id, node=thinnest.nodes[0].id)


def reserves(plan: Plan, problem: Problem) -> dict[str, float]:
    """Return by role the share of its capacity that may be used with its largest instance held ready.

    Capacity is that of the plan; a role needs its demand and as much again as one instance carries.
    """
    shares: dict[str, float] = {}
    for role in sorted({instance.role for instance in plan.instances}):
        named = parse_role(role)
        taken = sum(plan.weights(named.model, named.phase).values())
        used = problem.demand(role) * taken
        if used > 0.0:
            max_per_s = max(instance.throughput_per_s for instance in plan.of_role(role))
            shares[role] = used / (used + max_per_s)
    return shares
