"""Random layered graphs with a conserved flow, as instances of a plan and as tables."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from atoll.plan.plan import Flow, Instance, Node
from atoll.routing.route_tables import RouteTables


def instance(
    ranges: list[tuple[int, int]],
    flows: list[tuple[str, str, float]],
    *,
    partial: bool = False,
) -> Instance:
    """Nodes n0, n1, ... with these layers, and these flows."""
    return Instance(
        id="i0",
        service="chat",
        role="chat/llm/both",
        region="lab",
        stages=1,
        nodes=tuple(
            Node(id=f"n{i}", node_type="L4:1", market="owned", start=a, end=b, tp=1)
            for i, (a, b) in enumerate(ranges)
        ),
        flows=tuple(Flow(src=a, dst=b, per_s=w) for a, b, w in flows),
        throughput_per_s=sum(w for a, _, w in flows if a == "source"),
        usd_per_hour=0.0,
        partial=partial,
    )


def layered(weights: list[list[list[float]]]) -> RouteTables:
    """Stages of nodes; `weights[s][i][j]`: how stage s splits what its node i got over stage s + 1.

    Stage 0 is the source and the last one the sink; the flow from the source is 1.
    """
    sizes = [len(stage) for stage in weights] + [1]
    begin = np.concatenate([[0], np.cumsum(sizes)])
    through = np.zeros(int(begin[-1]))
    through[0] = 1.0
    edges: list[tuple[int, int, float]] = []
    for s, stage in enumerate(weights):
        for i, split in enumerate(stage):
            a = int(begin[s]) + i
            for j, w in enumerate(split):
                b = int(begin[s + 1]) + j
                flow = float(through[a] * w / sum(split))
                if flow > 0:
                    edges.append((a, b, flow))
                    through[b] += flow
    held = [(0, 0)]
    held += [(s, s + 1) for s in range(len(weights) - 1) for _ in range(sizes[s + 1])]
    held.append((len(weights) - 1, len(weights) - 1))
    names = ["source", *(f"n{i}" for i in range(len(held) - 2)), "sink"]
    return RouteTables.of_edges(names, held, edges)


@st.composite
def graphs(draw: st.DrawFn, *, most: int = 5, stages: int = 4) -> RouteTables:
    """Layered graphs with integer weights; some edges are missing, none leads nowhere."""
    sizes = [1, *draw(st.lists(st.integers(1, most), min_size=1, max_size=stages))]
    weights: list[list[list[float]]] = []
    for here, there in pairwise(sizes):
        split = st.lists(st.integers(0, 9), min_size=there, max_size=there)
        stage = [[float(w) for w in draw(split)] for _ in range(here)]
        for row in stage:
            if not any(row):
                row[0] = 1.0
        weights.append(stage)
    weights.append([[1.0]] * sizes[-1])
    return layered(weights)
