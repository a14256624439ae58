"""Capacity of a node of a fixed cluster within a promise: counted as for rented nodes, by its links.

A request passes at most S nodes. What the links of its way take, W, comes off the promise, and every node has
an S-th of the rest for its step: (TTFT - W) / S and (TPOT - W) / S. With these budgets a node carries what
`perf.capacity` says, at its best tensor-parallel size, and

    R(j) = 1 / (input_mean / P(j) + output_mean / D(j))        requests/s

where it does both phases, as in `capacities`. Where a profile was measured, P and D come from its curves:
with B requests in a step of t(B) seconds, of N that the KV cache holds, it finishes min(B / t, N / (S t)).

A message of a decode step carries a token for each sequence of the batch: on an edge with f requests/s
these are f output_mean TPOT / S, at least one; that of a prompt carries all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.catalog import Catalog
from atoll.catalog.nodes import NodeType
from atoll.core.ids import Phase
from atoll.engines.table import EngineChoice
from atoll.perf.capacity import CapacityModel, RoleLoad
from atoll.perf.layers import splits_evenly
from atoll.perf.memory_model import position_of
from atoll.perf.operators import Array
from atoll.perf.step import Position, analytic
from atoll.plan.capacities import longest_context
from atoll.plan.cluster import NodeProfile
from atoll.plan.cluster_profiles import (
    activation_bytes,
    at,
    cluster_of,
    measured_profile,
)
from atoll.plan.plan import SINK, SOURCE, Instance
from atoll.plan.problem import COMPONENT, Problem, Service

_GRID = tuple(float(b) for b in np.unique(np.round(np.geomspace(1.0, 1024.0, 64))))
"""Batch sizes that are tried on measured curves."""
_LINK_TIME_GRID = 1 / 256
"""Seconds on links are rounded up to this share of the promise, so that few tables are made."""

Loads = tuple[RoleLoad, RoleLoad]
Rows = tuple[Array, NDArray[np.int64]]
Wires = tuple[float, float]
"""Seconds of a prompt and of a token."""


@dataclass(frozen=True, eq=False)
class PromisedNode:
    """Rates of a kind of node for a service: by the performance model, or as measured."""

    node: NodeType
    engine: EngineChoice
    loads: Loads
    profile: NodeProfile | None
    fill: float
    _rows: dict[tuple[object, ...], Rows] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return self.loads[0].spec.layers

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Over how many GPUs of the node its layers can be split, ascending."""
        count, spec = self.node.count, self.loads[0].spec
        return tuple(
            size
            for size in range(1, count + 1)
            if count % size == 0 and (size == 1 or splits_evenly(spec, size))
        )

    @property
    def max_layers(self) -> int:
        """The most layers with which it carries anything, 0 if there are none."""
        whole = self.rates(1, Position.WHOLE)[0]
        if whole[self.layers] > 0.0:
            return self.layers
        # Nowhere does a node hold more than in the middle of a pipeline: there is nothing beside the layers.
        some = np.flatnonzero(self.rates(2, Position.MIDDLE)[0] > 0.0)
        return int(some.max(initial=0))

    def rates(self, stages: int, position: Position, wires_s: Wires = (0.0, 0.0)) -> Rows:
        """Return requests/s and the best tensor-parallel size by layers, 0 to all of them.

        `wires_s` are the seconds of a prompt and of a token on the links of the slowest way.
        """
        left_s = self._left(wires_s)
        key = (stages, position, left_s)
        if key not in self._rows:
            self._rows[key] = self._best(stages, position, left_s)
        return self._rows[key]

    def rate(
        self, layers: int, stages: int, position: Position, wires_s: Wires, *, tp: int | None = None
    ) -> float:
        """Return requests/s with so many layers, at its best tensor-parallel size or at `tp`."""
        if tp is None or self.profile is not None:
            return float(self.rates(stages, position, wires_s)[0][layers])
        return float(self._modelled(stages, position, self._left(wires_s), tp)[layers])

    def _left(self, wires_s: Wires) -> Wires:
        """Return the part of each phase's promise that the links leave, in seconds."""
        first, later = self.loads
        return _take(first.slo_s, wires_s[0]), _take(later.slo_s, wires_s[1])

    def _best(self, stages: int, position: Position, left_s: Wires) -> Rows:
        sizes = self.tp_sizes
        if self.profile is not None:
            row = _measured(self, self.profile, stages, left_s)
            return row, np.full(len(row), sizes[-1], np.int64)
        best = np.zeros(self.layers + 1)
        tp = np.full(self.layers + 1, sizes[-1], np.int64)
        for size in sizes:
            row = self._modelled(stages, position, left_s, size)
            # Of equals the larger answers sooner.
            tp[(row >= best) & (row > 0.0)] = size
            best = np.maximum(best, row)
        return best, tp

    def _modelled(self, stages: int, position: Position, left_s: Wires, tp: int) -> Array:
        if min(left_s) <= 0.0:
            return np.zeros(self.layers + 1)
        prefill, decode = (
            _model(load, self.node, tp, self.engine).throughput(
                [stages], [seconds / stages], position
            )[0]
            for load, seconds in zip(self.loads, left_s, strict=True)
        )
        lengths = self.loads[0].lengths
        with np.errstate(divide="ignore"):
            # Both phases take turns on the node.
            taken_s = lengths.input_mean / prefill + lengths.output_mean / decode
            return np.asarray(1.0 / taken_s)


