"""When starting fails: wait longer each time, somewhere else meanwhile; hosts that keep dying are set aside.

Failures are counted per offer (region, node type, market), or for a service where its image or settings are
at fault: those fail on every machine. The n-th failure in a row holds a key back for `backoff_s` * 2^(n - 1),
up to `backoff_max_s`; after that one more is tried. Something that becomes ready there ends it. What has
served is replaced at once the first time that it dies: that starting works there has been seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from atoll.control.decision.control_view import (
    Backoff,
    ControlPolicy,
    Memory,
    ObservedInstance,
    View,
)
from atoll.plan.plan import Instance, OfferKey

_OF_THE_SERVICE = ("image", "settings")
"""Failures that another machine would not help."""
_NOT_OF_THE_HOST = ("capacity", "quota", "image", "settings")
"""Failures that say nothing about the machine."""


_TAKEN = "taken"
"""How the memory calls a wanted instance that drains: somebody else told it to."""


@dataclass(frozen=True, slots=True)
class Lost:
    """An instance that served or was starting and does not any more; `starting` is when it never served."""

    id: str
    reason: str
    starting: bool


def offer_keys(instance: Instance) -> tuple[OfferKey, ...]:
    """Return the offers that the machines of an instance are of, each once, in order."""
    return tuple(sorted({(instance.region_of(n), n.node_type, n.market) for n in instance.nodes}))


def count_failures(
    view: View, memory: Memory, policy: ControlPolicy
) -> tuple[Memory, tuple[Lost, ...]]:
    """Return the memory with what failed, died or became ready since, and what was lost.

    Every failure counts once: an instance is looked at when its state differs from the one remembered.
    """
    before = {id: (state, since_s) for id, state, since_s in memory.states}  # noqa: A001
    # Kept for a while after its time, so that the next failure waits twice as long.
    forgotten_s = view.time_s - policy.backoff_max_s
    backoffs = {held.key: held for held in memory.backoffs if held.until_s > forgotten_s}
    deaths = {host: (count, at_s) for host, count, at_s in memory.deaths}
    lost: list[Lost] = []
    asked = {instance.id for instance in memory.wanted}
    states = []
    for seen in view.instances:
        mine = seen.id not in asked and before.get(seen.id, ("",))[0] != _TAKEN
        states.append((seen.id, _state(seen, view, policy, mine=mine), seen.status.since_s))
    for seen, (_, state, since_s) in zip(view.instances, states, strict=True):
        was, was_since_s = before.get(seen.id, ("", 0.0))
        if state == "ready":
            if was != "ready" and backoffs:
                _forgive(backoffs, seen.instance, view.time_s)
            # One that has served for long enough shows that its host is well.
            if deaths and view.time_s - since_s >= policy.settled_s:
                for host in seen.status.hosts:
                    deaths.pop(host, None)
        if not _is_loss(was, state, wanted=seen.id in asked):
            continue
        reason = seen.status.reason or "it ended by itself"
        lost.append(Lost(seen.id, reason, was not in ("ready", _TAKEN)))
        if state != "failed" and (_TAKEN in (was, state) or seen.status.kind is None):
            continue  # somebody ended it, which says nothing of what it stands on
        if seen.status.kind not in _NOT_OF_THE_HOST:
            for host in seen.status.hosts:
                deaths[host] = (deaths.get(host, (0, 0.0))[0] + 1, view.time_s)
        # What had settled and then died says nothing against starting there again.
        if was != "ready" or view.time_s - was_since_s < policy.settled_s:
            _hold_back(backoffs, seen, reason, view.time_s, policy, served=was == "ready")
    listed = {seen.id for seen in view.instances}
    lost += [
        Lost(id, "no target lists it any more", state == "starting")
        for id, state, _ in memory.states  # noqa: A001
        if id not in listed and id in asked and state in ("starting", "ready")
    ]
    learned = replace(
        memory,
        backoffs=tuple(backoffs[key] for key in sorted(backoffs, key=str)),
        deaths=tuple((host, *deaths[host]) for host in sorted(deaths)),
        states=tuple(sorted(states)),
    )
    return learned, tuple(sorted(lost, key=lambda one: one.id))


def _is_loss(was: str, state: str, *, wanted: bool) -> bool:
    """Return whether an instance ends, or has ended, that nobody here told to."""
    if state == was or was in ("failed", "gone", "draining"):
        return False
    return state == "failed" or (state in ("gone", _TAKEN) and (wanted or was == _TAKEN))


def _forgive(backoffs: dict[OfferKey | str, Backoff], instance: Instance, now_s: float) -> None:
    """Forget failures of what an instance became ready on; one that is under way still runs its time."""
    keys: tuple[OfferKey | str, ...] = (*offer_keys(instance), instance.service)
    for key in keys:
        held = backoffs.get(key)
        # One death is remembered: it takes no wait, so that a second one must.
        if held is not None and held.until_s <= now_s and held.failures > 0:
            del backoffs[key]


def is_late(seen: ObservedInstance, view: View, policy: ControlPolicy) -> bool:
    """Return whether an instance should have been ready long ago."""
    status = seen.status
    return status.state == "starting" and view.time_s - status.since_s > policy.ready_within_s


def _state(seen: ObservedInstance, view: View, policy: ControlPolicy, *, mine: bool) -> str:
    """Return the state of an instance, one that never becomes ready being failed.

    `mine`: if it drains, it was told to from here.
    """
    if seen.status.state == "draining" and not mine:
        return _TAKEN
    return "failed" if is_late(seen, view, policy) else seen.status.state


def _hold_back(
    backoffs: dict[OfferKey | str, Backoff],
    seen: ObservedInstance,
    reason: str,
    now_s: float,
    policy: ControlPolicy,
    *,
    served: bool,
) -> None:
    """Hold back what an instance failed on: its offers, or its service."""
    at_fault: Iterable[OfferKey | str] = offer_keys(seen.instance)
    if seen.status.kind in _OF_THE_SERVICE:
        at_fault = (seen.instance.service,)
    for key in at_fault:
        earlier = backoffs.get(key)
        failures = 0 if earlier is None else earlier.failures
        if earlier is None:
            failures = 0 if served else 1
        elif earlier.until_s > now_s or (earlier.until_s, failures) == (now_s, 0):
            # Several that fail together are one failure.
            failures = max(failures, 0 if served else 1)
        else:
            failures += 1
        wait_s = 0.0
        if failures > 0:
            wait_s = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** (failures - 1))
        backoffs[key] = Backoff(key, failures, now_s + wait_s, reason)


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Instances that may not be started now."""

    keys: frozenset[OfferKey | str]
    hosts: frozenset[str]

    def blocks(self, instance: Instance) -> bool:
        """Return whether an instance would stand on something that is held back."""
        if not self.keys and not self.hosts:
            return False
        if instance.service in self.keys:
            return True
        return any(
            (instance.region_of(node), node.node_type, node.market) in self.keys
            or (node.host is not None and node.host in self.hosts)
            for node in instance.nodes
        )


def hold_back(
    memory: Memory, now_s: float, policy: ControlPolicy, machines: int | None = None
) -> HeldBack:
    """Return what may not be started at this time.

    A host that keeps dying is tried once more after `set_aside_s`. No more than half of the machines there
    are is set aside, those that died most often: where most die it is not the machines.
    """
    dying = [
        (-count, host)
        for host, count, at_s in memory.deaths
        if count >= policy.deaths and now_s - at_s < policy.set_aside_s
    ]
    most = len(dying) if machines is None else machines // 2
    return HeldBack(
        frozenset(held.key for held in memory.backoffs if held.until_s > now_s),
        frozenset(host for _, host in sorted(dying)[:most]),
    )
