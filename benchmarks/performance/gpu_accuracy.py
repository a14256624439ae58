"""The performance model beside what was measured on GPUs once and is kept in `results`.

On an H200: whole steps of the stage engine and their energy (`h200_steps.csv`), layers of models
(`h200_layers.csv`), matrix products and attention alone, stacks of layers by the counter of energy
(`h200_energy.csv`), layers of encoders and diffusion blocks (`chain_accuracy`). On eight MI300X: batches of
FP8 models under two software stacks (`mi300x_latency.csv`). On A100-80: Cornserve's table 1
(`component_accuracy`). Nothing is fitted on these rows, but for the older stack on MI300X (`vllm@0.6`), which
they were read off. docs/measurements.md says how each was measured.

Errors are |predicted / measured - 1| in per cent; a bias above 0 is a prediction that is too slow. Layers
are predicted again (`layer_calibrated`) with constants fitted to the operators of that card.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from atoll.catalog import Catalog
from atoll.perf.batch import Batch
from atoll.perf.calibration import accuracy, fit, op_classes, predict
from atoll.perf.constants import GpuConstants, default_constants
from atoll.perf.energy import power_model, step_joules, step_work
from atoll.perf.layers import model_ops
from atoll.perf.measurements import Points, read_points
from atoll.perf.step import analytic, step_seconds
from benchmarks.performance import chain_accuracy, component_accuracy
from benchmarks.report import RESULTS, Figure, finish, options

Pair = tuple[float, float]
"""What was measured, and what the model says."""
LAYER_MODELS = {"llama-3.1-8b": "llama-3.1-8b", "llama-3.1-70b": "llama-3-70b"}
STACKS = {"vLLM 0.10.0 on ROCm 6.4.1": "vllm@0.10", "vLLM of 2024": "vllm@0.6"}
"""Software on MI300X, and the engine whose constants predict it."""
BARS = {"layer_median": 10.0, "step_median": 6.0}


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a kept file."""
    with (RESULTS / name).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def phase_of(batch: Batch[float]) -> str:
    """Return "decode", "prefill", or "mixed"."""
    if batch.prefill_tokens == 0:
        return "decode"
    return "prefill" if batch.decode_sequences == 0 else "mixed"


def fastest(points: Points) -> Points:
    """Keep the fastest implementation of every shape."""
    best: dict[tuple[object, ...], int] = {}
    for at in range(len(points)):
        key = tuple(points.sizes[name][at] for name in points.schema.sizes)
        key += tuple(points.labels[name][at] for name in points.schema.labels)
        if key not in best or points.seconds[at] < points.seconds[best[key]]:
            best[key] = at
    mask = np.zeros(len(points), dtype=np.bool_)
    mask[list(best.values())] = True
    return points.where(mask)


def operators() -> Iterator[Points]:
    """Return the matrix products and the attention that were measured alone."""
    for name in ("h200_gemm.csv", "h200_attention.csv"):
        yield fastest(read_points(RESULTS / name))


def single_operators(catalog: Catalog) -> Iterator[tuple[str, Pair]]:
    """Compare operators, whose operands came from memory."""
    gpu, constants = catalog.gpu("H200"), default_constants().gpu("H200")
    for points in operators():
        for op, part in op_classes(points):
            cold = replace(constants.op(op), hot_bytes=0.0, hot_gain=1.0)
            for pair in zip(part.seconds, predict(op, cold, part, gpu), strict=True):
                yield op.value, pair


def layers(catalog: Catalog) -> Iterator[tuple[str, Pair]]:
    """Compare layers in CUDA graphs."""
    for phase, pair in _layers(catalog, default_constants().for_gpu(catalog.gpu("H200"))):
        yield "layer", pair
        yield f"layer_{phase}", pair


def calibrated_layers(catalog: Catalog) -> Iterator[tuple[str, Pair]]:
    """Compare the same with constants that are fitted to the operators of that card."""
    gpu = catalog.gpu("H200")
    found = {
        op: fit(op, part, gpu, source="h200_gemm.csv, h200_attention.csv").constants
        for points in operators()
        for op, part in op_classes(points)
    }
    own = default_constants().gpu("H200").with_measured(found)
    for _, pair in _layers(catalog, own):
        yield "layer_calibrated", pair


def _layers(catalog: Catalog, constants: GpuConstants) -> Iterator[tuple[str, Pair]]:
    node = catalog.node("H200:1")
    for row in rows("h200_layers.csv"):
        if row["mode"] != "graph":
            continue
        sequences, phase = float(row["sequences"]), row["phase"]
        batch = (
            Batch.prefill(float(row["tokens"]), sequences)
            if phase == "prefill"
            else Batch.decode(sequences, float(row["context"]))
        )
        spec = catalog.model(LAYER_MODELS[row["model"]]).llm
        predicted_s = model_ops(spec, node, 1, constants).layers[0].seconds(batch)
        yield phase, (1e-6 * float(row["latency_us_per_layer"]), predicted_s)


def whole_steps(catalog: Catalog) -> Iterator[tuple[str, Pair]]:
    """Compare steps of the stage engine, host time included, and their joules."""
    node = catalog.node("H200:1")
    columns = ("prompt_tokens", "prompts", "prompt_context", "decodes", "decode_context")
    for row in rows("h200_steps.csv"):
        spec = catalog.model(row["model"]).llm
        model, batch = (
            analytic(spec, node, engine="atoll"),
            Batch(*(float(row[c]) for c in columns)),
        )
        times = (1e-3 * float(row["step_ms"]), step_seconds(model, batch, 0, spec.layers))
        joules = (float(row["joules_per_step"]), step_joules(model, batch, 0, spec.layers))
        for name in ("step", f"step_{phase_of(batch)}"):
            yield name, times
            yield name.replace("step", "step_joules"), joules


