"""Plans and published placements as Helix's event rules take them: its files read, its flows computed.

A published placement gets its flow as Helix gets it, by networkx's maximum flow. Which of several largest
flows that is depends on the order of its sets, with Helix's own names on Python's hash seed: one of
cluster42's decodes the published 645.57 tokens/s, others 633 to 638. Vertices are numbers here, drawn anew
for each of a few tries, so that a run gives the same flows everywhere.
"""

from __future__ import annotations

import configparser
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.rng import stream
from atoll.plan.files.helix import (
    NODE_TYPES,
    HelixCluster,
    read_cluster,
    read_solution,
    read_tables,
)
from atoll.plan.plan import SINK, SOURCE, Plan
from atoll.routing.route_tables import RouteTables
from tests.reference.helix_events import Floats, Placed

NIC_BYTES_PER_S = 1e10
_LOADED_BYTES_PER_S = 1e9
_LINK = re.compile(r"'([^']+)'")

Range = tuple[int, int]
Ends = tuple[int, int]


@dataclass(frozen=True)
class Judge:
    """A cluster and a model by Helix's files; nodes are numbered, -1 is the source and -2 the sink."""

    data: Path
    cluster: HelixCluster
    model: str
    card: Mapping[str, Any]
    links: Mapping[Ends, tuple[float, float]]

    @classmethod
    def read(cls, data: Path, cluster: str, model: str) -> Judge:
        """Read a cluster of `data` and what its node types do with a model."""
        folder = data / "helix"
        read = read_cluster(folder / f"clusters/{cluster}.ini")
        cards = json.loads((folder / "node_profiles.json").read_text("utf-8"))
        number = {SOURCE: -1, SINK: -2}
        links: dict[Ends, tuple[float, float]] = {}
        for (a, b), wire in read.links.items():
            one, other = number.get(a, -3), number.get(b, -3)
            ends = (one if one > -3 else int(a), other if other > -3 else int(b))
            links[ends] = wire
            # A link between nodes is written once and counts both ways, each with all of it.
            if min(ends) >= 0:
                links[ends[1], ends[0]] = wire
        return cls(folder, read, model, cards[model], links)

    def published(self, solution: str) -> dict[int, Range]:
        """The layers of a published placement, by node."""
        ranges = read_solution(self.data / "solutions" / solution, len(self.cluster.types))
        return {i: held for i, held in enumerate(ranges) if held[1] > held[0]}

    def kept_links(self, solution: str) -> list[Ends]:
        """The links that Helix's simulator was given for a published placement, in their order."""
        file = configparser.ConfigParser(interpolation=None)
        file.read(self.data / "solutions" / Path(solution).parent / "simulator_cluster.ini")
        ends = {"source": -1, "sink": -2}
        names = _LINK.findall(file["Links"]["names"])
        return [
            tuple(  # type: ignore[misc]
                ends[end] if end in ends else int(end.rsplit("_", 1)[1]) - 2
                for end in (file[name]["in"], file[name]["out"])
            )
            for name in names
        ]

    def begin_s(self, ranges: Mapping[int, Range]) -> float:
        """When Helix's clock begins to count: whole seconds that loading takes, and one."""
        most = max(end - start for start, end in ranges.values())
        loaded_s = math.ceil(most * float(self.card["layer_param_bytes"]) / _LOADED_BYTES_PER_S)
        return loaded_s + 1.0

    def ways(self, ranges: Mapping[int, Range]) -> list[Ends]:
        """All links of the cluster that a placement can use, without partial inference."""
        layers = self.card["num_layers"]
        found = []
        for a, b in self.links:
            from_ = 0 if a == -1 else ranges[a][1] if a in ranges else None
            to = layers if b == -2 else ranges[b][0] if b in ranges else None
            if from_ is not None and from_ == to and (a, b) != (-1, -2):
                found.append((a, b))
        return found

    def with_largest_flow(
        self, ranges: Mapping[int, Range], ways: Sequence[Ends] | None = None, tries: int = 1
    ) -> Iterator[Placed]:
        """A placement with each largest flow that Helix's own code may find, as far as so many tries do."""
        ways = self.ways(ranges) if ways is None else ways
        seen: set[bytes] = set()
        for turn in range(tries):
            flow = self._largest_flow(ranges, ways, turn)
            if (key := np.round(flow, 3).tobytes()) not in seen:
                seen.add(key)
                yield self._placed(ranges, ways, flow)

    def of_plan(self, plan: Plan) -> tuple[dict[int, Range], Placed]:
        """The layers of a plan by node, and it as the rules take it, with its own flows."""
        ranges: dict[int, Range] = {}
        flows: dict[Ends, float] = {}
        ends = {SOURCE: -1, SINK: -2}
        for instance in plan.instances:
            number = ends | {
                node.id: int(str(node.host).rsplit("-", 1)[1]) for node in instance.nodes
            }
            ranges |= {number[node.id]: (node.start, node.end) for node in instance.nodes}
            for flow in instance.flows:
                pair = (number[flow.src], number[flow.dst])
                flows[pair] = flows.get(pair, 0.0) + flow.per_s
        return ranges, self._placed(ranges, list(flows), np.array(list(flows.values())))

    def _placed(self, ranges: Mapping[int, Range], ways: Sequence[Ends], flow: Floats) -> Placed:
        nodes = sorted(ranges)
        vertex = {node: k for k, node in enumerate(nodes)} | {-1: len(nodes), -2: len(nodes) + 1}
        types = self.card["types"]
        kinds = [types[self.cluster.types[i]] for i in nodes]
        held = [ranges[i][1] - ranges[i][0] for i in nodes]

        def limit(name: str) -> Any:
            return np.array([kind[name][str(j)] for kind, j in zip(kinds, held, strict=True)])

        requests, sequences = limit("prompt_max_requests"), limit("decode_max_tokens")
        longest = int(requests.max()) * 2048
        decode = np.array(
            [_by_token(k["decode_ms_per_layer"], int(sequences.max())) for k in kinds]
        )
        # One request alone is measured as two.
        decode[:, 1] *= 2.0
        wires = [self.links[pair] for pair in ways]
        return Placed(
            layers=self.card["num_layers"],
            start=np.array([ranges[i][0] for i in nodes]),
            end=np.array([ranges[i][1] for i in nodes]),
            kv_entries=limit("vllm_num_blocks") * 16.0 * np.array(held),
            prompt_requests=requests,
            prompt_tokens=requests * 2048,
            decode_requests=sequences,
            decode_context=sequences * 1000,
            prompt_s=np.array([_by_token(k["prompt_ms_per_layer"], longest) for k in kinds]),
            decode_s=decode,
            activation_bytes=float(self.card["activation_bytes"]),
            token_bytes=float(self.card["token_bytes"]),
            nic_bytes_per_s=NIC_BYTES_PER_S,
            tail=np.array([vertex[a] for a, _ in ways]),
            head=np.array([vertex[b] for _, b in ways]),
            latency_s=np.array([latency_s for _, latency_s in wires]),
            bytes_per_s=np.array([speed for speed, _ in wires]),
            flow=np.asarray(flow, np.float64),
            order=_ties(vertex, ranges, ways, self.card["num_layers"]),
        )

    def _largest_flow(self, ranges: Mapping[int, Range], ways: Sequence[Ends], turn: int) -> Floats:
        import networkx as nx

        kinds = read_tables(self.data / "throughput_tables.json", self.model, self.cluster)
        few = float(self.card["token_bytes"])
        much = few + float(self.card["activation_bytes"])
        number = _numbers(len(ranges), turn)
        of = {node: k for k, node in enumerate(sorted(ranges))} | {-1: -1, -2: -2}
        ins: dict[int, list[int]] = {}
        outs: dict[int, list[int]] = {}
        for a, b in ways:
            outs.setdefault(a, []).append(b)
            ins.setdefault(b, []).append(a)
        graph = nx.DiGraph()

        def arc(tail: int, head: int, capacity: float) -> None:
            graph.add_edge(number[tail], number[head], capacity=capacity)

        # Card in, layers in, layers out, card out of node k are vertices 4 k + 4 .. 4 k + 7.
        arc(0, 1, NIC_BYTES_PER_S / few)
        arc(2, 3, NIC_BYTES_PER_S / few)
        for node in sorted(ranges):
            at = 4 * of[node] + 4
            start, end = ranges[node]
            kind = kinds[NODE_TYPES[self.cluster.types[node]]]
            for vertex in range(at, at + 4):
                graph.add_node(number[vertex])
            arc(at, at + 1, NIC_BYTES_PER_S / (few if ins.get(node) == [-1] else much))
            arc(at + 1, at + 2, kind[end - start - 1])
            arc(at + 2, at + 3, NIC_BYTES_PER_S / (few if outs.get(node) == [-2] else much))
        pairs = [
            (1 if a == -1 else 4 * of[a] + 7, 2 if b == -2 else 4 * of[b] + 4) for a, b in ways
        ]
        for (a, b), (tail, head) in zip(ways, pairs, strict=True):
            arc(tail, head, self.links[a, b][0] / (few if a == -1 or b == -2 else much))
        _, flow = nx.maximum_flow(graph, number[0], number[3])
        return np.array([flow[number[tail]][number[head]] for tail, head in pairs])


