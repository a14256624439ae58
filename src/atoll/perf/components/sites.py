"""A place where parts run together: one tensor-parallel size on one slice, memory and times worked out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.catalog.media import EncoderSpec, GeneratorSpec
from atoll.catalog.models import ModelSpec
from atoll.catalog.nodes import NodeType
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.engines.limits import HostTime
from atoll.engines.profile import EngineProfile
from atoll.engines.table import EngineChoice
from atoll.perf.capacity import copy_node, piece_times
from atoll.perf.components.batches import (
    ENGINE_HOST,
    BatchTime,
    Host,
    batch_time,
    largest_input_bytes,
)
from atoll.perf.components.class_loads import (
    class_parts,
    class_routes,
    component_of,
    kv_bytes,
    llm_lengths,
    talker_lengths,
)
from atoll.perf.components.component_shapes import autoregressive_spec
from atoll.perf.components.kernels import Kernels
from atoll.perf.components.measured import MeasuredRates
from atoll.perf.components.space import Space, fit, phase_of
from atoll.perf.components.talkers import talker_model
from atoll.perf.constants import ConstantTable
from atoll.perf.layers import splits_evenly, tp_sizes
from atoll.perf.step import (
    AnalyticStepModel,
    Position,
    StepModel,
    analytic,
    profile_on,
    window_counts,
)
from atoll.workload.classes import RequestClass
from atoll.workload.lengths import LengthMix

NEVER_S = float("inf")
_EXECUTOR_HOST_TIME = HostTime(step_s=0.3e-3, sequence_s=1e-6)
"""Host time of executors, which are Atoll's own; an assumption, near what its stage engine takes."""


@dataclass(frozen=True)
class Sharer:
    """Another service whose requests an executor takes, with `weight` requests for each of all others' 1."""

    model: ModelSpec
    classes: tuple[RequestClass, ...]
    weight: float
    measured: MeasuredRates | None = None


@dataclass(frozen=True)
class Company:
    """Services that share an executor, as one of them sees it: the weight of its requests, and the others."""

    weight: float = 1.0
    others: tuple[Sharer, ...] = ()


ALONE = Company()
"""An executor of one service."""


