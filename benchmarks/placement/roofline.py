"""How far a plain roofline is off measured steps and requests, and how far our model; OpenFabric's figure 6.

OpenFabric estimates every operator as max(arithmetic over peak FLOP/s, bytes over peak bandwidth), by the
method of LLM-Viewer, and is 23 to 26 % off end-to-end latencies (its figure 6, on an H100 and an RTX 3090).
Measured latencies of those two are not in the paper's text. Here the same is asked of what was measured on
other machines: a roofline is the performance model with every efficiency 1, the harder of two limits, no
start of kernels and no time of hosts, so that both count the same operators.

steps   27 steps of three models on an H200 (`h200_steps.csv`); no constant of ours is fitted on them
h200    requests of one model alone, end to end, put together from those steps: a prompt, then its answer
        at the measured time of a token
mi300x  batches of FP8 models on eight MI300X with vLLM 0.10.0, end to end (`mi300x_latency.csv`)

Errors are |predicted / measured - 1| in per cent, medians; biases are signed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.catalog import Catalog
from atoll.engines.profile import EngineProfile
from atoll.perf.batch import Batch
from atoll.perf.constants import ConstantTable, GpuConstants, OpClass, OpConstants
from atoll.perf.step import AnalyticStepModel, analytic, step_seconds
from benchmarks.performance.mi300x import STACKS, Latency
from benchmarks.performance.mi300x import read as read_batches
from benchmarks.report import ROOT, Figure, finish

STEPS = ROOT / "benchmarks" / "results" / "h200_steps.csv"
NEWER = next(stack for stack, name in STACKS.items() if name == "vllm010")
HARDER = 32.0
"""Exponent of the norm of two limits: so large that the larger of them is left."""
ANSWERS = (64, 256, 1024)
PAPER = (23.0, 26.0)
BAR = 10.0

ModelOn = Callable[[str, str, int], AnalyticStepModel]
"""A step model by model, node and tensor-parallel size."""


def roofline_constants() -> ConstantTable:
    """Return constants with which every operator runs at the data sheet's peaks."""
    ideal = {op: OpConstants(p=HARDER) for op in OpClass}
    return ConstantTable([GpuConstants(gpu, ideal) for gpu in ("H200", "MI300X")])


def roofline_on(catalog: Catalog) -> ModelOn:
    """Return plain rooflines, engines taking no time."""
    constants, engine = roofline_constants(), EngineProfile("roofline")
    return lambda model, node, tp: analytic(
        catalog.model(model).llm, catalog.node(node), tp=tp, engine=engine, constants=constants
    )


def ours_on(catalog: Catalog, engine: str) -> ModelOn:
    """Return the performance model with its constants."""
    return lambda model, node, tp: analytic(
        catalog.model(model).llm, catalog.node(node), tp=tp, engine=engine
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step."""

    model: str
    batch: Batch[float]
    seconds: float

    def predicted_s(self, on: ModelOn) -> float:
        """Return its time as a model has it."""
        made = on(self.model, "H200:1", 1)
        return step_seconds(made, self.batch, 0, made.spec.layers)


def read_steps() -> list[Step]:
    """Return the measured steps."""
    names = ("prompt_tokens", "prompts", "prompt_context", "decodes", "decode_context")
    with STEPS.open(encoding="utf-8") as stream:
        return [
            Step(
                row["model"],
                Batch(*(float(row[name]) for name in names)),
                float(row["step_ms"]) / 1e3,
            )
            for row in csv.DictReader(stream)
        ]


@dataclass(frozen=True, slots=True)
class RequestAlone:
    """A prompt and its answer, alone on the machine: one step of each, and how many of the second."""

    prompt: Step
    token: Step
    answer: int

    @property
    def seconds(self) -> float:
        """What was measured."""
        return self.prompt.seconds + (self.answer - 1) * self.token.seconds

    def predicted_s(self, on: ModelOn) -> float:
        """Return its latency as a model has it."""
        return self.prompt.predicted_s(on) + (self.answer - 1) * self.token.predicted_s(on)


def put_together(steps: list[Step]) -> list[RequestAlone]:
    """Return requests of every prompt alone, with answers of several lengths at the nearest context."""
    found = []
    for prompt in steps:
        batch = prompt.batch
        if (batch.prefill_sequences, batch.decode_sequences, batch.prefill_context) != (1, 0, 0):
            continue
        alone = [
            step
            for step in steps
            if step.model == prompt.model
            and step.batch.decode_sequences == 1
            and step.batch.prefill_sequences == 0
        ]
        for answer in ANSWERS:
            middle = batch.prefill_tokens + answer / 2
            token = min(alone, key=lambda step: abs(step.batch.decode_context - middle))
            found.append(RequestAlone(prompt, token, answer))
    return found


def batch_s(row: Latency, on: ModelOn) -> float:
    """Return the predicted seconds of a batch of equal requests on eight GPUs."""
    made = on(f"{row.model}@fp8", "MI300X:8", 8)
    layers, size = made.spec.layers, float(row.batch)
    prompts = Batch(size * row.input_tokens, size, 0.0, 0.0, 0.0)
    context = row.input_tokens + 0.5 * row.output_tokens
    token_s = step_seconds(made, Batch.decode(size, context), 0, layers)
    return step_seconds(made, prompts, 0, layers) + (row.output_tokens - 1) * token_s


def measure() -> list[Figure]:
    """Print errors of both models and return them as figures."""
    catalog = Catalog.default()
    steps, batches = read_steps(), [row for row in read_batches() if row.stack == NEWER]
    requests = put_together(steps)
    figures = []
    print("  errors in per cent: median, bias, 90th percentile")
    for name, h200, mi300x in (
        ("roofline", roofline_on(catalog), roofline_on(catalog)),
        ("ours", ours_on(catalog, "atoll"), ours_on(catalog, "vllm@0.10")),
    ):
        pairs = {
            "steps": [(step.seconds, step.predicted_s(h200)) for step in steps],
            "h200": [(one.seconds, one.predicted_s(h200)) for one in requests],
            "mi300x": [(row.seconds, batch_s(row, mi300x)) for row in batches],
        }
        for what, both in pairs.items():
            measured, predicted = np.array(both).T
            off = 100.0 * (predicted / measured - 1.0)
            median, bias = float(np.median(np.abs(off))), float(np.median(off))
            tail = float(np.quantile(np.abs(off), 0.9))
            print(f"  {name:9s}{what:8s}{len(both):4d} {median:6.1f} {bias:+7.1f} {tail:7.1f}")
            told = f"bias {bias:+.1f}, p90 {tail:.1f}"
            if name == "roofline":
                paper = "" if what == "steps" else f"; paper {PAPER[0]:g} to {PAPER[1]:g}"
                figures.append(Figure(f"roofline_err_{what}", median, None, told + paper))
            else:
                bar = BAR if what == "steps" else None
                figures.append(Figure(f"model_err_{what}", median, bar, told))
    return figures


def main() -> None:
    """Print and end with the figures."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    finish(measure())


if __name__ == "__main__":
    main()
