"""How long a step takes: the interface every backend offers, and the analytic backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Generic, Protocol

import numpy as np

from atoll.catalog.gpus import GpuType
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.engines.limits import HostTime
from atoll.engines.profile import EngineProfile
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.constants import ConstantTable, GpuConstants, Tag, default_constants
from atoll.perf.drafts import draft_of
from atoll.perf.layers import (
    LayerKind,
    LayerOps,
    ModelOps,
    default_tp,
    fuses,
    layer_kinds,
    model_ops,
    name_grounds,
    op_classes_of,
    splits_evenly,
)
from atoll.perf.measured_engine import with_measured
from atoll.perf.operators import Array, Num

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.catalog.measured_servers import MeasuredServer


class Position(StrEnum):
    """Where in the pipeline a node's layers lie: it decides who holds embedding and output matrix."""

    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"
    WHOLE = "whole"

    @property
    def embedding(self) -> bool:
        """Whether the node holds the input embedding."""
        return self in (Position.FIRST, Position.WHOLE)

    @property
    def head(self) -> bool:
        """Whether the node holds the output matrix."""
        return self in (Position.LAST, Position.WHOLE)


@dataclass(frozen=True, slots=True)
class StepParts(Generic[Num]):
    """The time of a step in pieces, in seconds: a node's step is the sum of the pieces it runs.

    `layers` has one entry per kind of layer of the model, in the order of `StepModel.kinds`. `host` is that
    of a node with the whole model, `stage_host` that of one with a part of it.
    """

    host: Num | float
    embedding: Num
    layers: tuple[Num, ...]
    head: Num
    stage_host: Num | float