def _take(promise_s: float, wire_s: float) -> float:
    """Return the rest of a promise, the seconds on links rounded up."""
    grain = promise_s * _LINK_TIME_GRID
    # What is a multiple already must not be rounded up by one more.
    return float(promise_s - grain * np.ceil(wire_s / grain - 1e-9))


def promised_node(
    problem: Problem, catalog: Catalog, service: Service, kind: str, machine: str
) -> PromisedNode:
    """Return what nodes of a kind, cut from machines of a node type, do for a service."""
    node = catalog.node(kind)
    if machine != kind and node.count > 1:
        node = replace(node, interconnect=catalog.node(machine).interconnect)
    spec = catalog.model(service.model).llm
    mix = service.lengths.mix()
    profile = measured_profile(problem, catalog, service, kind)
    longest = longest_context(catalog, service) if profile is None else 0
    prefill, decode = (
        RoleLoad(
            f"{service.name}/{COMPONENT}/{phase}",
            spec,
            phase,
            service.slo_s(phase),
            mix,
            together=True,
            max_model_len=longest,
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    )
    return PromisedNode(
        node=node,
        engine=problem.engine_of(service),
        loads=(prefill, decode),
        profile=profile,
        fill=cluster_of(problem).kv_fill,
    )


@lru_cache(maxsize=1024)
def _model(load: RoleLoad, node: NodeType, tp: int, engine: EngineChoice) -> CapacityModel:
    return CapacityModel(load, analytic(load.spec, node, tp=tp, engine=engine))


def _measured(own: PromisedNode, profile: NodeProfile, stages: int, left_s: Wires) -> Array:
    """Requests/s by layers from a profile's curves; no more than the tokens/s it was measured to carry."""
    row = np.zeros(own.layers + 1)
    if min(left_s) <= 0.0:
        return row
    lengths = own.loads[0].lengths
    tokens = lengths.input_mean + lengths.output_mean
    for j in range(1, min(profile.max_layers, own.layers) + 1):
        room = profile.kv_tokens[j - 1] * own.fill
        prompts = _finish(
            [profile.step_s + j * at(profile.prefill_s_per_layer, b * lengths.input_mean) for b in _GRID],
            profile.prefill_requests[j - 1] if profile.prefill_requests else None,
            room / lengths.input_mean, stages, left_s[0],
        )  # fmt: skip
        answers = _finish(
            [profile.step_s + j * at(profile.decode_s_per_layer, b) for b in _GRID],
            profile.decode_sequences[j - 1] if profile.decode_sequences else None,
            room / lengths.decode_context, stages, left_s[1],
        )  # fmt: skip
        if min(prompts, answers) > 0.0:
            row[j] = 1.0 / (1.0 / prompts + lengths.output_mean / answers)
            if profile.tokens_per_s is not None:
                row[j] = min(row[j], profile.tokens_per_s[j - 1] / tokens)
    return row


def _finish(
    steps_s: Sequence[float], max_batch: int | None, held: float, stages: int, left_s: float
) -> float:
    """Requests/s of steps with 1, 2, ... of `_GRID` in time, of `held` that the KV cache holds."""
    best = 0.0
    if held >= 1.0:
        for batch, step_s in zip(_GRID, steps_s, strict=True):
            if step_s * stages > left_s or batch > (max_batch or batch):
                # Larger batches only take longer.
                break
            best = max(best, min(batch, held / stages) / max(step_s, 1e-9))
    return best


# What a plan's instances may carry


def promised_limits(instance: Instance, problem: Problem, catalog: Catalog) -> Mapping[str, float]:
    """Return requests/s that each node of an instance carries within its service's promise, by node id.

    0 for nodes of an instance whose slowest way is too slow whatever it carries.
    """
    service = problem.service(instance.service)
    spec = catalog.model(service.model).llm
    wires_s = wire_seconds(instance, problem, catalog)
    return {
        node.id: promised_node(problem, catalog, service, node.kind, node.node_type).rate(
            node.layers,
            instance.stages,
            position_of(spec, node.start, node.end),
            wires_s,
            tp=node.tp,
        )
        for node in instance.nodes
    }


def wire_seconds(instance: Instance, problem: Problem, catalog: Catalog) -> Wires:
    """Return the seconds of a prompt and of a token on the links of the slowest way of an instance."""
    cluster = cluster_of(problem)
    service = problem.service(instance.service)
    host = {node.id: node.host or "" for node in instance.nodes} | {SOURCE: SOURCE, SINK: SINK}
    per_token = activation_bytes(catalog, service)
    # Flows lead to later ends: what comes before a node is known when it is its turn.
    order = sorted(instance.nodes, key=lambda node: (node.end, node.start))
    late: dict[str, tuple[float, float]] = {SOURCE: (0.0, 0.0)}
    for place in [*(node.id for node in order), SINK]:
        for flow in instance.flows:
            if flow.dst != place or flow.src not in late:
                continue
            link = cluster.link(host[flow.src], host[place])
            if link is None:
                continue
            share = slice_share(instance, flow.src, flow.dst)
            size = cluster.token_bytes if flow.src == SOURCE or place == SINK else per_token
            prompt_s, token_s = message_seconds(
                service,
                requests_per_s=flow.per_s,
                stages=instance.stages,
                seconds_per_token=size / (link.bytes_per_s * share),
                latency_s=link.latency_s,
                last=place == SINK,
            )
            before, now = late[flow.src], late.get(place, (0.0, 0.0))
            late[place] = (max(now[0], before[0] + prompt_s), max(now[1], before[1] + token_s))
    return late.get(SINK, (0.0, 0.0))


def slice_share(instance: Instance, src: str, dst: str) -> float:
    """Return the share of a link between machines that two nodes have who are slices of them."""
    return min((node.share for node in instance.nodes if node.id in (src, dst)), default=1.0)


def message_seconds(
    service: Service,
    *,
    requests_per_s: float,
    stages: int,
    seconds_per_token: float,
    latency_s: float,
    last: bool,
) -> Wires:
    """Return the seconds that a prompt and a decode step's message take on a link."""
    batch = max(1.0, requests_per_s * service.lengths.output_mean * service.tpot_s / stages)
    # What leaves is one token for each request, whatever came in.
    prompt = 1.0 if last else service.lengths.input_mean
    return latency_s + prompt * seconds_per_token, latency_s + batch * seconds_per_token
