"""Capacity of one node for a service, counted the same way by every solver and by the validator.

A node with j layers in a pipeline of S stages gets SLO / S for its step and the hand-over to the next
stage. It has room for one request of the context length that engines are started with, or carries nothing.
Prefill and decode capacities are those of `perf.capacity`, in tokens/s, with requests that come at
random and half of which must keep the promise. Where both phases run together it is `perf.mixed_capacity`
that says how many requests/s a node carries. Where they run apart, KV cache is handed over: prefill's
promise is TTFT less what that takes (`plan.handover`), and activations and KV together stay within the
node's network interface: half of all transfers wait no longer for others than a quarter of TTFT, or than they
may take themselves where that is more.

A node is a machine, or a slice of one with its share of the interface. Its GPUs hold copies of the layers
side by side, each split over TP GPUs; capacity is that of the best TP (`best_tp`), the same for both
phases where they run together. All of these never rise with j and never fall with a looser promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.link_table import Link
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.ids import Phase, RoleId, parse_role
from atoll.core.rng import stream
from atoll.engines.table import EngineChoice, is_asked_in_turn
from atoll.perf.capacity import CapacityModel, CapacityTable, RoleLoad, copy_of
from atoll.perf.layers import node_splits
from atoll.perf.memory_model import MemoryModel
from atoll.perf.mixed_capacity import MixedCapacityModel
from atoll.perf.operators import ACTIVATION_BYTES, Array
from atoll.perf.queueing import load_within
from atoll.perf.step import AnalyticStepModel, Position, analytic, check_tp
from atoll.plan.context_length import max_model_len
from atoll.plan.handover import (
    NODE_SHARE,
    handover,
    hop_link,
    kv_bytes_by_layers,
)
from atoll.plan.plan import Instance, Node
from atoll.plan.problem import Problem, Service
from atoll.plan.request_groups import DECILES
from atoll.workload.builtin import lengths_like
from atoll.workload.lengths import LengthMix

_DRAWS = 20_000
POSITIONS = CapacityTable.POSITIONS
"""The order of the first axis of `role_table`."""


@dataclass(frozen=True, slots=True)
class NodeSource:
    """A kind of node as some machine gives it: its GPUs with what joins them, and its link to other nodes."""

    node: NodeType
    link: Link


def node_source(
    catalog: Catalog, kind: str, *, region: str | None = None, machine: str | None = None
) -> NodeSource:
    """Return a kind of node, a slice of `machine` (a node type) or a machine itself, in a region."""
    node = catalog.node(kind)
    if machine is None or machine == kind:
        return NodeSource(node, hop_link(catalog, kind, region))
    whole = catalog.node(machine)
    if node.count > 1:
        # The GPUs of a slice are joined as those of its machine.
        node = replace(node, interconnect=whole.interconnect)
    return NodeSource(node, hop_link(catalog, machine, region, node.count))


def phase_loads(
    problem: Problem, catalog: Catalog, service: Service, role: RoleId | str
) -> tuple[RoleLoad, ...]:
    """Return what the performance model must be asked for: one phase, or both of them.

    Empty where handing KV over leaves prefill no time at all.
    """
    role_id = parse_role(role) if isinstance(role, str) else role
    phases = (Phase.PREFILL, Phase.DECODE) if role_id.phase is Phase.BOTH else (role_id.phase,)
    spec = catalog.model(service.model).llm
    mix, share = _asked(problem, service)
    promise_s = {phase: service.slo_s(phase) for phase in phases}
    if role_id.phase is Phase.PREFILL:
        promise_s[Phase.PREFILL] = prefill_promise_s(problem, catalog, service)
    if min(promise_s.values()) <= 0.0:
        return ()
    return tuple(
        RoleLoad(
            # Not the service's name: equal services have equal loads, and share what follows from them.
            f"{role_id.component}/{phase}",
            spec,
            phase,
            promise_s[phase],
            mix,
            together=role_id.phase is Phase.BOTH,
            waits=True,
            share=share,
            max_model_len=longest_context(catalog, service),
        )
        for phase in phases
    )


def _asked(problem: Problem, service: Service) -> tuple[LengthMix, float]:
    """The lengths that capacity is for, and the share of requests that must not wait too long.

    Where plans are sized for a share of requests the longest prompts that count must keep the promise by
    themselves; and twice as many as may be lost may wait too long: what is left is for simulation to find.
    """
    mix = service.lengths.mix()
    if service.prefix is not None:
        mix = replace(mix, prefix=service.prefix.shared())
    if problem.settings.sized_for == "half":
        return mix, 0.5
    # Of the longest decile as many must keep the promise as of all.
    lost = (1.0 - service.attainment) / (DECILES if service.length_deciles else 1)
    # A class loses as many times what it may lose as all do, and has the time of its own promise.
    times = lost / (1.0 - service.target)
    tails = [
        prompt_quantile(
            klass.text_mix, max(0.0, 1.0 - times * (1.0 - service.class_target(klass.name)))
        )
        * service.ttft_s
        / (klass.ttft_s or service.ttft_s)
        for klass in service.text_classes
    ] or [prompt_quantile(mix, 1.0 - lost)]
    tail = max(mix.input_tail, *tails)
    return replace(mix, input_tail=tail), max(0.5, 1.0 - 2.0 * (1.0 - service.attainment))


@lru_cache(maxsize=256)
def prompt_quantile(mix: LengthMix, share: float) -> float:
    """Return the length in tokens that a share of prompts does not exceed."""
    # The same draws each time: one answer, whenever it is asked for.
    prompts, _ = lengths_like(mix).draw(stream(0, "prompts"), _DRAWS)
    return float(np.quantile(prompts, share))


def prefill_promise_s(problem: Problem, catalog: Catalog, service: Service) -> float:
    """Return what a prefill instance that hands its KV over has of TTFT; 0 or less: nothing."""
    transfer = handover(problem, catalog, service)
    if transfer is None:
        return service.ttft_s
    return service.ttft_s - asked_again_s(problem, service) - transfer.seconds


def asked_again_s(problem: Problem, service: Service) -> float:
    """Return what goes by beside steps where who decodes is asked only when the prompt is computed."""
    engine = problem.engine_of(service)
    return engine.on(None).request_s if is_asked_in_turn(engine.name, Phase.DECODE) else 0.0


def tokens_per_unit(service: Service, phase: Phase) -> float:
    """Return how many tokens pass a hop for each unit of flow: one, or a whole request's."""
    lengths = service.lengths
    return lengths.input_mean + lengths.output_mean if phase is Phase.BOTH else 1.0


