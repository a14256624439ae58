"""How far steps on eight MI300X are off under two software stacks.

`benchmarks/results/mi300x_latency.csv` holds seconds from prompts to the last token for batches of equal
requests in FP8 on eight GPUs: with vLLM 0.10.0 on ROCm 6.4.1 (ROCm/vllm, docs/dev-docker/README.md), and with
a vLLM of 2024 (Oracle's blog on serving Llama 3.1 405B on BM.GPU.MI300X.8). Both schedule steps one after the
other. Nothing was fitted on the newer (`vllm@0.10`). Kernels of the older (`vllm@0.6`) are as much slower as
these batches say (`stacks_apart`), so its figures are not held out. Errors are |predicted / measured - 1| in
per cent; `stacks_apart` is how many times as long the older stack takes for a token of the same model, at the
same batches.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

import numpy as np

from atoll.catalog import Catalog
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from benchmarks.report import ROOT, Figure, finish

DATA = ROOT / "benchmarks" / "results" / "mi300x_latency.csv"
STACKS = {"vLLM 0.10.0 on ROCm 6.4.1": "vllm010", "vLLM of 2024": "vllm2024"}
ENGINES = {"vllm010": "vllm@0.10", "vllm2024": "vllm@0.6"}
"""What predicts them."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that a batch of equal requests took from prompts to the last token."""

    stack: str
    model: str
    batch: int
    input_tokens: int
    output_tokens: int
    seconds: float

    @property
    def token_s(self) -> float:
        """Seconds a token of the answer."""
        return self.seconds / self.output_tokens


def read() -> list[Latency]:
    """Return what was measured."""
    with DATA.open(encoding="utf-8") as stream:
        return [
            Latency(
                entry["stack"],
                entry["model"],
                int(entry["batch"]),
                int(entry["input_tokens"]),
                int(entry["output_tokens"]),
                float(entry["seconds"]),
            )
            for entry in csv.DictReader(stream)
        ]


def predict(row: Latency, catalog: Catalog) -> float:
    """Return the predicted seconds of a batch: a step with all prompts, then one for each further token."""
    spec = catalog.model(f"{row.model}@fp8").llm
    model = analytic(spec, catalog.node("MI300X:8"), tp=8, engine=ENGINES[STACKS[row.stack]])
    prompts = Batch(float(row.batch * row.input_tokens), float(row.batch), 0.0, 0.0, 0.0)
    context = row.input_tokens + 0.5 * row.output_tokens
    steps = (row.output_tokens - 1) * step_seconds(
        model, Batch.decode(float(row.batch), context), 0, spec.layers
    )
    return step_seconds(model, prompts, 0, spec.layers) + steps


def main() -> None:
    """Print every batch and the figures."""
    rows, catalog = read(), Catalog.default()
    off: dict[str, list[float]] = {name: [] for name in STACKS.values()}
    for row in rows:
        predicted = predict(row, catalog) / row.output_tokens
        error = 100.0 * (predicted / row.token_s - 1.0)
        off[STACKS[row.stack]].append(error)
        print(
            f"{row.stack:28s} {row.model:15s} batch {row.batch:4d}, {row.input_tokens:5d} tokens:"
            f" {1e3 * row.token_s:6.1f} ms a token, predicted {1e3 * predicted:6.1f} ({error:+.0f} %)"
        )
    figures = []
    for name, errors in off.items():
        figures.append(Figure(f"{name}_median", float(np.median(np.abs(errors)))))
        figures.append(Figure(f"{name}_bias", float(np.median(errors))))
    new, old = STACKS
    newer = {
        (row.model, row.batch, row.input_tokens): row.token_s for row in rows if row.stack == new
    }
    apart = [
        row.token_s / newer[row.model, row.batch, row.input_tokens]
        for row in rows
        if row.stack == old and (row.model, row.batch, row.input_tokens) in newer
    ]
    figures.append(Figure("stacks_apart", float(np.median(apart)), note="the older over the newer"))
    finish(figures, batches=len(rows))


if __name__ == "__main__":
    main()
