"""How many batches of tokens a pipeline has under way at a time.

Where every stage starts whatever waits as soon as it is free, a pipeline of S stages that are about equally
fast ends up with S + 1 batches in flight: the one that comes back finds the first stage just taken by
another, and waits. So the node where a pipeline starts counts the batches it has sent and not seen again, and
holds what comes back while k of them are out. Let n sequences start there, and t_i(b) be the seconds of the
step of node i for its part of a batch of b. Node i takes m_i batches for each one from here: those of other
nodes where pipelines start. With k batches of b = n / k a round takes

    R(k) = max( sum of t_i(b) on the way + hops,  max_d sum of k m_i t_i(b) over the nodes i of device d )

seconds: no less than the way of one batch, and no less than what the busiest device has to do for all of
them. Most nodes have a device of their own; those that share a core or a GPU take turns on it. Which k is
best depends on n: with stages that are alike it is as many as stages (over all nodes that share the first),
with very uneven ones and few sequences it is one, and where all stages share one device it is always one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.routing.decisions import Floats, Ints

_EVEN = 1.001
"""Rounds that differ by less count as equal."""


@dataclass(frozen=True)
class PacedNode:
    """A node that batches pass: seconds of its step by the sequences in the whole batch.

    `turns` is m, how many batches it takes for each one that is paced. Nodes that are not `on_way` have a
    part of the batch beside another node. Nodes with the same `device` run one at a time (None: it has one of
    its own). Between its points the curve is linear, after them it goes on.
    """

    sequences: Floats
    seconds: Floats
    turns: float = 1.0
    on_way: bool = True
    device: int | None = None

    def step_s(self, sequences: Floats) -> Floats:
        """Return the seconds of its step for batches of so many sequences."""
        found = np.interp(sequences, self.sequences, self.seconds)
        if len(self.sequences) > 1:
            # `np.interp` stays flat after the last point; the curve goes on with its last slope.
            slope = np.diff(self.seconds[-2:]) / np.diff(self.sequences[-2:])
            found = found + slope * np.maximum(sequences - self.sequences[-1], 0.0)
        return np.asarray(found)


def round_seconds(
    nodes: Sequence[PacedNode], sequences: Floats, batches: int, hops_s: float = 0.0
) -> Floats:
    """Return R(k), how long a token takes to come round: `batches` with so many sequences in all."""
    # No batch is smaller than one sequence.
    batch = np.maximum(sequences / batches, 1.0)
    longest = np.full_like(batch, hops_s)
    work: dict[int, Floats] = {}
    for number, node in enumerate(nodes):
        step = node.step_s(batch)
        # Numbers below 0 stand for devices that nobody else uses.
        device = -1 - number if node.device is None else node.device
        work[device] = work.get(device, 0.0) + batches * node.turns * step
        if node.on_way:
            longest = longest + step
    for seconds in work.values():
        longest = np.maximum(longest, seconds)
    return longest


def batches_in_flight(nodes: Sequence[PacedNode], sequences: Floats, hops_s: float = 0.0) -> Ints:
    """Return the best k for each number of sequences: 1 to the number of nodes on the way.

    Of equally good ones it is the largest, but never more batches than sequences.
    """
    stages = sum(node.on_way for node in nodes)
    # The largest first: `argmax` finds the first of equals.
    counts = range(stages, 0, -1)
    rounds = np.stack([round_seconds(nodes, sequences, k, hops_s) for k in counts])
    best = np.argmax(rounds <= rounds.min(axis=0) * _EVEN, axis=0)
    count = np.minimum(stages - best, np.maximum(1.0, np.floor(sequences)))
    return np.asarray(count, np.int64)