def hop_bytes_per_unit(catalog: Catalog, service: Service, phase: Phase) -> float:
    """Return the bytes of activations that a unit of flow hands from one stage to the next."""
    hidden = catalog.model(service.model).llm.hidden
    return hidden * ACTIVATION_BYTES * tokens_per_unit(service, phase)


def kv_context(service: Service, phase: Phase) -> float:
    """Return the tokens of KV cache that one request keeps on a node, on average."""
    mix = service.lengths.mix()
    return mix.input_mean if phase is Phase.PREFILL else mix.decode_context


def longest_context(catalog: Catalog, service: Service) -> int:
    """Return the tokens of the longest request that every node must have room for."""
    spec, given = catalog.model(service.model).llm, service.engine_limits.max_model_len
    return max_model_len(service.lengths.mix(), spec.max_context, given)


def memory_model(
    problem: Problem, catalog: Catalog, service: Service, phase: Phase, node: NodeType, tp: int
) -> MemoryModel:
    """Return what fits on a node that runs this phase."""
    spec = catalog.model(service.model).llm
    return _memory_model(spec, node, tp, problem.engine_of(service), phase)


def count_slots(problem: Problem, catalog: Catalog, instance: Instance) -> int | None:
    """Return how many requests an instance runs at a time where its engine keeps room for the longest.

    None where its engine books what each needs.
    """
    if instance.engine is None:
        return None
    service, run = problem.service(instance.service), problem.run_by(instance.engine)
    if service.is_graph or not run.engine_of(service).on(None).slots:
        return None
    longest = float(longest_context(catalog, service))
    return min(
        memory_model(run, catalog, service, instance.phase, catalog.node(node.kind), node.tp).slots(
            node.start, node.end, longest
        )
        for node in instance.nodes
    )


def share_kv_bytes(
    problem: Problem, catalog: Catalog, instance: Instance, node: Node
) -> int | None:
    """Return the KV cache of a node that has a share of a GPU, in bytes; None where its GPUs are whole.

    It is what planned requests have room in. Where an engine keeps slots these say how much it takes.
    """
    if node.gpu_shares == 1 or instance.slots is not None:
        return None
    service, run = problem.service(instance.service), problem.run_by(instance.engine)
    kind = catalog.node(node.kind)
    room = memory_model(run, catalog, service, instance.phase, kind, node.tp)
    return max(1, int(room.free_bytes(node.start, node.end)))


