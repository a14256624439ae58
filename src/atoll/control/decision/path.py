"""From what runs to what is wanted, one step at a time.

`next_steps` says what may be done now. Capacity is what is ready and not drained. A step never takes a lane
below min(demand, what it carries now): new instances come first, old ones go once they are not needed (make
before break). Where there is no room for a new one and nothing under way will make any, the old ones whose
loss costs the least go first, and the dip is stated. `foresee` walks the whole way in thought.

| stands | wanted | what happens |
|---|---|---|
| ready | yes | nothing |
| starting | yes | nothing; too late: stopped, and started anew under another name |
| ready | no | drained once its lane carries the demand without it, and has caught up |
| starting | no | stopped, unless its lane is short |
| draining | | stopped when its time is over |
| failed | | stopped, for it may still hold machines |
| nothing | yes | started, if its offer is not held back and there is room |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from atoll.control.decision.control_view import ControlPolicy, ObservedInstance
from atoll.control.decision.lane_capacity import (
    ROUNDING,
    CarriedLoad,
    Lanes,
    demand_by_lane,
    find_mixed,
    is_short,
)
from atoll.control.decision.machine_pool import MachinePool, rent_of
from atoll.deploy.labels import Labels
from atoll.deploy.target import InstanceStatus
from atoll.plan.plan import Instance, count_machines
from atoll.plan.problem import Problem

MAX_FORESEEN_ROUNDS = 400
"""Steps that are foreseen; a longer way is cut there."""


@dataclass(frozen=True, slots=True)
class CapacityDip:
    """A lane that will carry less than is asked, or than it did, until what replaces it is ready."""

    lane: str
    before_per_s: float
    after_per_s: float
    demand_per_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class PathStep:
    """Actions possible now: ids of wanted instances to start, and what to drain or stop, each with why."""

    starts: tuple[tuple[Instance, str], ...] = ()
    drains: tuple[tuple[ObservedInstance, str], ...] = ()
    stops: tuple[tuple[ObservedInstance, str], ...] = ()
    dips: tuple[CapacityDip, ...] = ()
    waits: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.starts or self.drains or self.stops)


@dataclass(frozen=True, slots=True)
class PathQuestion:
    """Inputs of a step.

    `problem` has the demand to carry and the offers there are. `late` are names of instances that should have
    been ready long ago, `ending` those that must be drained now because their machines will be gone,
    `spared` those that will be but serve until then, and `blocks` says whether something may not be started.
    `recovering` are services that give nothing up but to make room: they were short lately, or lack something
    for a while.
    """

    problem: Problem
    observed: Sequence[ObservedInstance]
    wanted: Sequence[Instance]
    time_s: float
    policy: ControlPolicy
    blocks: Callable[[Instance], bool] = lambda _: False
    late: frozenset[str] = frozenset()
    ending: frozenset[str] = frozenset()
    spared: frozenset[str] = frozenset()
    recovering: frozenset[str] = frozenset()


@dataclass
class _Walk:
    """The state of the world while one step is put together."""

    asked: PathQuestion
    mixed: frozenset[str]
    demand: Lanes
    carried: CarriedLoad
    pool: MachinePool
    starting: list[ObservedInstance] = field(default_factory=list)
    draining: int = 0
    moving: bool = False
    starts: list[tuple[Instance, str]] = field(default_factory=list)
    drains: list[tuple[ObservedInstance, str]] = field(default_factory=list)
    stops: list[tuple[ObservedInstance, str]] = field(default_factory=list)
    dips: list[CapacityDip] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


def next_steps(asked: PathQuestion) -> PathStep:
    """Return what may be done now; the same question has the same answer, whatever the order of its parts."""
    wanted = {instance.id: instance for instance in asked.wanted}
    holding = [seen for seen in asked.observed if seen.status.state != "gone"]
    if _is_settled(holding, wanted):
        return PathStep()
    # Sorted, so that the answer does not depend on the order in which targets list. Of two with one name the
    # ready one comes first, and so is the one that counts as present.
    holding.sort(key=lambda seen: (seen.id, STATE_ORDER[seen.status.state], seen.status.handle))
    mixed = find_mixed(asked.problem, (seen.instance for seen in holding))
    walk = _Walk(
        asked,
        mixed,
        demand_by_lane(asked.problem, mixed),
        CarriedLoad(asked.problem, mixed),
        MachinePool(asked.problem.offers, (seen.instance for seen in holding)),
    )
    surplus: list[ObservedInstance] = []
    present: set[str] = set()
    # What stands comes first: the steps below need to know what is carried, what is free and what is missing.
    for seen in holding:
        _sort_out(walk, seen, wanted, present, surplus)
    # Make before break: new ones first, then what is not needed any more. Only where neither moves anything
    # does an old one have to make room.
    _start(walk, [wanted[name] for name in sorted(wanted.keys() - present)], bool(surplus))
    left = _release(walk, surplus, asked.wanted)
    _make_room(walk, [wanted[name] for name in sorted(wanted.keys() - present)], left)
    return PathStep(
        tuple(walk.starts),
        tuple(walk.drains),
        tuple(walk.stops),
        tuple(walk.dips),
        tuple(walk.waits),
    )


def _is_settled(holding: Sequence[ObservedInstance], wanted: Mapping[str, Instance]) -> bool:
    """Return whether just what is wanted stands and serves: the usual case, with nothing to be done."""
    ready = {seen.id for seen in holding if seen.status.state == "ready"}
    return len(holding) == len(ready) == len(wanted) and ready == wanted.keys()


STATE_ORDER = {"ready": 0, "starting": 1, "draining": 2, "failed": 3, "gone": 4}


def _sort_out(
    walk: _Walk,
    seen: ObservedInstance,
    wanted: Mapping[str, Instance],
    present: set[str],
    surplus: list[ObservedInstance],
) -> None:
    """Clean up what has failed, and tell what stands as wanted from what is left over."""
    asked, state = walk.asked, seen.status.state
    if state == "failed":
        walk.stops.append((seen, f"it failed: {seen.status.reason or 'no reason given'}"))
        # Its end gives machines back, so nothing else has to make room meanwhile.
        walk.moving = True
        return
    if state == "starting" and seen.id in asked.late:
        walk.stops.append((seen, f"not ready after {asked.policy.ready_within_s:g} s"))
        walk.moving = True
        return
    if state == "draining":
        walk.draining += 1
        walk.moving = True
        if asked.time_s - seen.status.since_s >= asked.policy.drain_s:
            walk.stops.append((seen, f"still draining after {asked.policy.drain_s:g} s"))
        return
    # Only what is ready carries: one that starts may never come up.
    if state == "ready":
        walk.carried.add(seen.instance)
    # A second one under the same name is left over, too.
    if seen.id in wanted and seen.id not in present:
        present.add(seen.id)
        if state == "starting":
            walk.starting.append(seen)
    else:
        surplus.append(seen)


def _start(walk: _Walk, missing: Sequence[Instance], replacing: bool) -> None:
    """Start what is missing and has room: lanes that are short first, replacements a few at a time."""
    policy = walk.asked.policy
    # What leaves soon carries nothing then: its replacements are needed, all of them, now.
    going = walk.asked.ending | walk.asked.spared
    ready_now = [seen for seen in walk.asked.observed if seen.status.state == "ready"]
    serving = [s.instance for s in (*ready_now, *walk.starting) if s.id not in going]
    coming = CarriedLoad(walk.asked.problem, walk.mixed, serving)
    under_way = len(walk.starting)
    # At least one, or a small fleet would never replace anything.
    surge = max(1, math.ceil(policy.surge_share * len(walk.asked.wanted)))
    ready = walk.carried.lanes()
    for instance in sorted(missing, key=lambda one: (-_shortage(walk, one, ready), one.id)):
        if walk.asked.blocks(instance):
            walk.waits.append(f"{instance.id} waits: starting there failed lately")
            continue
        if under_way >= policy.parallel_starts:
            walk.waits.append(f"{instance.id} waits: {under_way} are starting")
            continue
        soon = coming.of_instance(instance)
        needed = any(is_short(soon[lane], walk.demand[lane]) for lane in _lanes_of(instance, soon))
        # What the demand needs is not held to the surge: its lane is short without it.
        if replacing and not needed and under_way >= surge:
            walk.waits.append(f"{instance.id} waits: {under_way} replacements are starting")
            continue
        # One without room is left to `_make_room`, which acts when nothing else moves.
        if not walk.pool.has_room(instance):
            continue
        walk.pool.take(instance)
        coming.add(instance)
        under_way += 1
        walk.moving = True
        why = "demand needs it" if needed else "the plan has it"
        walk.starts.append((instance, f"{why}: {instance.describe()}"))


def _lanes_of(instance: Instance, lanes: Lanes) -> tuple[str, ...]:
    """Return the lanes that an instance carries in: its role, or its service."""
    return (instance.role,) if instance.role in lanes else tuple(lanes)


def _shortage(walk: _Walk, instance: Instance, ready: Lanes) -> float:
    """Return which share of the demand of its lane is not carried now."""
    lanes = walk.carried.of_instance(instance)
    short = 0.0
    for lane in _lanes_of(instance, lanes):
        need = walk.demand[lane]
        if need > 0.0:
            short = max(short, 1.0 - ready[lane] / need)
    # Rounded, so that the last digits of a float do not decide the order.
    return round(short, 9)


def _release(
    walk: _Walk, surplus: Sequence[ObservedInstance], wanted: Iterable[Instance]
) -> list[ObservedInstance]:
    """Let go of what is left over and not needed, the dearest first; return what is needed still."""
    policy, left = walk.asked.policy, []
    floors, exceeded = _find_floors(walk, wanted) if surplus else ({}, False)
    for seen in sorted(surplus, key=lambda one: (-one.instance.usd_per_hour, one.id)):
        if seen.status.state == "starting":
            lanes = walk.carried.of_instance(seen.instance)
            short = any(is_short(lanes[lane], walk.demand[lane]) for lane in lanes)
            # It carries nothing yet: it is worth keeping where its lane is short and limits allow it.
            if short and not exceeded:
                left.append(seen)
            else:
                walk.stops.append((seen, "the plan has it no more, and it does not serve yet"))
                walk.moving = True
            continue
        after = walk.carried.without(seen.instance)
        if seen.id in walk.asked.ending:
            # Its machine goes in any case, so it is drained whatever its lanes lose.
            _drain(walk, seen, "its machine is taken away soon")
            _state_dips(walk, seen, after)
        elif any(is_short(after[lane], _floor(walk, lane, floors)) for lane in after):
            left.append(seen)
        elif not exceeded and not walk.asked.recovering.isdisjoint(seen.instance.services):
            walk.waits.append(f"{seen.id} waits: its service has not caught up")
            left.append(seen)
        elif walk.draining >= policy.parallel_drains:
            walk.waits.append(f"{seen.id} waits: {walk.draining} are draining")
            walk.moving = True
        else:
            _drain(walk, seen, "the plan has it no more, and the others carry the demand")
    return left


def _find_floors(walk: _Walk, wanted: Iterable[Instance]) -> tuple[dict[str, float], bool]:
    """Return below what a lane does not go, and whether what stands exceeds the fleet's limits.

    That is what it carries now; where limits are exceeded, what the plan carries, if less.
    """
    now = walk.carried.lanes()
    problem = walk.asked.problem
    budget, most = problem.limits.budget_usd_per_hour, problem.limits.max_nodes
    if budget is None and most is None:
        return now, False
    present = [
        seen.instance for seen in walk.asked.observed if seen.status.state in ("starting", "ready")
    ]
    # Sums of prices: rounding alone must not count as over budget.
    dear = budget is not None and rent_of(problem.offers, present) > budget * (1.0 + ROUNDING)
    many = most is not None and count_machines(present).total() > most
    if not dear and not many:
        return now, False
    # A fleet beyond its limits may go down to what the plan carries, or it would never come back within them.
    planned = CarriedLoad(problem, walk.mixed, wanted).lanes()
    return {lane: min(value, planned[lane]) for lane, value in now.items()}, True


def _floor(walk: _Walk, lane: str, floors: Lanes) -> float:
    """Return what a lane must carry after a step: the demand, or what it carried before if that is less."""
    return min(walk.demand[lane], floors[lane])


def _drain(walk: _Walk, seen: ObservedInstance, reason: str) -> None:
    walk.drains.append((seen, reason))
    walk.carried.remove(seen.instance)
    walk.draining += 1
    walk.moving = True


def _state_dips(walk: _Walk, seen: ObservedInstance, after: Lanes) -> None:
    """State what lanes lose with an instance that has just been drained, where the demand needs it."""
    # Put back for a moment, to see what its lanes carried with it.
    walk.carried.add(seen.instance)
    before = walk.carried.of_instance(seen.instance)
    walk.carried.remove(seen.instance)
    for lane, left in sorted(after.items()):
        need = walk.demand[lane]
        if is_short(left, min(need, before[lane])):
            reason = f"{seen.id} goes before what replaces it is ready"
            walk.dips.append(CapacityDip(lane, before[lane], left, need, reason))


def _make_room(walk: _Walk, missing: Sequence[Instance], left: Sequence[ObservedInstance]) -> None:
    """Break before make: where nothing under way will make room, let go of what costs the least.

    For every instance that has no room, the old ones that stand in its way are taken in order of the dip that
    each brings until there is room; the instance with the smallest dip goes ahead, alone.
    """
    # A dip is only taken where nothing under way makes room by itself.
    if walk.moving or not left:
        return
    # Nothing goes of a service of which something starts: what it carries is about to change.
    busy = {name for seen in walk.starting for name in seen.instance.services}
    spared = walk.asked.spared
    free = [
        seen for seen in left if busy.isdisjoint(seen.instance.services) and seen.id not in spared
    ]
    best: tuple[float, str, list[ObservedInstance]] | None = None
    # Instances of one placement need the same room, so that one of them answers for all.
    tried: set[object] = set()
    for instance in missing:
        if instance.placement_key in tried or walk.asked.blocks(instance):
            continue
        if walk.pool.has_room(instance):
            continue  # it waits for its turn, not for room
        tried.add(instance.placement_key)
        found = _find_way(walk, instance, free)
        if found is not None and (best is None or (found[0], instance.id) < best[:2]):
            best = (found[0], instance.id, found[1])
    if best is None:
        walk.waits += [f"{instance.id} waits: no room" for instance in missing]
        return
    for seen in best[2]:
        if seen.status.state == "starting":
            walk.stops.append((seen, f"makes room for {best[1]}"))
        else:
            after = walk.carried.without(seen.instance)
            _drain(walk, seen, f"makes room for {best[1]}: there is no other")
            _state_dips(walk, seen, after)


def _find_way(
    walk: _Walk, instance: Instance, free: Sequence[ObservedInstance]
) -> tuple[float, list[ObservedInstance]] | None:
    """Return what must go for an instance to have room and the dip that brings; None if nothing helps."""
    needs = Counter((instance.region_of(n), n.node_type, n.market) for n in instance.nodes)
    helps = [
        seen
        for seen in free
        if any(
            (seen.instance.region_of(n), n.node_type, n.market) in needs
            for n in seen.instance.nodes
        )
    ]
    helps.sort(key=lambda seen: (_dip_without(walk, seen), seen.id))
    gone: list[ObservedInstance] = []
    for seen in helps:
        walk.pool.give_back(seen.instance)
        gone.append(seen)
        if walk.pool.has_room(instance):
            break
    fits = walk.pool.has_room(instance)
    for seen in list(gone) if fits else ():
        walk.pool.take(seen.instance)  # those that turned out not to be in the way stay
        if walk.pool.has_room(instance):
            gone.remove(seen)
        else:
            walk.pool.give_back(seen.instance)
    # The pool was only tried out: nothing has gone yet.
    for seen in gone:
        walk.pool.take(seen.instance)
    if not fits:
        return None
    return sum(_dip_without(walk, seen) for seen in gone), gone


def _dip_without(walk: _Walk, seen: ObservedInstance) -> float:
    """Return by which share of its demand a lane falls short without an instance, beyond what it does now."""
    # It carries nothing yet, so its end costs nothing.
    if seen.status.state == "starting":
        return 0.0
    before = walk.carried.of_instance(seen.instance)
    after = walk.carried.without(seen.instance)
    worst = 0.0
    for lane, left in after.items():
        need = walk.demand[lane]
        if need > 0.0:
            # Cut at the demand: what a lane carries beyond it is no loss.
            worst = max(worst, (min(need, before[lane]) - min(need, left)) / need)
    return worst


@dataclass(frozen=True, slots=True)
class ForeseenPath:
    """The whole way, if all goes well: its dips, how many rounds it takes, and what it ends with.

    `complete` says that it ends with just what is wanted.
    """

    dips: tuple[CapacityDip, ...]
    rounds: int
    complete: bool


def foresee(asked: PathQuestion) -> ForeseenPath:
    """Walk the way in thought: what is started is ready in the next round, what is drained is gone."""
    observed = list(asked.observed)
    dips: list[CapacityDip] = []
    for rounds in range(MAX_FORESEEN_ROUNDS):
        step = next_steps(replace(asked, observed=observed, recovering=frozenset()))
        dips += step.dips
        # What starts or drains changes the world in the next round: an empty step alone is not the end.
        waiting = any(seen.status.state in ("starting", "draining") for seen in observed)
        if step.empty and not waiting:
            wanted = {instance.id for instance in asked.wanted}
            there = {seen.id for seen in observed if seen.status.state == "ready"}
            return ForeseenPath(tuple(dips), rounds, wanted == there)
        observed = _apply(asked, observed, step)
    return ForeseenPath(tuple(dips), MAX_FORESEEN_ROUNDS, False)


def _apply(
    asked: PathQuestion, observed: Iterable[ObservedInstance], step: PathStep
) -> list[ObservedInstance]:
    """Return the world after a step and the time that all of it takes."""
    # By identity: two of them may have the same name.
    stopped = {id(seen) for seen, _ in step.stops}
    drained = {id(seen) for seen, _ in step.drains}
    after: list[ObservedInstance] = []
    for seen in observed:
        state = seen.status.state
        if id(seen) in stopped or state in ("draining", "failed", "gone"):
            continue
        if id(seen) in drained:
            state = "draining"
        elif state == "starting":
            state = "ready"
        status = replace(seen.status, state=state, since_s=asked.time_s)
        after.append(replace(seen, status=status))
    for instance, _ in step.starts:
        labels = Labels(
            # In thought only the name, service and role count.
            fleet="",
            instance=instance.id,
            plan="",
            placement="",
            service=instance.service,
            role=instance.role,
        )
        status = InstanceStatus(instance.id, labels, "starting", asked.time_s)
        after.append(ObservedInstance(status, instance))
    return after
