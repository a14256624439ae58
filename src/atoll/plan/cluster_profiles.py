"""Profile of a node of a cluster: measured, or tabulated from the performance model.

Where a profile says no tokens/s, they are worked out as Helix does. A request passes all L layers of the
model, so a node that holds j of them sees it for the share

    w(j) = (j / v) / ((L - j) m + j / v)

of its time, with v the node's speed in layers (tokens/s times layers held) and m the mean time per layer over
the cluster. With A tokens of KV cache at hand, A / (I + O) requests of I prompt and O generated tokens fit,
w A / (I + O) of them wait at or run on the node at a time: the batch d of a decode step. One prompt
comes with every O steps of a request, so r = d / O prompts come with each step. A node then carries

    T(j) = k (p + d) / (j (prefill(k p) + k decode(d)) + k s),     p = r I,  k = 1 / r

tokens/s: k decode steps for each whole prompt, and s seconds of host time a step; with r > 1 it is cut
to one prompt and O sequences a step. T sets the speeds and the speeds set T: the two are iterated.

A profile is of one tensor-parallel size. Where none is measured, that is the size with which equal pipelines
of such nodes carry most per node within the promise (`profile_tps`), unless the cluster could not hold the
model then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import UsageError
from atoll.core.ids import Phase, RoleId, parse_node_type
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.layers import node_splits
from atoll.perf.memory_model import MemoryModel
from atoll.perf.operators import ACTIVATION_BYTES, Array
from atoll.perf.step import Position, analytic, range_counts
from atoll.plan.capacities import node_capacity
from atoll.plan.cluster import Cluster, NodeProfile
from atoll.plan.context_length import max_model_len
from atoll.plan.plan import Instance
from atoll.plan.problem import COMPONENT, Problem, Service
from atoll.workload.lengths import LengthMix

_ITERATIONS = 10
_TIGHT = 1.2
"""Below this many times the model's layers, held at typical numbers, nodes hold all they can."""
_STAGES = 8
"""The deepest equal pipelines by which tensor-parallel sizes are compared."""
_TYPICAL = 2 / 3
"""Share of the most layers a node can hold that it typically holds, where its profile does not say."""

Curve = tuple[tuple[float, float], ...]


def cluster_of(problem: Problem) -> Cluster:
    """Return the cluster of a problem that has one."""
    if problem.cluster is None:
        raise UsageError(
            f"{problem.name} has no fixed cluster",
            hint="add a 'cluster' section with nodes and links",
        )
    return problem.cluster


def activation_bytes(catalog: Catalog, service: Service) -> float:
    """Return the bytes that one token hands from node to node."""
    return catalog.model(service.model).llm.hidden * ACTIVATION_BYTES


def request_tokens(service: Service) -> float:
    """Return the tokens of a mean request, prompt and answer."""
    return service.lengths.input_mean + service.lengths.output_mean


def service_profiles(
    problem: Problem, catalog: Catalog, service: Service
) -> dict[str, NodeProfile]:
    """Return the profile of every kind of node of the cluster that can hold a layer of the service's model.

    Kinds are whole machines and slices of them. A profile given for the service counts before one for its
    model, and that before the performance model.
    """
    cluster = cluster_of(problem)
    model = catalog.model(service.model)
    profiles: dict[str, NodeProfile] = {}
    sizes = profile_tps(problem, catalog, service)
    for kind in problem.kinds:
        if not is_known(problem, catalog, service, kind):
            continue
        profile = measured_profile(problem, catalog, service, kind) or tabulate(
            model.llm,
            catalog.node(kind),
            problem.engine_of(service),
            service.lengths.mix(),
            sizes[kind],
        )
        if profile is not None and max_layers(profile, cluster, service) > 0:
            profiles[kind] = profile
    return profiles


