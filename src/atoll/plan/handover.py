"""Handing KV cache over: what it takes where prefill and decode run apart.

A prompt's KV cache leaves the prefill instance through the network interfaces of its nodes and enters the
decode instance through theirs. A node that holds j of a model's L layers moves the KV of those: all nodes
do so at once, so a transfer takes

    latency + max over nodes of both sides of KV_j / NIC        (in another region: at least KV_L / link too)

seconds. First tokens are promised within TTFT, so prefill has TTFT - A for itself, with an allowance A that
every transfer of a mean prompt keeps: nodes for which KV_j / NIC does not fit carry nothing with j layers,
and pairs of regions whose link is too slow hand nothing over. A is what the slowest kind of node on offer
needs to move the KV of as many layers as it can hold, among those that stay within a quarter of TTFT, and
what the slowest pair of regions needs, among those that stay within a tenth of it.

Layers with a sliding window keep at most the window of a sequence, as in `perf.memory_model`. Where layers
differ, j layers mean the j neighbours that keep most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.link_table import Link
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec, kept_tokens
from atoll.core.ids import Phase, parse_node_type
from atoll.engines.table import EngineChoice, find_engine
from atoll.perf.layers import LayerKind, default_tp, layer_kinds
from atoll.perf.memory_model import MemoryModel
from atoll.perf.operators import Array
from atoll.perf.step import Position, window_counts
from atoll.plan.plan import Instance, OfferKey
from atoll.plan.problem import Offer, Problem, Service
from atoll.workload.lengths import LengthMix

_APART = (Phase.PREFILL, Phase.DECODE)
NODE_SHARE = 0.25
"""A kind of node that needs more of TTFT to hand over a whole model's KV does not set the allowance."""
LINK_SHARE = 0.10
"""Pairs of regions whose link needs more of TTFT hand nothing over."""


@dataclass(frozen=True, slots=True)
class Handover:
    """Share of a service's promise that handing KV over takes, for prompts of mean length.

    `seconds` is the allowance A inside TTFT, `latency_s` the part of it before the first byte (the longest
    that any transfer may see) and `bytes_per_request` the KV of all layers. `pairs` are the ordered pairs of
    different regions over which KV may travel; inside a region it always may.
    """

    seconds: float
    latency_s: float
    bytes_per_request: float
    pairs: frozenset[tuple[str, str]]

    def reaches(self, sender: str, receiver: str) -> bool:
        """Return whether KV may travel from one region to another, or stay in one."""
        return sender == receiver or (sender, receiver) in self.pairs

    @property
    def moving_s(self) -> float:
        """Seconds that a node has to move its share of a mean prompt's KV."""
        return self.seconds - self.latency_s


def hop_link(
    catalog: Catalog, node_type: str, region: str | None = None, gpus: int | None = None
) -> Link:
    """Return the link over which a machine of this type hands data to others, inside a region.

    The next node is taken to have the same interface; without a region, an ordinary one is meant. A slice of
    `gpus` of the machine's GPUs has its share of the bandwidth.
    """
    here = region or ""
    link = catalog.links.between(here, here, node_type, node_type)
    whole = parse_node_type(node_type).gpu_count
    return link if gpus is None else link.share(gpus, whole)


def pair_link(
    catalog: Catalog,
    sender: tuple[str, str, int | None],
    receiver: tuple[str, str, int | None],
) -> Link:
    """Return the link from one machine to another, each as region, node type and GPUs of the slice.

    That is the slower of both ends' shares of their interfaces, or of the link that is stated for the two.
    """
    stated = catalog.links.node_pairs.get((sender[1], receiver[1]))
    ends = []
    for region, node_type, gpus in (sender, receiver):
        if stated is None:
            ends.append(hop_link(catalog, node_type, region, gpus))
        else:
            whole = parse_node_type(node_type).gpu_count
            ends.append(stated.share(whole if gpus is None else gpus, whole))
    return Link(min(end.bandwidth_bytes_per_s for end in ends), max(end.latency_s for end in ends))


