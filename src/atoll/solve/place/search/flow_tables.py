"""Arrays of the flow search's kernel: an instance as whole numbers, and the state of a search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.solve.array_types import Floats, Ints, Small
from atoll.solve.place.flow_instance import FlowInstance

_LARGEST = float(1 << 50)
"""Units that the summed capacity of all nodes may count: floats still hold them, sums do not overflow."""


class Tables(NamedTuple):
    """Arrays that a search does not change: capacities as integers, groups, limits.

    `link[i, k]` is 0 inside a group; where there is one group its shape is (1, 1). `width` is the
    number of layers at which a node may be entered: 1, or with partial inference as many as it may hold.
    """

    layers: int
    width: int
    groups: int
    rate: Ints
    link: Ints
    enter: Ints
    leave: Ints
    group: Ints
    max_layers: Ints


class FlowState(NamedTuple):
    """A placement and a maximum flow over it.

    `flow` holds, one after the other: enter[n], leave[n], through[n], into the hub[n], out of the hub at
    each entry layer[n * width], and, where there are several groups, link flows[n * n]. `entry_*` are doubly
    linked lists of the entries (node * width + layer - start) of each hub, `exit_*` of the nodes that end
    at it.
    `seen` to `stack` are the scratch of a search, by vertex: in_i is i, out_i is n + i, a hub 2n + hub.
    """

    start: Ints
    end: Ints
    flow: Ints
    cover: Ints
    number: Ints
    entry_head: Small
    entry_next: Small
    entry_back: Small
    exit_head: Small
    exit_next: Small
    exit_back: Small
    log_at: Small
    log_by: Ints
    seen: Ints
    parent: Small
    slot: Small
    room: Ints
    stack: Small


TABLES_TYPE = (
    "Tuple((int64, int64, int64, int64[:, ::1], int64[:, ::1],"
    " int64[::1], int64[::1], int64[::1], int64[::1]))"
)
STATE_TYPE = (
    "Tuple((int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int32[::1], int32[::1],"
    " int32[::1], int32[::1], int32[::1], int32[::1], int32[::1], int64[::1], int64[::1],"
    " int32[::1], int32[::1], int64[::1], int32[::1]))"
)
"""Types of `Tables` and `FlowState` in entries: plain tuples, whose types have a name in numba."""


def groups_of(instance: FlowInstance, max_rate: float = np.inf) -> Ints:
    """Return a group for every node, such that no link inside a group can bind in flows up to `max_rate`.

    A link cannot bind if it carries what the slower of its ends does at its best.
    """
    top = np.minimum(instance.rate.max(axis=1), max_rate)
    free = instance.link >= np.minimum(top[:, None], top[None, :])
    # Both directions must be free: nodes of a group may stand in either order.
    free &= free.T
    group = np.full(instance.size, -1, np.int64)
    count = 0
    for i in range(instance.size):
        if group[i] >= 0:
            continue
        members = [i]
        # A clique, grown greedily: a node joins only if no link to any member can bind.
        fits = free[i].copy()
        for k in np.flatnonzero(fits & (group < 0)):
            if k > i and fits[k]:
                members.append(int(k))
                fits &= free[k]
        group[members] = count
        count += 1
    return group


def tables_of(instance: FlowInstance, max_rate: float = np.inf) -> tuple[Tables, float]:
    """Return an instance in whole numbers, and how many units a token/s is.

    `max_rate` is a proven bound on the flow, tokens/s.
    """
    group = groups_of(instance, max_rate)
    groups = int(group.max()) + 1
    total = float(instance.rate.max(axis=1).sum())
    # A power of two, so that scaling is exact and only the floor below rounds.
    units = float(2.0 ** np.floor(np.log2(_LARGEST / max(total, 1e-300))))

    def whole(rates: Floats) -> Ints:
        # Rounded down: a flow in whole numbers never exceeds what the real links and nodes carry.
        return np.floor(np.minimum(rates, total) * units).astype(np.int64)

    rate = whole(instance.rate)
    # A node that holds nothing carries nothing, whatever the table says.
    rate[:, 0] = 0
    link = np.zeros((1, 1), np.int64)
    if groups > 1:
        link = whole(instance.link)
        # Inside a group tokens pass through hubs: a single arc beside them would count the link twice.
        link[group[:, None] == group[None, :]] = 0
    return Tables(
        layers=instance.layers,
        width=int(instance.max_layers.max()) if instance.partial else 1,
        groups=groups,
        rate=rate,
        link=link,
        enter=whole(instance.enter),
        leave=whole(instance.leave),
        group=group,
        max_layers=np.minimum(instance.max_layers, instance.layers).astype(np.int64),
    ), units


def state_of(tables: Tables) -> FlowState:
    """Return an empty state: no node is used."""
    n = len(tables.max_layers)
    hubs = (tables.layers + 1) * tables.groups
    vertices = 2 * n + hubs
    links = n * n if tables.groups > 1 else 0
    # Enough for most steps; where a step changes more, `attempt` computes the flow again from nothing.
    logged = 64 * n + 4096

    def small(size: int) -> Small:
        return np.zeros(size, np.int32)

    def large(size: int) -> Ints:
        return np.zeros(size, np.int64)

    return FlowState(
        start=large(n),
        end=large(n),
        flow=large((4 + tables.width) * n + links),
        cover=large(tables.layers),
        number=large(4),
        # -1 ends a list: every hub begins with an empty one.
        entry_head=small(hubs) - np.int32(1),
        entry_next=small(n * tables.width),
        entry_back=small(n * tables.width),
        exit_head=small(hubs) - np.int32(1),
        exit_next=small(n),
        exit_back=small(n),
        log_at=small(logged),
        log_by=large(logged),
        seen=large(vertices),
        parent=small(vertices),
        slot=small(vertices),
        room=large(vertices),
        # A search holds each vertex once; a path up or down has three slots for each of at most L nodes.
        stack=small(vertices + 6 * tables.layers + 64),
    )