@lru_cache(maxsize=1024)
def _memory_model(
    spec: TransformerSpec, node: NodeType, tp: int, engine: EngineChoice, phase: Phase
) -> MemoryModel:
    return MemoryModel.of(spec, node, tp=tp, engine=engine.on(node.gpu), phase=phase)


# One copy of a node's layers, `tp` GPUs that split them. A node carries as many times that as it has copies.


@lru_cache(maxsize=1024)
def _step_model(spec: TransformerSpec, copy: NodeType, engine: EngineChoice) -> AnalyticStepModel:
    return analytic(spec, copy, tp=copy.count, engine=engine)


@lru_cache(maxsize=1024)
def _copy_model(load: RoleLoad, copy: NodeType, engine: EngineChoice) -> CapacityModel:
    return CapacityModel(load, _step_model(load.spec, copy, engine))


@lru_cache(maxsize=1024)
def _both_model(
    loads: tuple[RoleLoad, ...], copy: NodeType, engine: EngineChoice, link: Link | None
) -> MixedCapacityModel:
    prompts, answers = loads
    return MixedCapacityModel(prompts, answers, _step_model(prompts.spec, copy, engine), link=link)


def _copy_rates(
    loads: tuple[RoleLoad, ...],
    copy: NodeType,
    engine: EngineChoice,
    link: Link | None,
    stages: Sequence[int],
    positions: Sequence[Position],
) -> Array:
    """Return the rates of one copy with both phases at the best split: (positions, stage counts, layers + 1).

    A single stage needs no link.
    """
    if len(loads) == 1:
        budgets = [loads[0].slo_s / count for count in stages]
        # Whatever is promised, the model is the same.
        load = replace(loads[0], slo_s=1.0)
        model = _copy_model(load, copy, engine)
        return (model.linked(link) if link else model).throughputs(stages, budgets, positions)
    return _both_model(loads, copy, engine, link).throughputs(stages, positions)


@lru_cache(maxsize=2048)
def _copy_table(
    loads: tuple[RoleLoad, ...],
    copy: NodeType,
    engine: EngineChoice,
    link: Link | None,
    stages: int,
) -> Array:
    table = np.zeros((len(POSITIONS), stages, loads[0].spec.layers + 1))
    if stages == 1:
        table[-1:] = _copy_rates(loads, copy, engine, None, [1], [Position.WHOLE])
        return table
    # Single nodes may have been asked for before, and are the same whatever the link.
    table[:, :1] = _copy_table(loads, copy, engine, None, 1)
    many = range(2, stages + 1)
    table[:-1, 1:] = _copy_rates(loads, copy, engine, link, many, POSITIONS[:-1])
    return table