def is_measured(problem: Problem, catalog: Catalog, instance: Instance) -> bool:
    """Return whether times of an instance are measured: whatever ran then is to run now."""
    service = problem.service(instance.service)
    return any(measured_profile(problem, catalog, service, node.kind) for node in instance.nodes)


def measured_profile(
    problem: Problem, catalog: Catalog, service: Service, kind: str
) -> NodeProfile | None:
    """Return the profile given for a kind of node, None where the performance model has to say."""
    given = cluster_of(problem).profiles
    for name in (service.name, service.model, catalog.model(service.model).name):
        profile = given.get(name, {}).get(kind)
        if profile is not None:
            return profile
    return None


def is_known(problem: Problem, catalog: Catalog, service: Service, kind: str) -> bool:
    """Return whether a kind can be used: slices of machines that were measured have to be measured, too."""
    whole = cluster_of(problem).counts()
    if kind in whole or measured_profile(problem, catalog, service, kind) is not None:
        return True
    gpu = parse_node_type(kind).gpu
    machines = (machine for machine in whole if parse_node_type(machine).gpu == gpu)
    return all(measured_profile(problem, catalog, service, m) is None for m in machines)


def profile_tps(problem: Problem, catalog: Catalog, service: Service) -> dict[str, int]:
    """Return over how many GPUs a layer is split on each kind of node of the cluster, for its profile.

    Splitting less carries more and holds less. Where the cluster would hold the model with little to spare,
    the node types that lose least by it split their layers further. The largest size counts where none keeps
    the promise, and where the profile is measured.
    """
    cluster = cluster_of(problem)
    spec = catalog.model(service.model).llm
    counts = cluster.counts()
    max_stages = min(_STAGES, counts.total(), spec.layers)
    measured = {
        kind: profile
        for kind in problem.kinds
        if (profile := measured_profile(problem, catalog, service, kind)) is not None
    }
    worth: dict[str, dict[int, float]] = {}
    for kind in sorted({*counts, *problem.kinds}):
        sizes = node_splits(spec, catalog.node(kind))
        worth[kind] = {
            tp: _worth(problem, catalog, service, kind, tp, max_stages)
            for tp in (sizes[-1:] if kind in measured else sizes)
        }
    best = {kind: max(own, key=lambda tp: (own[tp], tp)) for kind, own in worth.items()}

    def held(kind: str, tp: int) -> int:
        """Layers that one such node holds."""
        engine, mix = problem.engine_of(service), service.lengths.mix()
        profile = measured.get(kind) or tabulate(spec, catalog.node(kind), engine, mix, tp)
        return profile.max_layers if profile is not None else 0

    def has_room() -> bool:
        """Whether one node holds the model, or all of them hold it with some to spare."""
        each = {kind: held(kind, best[kind]) for kind in counts}
        total = sum(counts[kind] * layers for kind, layers in each.items())
        return max(each.values()) >= spec.layers or total >= _TIGHT * spec.layers

    while not has_room():
        # The next larger size of a node type, and which part of what it carries that keeps.
        larger = [
            (worth[kind][size] / max(worth[kind][tp], 1e-300), held(kind, size), kind, size)
            for kind in sorted(counts)
            for tp in [best[kind]]
            for size in [min((size for size in worth[kind] if size > tp), default=0)]
            if size
        ]
        if not larger:
            break
        _, _, kind, size = max(larger)
        best[kind] = size
    return best