class StepModel(Protocol):
    """A role on a node: how long its steps take. Backends differ in where the numbers come from."""

    @property
    def spec(self) -> TransformerSpec:
        """The shapes of the model whose layers run."""
        ...

    @property
    def node(self) -> NodeType:
        """The node type that runs them."""
        ...

    @property
    def tp(self) -> int:
        """GPUs that split each layer; the node holds `node.count // tp` such groups."""
        ...

    @property
    def engine(self) -> EngineProfile:
        """The engine whose host time and limits count."""
        ...

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layer, in the order of `StepParts.layers`."""
        ...

    @property
    def provenance(self) -> str:
        """Where the numbers come from, in one line for reports; the weakest ground comes first."""
        ...

    def largest_batch(self, phase: Phase) -> float:
        """The most prompt tokens (prefill) or sequences (decode) a step can be asked about."""
        ...

    def measures_host(self, phase: Phase) -> bool:
        """Whether the host time of steps of a phase was measured, not assumed from the engine."""
        ...

    def parts(self, batch: Batch[Num]) -> StepParts[Num]:
        """Return the pieces of a step with this batch."""
        ...


def step_seconds(
    model: StepModel, batch: Batch[Num], start: int, end: int, *, host: bool = True
) -> Num:
    """Return the time in seconds of one step of a node that holds layers [start, end).

    The embedding counts where start is 0 and the output matrix where end is the last layer. Works on
    floats and on arrays of batches.
    """
    spec = model.spec
    if not 0 <= start < end <= spec.layers:
        raise UsageError(f"layers [{start}, {end}) are not a range within 0 to {spec.layers}")
    parts = model.parts(batch)
    counts = range_counts(spec, model.kinds, start, end)
    total = parts.layers[0] * float(counts[0])
    for seconds, count in zip(parts.layers[1:], counts[1:], strict=True):
        total = total + seconds * float(count)
    if start == 0:
        total = total + parts.embedding
    if end == spec.layers:
        total = total + parts.head
    own_host = parts.host if end - start == spec.layers else parts.stage_host
    return total + own_host if host else total


def range_counts(
    spec: TransformerSpec, kinds: tuple[LayerKind, ...], start: int, end: int
) -> tuple[int, ...]:
    """Return how many layers of each kind lie in [start, end)."""
    if len(kinds) == 1:
        return (end - start,)
    range_kinds = layer_kinds(spec)[start:end]
    return tuple(range_kinds.count(kind) for kind in kinds)


@lru_cache(maxsize=256)
def window_counts(spec: TransformerSpec, kinds: tuple[LayerKind, ...]) -> NDArray[np.float64]:
    """Return, per number of layers j and per distinct run of j layers, the layers of each kind.

    Shape (layers + 1, runs, kinds); where j layers have fewer distinct runs than the largest j the
    last run is repeated. Capacity takes the slowest run, so that a table entry holds wherever in the
    model the j layers lie. The array is shared: do not write to it.
    """
    total = spec.layers
    if len(kinds) == 1:
        return np.arange(total + 1, dtype=np.float64).reshape(-1, 1, 1)
    kinds_by_layer = layer_kinds(spec)
    one_hot = np.array([[kind == k for k in kinds] for kind in kinds_by_layer], dtype=np.float64)
    before = np.vstack([np.zeros(len(kinds)), np.cumsum(one_hot, axis=0)])
    # By hand: NumPy's search for unique rows takes longer than all the rest.
    ranges = [(before[j:] - before[: total + 1 - j]).tolist() for j in range(total + 1)]
    runs = [np.array(sorted(set(map(tuple, rows)))) for rows in ranges]
    longest = max(len(run) for run in runs)
    return np.stack(
        [np.vstack([run, np.repeat(run[-1:], longest - len(run), axis=0)]) for run in runs]
    )


def slowest_run(counts: Array, kinds: Sequence[Array]) -> Array:
    """Return the time of the slowest run of j layers, (layers + 1, batches), from `window_counts`.

    `kinds` holds the time of one layer of each kind for the same batches.
    """
    total = counts[:, :, 0, None] * kinds[0]
    for index, seconds in enumerate(kinds[1:], start=1):
        total = total + counts[:, :, index, None] * seconds
    return np.asarray(total.max(axis=1))


@dataclass(frozen=True)
class AnalyticStepModel:
    """The default backend: sums of fitted rooflines (see `operators`).

    With a `draft` every step runs that model, too, once for each token that is guessed.
    """

    spec: TransformerSpec
    node: NodeType
    tp: int
    engine: EngineProfile
    ops: ModelOps
    provenance: str
    draft: AnalyticStepModel | None = field(default=None, kw_only=True)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layer of the model."""
        return self.ops.kinds

    def largest_batch(self, phase: Phase) -> float:
        """Return the most prompt tokens or sequences that the engine puts into one step."""
        return engine_limit(self.engine, phase)

    def measures_host(self, phase: Phase) -> bool:  # noqa: ARG002
        """Return whether the engine profile's host time was measured on a server."""
        return self.engine.measured is not None

    def parts(self, batch: Batch[Num]) -> StepParts[Num]:
        """Return the pieces of a step with this batch; those of a draft count with the output matrix."""
        sequences = batch.outputs
        if self.engine.rows > 1:
            batch = replace(batch, rows=float(self.engine.rows))
        head = self.ops.head_seconds(batch)
        if self.draft is not None:
            head = head + self.draft_seconds(self.draft, batch)
        return StepParts(
            host=self.engine.host_seconds(sequences),
            embedding=self.ops.embedding_seconds(batch),
            layers=tuple(self._launched(layer, batch) for layer in self.ops.layers),
            head=head,
            stage_host=self.engine.of_stage().host_seconds(sequences),
        )

    def draft_seconds(self, draft: AnalyticStepModel, batch: Batch[Num]) -> Num:
        """Return the seconds of guessing: over all tokens of a step, then over one of each sequence."""
        layers, first = draft.spec.layers, step_seconds(draft, batch, 0, draft.spec.layers)
        nothing = 0.0 * batch.prefill_tokens
        sequences = batch.prefill_sequences + batch.decode_sequences
        next_one = Batch(nothing, nothing, nothing, sequences, batch.decode_context)
        more = self.engine.rows - 2
        return first + float(more) * step_seconds(draft, next_one, 0, layers) if more else first

    def _launched(self, layer: LayerOps, batch: Batch[Num]) -> Num:
        """The time of a layer, no shorter than launching its kernels takes where there are prompts."""
        seconds, launch = layer.seconds(batch), self.engine.launch
        large_s = launch.beyond_graphs_s(experts=layer.experts is not None)
        prompts, tokens = batch.prefill_tokens, batch.tokens
        if isinstance(seconds, float):
            min_s = large_s if tokens > launch.graph_tokens else launch.layer_s
            return max(seconds, min_s) if prompts > 0.0 else seconds
        least = np.where(tokens > launch.graph_tokens, large_s, launch.layer_s)
        return np.where(prompts > 0.0, np.maximum(seconds, least), seconds)


def engine_limit(engine: EngineProfile, phase: Phase) -> float:
    """Return the most prompt tokens or sequences an engine puts into one step."""
    return float(engine.max_sequences if phase is Phase.DECODE else engine.max_tokens)


