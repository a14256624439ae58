"""Nodes that are lost while a plan serves: spot at random, and what a plan must survive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core.rng import stream
from atoll.plan.losses import Loss, losses
from atoll.sim.sim_options import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

BACK_S = 300.0
"""Seconds until a lost spot node has been replaced and serves."""


def away_share(problem: Problem) -> float:
    """Return for which share of the time a spot node is away."""
    away_h = problem.limits.spot_loss_per_h * BACK_S / 3600.0
    return away_h / (1.0 + away_h)


def lost_nodes(plan: Plan, problem: Problem) -> list[tuple[str, str]]:
    """Return the nodes that are lost now and then, with their services: those on spot, if so asked."""
    if problem.limits.spot_loss_per_h <= 0.0:
        return []
    return [
        (instance.service, node.id)
        for instance in plan.instances
        for node in instance.nodes
        if node.market == "spot"
    ]


def spot_losses(plan: Plan, problem: Problem, seconds: float, seed: int) -> tuple[Failure, ...]:
    """Return losses of spot nodes at random, each as often as the problem says, in so many seconds.

    A node may be away from the beginning on, as it is at any other time.
    """
    rate_per_s = problem.limits.spot_loss_per_h / 3600.0
    if rate_per_s <= 0.0:
        return ()
    luck, away = stream(seed, "spot losses"), away_share(problem)
    failures: list[Failure] = []
    for instance in plan.instances:
        for node in instance.nodes:
            if node.market != "spot":
                continue
            at = float(luck.exponential(1.0 / rate_per_s))
            if luck.random() < away:
                back_s = BACK_S * (1.0 - float(luck.random()))
                failures.append(Failure(0.0, instance=instance.id, node=node.id, back_s=back_s))
                at += back_s
            while at < seconds:
                failures.append(Failure(at, instance=instance.id, node=node.id, back_s=at + BACK_S))
                at += BACK_S + float(luck.exponential(1.0 / rate_per_s))
    return tuple(
        sorted(failures, key=lambda loss: (loss.time_s, loss.instance or "", loss.node or ""))
    )


def loss_failures(
    plan: Plan, problem: Problem, time_s: float
) -> Iterator[tuple[Loss, tuple[Failure, ...]]]:
    """Yield the losses to survive, each with the nodes that go at `time_s` for good.

    On a fixed cluster, whose instances go on without a node, of instances that are alike one loses its first
    node: a pipeline without one of its nodes serves as little as without another, where nodes share no stage.
    """
    if problem.family != "place":
        for loss in losses(plan.instances, problem.limits.survival):
            yield loss, tuple(Failure(time_s, instance=i, node=node) for i, node in loss.nodes)
        return
    seen: set[object] = set()
    for instance in plan.instances:
        alike = (instance.region, instance.template_key)
        if alike in seen:
            continue
        seen.add(alike)
        thinnest = min(instance.layout(), key=lambda stage: (len(stage.nodes), stage.start))
        node = thinnest.nodes[0].id
        loss = Loss("machine", (node,), (node,), frozenset({instance.id}), ((instance.id, node),))
        yield loss, (Failure(time_s, instance=instance.id, node=node),)