def _worth(
    problem: Problem, catalog: Catalog, service: Service, kind: str, tp: int, max_stages: int
) -> float:
    """Requests/s per node of the best equal pipeline of nodes of one type at one tensor-parallel size."""
    role = RoleId(service.name, COMPONENT, Phase.BOTH)
    layers = catalog.model(service.model).llm.layers
    found = []
    for stages in range(1, max_stages + 1):
        position = Position.WHOLE if stages == 1 else Position.MIDDLE
        held = -(-layers // stages)
        rate = node_capacity(problem, catalog, service, role, kind, held, stages, position, tp=tp)
        found.append(rate / stages)
    return max(found)


def max_layers(profile: NodeProfile, cluster: Cluster, service: Service) -> int:
    """Return the most layers a node may hold: beside them one mean request's KV cache must fit."""
    need = request_tokens(service)
    fits = [j for j, tokens in enumerate(profile.kv_tokens, 1) if tokens * cluster.kv_fill >= need]
    return max(fits, default=0)


def service_rates(
    problem: Problem, catalog: Catalog, service: Service
) -> dict[str, tuple[float, ...]]:
    """Return, per kind of node, the tokens/s it carries with 1, 2, ... layers of the service's model."""
    cluster = cluster_of(problem)
    profiles = service_profiles(problem, catalog, service)
    allowed = {kind: profile for kind, profile in profiles.items() if service.allows(kind)}
    if not allowed:
        return {}
    return rates(
        allowed,
        cluster.counts(),
        catalog.model(service.model).llm.layers,
        input_mean=service.lengths.input_mean,
        output_mean=service.lengths.output_mean,
        fill=cluster.kv_fill,
    )


def rates(
    profiles: Mapping[str, NodeProfile],
    counts: Mapping[str, int],
    layers: int,
    *,
    input_mean: float,
    output_mean: float,
    fill: float,
) -> dict[str, tuple[float, ...]]:
    """Return T(j) in tokens/s, j = 1, 2, ..., per kind of node of a cluster with so many of each.

    Kinds that `counts` does not name are slices of machines; machines are counted whole, unless only slices
    of them may be used. Given rates are taken as they are; the others come from the iteration in this
    module's docstring.
    """
    own = {kind: counts.get(kind, 0) for kind in profiles}
    number = own if any(own.values()) else dict.fromkeys(profiles, 1)
    normal, tight, speed = {}, {}, {}
    for kind, profile in profiles.items():
        max_layers = profile.max_layers
        normal[kind], tight[kind] = profile.typical_layers or (
            max(1, round(max_layers * _TYPICAL)),
            max_layers,
        )
        speed[kind] = profile.start_rate or _alone(profile, input_mean, output_mean)
    roomy = sum(number[kind] * normal[kind] for kind in profiles) >= _TIGHT * layers
    typical = normal if roomy else tight

    def rate(kind: str, held: int) -> float:
        total = sum(number[kind] * typical[kind] for kind in profiles)
        mean = sum(number[u] * typical[u] / speed[u] for u in profiles) / total
        seconds_here = held / speed[kind]
        share = seconds_here / ((layers - held) * mean + seconds_here)
        return _rate(profiles[kind], held, share, input_mean, output_mean, fill)

    for _ in range(_ITERATIONS):
        speed = {kind: typical[kind] * rate(kind, typical[kind]) for kind in profiles}
    return {
        kind: profile.tokens_per_s or tuple(rate(kind, j) for j in range(1, profile.max_layers + 1))
        for kind, profile in profiles.items()
    }


def _alone(profile: NodeProfile, input_mean: float, output_mean: float) -> float:
    """Tokens/s of one layer with a request at a time: where speeds start."""
    prefill = at(profile.prefill_s_per_layer, input_mean)
    decode = output_mean * at(profile.decode_s_per_layer, 1.0)
    return (input_mean + output_mean) / (prefill + decode)


def _rate(
    profile: NodeProfile,
    held: int,
    share: float,
    input_mean: float,
    output_mean: float,
    fill: float,
) -> float:
    room = int(fill * profile.kv_tokens[held - 1])
    sequences = room / (input_mean + output_mean) * share
    prompts = sequences / output_mean
    if prompts > 1:
        steps, prompt, decoding = 1.0, input_mean, output_mean
    else:
        steps = 1 / prompts
        prompt, decoding = float(round(prompts * input_mean)), float(round(sequences))
        if not decoding:  # less than a sequence at a time: as it is, not rounded
            prompt, decoding = prompts * input_mean, sequences
    whole = prompt * steps if steps == 1.0 else float(int(prompt * steps))
    prefill = at(profile.prefill_s_per_layer, whole)
    decode = at(profile.decode_s_per_layer, decoding)
    busy_s = held * (prefill + steps * decode) + steps * profile.step_s
    return steps * (prompt + decoding) / busy_s


def at(curve: Curve, x: float) -> float:
    """Return a curve at x: linear between its points, constant before, on with the last slope after."""
    if len(curve) == 1 or x <= curve[0][0]:
        return curve[0][1]
    upper = min(bisect_left(curve, x, key=lambda point: point[0]), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[upper - 1], curve[upper]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


# From the performance model


def _room(memory: MemoryModel, context: float) -> Array:
    """Sequences of `context` tokens that fit beside j layers, wherever in the pipeline they are."""
    some = [
        memory.sequences_by_layers(context, position)
        for position in (Position.FIRST, Position.MIDDLE, Position.LAST)
    ]
    room = np.min(some, axis=0)
    room[-1] = memory.sequences_by_layers(context, Position.WHOLE)[-1]
    return np.asarray(room)


@lru_cache(maxsize=512)
def tabulate(
    spec: TransformerSpec, node: NodeType, engine: EngineChoice, lengths: LengthMix, tp: int
) -> NodeProfile | None:
    """Return the profile of a node type by the performance model, None if not even one layer fits.

    Each layer is split over `tp` GPUs, and the node holds copies of its layers side by side.

    Seconds per layer are those of the mean layer, with embedding and output matrix spread over all
    layers; prompts have their mean length and sequences the mean context. In memory, embedding and output
    matrix count as if the node held whichever is larger, since any node may come first or last.
    """
    settings = engine.on(node.gpu)
    groups = node.count // tp
    context = lengths.input_mean + lengths.output_mean
    memory = MemoryModel.of(spec, node, tp=tp, engine=settings, phase=Phase.BOTH)
    room = _room(memory, context)
    longest = max_model_len(lengths, spec.max_context, engine.limits.max_model_len)
    starts = _room(memory, float(longest)) >= 1.0
    max_layers = int(np.max(np.flatnonzero((room >= 1.0) & starts)))
    if max_layers == 0:
        return None
    prompts = np.unique(np.round(np.geomspace(32, settings.max_tokens, 33)))
    sequences = np.unique(np.round(np.geomspace(1, settings.max_sequences, 33)))
    zero = np.zeros_like(prompts)
    spread = lengths.input_mean_square / lengths.input_mean**2
    prefill = Batch(prompts, prompts / lengths.input_mean, zero, zero, zero, spread)
    zero = np.zeros_like(sequences)
    decode = Batch(zero, zero, zero, sequences, zero + lengths.decode_context)
    model = analytic(spec, node, tp=tp, engine=engine)
    counts = range_counts(spec, model.kinds, 0, spec.layers)

    def curve(batch: Batch[Array], x: Array) -> Curve:
        parts = model.parts(batch)
        total = parts.embedding + parts.head
        # As if the node held all that it can: then a step's sequences cost what they do on the host.
        total = total + settings.host.sequence_s * batch.outputs * (spec.layers / max_layers)
        for seconds, count in zip(parts.layers, counts, strict=True):
            total = total + seconds * float(count)
        per_layer = np.maximum.accumulate(total) / spec.layers
        # Groups of GPUs share a step's batch.
        pairs = zip((x * groups).tolist(), per_layer.tolist(), strict=True)
        return ((0.0, 0.0), *pairs)

    return NodeProfile(
        max_layers=max_layers,
        kv_tokens=_whole(room[1 : max_layers + 1] * context * groups),
        prefill_s_per_layer=curve(prefill, prompts),
        decode_s_per_layer=curve(decode, sequences),
        step_s=settings.host.step_s,
    )


def _whole(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(int(value)) for value in values)