def analytic(
    spec: TransformerSpec,
    node: NodeType,
    *,
    tp: int | None = None,
    engine: str | EngineChoice | EngineProfile = "vllm",
    constants: ConstantTable | None = None,
) -> AnalyticStepModel:
    """Return the analytic step model of a transformer on a node.

    `tp` is how many GPUs split each layer; unless given, the most that divide the model evenly.
    """
    size = check_tp(node, tp, spec)
    table = constants if constants is not None else default_constants()
    profile = with_measured(profile_on(engine, node), spec, node.gpu, size)
    gpu, kernels, server = node.gpu.whole, profile.kernels, profile.measured
    fitted = _constants_of(table, gpu, profile.name, profile.keeps_busy, server)
    if kernels is not None:
        usual = _constants_of(default_constants(), gpu, profile.name, profile.keeps_busy, None)
        fitted = fitted.with_kernels(kernels, gpu, usual)
    fitted = fitted.with_ratios(profile.ratios).in_turns(node.gpu.shares)
    profile = replace(profile, launch=profile.launch.of(spec)).with_host(fitted.host)
    split = size
    if profile.layer_split_s is not None:
        # One GPU works after the other, on layers of its own.
        host, split = profile.host, 1
        passed_on_s = (size - 1) * profile.layer_split_s
        profile = replace(
            profile, host=host.model_copy(update={"step_s": host.step_s + passed_on_s})
        )
    ranks = profile.spread(spec, node.count, size)
    formats = kernels.formats if kernels is not None else None
    fused = profile.fuses_all_reduce and fuses(node, split, widely=profile.fuses_widely)
    ops = model_ops(
        spec,
        node,
        split,
        fitted,
        fused=fused,
        formats=formats,
        mxfp8=profile.mxfp8,
        queries=float(profile.rows),
        ranks=ranks,
    )
    used = op_classes_of(spec, node.gpu)
    guessed, spread = profile.rows > 1, ranks is not None
    grounds = (
        f"{Tag.MEASURED.value} ({server})"
        if server is not None and not (guessed or spread)
        else name_grounds(spec, node.gpu, fitted, guessed=guessed, spread=spread).summary(used)
    )
    if profile.ratios.kernels != 1.0:
        grounds = f"{grounds}; {profile.ratios.source}"
    small = draft_of(spec, profile)
    draft = None
    if small is not None:
        # Each pass is launched by itself.
        own = model_ops(small, node, split, fitted, fused=profile.fuses_all_reduce, formats=formats)
        pass_s = HostTime(step_s=profile.launch.layer_s)
        passes = EngineProfile("draft", host=pass_s, launch=profile.launch)
        draft = AnalyticStepModel(small, node, size, passes, own, grounds)
    return AnalyticStepModel(spec, node, size, profile, ops, grounds, draft=draft)


@lru_cache(maxsize=256)
def _constants_of(
    table: ConstantTable, gpu: GpuType, engine: str, is_busy: bool, server: MeasuredServer | None
) -> GpuConstants:
    """The constants of a GPU under an engine, alone or kept busy, as a server showed them if measured."""
    fitted = table.for_gpu(gpu).of_engine(engine)
    fitted = fitted if server is None else fitted.as_measured(server)
    return fitted.under_load() if is_busy else fitted


def profile_on(engine: str | EngineChoice | EngineProfile, node: NodeType) -> EngineProfile:
    """Return an engine's profile on the GPUs of a node, for its name, a choice of limits, or a profile."""
    if isinstance(engine, EngineProfile):
        return engine
    choice = EngineChoice(engine) if isinstance(engine, str) else engine
    return choice.on(node.gpu)


def check_tp(node: NodeType, tp: int | None, spec: TransformerSpec) -> int:
    """Return a valid tensor-parallel size: `tp`, or the most that divide node and model evenly."""
    if tp is None:
        return default_tp(spec, node)
    if tp > 1 and node.gpu.shares > 1:
        raise UsageError(
            f"tensor-parallel size {tp} on shares of a {node.gpu.whole.name}, which take turns",
            hint="use 1, or offer the GPUs whole (leave 'shares' out)",
            field="tp",
        )
    if tp < 1 or node.count % tp:
        raise UsageError(
            f"tensor-parallel size {tp} does not divide the {node.count} GPUs of {node.id}",
            hint="use a divisor of the GPU count",
            field="tp",
        )
    if not splits_evenly(spec, tp):
        raise UsageError(
            f"{spec.heads} heads and {spec.kv_heads} KV heads do not split over {tp} GPUs",
            hint=f"use {default_tp(spec, node)} for {node.id}",
            field="tp",
        )
    return tp