def stacks(catalog: Catalog) -> Iterator[tuple[str, Pair]]:
    """Compare joules and watts of stacks of layers, of a GPU at work all or a share of the time, and idle."""
    node = catalog.node("H200:1")
    power = power_model(node.gpu)
    for row in rows("h200_energy.csv"):
        if row["phase"] == "idle":
            yield "idle_watts", (float(row["watts"]), power.idle_w)
            continue
        spec = catalog.model(row["model"]).llm
        model, sequences = analytic(spec, node, engine="atoll"), float(row["sequences"])
        batch = (
            Batch.prefill(float(row["tokens"]), sequences)
            if row["phase"] == "prefill"
            else Batch.decode(sequences, float(row["context"]))
        )
        span = (1, 1 + int(row["layers"]))  # not the first layer: the embedding was not measured
        work = step_work(spec, batch, *span)
        measured_s, duty = 1e-3 * float(row["replay_ms"]), float(row["duty"])
        # A GPU that works a share of the time draws that share of what its steps add to waiting.
        busy_w = power.watts(work.moved_bytes / measured_s, work.flops / measured_s)
        watts = (float(row["watts"]), power.idle_w + duty * (busy_w - power.idle_w))
        if duty < 1.0:
            yield "stack_watts_partly", watts
            continue
        yield "stack_watts", watts
        predicted_s = step_seconds(model, batch, *span, host=False)
        own_w = power.watts(work.moved_bytes / predicted_s, work.flops / predicted_s)
        joules = (float(row["joules_per_replay"]), own_w * predicted_s)
        yield "stack_joules", joules
        yield f"stack_joules_{row['phase']}", joules


@dataclass(frozen=True, slots=True)
class ServedBatch:
    """Seconds that a batch of equal requests took on eight MI300X, from prompts to the last token."""

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

    def predicted_s(self, catalog: Catalog) -> float:
        """Return what the model says: a step with all prompts, then one for each further token."""
        spec = catalog.model(f"{self.model}@fp8").llm
        model = analytic(spec, catalog.node("MI300X:8"), tp=8, engine=STACKS[self.stack])
        size = float(self.batch)
        decode = Batch.decode(size, self.input_tokens + 0.5 * self.output_tokens)
        rest_s = (self.output_tokens - 1) * step_seconds(model, decode, 0, spec.layers)
        prompts = Batch(size * self.input_tokens, size, 0.0, 0.0, 0.0)
        return step_seconds(model, prompts, 0, spec.layers) + rest_s


def read_batches() -> list[ServedBatch]:
    """Return the batches on MI300X."""
    return [
        ServedBatch(
            stack=row["stack"],
            model=row["model"],
            batch=int(row["batch"]),
            input_tokens=int(row["input_tokens"]),
            output_tokens=int(row["output_tokens"]),
            seconds=float(row["seconds"]),
        )
        for row in rows("mi300x_latency.csv")
    ]


def mi300x(catalog: Catalog) -> Iterator[tuple[str, Pair]]:
    """Compare batches under either stack."""
    new, _ = STACKS
    for one in read_batches():
        name = "mi300x_new" if one.stack == new else "mi300x_old"
        yield name, (one.seconds, one.predicted_s(catalog))


def stacks_apart() -> float:
    """Return how many times as long the older stack takes for a token of the same model and batch."""
    new, _ = STACKS
    found = read_batches()
    newer = {(o.model, o.batch, o.input_tokens): o.token_s for o in found if o.stack == new}
    ratios = [
        one.token_s / newer[one.model, one.batch, one.input_tokens]
        for one in found
        if one.stack != new and (one.model, one.batch, one.input_tokens) in newer
    ]
    return float(np.median(ratios))


def summarise(found: Iterable[tuple[str, Pair]]) -> dict[str, float]:
    """Print the errors of each group, and return median, 95th percentile and bias of each."""
    groups: dict[str, list[Pair]] = {}
    for name, pair in found:
        groups.setdefault(name, []).append(pair)
    figures = {}
    for name, pairs in groups.items():
        measured, predicted = np.array(pairs).T
        result = accuracy(predicted, measured)
        bias = float(np.median(100.0 * (predicted / measured - 1.0)))
        print(f"  {name:28s}{result.points:6d}{result.median:9.1f}{result.p95:9.1f}{bias:+9.1f}")
        for what, value in (("median", result.median), ("p95", result.p95), ("bias", bias)):
            figures[f"{name}_{what}"] = value
    return figures


def measure() -> dict[str, float]:
    """Print all comparisons with GPUs that were measured for Atoll, and return their figures."""
    catalog = Catalog.default()
    print(f"  {'':28s}points   median      p95     bias   (per cent)")
    parts = (layers, calibrated_layers, single_operators, whole_steps, stacks, mi300x)
    found = summarise(pair for part in parts for pair in part(catalog))
    return found | summarise(chain_accuracy.compare()) | {"mi300x_stacks_apart": stacks_apart()}


def main() -> None:
    """Compare and report."""
    options(__doc__ or "")
    found = measure()
    held = [Figure(name, found.pop(name), bar) for name, bar in BARS.items()]
    finish(held + component_accuracy.measure(), **found)


if __name__ == "__main__":
    main()