def cut_sizes(problem: Problem, catalog: Catalog) -> Mapping[OfferKey, tuple[int, ...]]:
    """Return by offer the slices that its machines are cut into, of those that they may be.

    Nodes of one kind count alike wherever they come from, so slices with a poorer link than others of their
    kind would drag these down. A kind that is sold as a machine of its own is not cut out of larger ones
    that give it less of a link or join its GPUs otherwise; one that is not, only out of those that give it at
    least half of what the best do.
    """
    key = (id(problem), id(catalog))
    known = _CUTS.get(key)
    if known is not None:
        return known[2]
    found = _choose_cuts(problem, catalog)
    if len(_CUTS) >= _MAX_KNOWN:
        _CUTS.clear()
    _CUTS[key] = (problem, catalog, found)
    return found


def _choose_cuts(problem: Problem, catalog: Catalog) -> Mapping[OfferKey, tuple[int, ...]]:
    links: dict[str, dict[bool, list[float]]] = {}
    for offer in problem.offers:
        for gpus, kind in zip(offer.sizes, offer.kinds, strict=True):
            link = hop_link(catalog, offer.node_type, offer.region, gpus)
            whole = gpus == offer.gpus
            links.setdefault(kind, {}).setdefault(whole, []).append(link.bandwidth_bytes_per_s)
    min_bandwidth = {
        kind: min(by_size[True]) if True in by_size else 0.5 * max(by_size[False])
        for kind, by_size in links.items()
    }
    out: dict[OfferKey, tuple[int, ...]] = {}
    for offer in problem.offers:
        sizes = []
        for gpus, kind in zip(offer.sizes, offer.kinds, strict=True):
            link = hop_link(catalog, offer.node_type, offer.region, gpus)
            # A single GPU is joined to no other.
            joined = gpus == 1 or True not in links[kind] or _joins_alike(catalog, offer, kind)
            # Equal links must not differ by rounding.
            fast = link.bandwidth_bytes_per_s >= min_bandwidth[kind] * (1.0 - 1e-9)
            if gpus == offer.gpus or (joined and fast):
                sizes.append(gpus)
        out[offer.key] = tuple(sizes)
    return out


def _joins_alike(catalog: Catalog, offer: Offer, kind: str) -> bool:
    """Whether a machine joins its GPUs as machines of a smaller kind do."""
    whole, own = catalog.node(offer.node_type).interconnect, catalog.node(kind).interconnect
    return whole.name == own.name


# Bytes


@lru_cache(maxsize=512)
def kv_bytes_by_layers(spec: TransformerSpec, tokens: float) -> Array:
    """Return the KV bytes of a prompt of so many tokens in j layers, j = 0..layers.

    Where layers differ, those of the j neighbours that keep most. The array is shared: do not write to it.
    """
    kinds = tuple(dict.fromkeys(layer_kinds(spec)))
    kept = np.array([_kept_bytes(spec, tokens, kind) for kind in kinds])
    max_bytes = (window_counts(spec, kinds) * kept).sum(axis=2).max(axis=1)
    return np.asarray(max_bytes)


@lru_cache(maxsize=4096)
def kv_bytes(spec: TransformerSpec, start: int, end: int, tokens: float) -> float:
    """Return the KV bytes of a prompt of so many tokens in layers [start, end)."""
    return sum(_kept_bytes(spec, tokens, kind) for kind in layer_kinds(spec)[start:end])


def _kept_bytes(spec: TransformerSpec, tokens: float, kind: LayerKind) -> float:
    """A prompt in one layer, keys and values of all heads once: copies for tensor parallelism are local."""
    if kind.window == 0:
        return spec.state_bytes_per_layer
    return kept_tokens(kind.window, tokens) * spec.kv_bytes_per_token_layer


# Time


_CUTS: dict[tuple[int, int], tuple[Problem, Catalog, Mapping[OfferKey, tuple[int, ...]]]] = {}
_KNOWN: dict[tuple[int, int, int], tuple[Problem, Catalog, Service, Handover | None]] = {}
_ALIKE: dict[tuple[object, ...], tuple[Problem, Catalog, Handover]] = {}
_MAX_KNOWN = 512


