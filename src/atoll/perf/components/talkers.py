"""Talkers as step models: a transformer over codes, with what makes a frame's further codebooks.

Where a frame has several codebooks, the talker makes the first and a small transformer all others, one after
another: every decoding step is followed by `codebooks - 1` steps of it for every sequence. They count into
the part of a step behind the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.catalog.media import GeneratorSpec
from atoll.perf.batch import Batch
from atoll.perf.components.component_shapes import predictor_spec
from atoll.perf.constants import ConstantTable
from atoll.perf.operators import Num, larger
from atoll.perf.step import AnalyticStepModel, StepParts, analytic, step_seconds


@dataclass(frozen=True)
class TalkerStepModel(AnalyticStepModel):
    """A talker whose steps end with `further` steps of a small transformer."""

    predictor: AnalyticStepModel
    further: int

    def parts(self, batch: Batch[Num]) -> StepParts[Num]:
        """Return the pieces of a step; what follows the layers counts as its head."""
        found = super().parts(batch)
        nothing = 0.0 * batch.outputs
        own = Batch(nothing, nothing, nothing, batch.outputs, nothing + 0.5 * self.further)
        layers = self.predictor.spec.layers
        after = step_seconds(self.predictor, own, 0, layers, host=False)
        # A loop inside a step is launched piece by piece.
        after = larger(after, layers * self.engine.launch.layer_s)
        return replace(found, head=found.head + self.further * after)


def talker_model(
    spec: GeneratorSpec, model: AnalyticStepModel, constants: ConstantTable | None
) -> AnalyticStepModel:
    """Return the step model of a talker, given that of its layers."""
    small = predictor_spec(spec)
    if small is None or spec.codebooks is None:
        return model
    # Too small to be worth splitting: every GPU runs it whole.
    node = replace(model.node, count=1)
    predictor = analytic(small, node, tp=1, engine=model.engine, constants=constants)
    return TalkerStepModel(
        model.spec,
        model.node,
        model.tp,
        model.engine,
        model.ops,
        model.provenance,
        predictor,
        spec.codebooks - 1,
    )
