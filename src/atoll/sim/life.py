"""Life-cycle events in arrays, with the routing weights that change at each."""

from __future__ import annotations

import math

import numpy as np

from atoll.routing.reweight import reweight
from atoll.sim import sim_arrays as a
from atoll.sim.graphs import Lower, Upper
from atoll.sim.instance_history import FleetHistory, LifeEvent


def life_records(
    history: FleetHistory, lower: Lower, upper: Upper
) -> tuple[a.Records, a.Records, list[tuple[float, int]]]:
    """Return events, changes of edge weights, and when each event comes (those that wait have no time).

    The changes of event i are `life[i].change .. life[i + 1].change`.
    """
    rows: list[tuple[int, int, int]] = []
    changes: list[tuple[int, float]] = []
    starts: list[tuple[float, int]] = []
    dead: set[int] = set()
    leaving: dict[str, int] = {}
    plan = 0
    for event in sorted(history.events, key=_when):
        hit = _targets(history, lower, event)
        if event.kind == a.FAIL:
            dead |= set(hit)
        elif event.kind == a.REVIVE:
            dead -= set(hit)
        if event.node is not None:
            # From when it is announced that a node goes until it does: others take what comes.
            key = f"{event.instance} {event.node}"
            if event.kind == a.WEIGHTS:
                leaving[key] = event.instance
            else:
                leaving.pop(key, None)
        if event.plan is not None:
            plan = event.plan
        for number, target in enumerate(hit):
            if event.time_s is not None:
                starts.append((event.time_s, len(rows)))
            rows.append((event.kind, target, len(changes)))
            if number == 0 and event.kind in (a.FAIL, a.REVIVE, a.WEIGHTS):
                changes += _weights(lower, upper, dead, {*leaving.values()}, plan)
    rows.append((0, 0, len(changes)))
    return np.array(rows, a.LIFE_TYPE), np.array(changes, a.CHANGE), starts


def _when(event: LifeEvent) -> float:
    return math.inf if event.time_s is None else event.time_s


def _targets(history: FleetHistory, lower: Lower, event: LifeEvent) -> list[int]:
    """The units of a node, or the instance."""
    if event.kind not in (a.FAIL, a.REVIVE):
        return [event.instance]
    names = [node.id for node in history.standing[event.instance].instance.nodes]
    return [
        at
        for at, unit in enumerate(lower.units)
        if unit.instance == event.instance and names[unit.index] == event.node
    ]


def _weights(
    lower: Lower, upper: Upper, dead: set[int], leaving: set[int], plan: int
) -> list[tuple[int, float]]:
    """All weights, on both levels, under a plan when units are dead and some instances get nothing new.

    What instances that are leaving still compute they pass on; where nobody else serves they get all.
    """
    weights: list[float] = []
    gone: set[int] = set()
    base = 0
    for number, table in enumerate(lower.tables):
        size = table.vertices - 2
        flags = np.zeros(table.vertices, np.bool_)
        flags[[1 + at - base for at in dead if base <= at < base + size]] = True
        weight = reweight(table, flags).weight if flags.any() else table.weight
        if not weight[int(table.first[0]) : int(table.first[1])].any():
            gone.add(number)
        weights += weight.tolist()
        base += size
    # Routes that are ready for what is gone hold without any share of a lost instance.
    ready = upper.after_loss.get((plan, frozenset(gone | leaving)))
    for at, table in enumerate(upper.tables):
        weighted = table.with_weight(upper.weights[plan if ready is None else ready][at])
        flags = np.array([False, *(n in gone for n in upper.numbers[at]), False])
        weight = reweight(weighted, flags).weight if flags.any() else weighted.weight
        avoided = np.array([False, *(n in leaving for n in upper.numbers[at]), False])
        if avoided.any():
            stays = table.with_weight(upper.weights[plan][at])
            passed = reweight(stays, flags).weight if flags.any() else stays.weight
            weight = reweight(weighted, flags | avoided).weight
            if not weight[int(table.first[0]) : int(table.first[1])].any():
                weight = passed
            weight = np.where(avoided[table.source_of], passed, weight)
        if upper.leaving[plan][at]:
            into = np.bincount(table.target, weights=weight, minlength=table.vertices)
            weight = weight.copy()
            for edge, target in upper.leaving[plan][at]:
                weight[edge] = into[target]
        weights += weight.tolist()
    return list(enumerate(weights))