@dataclass(frozen=True)
class ExecutorSite:
    """Parts of a model on one slice at one tensor-parallel size; times are those of one copy.

    `models` has the step model of every part that makes tokens, `batches` by (class, part) the times of all
    others.
    """

    model: ModelSpec
    parts: tuple[str, ...]
    node: NodeType
    tp: int
    space: Space
    kernels: Kernels
    models: Mapping[str, AnalyticStepModel]
    batches: Mapping[tuple[str, str], BatchTime]
    needs: Mapping[str, frozenset[str]]
    engine: EngineProfile
    constants: ConstantTable | None
    measured: MeasuredRates | None
    host: Host

    @property
    def talkers(self) -> frozenset[str]:
        """Parts that make codes of speech."""
        return frozenset(part for part in self.models if is_talker(self.model, part))

    @property
    def llm_tokens(self) -> int:
        """Tokens of the llm that find room, in all copies; 0 without one."""
        held = [tokens for part, tokens in self.space.kv_tokens.items() if part not in self.talkers]
        return max(held, default=0)

    def phase(self, part: str) -> Phase:
        """Return the phase that a part is, both where it is whole."""
        return phase_of(part)

    def lengths(self, klass: RequestClass, part: str) -> LengthMix:
        """Return the lengths that a part which makes tokens sees of a class."""
        if is_talker(self.model, part):
            return talker_lengths(self.model, component_of(part), klass)
        return llm_lengths(self.model, klass)

    def most(self, times: BatchTime) -> int:
        """Return the largest batch for which there is memory, one at least."""
        room = self.space.for_batches / max(1.0, times.request_bytes)
        return max(1, min(times.max_batch, int(room)))

    def grounds(self, part: str) -> str:
        """Return what the times of a part rest on."""
        if self.measured is not None and any(rate.part == part for rate in self.measured.rates):
            return f"{part}: {self.measured.source}"
        if part in self.models:
            return f"{part}: {self.models[part].provenance}"
        found = [times.grounds for (_, name), times in self.batches.items() if name == part]
        return f"{part}: {found[0] if found else self.kernels.provenance}"

    def measured_seconds(self, klass: RequestClass, part: str) -> float | None:
        """Return the measured seconds of one copy for a request, None where nothing was measured."""
        if self.measured is None:
            return None
        known = self.measured.request_seconds(part, self.node, klass)
        return None if known is None else known * (self.node.count // self.tp)

    def promise(self, klass: RequestClass, part: str) -> float:
        """Return the seconds that are promised to what a part contributes to; infinite where none are."""
        return _promise(self.model, klass, part)

    def budget(self, klass: RequestClass, part: str) -> float:
        """Return the share of that promise which a part has: as its time alone is to all that count."""
        promise = _promise(self.model, klass, part)
        if promise == NEVER_S:
            return NEVER_S
        group = _group(self.model, klass, part)
        if group == [part]:
            return promise
        times = {name: self._alone(klass, name) for name in group}
        total = sum(times.values())
        return promise * times[part] / total if total > 0.0 else promise

    def _alone(self, klass: RequestClass, part: str) -> float:
        """The time of one request at a part on this kind of slice, wherever it runs in truth."""
        spec = autoregressive_spec(self.model, part)
        if spec is None:
            times = self.batches.get((klass.name, part))
            if times is None:
                times = _times(
                    self.model, part, klass, self.kernels, self.node, self.measured, self.host
                )
            return times.alone_s
        model = self.models.get(part)
        if model is None:
            tp = self.tp if splits_evenly(spec, self.tp) else 1
            model = step_model(self.model, part, self.node, tp, self.engine, self.constants)
        lengths = self.lengths(klass, part)
        first = prompt_seconds(model, lengths.input_mean, float(model.engine.max_tokens))
        if not is_talker(self.model, part):
            return first
        return first + lengths.output_mean * decode_seconds(model, lengths.decode_context)


def is_talker(model: ModelSpec, part: str) -> bool:
    """Return whether a part makes codes of speech one after another."""
    spec = model.components[component_of(part)]
    return isinstance(spec, GeneratorSpec) and spec.kind == "autoregressive"


def prompt_seconds(model: StepModel, tokens: float, max_tokens: float) -> float:
    """Return the seconds of one prompt, alone, in pieces of `max_tokens` tokens."""
    counts = window_counts(model.spec, model.kinds)
    return float(piece_times(model, counts, tokens, max_tokens, Position.WHOLE).all_s[-1])


def decode_seconds(model: StepModel, context: float) -> float:
    """Return the seconds of one decoding step of a single sequence."""
    from atoll.perf.batch import Batch
    from atoll.perf.step import step_seconds

    return float(step_seconds(model, Batch.decode(1.0, context), 0, model.spec.layers))


def _promise(model: ModelSpec, klass: RequestClass, part: str) -> float:
    if klass.image_output is not None:
        return klass.image_s if klass.image_s is not None else NEVER_S
    if _speaks(model, klass, part):
        if klass.ahead_s is None or klass.speech_s is None:
            return NEVER_S
        return klass.speech_s - klass.ahead_s
    if phase_of(part) is Phase.DECODE:
        return NEVER_S
    return klass.ttft_s if klass.ttft_s is not None else NEVER_S


def _speaks(model: ModelSpec, klass: RequestClass, part: str) -> bool:
    """Whether a part stands behind the llm in a class that wants speech."""
    if klass.speech_s is None:
        return False
    name = component_of(part)
    return isinstance(model.components[name], GeneratorSpec)


def _group(model: ModelSpec, klass: RequestClass, part: str) -> list[str]:
    """The parts of a route that share a promise with a part."""
    route = next(route for route in class_routes(model, klass) if part in route)
    speaks = _speaks(model, klass, part)
    return [
        name
        for name in route
        if _speaks(model, klass, name) == speaks and phase_of(name) is not Phase.DECODE
    ]


def step_model(
    model: ModelSpec,
    part: str,
    node: NodeType,
    tp: int,
    engine: EngineProfile,
    constants: ConstantTable | None,
) -> AnalyticStepModel:
    """Return the step model of one copy of a part that makes tokens."""
    spec = autoregressive_spec(model, part)
    assert spec is not None
    copy = copy_node(node, tp)
    # Here sequences run when there is room for their answers too (`sim.tasks`), whatever engine it is.
    booking = replace(engine, admits_by_prompts=False)
    found = analytic(spec, copy, tp=tp, engine=booking, constants=constants)
    component = model.components[component_of(part)]
    if isinstance(component, GeneratorSpec):
        return talker_model(component, found, constants)
    return found


def tp_choices(
    model: ModelSpec, parts: Sequence[str], node: NodeType, tp: int | None
) -> tuple[int, ...]:
    """Return the tensor-parallel sizes that all parts of an executor can run at, ascending."""
    sizes = [size for size in range(1, node.count + 1) if node.count % size == 0]
    for part in parts:
        spec = autoregressive_spec(model, part)
        if spec is not None:
            sizes = [size for size in sizes if size in tp_sizes(spec, node.count)]
    if tp is None:
        return tuple(sizes)
    if tp not in sizes:
        raise UsageError(
            f"{', '.join(parts)} cannot be split over {tp} of the {node.count} GPUs of {node.id}",
            hint=f"use one of {', '.join(map(str, sizes))}",
            field="tp",
        )
    return (tp,)


def executor_profile(engine: str | EngineChoice, node: NodeType) -> EngineProfile:
    """The profile of an engine as executors run it: they prepare a step when the one before has ended."""
    profile = profile_on(engine, node)
    measured = engine.limits.host if isinstance(engine, EngineChoice) else None
    usual = _EXECUTOR_HOST_TIME if profile.schedules_ahead else profile.host
    host = measured or profile.stage_host or usual
    return replace(
        profile, host=host, schedules_ahead=False, request_s=0.0, stream_s=0.0, tokenize_s=0.0
    )


def open_site(
    model: ModelSpec,
    parts: Sequence[str],
    node: NodeType,
    classes: Sequence[RequestClass],
    tp: int,
    engine: str | EngineChoice,
    constants: ConstantTable | None,
    measured: MeasuredRates | None = None,
    host: Host = ENGINE_HOST,
    company: Company = ALONE,
) -> ExecutorSite | None:
    """Return the parts at one tensor-parallel size; None where they do not fit in memory.

    Memory is that which requests of all services need that share the executor, times are those of one.
    """
    profile = executor_profile(engine, node)
    kernels = Kernels.of(copy_node(node, tp), tp, profile, constants)
    needs = {klass.name: class_parts(model, klass) for klass in classes}
    batches: dict[tuple[str, str], BatchTime] = {}
    for part in parts:
        if autoregressive_spec(model, part) is not None:
            continue
        for klass in classes:
            if part in needs[klass.name]:
                times = _times(model, part, klass, kernels, node, measured, host)
                batches[klass.name, part] = times
    makers = [part for part in parts if autoregressive_spec(model, part) is not None]
    weights = _kv_weights(model, makers, classes, needs, company.weight)
    every = list(batches.values())
    for other in company.others:
        wants = {klass.name: class_parts(other.model, klass) for klass in other.classes}
        every += [
            _times(other.model, part, klass, kernels, node, other.measured, host)
            for part in parts
            if part not in makers
            for klass in other.classes
            if part in wants[klass.name]
        ]
        theirs = _kv_weights(other.model, makers, other.classes, wants, other.weight)
        weights = {part: weight + theirs[part] for part, weight in weights.items()}
    full = max((t.request_bytes * t.max_batch for t in every), default=0.0)
    single = max((t.request_bytes for t in every), default=0.0)
    # Beside a KV cache the largest batch is set aside; alone, a batch takes what there is.
    space = fit(
        model,
        parts,
        node,
        tp,
        profile,
        batch_bytes=single,
        largest_bytes=max(full, _largest_bytes(model, parts)) if makers else 0.0,
        kv_weights=weights,
    )
    if space is None:
        return None
    models = {
        part: step_model(model, part, node, tp, space.engines[part], constants) for part in makers
    }
    return ExecutorSite(
        model,
        tuple(parts),
        node,
        tp,
        space,
        kernels,
        models,
        batches,
        needs,
        profile,
        constants,
        measured,
        host,
    )


def _times(
    model: ModelSpec,
    part: str,
    klass: RequestClass,
    kernels: Kernels,
    node: NodeType,
    measured: MeasuredRates | None,
    host: Host,
) -> BatchTime:
    """Times of batches: measured ones, without a table as batches of one on each copy, or predicted ones."""
    known = measured.request_seconds(part, node, klass) if measured is not None else None
    if known is None or measured is None:
        max_tokens = kernels.engine.max_tokens
        return batch_time(model, part, klass, kernels, max_tokens=max_tokens, host=host)
    copies = node.count // kernels.tp
    line = measured.batch_line(part, node, klass)
    if line is not None:
        fixed_s, item_s = line.fixed_s * copies, line.item_s * copies
        return BatchTime(fixed_s, item_s, line.max_batch, 1, 0.0, measured.source)
    return BatchTime(0.0, known * copies, 1, 1, 0.0, measured.source)


def _largest_bytes(model: ModelSpec, parts: Sequence[str]) -> float:
    """Bytes per GPU for the largest input of any encoder that runs beside the llm."""
    specs = [model.components[component_of(part)] for part in parts]
    if not model.has_llm or model.llm not in specs:
        return 0.0
    context = model.llm.max_context
    found = [largest_input_bytes(s, context) for s in specs if isinstance(s, EncoderSpec)]
    return max(found, default=0.0)


def _kv_weights(
    model: ModelSpec,
    makers: Sequence[str],
    classes: Sequence[RequestClass],
    needs: Mapping[str, frozenset[str]],
    weight: float,
) -> dict[str, float]:
    """How much KV cache requests leave at each part that keeps one, by their shares of all requests."""
    found: dict[str, float] = {}
    for part in makers:
        spec = autoregressive_spec(model, part)
        assert spec is not None
        found[part] = 0.0
        for klass in classes:
            if part not in needs[klass.name]:
                continue
            if is_talker(model, part):
                lengths = talker_lengths(model, component_of(part), klass)
            else:
                lengths = llm_lengths(model, klass)
            found[part] += weight * klass.share * kv_bytes(spec, lengths.decode_context)
    return found
