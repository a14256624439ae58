"""The largest flow over a placement, by a library: what every value that is reported is checked with.

Shares nothing with the kernel of the search: the graph is written out arc by arc and given to
`scipy.sparse.csgraph.maximum_flow` (Dinic). That takes 32-bit capacities, so they are counted in units of
2^-30 of an upper limit of the flow and rounded down: the flow found can be sent as it is, and its value is
below the true one by at most one unit per arc of the smallest cut, about 1e-9 of it per arc.
"""

from __future__ import annotations

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement

_UNITS = float(1 << 30)


def edges(instance: FlowInstance, placement: Placement) -> tuple[Ints, Ints]:
    """Return (tail, head) of all links between nodes that a placement can use."""
    start, end = placement.start, placement.end
    used = end > start
    meets = end[:, None] == start[None, :]
    if instance.partial:
        meets = (start[None, :] <= end[:, None]) & (end[:, None] < end[None, :])
    meets &= used[:, None] & used[None, :] & (instance.link > 0.0)
    np.fill_diagonal(meets, val=False)
    tail, head = np.nonzero(meets)
    return tail.astype(np.int64), head.astype(np.int64)


def max_flow(instance: FlowInstance, placement: Placement) -> Flows:
    """Return a largest flow over a placement, tokens/s; exact to about 1e-9 per arc of the smallest cut."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    n = instance.size
    start, end = placement.start, placement.end
    used = end > start
    rate = np.where(used, instance.rate[np.arange(n), end - start], 0.0)
    first = np.flatnonzero(used & (start == 0) & (instance.enter > 0.0))
    last = np.flatnonzero(used & (end == instance.layers) & (instance.leave > 0.0))
    limit = min(
        float(np.minimum(rate, instance.enter)[first].sum()),
        float(np.minimum(rate, instance.leave)[last].sum()),
    )
    if limit <= 0.0:
        return Flows(0.0, np.zeros((n, n)), np.zeros(n), np.zeros(n))
    tail, head = edges(instance, placement)
    # Vertices: node i is entered at 2i and left at 2i + 1, then come source and sink.
    source, sink = 2 * n, 2 * n + 1
    nodes = np.flatnonzero(used)
    tails = np.concatenate([2 * nodes, 2 * tail + 1, np.full(len(first), source), 2 * last + 1])
    heads = np.concatenate([2 * nodes + 1, 2 * head, 2 * first, np.full(len(last), sink)])
    capacity = np.concatenate(
        [rate[nodes], instance.link[tail, head], instance.enter[first], instance.leave[last]]
    )
    whole = np.floor(np.minimum(capacity, limit) * (_UNITS / limit)).astype(np.int32)
    size = 2 * n + 2
    graph = csr_array((whole, (tails, heads)), shape=(size, size))
    graph.indices, graph.indptr = graph.indices.astype(np.int32), graph.indptr.astype(np.int32)
    result = maximum_flow(graph, source, sink)
    flow = result.flow
    unit = limit / _UNITS

    def flow_over(a: Ints, b: Ints) -> Floats:
        values: Floats = np.maximum(np.asarray(flow[a, b]).ravel(), 0).astype(np.float64) * unit
        return values

    edge = np.zeros((n, n))
    if len(tail):
        edge[tail, head] = flow_over(2 * tail + 1, 2 * head)
    enter, leave = np.zeros(n), np.zeros(n)
    enter[first] = flow_over(np.full(len(first), source), 2 * first)
    leave[last] = flow_over(2 * last + 1, np.full(len(last), sink))
    return Flows(float(result.flow_value) * unit, edge, enter, leave)
