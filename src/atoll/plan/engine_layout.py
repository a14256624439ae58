"""Layout of an instance as engines ask for it."""

from __future__ import annotations

from itertools import pairwise

from atoll.engines.engine import EngineLayout, Irregularity
from atoll.plan.plan import Instance


def engine_layout(instance: Instance) -> EngineLayout:
    """Return the nodes and layers of an instance, and what is irregular about them."""
    stages, first = instance.layout(), instance.nodes[0]
    found = {
        Irregularity.PARTIAL: instance.partial,
        Irregularity.WIDE_STAGE: any(len(stage.nodes) > 1 for stage in stages),
        Irregularity.UNLIKE_NODES: len({(node.kind, node.tp) for node in instance.nodes}) > 1,
        Irregularity.OVERLAP: any(a.end != b.start for a, b in pairwise(stages)),
    }
    return EngineLayout(
        instance=instance.id,
        nodes=len(instance.nodes),
        tp=first.tp,
        copies=first.gpus // first.tp,
        layers=tuple(stage.end - stage.start for stage in stages),
        irregularities=tuple(each for each, holds in found.items() if holds),
    )
