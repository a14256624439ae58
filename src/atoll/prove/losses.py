"""Nodes that are lost while a plan serves: spot at random, and what a plan must survive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core.rng import stream
from atoll.plan.losses import Loss, losses
from atoll.plan.startup import StartupTimes
from atoll.sim.sim_options import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem

_MIN_BACK_S = 1.0
"""Seconds that a lost node is away at least, however fast instances start."""


class SpotAbsence:
    """For how long nodes on spot are away: one that is lost is ordered anew at once, and starts."""

    def __init__(self, problem: Problem) -> None:
        self._per_s = problem.limits.spot_loss_per_h / 3600.0
        self._startup = StartupTimes(problem)

    def back_s(self, instance: Instance) -> float:
        """Return the seconds until a lost node of an instance serves again."""
        return max(_MIN_BACK_S, self._startup.of(instance))

    def share(self, instance: Instance) -> float:
        """Return for which share of the time a spot node of an instance is away."""
        away = self._per_s * self.back_s(instance)
        return away / (1.0 + away)


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
    luck, absence = stream(seed, "spot losses"), SpotAbsence(problem)
    failures: list[Failure] = []
    for instance in plan.instances:
        spot = [node for node in instance.nodes if node.market == "spot"]
        if not spot:
            continue
        away_s, away = absence.back_s(instance), absence.share(instance)
        for node in spot:
            at = float(luck.exponential(1.0 / rate_per_s))
            if luck.random() < away:
                back_s = away_s * (1.0 - float(luck.random()))
                failures.append(Failure(0.0, instance=instance.id, node=node.id, back_s=back_s))
                at += back_s
            while at < seconds:
                failures.append(Failure(at, instance=instance.id, node=node.id, back_s=at + away_s))
                at += away_s + float(luck.exponential(1.0 / rate_per_s))
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