def handover(problem: Problem, catalog: Catalog, service: Service) -> Handover | None:
    """Return what handing KV over takes of a service's promise; None where its phases run together only."""
    key = (id(problem), id(catalog), id(service))
    known = _KNOWN.get(key)
    # The three are kept beside the answer, so their ids cannot have passed to others.
    if known is not None:
        return known[3]
    found = None
    if service.phases != "together":
        # Services of one problem that are asked the same have one answer.
        asked = (service.model, service.lengths, service.ttft_s, service.only, service.avoid)
        alike = (id(problem), id(catalog), *asked, service.engine_limits)
        same = _ALIKE.get(alike)
        found = _work_out(problem, catalog, service) if same is None else same[2]
        if len(_ALIKE) >= _MAX_KNOWN:
            _ALIKE.clear()
        _ALIKE[alike] = (problem, catalog, found)
    if len(_KNOWN) >= _MAX_KNOWN:
        _KNOWN.clear()
    _KNOWN[key] = (problem, catalog, service, found)
    return found


RecalledHandovers = list[tuple[str, float, float, float, list[tuple[str, str]]]]
"""A service, seconds, latency and bytes of its hand-over, and the pairs of regions that it may cross."""


def recall_handovers(problem: Problem, catalog: Catalog) -> RecalledHandovers:
    """Return the hand-overs of this very problem as far as they were asked for, for `take_handovers`."""
    return [
        (service.name, found.seconds, found.latency_s, found.bytes_per_request, sorted(found.pairs))
        for own, facts, service, found in _KNOWN.values()
        if own is problem and facts is catalog and found is not None
    ]


def take_handovers(problem: Problem, catalog: Catalog, known: RecalledHandovers) -> None:
    """Take over what `recall_handovers` gave for a problem with the same services at the same offers."""
    services = {service.name: service for service in problem.services}
    if len(_KNOWN) + len(known) > _MAX_KNOWN:
        _KNOWN.clear()
    for name, seconds, latency_s, size, pairs in known[:_MAX_KNOWN]:
        service, crossed = services[name], frozenset((a, b) for a, b in pairs)
        found = Handover(float(seconds), float(latency_s), float(size), crossed)
        _KNOWN[(id(problem), id(catalog), id(service))] = (problem, catalog, service, found)


def _work_out(problem: Problem, catalog: Catalog, service: Service) -> Handover:
    spec = catalog.model(service.model).llm
    size = float(kv_bytes(spec, 0, spec.layers, service.lengths.input_mean))
    engine = handover_engine(problem, catalog, service)
    by_layers = kv_bytes_by_layers(spec, service.lengths.input_mean)
    regions: set[str] = set()
    # Seconds to move all that a kind can hold, and its latency.
    times: set[tuple[float, float]] = set()
    cuts = cut_sizes(problem, catalog)
    mix = service.lengths.mix()
    most = {
        kind: max_layers(spec, catalog.node(kind), engine, mix)
        for kind in problem.kinds
        if service.allows(kind)
    }
    for offer in problem.offers:
        for gpus, kind in zip(offer.sizes, offer.kinds, strict=True):
            if gpus not in cuts[offer.key]:
                continue
            held = most.get(kind)
            if held:
                regions.add(offer.region)
                nic = hop_link(catalog, offer.node_type, offer.region, gpus)
                moving_s = float(by_layers[held]) / nic.bandwidth_bytes_per_s
                times.add((moving_s, nic.latency_s))
    if not times:
        return Handover(0.0, 0.0, size, frozenset())
    # The slowest kind that is still fast enough sets the allowance; where none is, the fastest.
    within = [time for time in times if sum(time) <= NODE_SHARE * service.ttft_s]
    moving_s, _ = max(within) if within else min(times)
    latency_s = max(latency for _, latency in times)
    links = {
        (a, b): catalog.links.between(a, b)
        for a in sorted(regions)
        for b in sorted(regions)
        if a != b
    }
    pairs = {
        pair: link
        for pair, link in links.items()
        if link.time_s(size) <= LINK_SHARE * service.ttft_s
    }
    # The allowance covers every pair of regions that may hand over.
    latency_s = max([latency_s, *(link.latency_s for link in pairs.values())])
    moving_s = max([moving_s, *(size / link.bandwidth_bytes_per_s for link in pairs.values())])
    return Handover(latency_s + moving_s, latency_s, size, frozenset(pairs))


