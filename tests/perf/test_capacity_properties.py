"""What holds for the capacity of every role on every node, and a search that shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.link_table import Link
from atoll.catalog.transformer import TransformerSpec
from atoll.core.ids import Phase
from atoll.engines.limits import HostTime
from atoll.engines.profile import EngineProfile
from atoll.perf.batch import Batch
from atoll.perf.capacity import (
    CapacityModel,
    CapacityTable,
    RoleLoad,
    copy_node,
    table_of,
)
from atoll.perf.layers import splits_evenly, tp_sizes
from atoll.perf.memory_model import MemoryModel
from atoll.perf.operators import Array
from atoll.perf.step import AnalyticStepModel, Position, StepParts, analytic, range_counts
from atoll.workload.lengths import BUILT_IN, LengthMix
from tests.perf.builders import mixture, model, node_type
from tests.reference.capacity_tables import capacity, capacity_table

MODELS: dict[str, TransformerSpec] = {
    "llama-3.1-8b": model("llama-3.1-8b"),
    "llama-3-70b": model("llama-3-70b"),
    "llama-2-13b": model("llama-2-13b"),
    "llama-3.2-1b": model("llama-3.2-1b"),
    "gpt-oss-20b": model("gpt-oss-20b"),
    "qwen3-32b@fp8": model("qwen3-32b@fp8"),
    "mixture": mixture(layers=12, hidden=2048, vocab=32000),
}
NODES = ("T4:1", "T4:4", "L4:1", "L4:2", "A10G:1", "L40S:2", "A100-80:1", "H100:1", "H100:8")
ENGINES = (
    EngineProfile("few", HostTime(step_s=1e-3), max_sequences=32, max_tokens=2048),
    EngineProfile("many", HostTime(step_s=2e-3), max_sequences=1024, max_tokens=16384),
    EngineProfile("sync", HostTime(step_s=1e-3, sequence_s=5e-5), max_sequences=256),
    EngineProfile("kernels"),
)
MIXES = (
    *BUILT_IN.values(),
    LengthMix.fixed(1024, 256),
    LengthMix.fixed(1, 1),
    LengthMix.fixed(30_000, 2_000),
    LengthMix.lognormal(1500, 600, 300, 150),
    replace(LengthMix.fixed(500, 100), input_tail=4000.0),
    replace(LengthMix.fixed(500, 100), input_tail=60_000.0),
)
LINKS = (None, Link(10e9 / 8, 0.5e-3), Link(100e9 / 8, 0.0), Link(1e7, 0.05))


@dataclass(frozen=True)
class Case:
    """One question to the capacity model."""

    role: RoleLoad
    model: AnalyticStepModel
    link: Link | None
    position: Position
    stages: int
    budget_s: float

    def rates(self, *, stages: int | None = None, budget_s: float | None = None) -> Array:
        """Tokens/s by number of layers."""
        own = CapacityModel(self.role, self.model, link=self.link)
        rates = own.throughput(
            [self.stages if stages is None else stages],
            [self.budget_s if budget_s is None else budget_s],
            self.position,
        )
        return np.asarray(rates[0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    llm = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    machine = node_type(draw(st.sampled_from(NODES)))
    sizes = [n for n in (1, 2, 4, 8) if machine.count % n == 0 and splits_evenly(llm, n)]
    tp = draw(st.sampled_from(sizes))
    mixes = [
        mix
        for mix in MIXES
        if max(mix.input_mean + mix.output_mean, mix.input_tail) <= llm.max_context
    ]
    phase = draw(st.sampled_from([Phase.PREFILL, Phase.DECODE]))
    budget_s = 10 ** draw(st.floats(-3.0, 1.5))
    return Case(
        role=RoleLoad("role", llm, phase, budget_s, draw(st.sampled_from(mixes))),
        model=analytic(llm, machine, tp=tp, engine=draw(st.sampled_from(ENGINES))),
        link=draw(st.sampled_from(LINKS)),
        position=draw(st.sampled_from(list(Position))),
        stages=draw(st.integers(1, 8)),
        budget_s=budget_s,
    )


@given(cases())
def test_more_layers_never_carry_more(case: Case) -> None:
    rates = case.rates()
    assert rates.shape == (case.role.spec.layers + 1,)
    assert rates[0] == 0.0
    assert np.all(np.isfinite(rates))
    assert np.all(rates >= 0.0)
    assert np.all(np.diff(rates[1:]) <= 0.0)


@given(cases(), st.floats(1.0, 4.0))
def test_a_longer_budget_never_carries_less(case: Case, factor: float) -> None:
    longer = case.rates(budget_s=case.budget_s * factor)
    assert np.all(longer >= case.rates() * (1 - 1e-9))


@given(cases(), st.integers(1, 8))
def test_more_stages_of_the_same_promise_never_carry_more(case: Case, more: int) -> None:
    stages = case.stages + more
    deeper = case.rates(stages=stages, budget_s=case.budget_s * case.stages / stages)
    assert np.all(deeper <= case.rates() * (1 + 1e-9))


@given(cases())
def test_nothing_where_nothing_fits(case: Case) -> None:
    rates = case.rates()
    memory = MemoryModel.of(
        case.role.spec,
        case.model.node,
        tp=case.model.tp,
        engine=case.model.engine,
        phase=case.role.phase,
    )
    lengths = case.role.lengths
    context = lengths.input_mean if case.role.phase is Phase.PREFILL else lengths.decode_context
    most = memory.max_layers(context, case.position)
    assert np.all(rates[most + 1 :] == 0.0)


@given(cases())
def test_arithmetic_bounds_everything(case: Case) -> None:
    """No token can take fewer operations than two per weight it passes, at the very peak."""
    llm, gpu = case.role.spec, case.model.node.gpu
    peak = max(gpu.fp16_flops, gpu.fp8_flops or 0.0) * case.model.node.count
    least = min(
        llm.attention_params + llm.mlp_params(i) + _routed(llm, i) for i in range(llm.layers)
    )
    layers = np.arange(1, llm.layers + 1)
    assert np.all(case.rates()[1:] <= peak / (2.0 * least * layers) * (1 + 1e-9))


def _routed(llm: TransformerSpec, layer: int) -> int:
    if llm.moe is None or not llm.is_moe_layer(layer):
        return 0
    return llm.moe.top_k * 3 * llm.hidden * llm.moe.intermediate


@given(cases())
def test_a_link_only_costs(case: Case) -> None:
    if case.link is not None:
        alone = replace(case, link=None).rates()
        assert np.all(case.rates() <= alone * (1 + 1e-9))
        if case.stages == 1:
            # A single stage hands nothing over.
            assert np.array_equal(case.rates(), alone)


@given(cases())
def test_two_runs_are_bit_for_bit_the_same(case: Case) -> None:
    assert case.rates().tobytes() == case.rates().tobytes()


# The best tensor-parallel size.


@given(cases(), st.floats(1.0, 4.0))
def test_the_best_split_is_no_worse_than_any_and_as_monotone(case: Case, factor: float) -> None:
    def best(slo_s: float) -> CapacityTable:
        load = replace(case.role, slo_s=slo_s)
        return capacity_table([load], [case.model.node], 2, link=case.link)["role", node]

    node = case.model.node.id
    found, longer = best(case.budget_s), best(case.budget_s * factor)
    rates = found.throughput
    for tp in tp_sizes(case.role.spec, case.model.node.count):
        own = table_of(
            case.role, analytic(case.role.spec, case.model.node, tp=tp), 2, link=case.link
        )
        assert (rates >= own.throughput).all()
        np.testing.assert_array_equal(rates[found.tp == tp], own.throughput[found.tp == tp])
    assert (np.diff(rates[:, :, 1:], axis=2) <= 0.0).all()
    assert (longer.throughput >= rates * (1 - 1e-9)).all()


@given(cases())
def test_a_node_carries_what_its_copies_carry(case: Case) -> None:
    copies = case.model.node.count // case.model.tp
    one = copy_node(case.model.node, case.model.tp)
    share = case.link and case.link.share(1, copies)
    alone = replace(
        case,
        model=analytic(case.role.spec, one, tp=case.model.tp, engine=case.model.engine),
        link=share,
    )
    np.testing.assert_allclose(case.rates(), copies * alone.rates(), rtol=1e-12)


# The same question answered by trying batch sizes.


def brute_force(case: Case, layers: int, points: int = 3000) -> float:
    """The best of min(B / t, N / (S (m t + u))) over many B with m t + u <= b, in tokens/s.

    m is 1, or for a prompt in n pieces (n + S - 1) / S. In a pipeline also no more than the link carries.
    """
    role, own = case.role, case.model
    prefill = role.phase is Phase.PREFILL
    mean = role.lengths.input_mean
    most = own.engine.max_tokens
    largest = most / mean if prefill else own.engine.max_sequences
    b = np.unique(np.geomspace(min(1.0, largest), largest, points))
    steps = (np.maximum(1.0, 1.0 / b) + case.stages - 1.0) / case.stages
    zero = 0.0 * b
    spread = role.lengths.input_mean_square / mean**2
    step = _step(
        case,
        layers,
        Batch(b * mean, b, zero, zero, zero, spread)
        if prefill
        else Batch(zero, zero, zero, b, zero + role.lengths.decode_context),
    )
    handed = _handed(case, b * (mean if prefill else 1.0))
    if prefill and role.lengths.input_tail > mean:
        left, tail_s, before = role.lengths.input_tail, [], 0.0
        while left > 0.0:
            size = np.array([min(left, float(most))])
            piece = Batch(size, size**0, size * 0.0 + before, size * 0.0, size * 0.0)
            tail_s.append(float(_step(case, layers, piece)[0]))
            before, left = before + float(size[0]), left - float(size[0])
        first = np.array([min(role.lengths.input_tail, float(most))])
        alone = (sum(tail_s) + (case.stages - 1) * max(tail_s)) / case.stages
        alone += float(_handed(case, first)[0])
        if alone > case.budget_s or _room(case, layers, role.lengths.input_tail) < 1.0:
            return 0.0
    room = _room(case, layers, mean if prefill else role.lengths.decode_context)
    if room < 1.0:
        return 0.0
    rate = np.minimum(b / step, room / (case.stages * (steps * step + handed)))
    allowed = steps * step + handed <= case.budget_s
    best = float(rate[allowed].max(initial=0.0))
    replicas = own.node.count // own.tp
    tokens = best * (mean if prefill else 1.0) * replicas
    if case.link is None or case.stages == 1:
        return tokens
    return min(tokens, case.link.bandwidth_bytes_per_s / (2 * role.spec.hidden))


def _step(case: Case, layers: int, batch: Batch[Array]) -> Array:
    parts: StepParts[Array] = case.model.parts(batch)
    llm = case.role.spec
    runs = {
        range_counts(llm, case.model.kinds, start, start + layers)
        for start in range(llm.layers - layers + 1)
    }
    stacks = [sum(n * s for n, s in zip(run, parts.layers, strict=True)) for run in runs]
    total = np.maximum.reduce([np.asarray(stack) for stack in stacks]) + parts.host
    if case.position in (Position.FIRST, Position.WHOLE):
        total = total + parts.embedding
    if case.position in (Position.LAST, Position.WHOLE):
        total = total + parts.head
    return np.asarray(total)


def _handed(case: Case, tokens: Array) -> Array:
    if case.link is None or case.stages == 1:
        return 0.0 * tokens
    # Copies side by side have a share of the link each.
    share = case.link.bandwidth_bytes_per_s * case.model.tp / case.model.node.count
    return case.link.latency_s + tokens * case.role.spec.hidden * 2 / share


def _room(case: Case, layers: int, context: float) -> float:
    llm, own = case.role.spec, case.model
    memory = MemoryModel.of(llm, own.node, tp=own.tp, engine=own.engine, phase=case.role.phase)
    rooms = []
    for start in range(llm.layers - layers + 1):
        weights = memory.layer_weight_bytes(start, start + layers)
        free = memory.usable_bytes - weights - memory.outer_bytes(case.position)
        kept = memory.kv_bytes_per_sequence(start, start + layers, context)
        rooms.append(max(0.0, free) / kept)
    return min(rooms)


@given(cases(), st.data())
def test_trying_every_batch_finds_the_same(case: Case, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, case.role.spec.layers))
    found = capacity(
        case.role,
        case.model,
        layers,
        stages=case.stages,
        budget_s=case.budget_s,
        position=case.position,
        link=case.link,
    )
    expected = brute_force(case, layers)
    assert found.throughput == pytest.approx(expected, rel=0.01)
    assert found.throughput == case.rates()[layers]


@given(cases(), st.data())
def test_what_a_capacity_says_about_its_step(case: Case, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, case.role.spec.layers))
    own = CapacityModel(case.role, case.model, link=case.link)
    found = own.detail(layers, case.stages, case.budget_s, case.position)
    if found.throughput == 0.0:
        assert found.batch == 0.0
        assert found.limit.startswith(("memory:", "latency:"))
        return
    assert found.step_s + found.transfer_s <= case.budget_s * (1 + 1e-9)
    prefill = case.role.phase is Phase.PREFILL
    tokens = case.role.lengths.input_mean if prefill else 1.0
    full = found.batch / found.step_s * tokens * (case.model.node.count // case.model.tp)
    # Less than a full step every time only where not even one request per stage has room.
    assert found.throughput <= full * (1 + 1e-9)
    if found.batch > 1.0 and found.limit != "the link between stages":
        assert found.throughput == pytest.approx(full, rel=1e-6)