@lru_cache(maxsize=8192)
def _rows_by_tp(
    loads: tuple[RoleLoad, ...],
    source: NodeSource,
    engine: EngineChoice,
    stages: int,
    position: Position,
) -> tuple[tuple[int, Array], ...]:
    """Per tensor-parallel size, ascending: what a node carries by layers, KV not counted."""
    rows = []
    for tp in node_splits(loads[0].spec, source.node):
        copy, own = copy_of(source.node, tp, engine)
        share = source.link.share(tp, source.node.count)
        if stages == 1 and position is Position.WHOLE:
            rates = _copy_table(loads, copy, own, None, 1)[-1, 0]
        else:
            rates = _copy_rates(loads, copy, own, share, [stages], [position])[0, 0]
        rows.append((tp, rates * (source.node.count // tp)))
    return tuple(rows)


def _kv_limits(
    problem: Problem, catalog: Catalog, service: Service, phase: Phase, link: Link
) -> tuple[Array, Array]:
    """Units/s by layers that a node's interface carries with the KV it hands over: alone, and in a pipeline.

    0 where a mean prompt's KV of so many layers takes longer than its allowance.
    """
    transfer = handover(problem, catalog, service) if phase is not Phase.BOTH else None
    spec = catalog.model(service.model).llm
    if transfer is None:
        free = np.full(spec.layers + 1, np.inf)
        return free, free
    mix = service.lengths.mix()
    hop = hop_bytes_per_unit(catalog, service, phase)
    # A transfer may wait as long as the slowest may take that sets an allowance.
    wait_s = max(transfer.moving_s, NODE_SHARE * service.ttft_s)
    return _interface_limits(spec, mix, phase, link, transfer.moving_s, wait_s, hop)


@lru_cache(maxsize=1024)
def _interface_limits(
    spec: TransformerSpec,
    mix: LengthMix,
    phase: Phase,
    link: Link,
    moving_s: float,
    wait_s: float,
    hop: float,
) -> tuple[Array, Array]:
    """The arrays are shared: do not write to them."""
    moved = kv_bytes_by_layers(spec, mix.input_mean)
    # What was allowed because this very node set the allowance must not fail by rounding.
    takes_s = moved / link.bandwidth_bytes_per_s
    in_time = takes_s <= moving_s * (1.0 + 1e-9)
    once = 0.5 * mix.input_mean_square / mix.input_mean**2
    with np.errstate(divide="ignore", invalid="ignore"):
        load = load_within(wait_s / takes_s / once, np.ones(1))
    per_unit = moved / (mix.input_mean if phase is Phase.PREFILL else mix.output_mean)
    with np.errstate(divide="ignore"):
        alone = link.bandwidth_bytes_per_s / per_unit
    piped = link.bandwidth_bytes_per_s / (per_unit + hop)
    return np.where(in_time, alone * load, 0.0), np.where(in_time, piped * load, 0.0)


def _split_rates(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    role: RoleId | str,
    source: NodeSource,
    layers: int,
    stages: int,
    position: Position,
) -> list[tuple[int, float]]:
    """Return the capacity of a node at each tensor-parallel size, ascending."""
    role_id = parse_role(role) if isinstance(role, str) else role
    spec = catalog.model(service.model).llm
    loads = phase_loads(problem, catalog, service, role_id)
    if not loads or not 1 <= layers <= spec.layers:
        return [(tp, 0.0) for tp in node_splits(spec, source.node)]
    alone, piped = _kv_limits(problem, catalog, service, role_id.phase, source.link)
    limit = float((piped if stages > 1 else alone)[layers])
    rows = _rows_by_tp(loads, source, problem.engine_of(service), stages, position)
    return [(tp, min(float(row[layers]), limit)) for tp, row in rows]


def node_capacity(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    role: RoleId | str,
    kind: str,
    layers: int,
    stages: int,
    position: Position,
    *,
    tp: int | None = None,
    region: str | None = None,
    machine: str | None = None,
) -> float:
    """Return what a node carries with `layers` layers at `position` in a pipeline of `stages`.

    Prompt tokens/s, generated tokens/s, or requests/s where both phases run together; 0 where the
    layers do not fit or the promise cannot be kept. `machine` is the node type that the node is a slice of,
    None if it is a machine itself. The best tensor-parallel size counts unless `tp` is given.
    """
    where = (kind, layers, stages, position, region, machine)
    rates = _known_rates(problem, catalog, service, role, *where)
    if tp is None:
        return max(rate for _, rate in rates)
    for size, rate in rates:
        if size == tp:
            return rate
    # No such split: the check says why.
    source = node_source(catalog, kind, region=region, machine=machine)
    check_tp(source.node, tp, catalog.model(service.model).llm)
    return dict(rates)[tp]


_RATES: dict[
    tuple[int, int, int, Phase, str, int, int, Position, str | None, str | None],
    tuple[Problem, Catalog, Service, tuple[tuple[int, float], ...]],
] = {}
_ALIKE: dict[tuple[object, ...], tuple[Problem, Service, Service]] = {}
_MAX_RATES = 4096


def _first_alike(problem: Problem, service: Service) -> Service:
    """Return the first service of a problem that is asked the same: a node carries as much of both."""
    key = (id(problem), id(service))
    known = _ALIKE.get(key)
    if known is None:
        asked = (
            id(problem), service.model, service.lengths, service.ttft_s, service.tpot_s,
            service.attainment, service.length_deciles, service.phases, service.only, service.avoid,
            service.engine_limits, service.text_classes, service.prefix,
        )  # fmt: skip
        first = _ALIKE.get(asked, (problem, service, service))[2]
        if len(_ALIKE) >= _MAX_RATES:
            _ALIKE.clear()
        known = _ALIKE[key] = _ALIKE[asked] = (problem, service, first)
    return known[2]


def _known_rates(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    role: RoleId | str,
    kind: str,
    layers: int,
    stages: int,
    position: Position,
    region: str | None,
    machine: str | None,
) -> tuple[tuple[int, float], ...]:
    """`_split_rates` of a kind of node: equal nodes of a plan are asked for again and again."""
    role_id = parse_role(role) if isinstance(role, str) else role
    phase = role_id.phase
    # Services that are asked the same share one entry.
    service = _first_alike(problem, service)
    role = RoleId(service.name, role_id.component, phase)
    asked = (kind, layers, stages, position, region, machine)
    key = (id(problem), id(catalog), id(service), phase, *asked)
    known = _RATES.get(key)
    # The three are kept beside the answer, so their ids cannot have passed to others.
    if known is not None:
        return known[3]
    source = node_source(catalog, kind, region=region, machine=machine)
    found = _split_rates(problem, catalog, service, role, source, layers, stages, position)
    if len(_RATES) >= _MAX_RATES:
        _RATES.clear()
    _RATES[key] = (problem, catalog, service, tuple(found))
    return tuple(found)


Recalled = list[
    tuple[str, str, str, int, int, str, str | None, str | None, list[tuple[int, float]]]
]
"""Service, phase, kind, layers, stages, position, region and machine of a node, and what it carries by TP."""


def recall_rates(problem: Problem, catalog: Catalog) -> Recalled:
    """Return what nodes carry as far as it was asked for of this very problem, for `take_rates`."""
    return [
        (
            service.name,
            phase.value,
            kind,
            layers,
            stages,
            position.value,
            region,
            machine,
            list(found),
        )
        for (_, _, _, phase, kind, layers, stages, position, region, machine), (
            own,
            facts,
            service,
            found,
        ) in _RATES.items()
        if own is problem and facts is catalog
    ]


def take_rates(problem: Problem, catalog: Catalog, known: Recalled) -> None:
    """Take over what `recall_rates` gave for a problem with the same services, asked the same, and offers."""
    services = {service.name: service for service in problem.services}
    if len(_RATES) + len(known) > _MAX_RATES:
        _RATES.clear()
    for name, phase, kind, layers, stages, position, region, machine, found in known[:_MAX_RATES]:
        service = services[name]
        asked = (kind, layers, stages, Position(position), region, machine)
        rates = tuple((int(tp), float(rate)) for tp, rate in found)
        key = (id(problem), id(catalog), id(service), Phase(phase), *asked)
        _RATES[key] = (problem, catalog, service, rates)


def best_tp(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    role: RoleId | str,
    kind: str,
    layers: int,
    stages: int,
    position: Position,
    *,
    region: str | None = None,
    machine: str | None = None,
) -> int:
    """Return over how many GPUs a node splits each layer to carry `node_capacity`: of equals the most."""
    where = (kind, layers, stages, position, region, machine)
    rates = _known_rates(problem, catalog, service, role, *where)
    return max(rates, key=lambda split: (split[1], split[0]))[0]


def role_table(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    role: RoleId | str,
    kind: str,
    stages: int,
    *,
    region: str | None = None,
    machine: str | None = None,
    source: NodeSource | None = None,
    tp: int | None = None,
) -> Array:
    """Return `node_capacity` of every position, stage count and number of layers at once.

    Shape (4, stages, layers + 1): positions as in `POSITIONS` (first, middle, last, whole), S = 1..
    `stages`, j = 0..layers. Whole is for S = 1 only, the others for S >= 2; the rest is 0. `source` says
    where the kind comes from instead of `region` and `machine`; `tp` is the only split that counts.
    """
    role_id = parse_role(role) if isinstance(role, str) else role
    where = source or node_source(catalog, kind, region=region, machine=machine)
    node, link, spec = where.node, where.link, catalog.model(service.model).llm
    loads = phase_loads(problem, catalog, service, role_id)
    best = np.zeros((len(POSITIONS), stages, spec.layers + 1))
    if not loads:
        return best
    for size in node_splits(spec, node):
        if tp not in (None, size):
            continue
        copy, own = copy_of(node, size, problem.engine_of(service))
        joint = link.share(size, node.count) if stages > 1 else None
        table = _copy_table(loads, copy, own, joint, stages)
        best = np.maximum(best, table * (node.count // size))
    alone, piped = _kv_limits(problem, catalog, service, role_id.phase, link)
    best[:, 0] = np.minimum(best[:, 0], alone)
    best[:, 1:] = np.minimum(best[:, 1:], piped)
    return best