def handover_engine(problem: Problem, catalog: Catalog, service: Service) -> EngineChoice:
    """Return the engine whose connector hands KV cache of a service over, with its limits.

    That is the first of those allowed which holds the whole model on one node of some kind: connectors may
    want that of one side or both. Where none does, the first that takes pipelines on both sides.
    """
    limits, spec = service.engine_limits, catalog.model(service.model).llm
    named = [find_engine(name) for name in problem.settings.engines]
    able = [
        engine
        for engine in named
        if engine.connector is not None and engine.refuses_launch(limits) is None
    ]
    mix = service.lengths.mix()
    kinds = [catalog.node(kind) for kind in problem.kinds if service.allows(kind)]
    # The largest first: most models fit on it, and one is enough.
    kinds.sort(key=lambda node: -node.memory_bytes)
    # Executors of any-to-any models are Atoll's own, and hand over as its engine does.
    for engine in able if not service.is_graph else ():
        choice = replace(problem.engine_of(service), name=engine.name)
        if any(
            engine.refuses(spec, node.gpu) is None
            and max_layers(spec, node, choice, mix) >= spec.layers
            for node in kinds
        ):
            return choice
    free = [engine for engine in able if "none" not in map(engine.pipelines_in, _APART)]
    chosen = (*free, *able)[:1]
    choice = problem.engine_of(service)
    return replace(choice, name=chosen[0].name) if chosen else choice


@lru_cache(maxsize=1024)
def max_layers(
    spec: TransformerSpec, node: NodeType, engine: EngineChoice, lengths: LengthMix
) -> int:
    """Return the most layers that a node holds in any phase and split, beside one mean request's KV cache."""
    tp = default_tp(spec, node)  # split over as many GPUs as can be, most layers fit
    profile = engine.on(node.gpu)
    contexts = {Phase.PREFILL: lengths.input_mean, Phase.DECODE: lengths.decode_context}
    # In the middle of a pipeline there is nothing beside the layers: nowhere does a node hold more.
    return max(
        MemoryModel.of(spec, node, tp=tp, engine=profile, phase=phase).max_layers(
            context, Position.MIDDLE
        )
        for phase, context in contexts.items()
    )


def transfer_s(
    catalog: Catalog,
    service: Service,
    prefill: Instance,
    decode: Instance,
    *,
    tokens: float | None = None,
) -> float:
    """Return the seconds that a prompt's KV takes from a prefill to a decode instance, nothing else moving.

    `tokens` is the prompt's length, the mean one unless given. Every node moves the KV of its own layers.
    """
    spec = catalog.model(service.model).llm
    length = service.lengths.input_mean if tokens is None else tokens
    moving_s = latency_s = 0.0
    for instance in (prefill, decode):
        for node in instance.nodes:
            nic = hop_link(catalog, node.node_type, instance.region_of(node), node.gpus)
            moved = kv_bytes(spec, node.start, node.end, length)
            moving_s = max(moving_s, moved / nic.bandwidth_bytes_per_s)
            latency_s = max(latency_s, nic.latency_s)
    if prefill.region != decode.region:
        link = catalog.links.between(prefill.region, decode.region)
        moved = kv_bytes(spec, 0, spec.layers, length)
        moving_s = max(moving_s, moved / link.bandwidth_bytes_per_s)
        latency_s = max(latency_s, link.latency_s)
    return latency_s + moving_s
