"""Nodes that are lost while a plan serves: spot at random, and what a plan must survive."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from atoll.core.rng import stream
from atoll.plan.losses import Loss, losses, units_of
from atoll.plan.startup import StartupTimes
from atoll.sim.sim_options import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem
    from atoll.plan.survival import Survival

DRAIN_S = 20.0
"""Seconds before a loss that is announced in which a node gets nothing new, while another one starts: as the
controller drains it (`ControlPolicy.move_s`)."""
_MIN_BACK_S = 1.0
"""Seconds that a lost node is away at least, however fast instances start."""


class SpotAbsence:
    """For how long nodes on spot are away: one is ordered anew when its end is announced, and starts."""

    def __init__(self, problem: Problem) -> None:
        self._per_s = problem.limits.spot_loss_per_h / 3600.0
        self._startup = StartupTimes(problem)
        self._notice_s = problem.limits.spot_notice_s

    def back_s(self, instance: Instance) -> float:
        """Return the seconds until a lost node of an instance serves again."""
        return max(_MIN_BACK_S, self._startup.of(instance) - self._notice_s)

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
    drain_s = min(DRAIN_S, problem.limits.spot_notice_s)
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
                drained_s = max(0.0, at - drain_s) if drain_s else None
                failures.append(
                    Failure(
                        at,
                        instance=instance.id,
                        node=node.id,
                        back_s=at + away_s,
                        drained_s=drained_s,
                    )
                )
                at += away_s + float(luck.exponential(1.0 / rate_per_s))
    return tuple(
        sorted(failures, key=lambda loss: (loss.time_s, loss.instance or "", loss.node or ""))
    )


def loss_failures(
    plan: Plan, problem: Problem, time_s: float
) -> Iterator[tuple[Loss, tuple[Failure, ...]]]:
    """Yield the losses to survive, each with the nodes that go at `time_s` for good."""
    survival = problem.limits.survival
    own = _cluster_losses if problem.family == "place" else losses
    for loss in own(plan.instances, survival):
        yield loss, tuple(Failure(time_s, instance=i, node=node) for i, node in loss.nodes)


def _cluster_losses(instances: Sequence[Instance], survival: Survival) -> Iterator[Loss]:
    """Yield the losses of a fixed cluster, whose instances go on without a node; of those alike only one.

    Places go with all of their nodes. Of machines those of the stage with the fewest nodes do: a pipeline
    without one of its nodes serves as little as without another, where nodes share no stage.
    """
    for unit, number in survival.lost.items():
        if unit == "machine":
            units, alike = _thin_nodes(instances, number)
        else:
            units = [
                one for one in units_of(instances, unit) if one.kinds[0] not in survival.spared
            ]
            alike = {one.nodes: one.nodes for one in units}
        seen: set[object] = set()
        for some in itertools.combinations(units, min(number, len(units))):
            # How many nodes of one instance go matters, and what it is like, but not which instance it is.
            lost = Counter((alike[one.nodes], one.nodes[0][0]) for one in some)
            key = tuple(sorted((repr(like), n) for (like, _), n in lost.items()))
            if some and key not in seen:
                seen.add(key)
                yield Loss.of_all(some)


def _thin_nodes(
    instances: Sequence[Instance], number: int
) -> tuple[list[Loss], dict[object, object]]:
    """So many nodes of the thinnest stage of so many instances of a kind, and by nodes what they are like."""
    found: list[Loss] = []
    alike: dict[object, object] = {}
    taken: Counter[object] = Counter()
    for instance in instances:
        like = (instance.region, instance.template_key)
        taken[like] += 1
        if taken[like] > number:
            continue
        thinnest = min(instance.layout(), key=lambda stage: (len(stage.nodes), stage.start))
        for node in thinnest.nodes[:number]:
            held = ((instance.id, node.id),)
            found.append(Loss("machine", (node.id,), (node.id,), frozenset({instance.id}), held))
            alike[held] = like
    return found, alike
