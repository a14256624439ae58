"""The flow of a pipeline in stages, spread over all links between them, within a promise.

The messages of a step are as large as what flows over a link. A largest flow uses few links, each for much;
here every node sends to all of the next stage in proportion to what they carry, so messages are small and
leave the steps more of the promise.
"""

from __future__ import annotations

import numpy as np

from atoll.plan.cluster_capacities import Wires
from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.latency import rates_within, scale_flows, ways_of

_ROUNDS = 12
"""Rounds in which flow and the seconds on links, which depend on each other, are found."""


def spread_within(instance: FlowInstance, placement: Placement) -> Flows | None:
    """Return the flow of a placement whose nodes stand in stages; None where there is none."""
    starts = np.unique(placement.start)
    stage = np.searchsorted(starts, placement.start).astype(np.int64)
    ends = np.array([placement.end[stage == s].max() for s in range(len(starts))])
    if (ends[stage] != placement.end).any() or (ends[:-1] != starts[1:]).any():
        return None
    wires: Wires = (0.0, 0.0)
    # Seconds on links never fall between rounds, so the last flow keeps the promise.
    for _ in range(_ROUNDS):
        rate = rates_within(instance, placement, len(starts), wires)
        flows = _spread(instance, stage, rate)
        if flows is None or flows.value <= 0.0:
            return None
        seen = ways_of(instance, placement, flows, len(starts)).wires_s
        slower = max(wires[0], seen[0]), max(wires[1], seen[1])
        if slower == wires:
            return flows
        wires = slower
    return None


def _spread(instance: FlowInstance, stage: Ints, rate: Floats) -> Flows | None:
    """Return the largest flow in proportion to rates, stage by stage."""
    stages = int(stage.max()) + 1
    carried = np.bincount(stage, rate, minlength=stages)
    value = float(carried.min())
    if value <= 0.0:
        return None
    share = rate / carried[stage]
    edge = np.where(
        stage[:, None] + 1 == stage[None, :], value * share[:, None] * share[None, :], 0.0
    )
    enter = np.where(stage == 0, value * share, 0.0)
    leave = np.where(stage == stages - 1, value * share, 0.0)
    flows = Flows(value, edge, enter, leave)
    scale = 1.0
    for flow, link in ((edge, instance.link), (enter, instance.enter), (leave, instance.leave)):
        used = flow > 0.0
        if (link[used] <= 0.0).any():
            return None
        scale = min(scale, float((link[used] / flow[used]).min(initial=1.0)))
    return flows if scale >= 1.0 else scale_flows(flows, scale)
