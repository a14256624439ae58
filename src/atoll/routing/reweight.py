"""Flows of a plan that are left when nodes die, found without planning again.

Let f_e be the planned flow of edge e and F_v that through vertex v. Backwards from the sink, vertex v
can still pass on g_v = sum over its edges of f_e * g_w / F_w, where w is the edge's target, g = 0 for a dead
node and g = F for the sink. The new weight of e is f_e * g_w / F_w: each vertex sends to its next hops in
proportion to what they can still carry to the end, and nothing into a dead end (a node all of whose
continuations are dead has g = 0, so it is dead itself). Where all planned edges of a live vertex are gone
but a spare one (weight 0) leads on, the spare ones take its flow, in proportion to what their targets
can pass on.

This never raises the flow of an edge that the plan uses. A planner may do better: pass a function that
computes flows on what survives (`solve`), a max flow, say.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.routing.decisions import Flags, Floats
from atoll.routing.route_tables import RouteTables

Solve = Callable[[RouteTables, Flags], Floats]
"""From the planned tables and which vertices are dead to the new weight of every edge."""


def reweight(tables: RouteTables, dead: Flags, solve: Solve | None = None) -> RouteTables:
    """Return the tables with weights for the nodes that live; all 0 where no pipeline is left.

    `tables` must hold the planned weights, not those of an earlier call: a node that comes back gets its
    flow back.
    """
    weight = _scale(tables, dead) if solve is None else solve(tables, dead)
    return tables.with_weight(weight)


def _scale(tables: RouteTables, dead: Flags) -> Floats:
    first, target, planned = tables.first, tables.target, tables.weight
    sink = tables.vertices - 1
    through = np.bincount(target, weights=planned, minlength=tables.vertices)
    # Nothing flows into the source: it counts with what leaves it.
    through[0] = planned[first[0] : first[1]].sum()
    # What is left of a vertex: g_v / F_v, for spare nodes (F_v = 0) what they could pass on.
    left = np.zeros(tables.vertices)
    left[sink] = 1.0
    able = through.copy()
    weight = np.zeros(tables.edges)
    # From the sink on: what next hops can take is known by then.
    for v in tables.sweep:
        if v == sink or dead[v]:
            continue
        edges = slice(int(first[v]), int(first[v + 1]))
        hops = target[edges]
        new = planned[edges] * left[hops]
        if not new.any():
            # All next hops of the plan are lost: fall back on those that it does not use.
            new = _spread(left[hops] * np.where(hops == sink, 1.0, able[hops]), float(through[v]))
        weight[edges] = new
        total = float(new.sum())
        if through[v] > 0.0:
            left[v] = min(1.0, total / through[v])
        else:
            left[v], able[v] = float(total > 0.0), total
    return weight


def _spread(share: Floats, flow: float) -> Floats:
    """Share a flow out; a vertex that no flow entered passes on what its next hops can take."""
    total = float(share.sum())
    if total <= 0.0:
        return share
    return share / total * (flow if flow > 0.0 else total)