def _numbers(nodes: int, turn: int) -> list[int]:
    count = 4 * nodes + 4
    return list(range(count)) if turn == 0 else stream(turn, "names").permutation(count).tolist()


def _by_token(points: Iterable[tuple[float, float]], most: int) -> Floats:
    """Seconds for 0, 1, ... tokens along a curve in milliseconds; never done beyond its end."""
    x, y = np.array([*points]).T
    tokens = np.arange(most + 1)
    seconds: Floats = np.where(tokens > x[-1], np.inf, np.interp(tokens, x, y * 1e-3))
    return seconds


def _ties(
    vertex: Mapping[int, int], ranges: Mapping[int, Range], ways: Sequence[Ends], layers: int
) -> Any:
    """The order in which Atoll's router decides ties, for each way."""
    size = len(ranges)
    # Its tables have the source first.
    at = {node: 0 if node == -1 else v + 1 if node >= 0 else size + 1 for node, v in vertex.items()}
    held = [(0, 0), *(ranges[i] for i in sorted(ranges)), (layers, layers)]
    names = [str(k) for k in range(size + 2)]
    tables = RouteTables.of_edges(names, held, [(at[a], at[b], 1.0) for a, b in ways])
    order = {
        (int(tail), int(head)): int(place)
        for tail, head, place in zip(tables.source_of, tables.target, tables.order, strict=True)
    }
    return np.array([order[at[a], at[b]] for a, b in ways])
