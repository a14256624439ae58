"""The backend of aiconfigurator-core (extra `aic`): NVIDIA's tables of measured vLLM operators.

It knows whole models on a few GPUs. Its compiled engine answers per operator, which is folded here
into the pieces of a step; layers of a hybrid model come out as equal shares of all layers, since the
engine does not tell them apart.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from atoll.catalog.models import ModelSpec, default_models
from atoll.catalog.nodes import NodeType
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import MissingDependencyError, UnknownNameError, UsageError
from atoll.core.ids import Phase
from atoll.engines.profile import EngineProfile
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.layers import LayerKind, layer_kinds
from atoll.perf.operators import Array, Num
from atoll.perf.step import StepParts, check_tp, engine_limit, profile_on

if TYPE_CHECKING:
    from aiconfigurator_core.sdk.engine import EngineHandle

SYSTEMS = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "A100-80": "a100_sxm",
    "L40S": "l40s",
}
"""GPU types with measured tables in the package, and its name for each."""

_Operator = tuple[str, float, float, str]
_SAME_SHAPES = {
    "meta-llama/Meta-Llama-3-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
}


@dataclass(frozen=True)
class AicStepModel:
    """Step times from aiconfigurator-core's compiled engine, one call per batch shape."""

    spec: TransformerSpec
    node: NodeType
    tp: int
    engine: EngineProfile
    handle: EngineHandle
    provenance: str = "measured operators (aiconfigurator-core 0.12.0, vLLM)"

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct kinds of layer of the model."""
        return tuple(dict.fromkeys(layer_kinds(self.spec)))

    def largest_batch(self, phase: Phase) -> float:
        """Return the most prompt tokens or sequences that the engine puts into one step."""
        return engine_limit(self.engine, phase)

    def measures_host(self, phase: Phase) -> bool:  # noqa: ARG002
        """Return False: the tables hold kernels only."""
        return False

    def parts(self, batch: Batch[Num]) -> StepParts[Num]:
        """Return the pieces of a step; mixed steps add the times of both phases."""
        if isinstance(batch.prefill_tokens, float):
            embedding, layer, head = self._step_seconds(
                batch.prefill_tokens,
                batch.prefill_sequences,
                batch.prefill_context,
                batch.decode_sequences,
                batch.decode_context,
            )
            layers: tuple[Num, ...] = (layer,) * len(self.kinds)
            return StepParts(
                self.engine.host_seconds(batch.outputs),
                *(embedding, layers, head),
                self.engine.of_stage().host_seconds(batch.outputs),
            )
        columns = np.broadcast_arrays(
            batch.prefill_tokens,
            batch.prefill_sequences,
            batch.prefill_context,
            batch.decode_sequences,
            batch.decode_context,
        )
        rows: Array = np.array(
            [self._step_seconds(*map(float, row)) for row in zip(*columns, strict=True)]
        )
        return StepParts(
            self.engine.host_seconds(batch.outputs),
            rows[:, 0],
            (rows[:, 1],) * len(self.kinds),
            rows[:, 2],
            self.engine.of_stage().host_seconds(batch.outputs),
        )

    def _step_seconds(
        self, tokens: float, prompts: float, before: float, sequences: float, context: float
    ) -> tuple[float, float, float]:
        """Seconds of (embedding, one layer, head) of one step."""
        total = [0.0, 0.0, 0.0]
        if tokens > 0.0:
            count = max(1, round(prompts))
            length = max(1, round(tokens / count))
            operators, _ = self._ask(
                batch_size=count, isl=length + round(before), osl=1, prefix=round(before)
            )
            _add(total, operators)
        if sequences > 0.0:
            _, operators = self._ask(
                batch_size=max(1, round(sequences)), isl=max(1, round(context) - 1), osl=2
            )
            _add(total, operators)
        return total[0], total[1] / self.spec.layers, total[2]

    def _ask(self, **shape: int) -> tuple[list[_Operator], list[_Operator]]:
        try:
            context, generation = self.handle.run_static_per_op(**shape)
        except Exception as error:
            # Its errors share no base class, and quote paths inside the package.
            raise UsageError(
                f"aiconfigurator-core has no measurements for this model on {self.node.id}",
                hint="use the analytic backend",
            ) from error
        return context, generation


def _add(total: list[float], operators: list[_Operator]) -> None:
    for name, milliseconds, *_ in operators:
        slot = 0 if "embedding" in name else 2 if "logits" in name else 1
        total[slot] += milliseconds * 1e-3


def aic(
    model: ModelSpec,
    node: NodeType,
    *,
    tp: int | None = None,
    engine: str | EngineChoice | EngineProfile = "none",
) -> AicStepModel:
    """Return the step model of a catalog model on a node from aiconfigurator-core's tables."""
    size = check_tp(node, tp, model.llm)
    system = SYSTEMS.get(node.gpu.name)
    if system is None:
        raise UnknownNameError("GPU with aiconfigurator-core tables", node.gpu.name, SYSTEMS)
    profile = profile_on(engine, node)
    name = _SAME_SHAPES.get(model.hf_id or "", model.hf_id or model.name)
    _check_native(model)
    handle = _compile(name, system, size, model.llm.moe is not None)
    return AicStepModel(model.llm, node, size, profile, handle)


def _check_native(model: ModelSpec) -> None:
    """The package looks a model up by name: a variant or an overlay's changes would be ignored."""
    native = next((m for m in default_models().values() if m.hf_id == model.hf_id), None)
    if native is None or native.llm != model.llm:
        raise UsageError(
            f"aiconfigurator-core knows {model.hf_id or model.name} in its own precision and shape only",
            hint="use the analytic backend for variants and models of your own",
            field="model",
        )


@lru_cache(maxsize=128)
def _compile(name: str, system: str, tp: int, moe: bool) -> EngineHandle:
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as error:
        raise MissingDependencyError("aiconfigurator-core", "aic") from error
    # Each table it falls back on is a warning; what it used is in the results' provenance instead.
    logger = logging.getLogger("aiconfigurator_core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return EngineHandle.compile(
            name, system, "vllm", tp_size=tp, moe_tp_size=tp if moe else None
        )
    except Exception as error:
        # Its errors share no base class; whatever it is, this model cannot be had from it.
        text = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise UsageError(f"aiconfigurator-core cannot model {name} on {system}: {text}") from error
    finally:
        logger.setLevel(level)
