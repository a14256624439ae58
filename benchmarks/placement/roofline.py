"""How far a plain roofline is off measured steps and requests, and how far our model; OpenFabric's figure 6.

OpenFabric estimates every operator as max(arithmetic over peak FLOP/s, bytes over peak bandwidth), by the
method of LLM-Viewer, and is 23 to 26 % off end-to-end latencies (its figure 6, on an H100 and an RTX 3090).
Its measured latencies are not in the text. Here the same is asked of what others measured: a roofline is the
performance model with every efficiency 1, the harder of two limits, no start of kernels and no time of hosts,
so that both count the same operators.

steps   27 steps of three models on an H200 (`h200_steps.csv`); no constant of ours is fitted on them
h200    requests of one model alone, end to end, put together from those steps: a prompt, then its answer
        at the measured time of a token
mi300x  batches of FP8 models on eight MI300X with vLLM 0.10.0, end to end (`mi300x_latency.csv`)
h100    servers of dense models on one to eight H100 (vLLM, SGLang, TensorRT-LLM) under load, from a request's
        arrival to its last token, in the same simulator: with a roofline's steps on an engine that takes no
        time, and ours with constants fitted without the series (`server_rows`; extra `aic`, else left out)
one     of these the ones on a single GPU, as figure 6 has them

Figure 6 also has an RTX 3090 over an H100, 3.2 to 3.4 times as slow: both models are asked for that on
prompts and answers of several lengths of an 8B model alone, which fits on both.

Errors are |predicted / measured - 1| in per cent, medians; biases are signed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from atoll.catalog import Catalog
from atoll.core.errors import MissingDependencyError
from atoll.engines.profile import EngineProfile
from atoll.perf.batch import Batch
from atoll.perf.constants import ConstantTable, GpuConstants, OpClass, OpConstants
from atoll.perf.step import AnalyticStepModel, analytic, step_seconds
from benchmarks.performance.mi300x import STACKS, Latency
from benchmarks.performance.mi300x import read as read_batches
from benchmarks.performance.server_fit import read_left_out
from benchmarks.performance.server_rows import ServerRow, Times, read_rows, simulate_row
from benchmarks.report import ROOT, Figure, finish

STEPS = ROOT / "benchmarks" / "results" / "h200_steps.csv"
NEWER = next(stack for stack, name in STACKS.items() if name == "vllm010")
HARDER = 32.0
"""Exponent of the norm of two limits: so large that the larger of them is left."""
SLOWER = "RTX3090"
ANSWERS = (64, 256, 1024)
PAPER = (23.0, 26.0)
PAPER_SLOWER = (3.2, 3.4)
PROMPTS = (128, 512, 1024, 2048)
BAR = 10.0

ModelOn = Callable[[str, str, int], AnalyticStepModel]
"""A step model by model, node and tensor-parallel size."""


def roofline_constants() -> ConstantTable:
    """Return constants with which every operator runs at the data sheet's peaks."""
    ideal = {op: OpConstants(p=HARDER) for op in OpClass}
    return ConstantTable([GpuConstants(gpu, ideal) for gpu in ("H100", "H200", "MI300X", SLOWER)])


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


@dataclass(frozen=True, slots=True)
class ServedRow:
    """Seconds from a request's arrival at a server to its last token: measured, by a roofline, by ours."""

    gpus: int
    measured_s: float
    roofline_s: float
    ours_s: float


def read_served(catalog: Catalog) -> list[ServedRow]:
    """Return measured servers of dense models on H100s and what both models say; none without `aic`."""
    try:
        rows = [row for row in read_rows() if row.gpu == "H100" and row.dense]
    except MissingDependencyError as error:
        print(f"  servers on H100 are left out: {error}")
        return []
    ideal, left_out = roofline_constants(), read_left_out()

    def seconds(row: ServerRow, times: Times | ServerRow) -> float:
        return 1e-3 * (times.ttft_ms + (row.output_tokens - 1) * times.tpot_ms)

    found = []
    for row in rows:
        bound = simulate_row(replace(row, engine="none", version=""), catalog, ideal)
        own = simulate_row(row, catalog, served=left_out.get(row.series))
        if bound is not None and own is not None:
            found.append(ServedRow(row.tp, *(seconds(row, one) for one in (row, bound, own))))
    return found


def times_slower(on: ModelOn) -> tuple[float, float]:
    """Return from how many to how many times as long a request takes on an RTX 3090 as on an H100."""

    def seconds(node: str, prompt: int, answer: int) -> float:
        made = on("llama-3.1-8b", node, 1)
        layers, middle = made.spec.layers, prompt + answer / 2
        token_s = step_seconds(made, Batch.decode(1.0, middle), 0, layers)
        return step_seconds(made, Batch(float(prompt), 1.0, 0.0, 0.0, 0.0), 0, layers) + (
            (answer - 1) * token_s
        )

    loads = [(prompt, answer) for prompt in PROMPTS for answer in ANSWERS]
    ratios = [seconds(f"{SLOWER}:1", *load) / seconds("H100:1", *load) for load in loads]
    return min(ratios), max(ratios)


def measure() -> list[Figure]:
    """Print errors of both models and return them as figures."""
    catalog = Catalog.default()
    served = read_served(catalog)
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
        for what, rows in (("h100", served), ("one", [row for row in served if row.gpus == 1])):
            said = [row.roofline_s if name == "roofline" else row.ours_s for row in rows]
            pairs[what] = [(row.measured_s, own) for row, own in zip(rows, said, strict=True)]
        for what, both in pairs.items():
            key = f"{'model' if name == 'ours' else name}_err_{what}"
            if not both:
                figures.append(Figure(key, None, None, "needs the extra 'aic'"))
                continue
            measured, predicted = np.array(both).T
            off = 100.0 * (predicted / measured - 1.0)
            median, bias = float(np.median(np.abs(off))), float(np.median(off))
            tail = float(np.quantile(np.abs(off), 0.9))
            print(f"  {name:9s}{what:8s}{len(both):4d} {median:6.1f} {bias:+7.1f} {tail:7.1f}")
            told = f"bias {bias:+.1f}, p90 {tail:.1f}"
            if name == "roofline":
                paper = "" if what == "steps" else f"; paper {PAPER[0]:g} to {PAPER[1]:g}"
                figures.append(Figure(key, median, None, told + paper))
            else:
                bar = None if what in ("h200", "mi300x") else BAR
                figures.append(Figure(key, median, bar, told))
    for name, on in (("roofline", roofline_on(catalog)), ("model", ours_on(catalog, "vllm"))):
        least, most = times_slower(on)
        note = f"{least:.2f} to {most:.2f}; paper {PAPER_SLOWER[0]} to {PAPER_SLOWER[1]}, measured"
        figures.append(Figure(f"{name}_3090_over_h100", (least + most) / 2, None, note))
    return figures


def main() -> None:
    """Print and end with the figures."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    finish(measure())


if __name__ == "__main__":
    main()
