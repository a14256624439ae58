"""Predicted against measured on an H200: steps of whole models, layers, matrix products, attention, energy.

The measurements in `benchmarks/results` were taken with `benchmarks.h200_measure` (layers and operators)
and `benchmarks.h200_steps` (steps of the stage engine and their energy); no constant is fitted on layers
or steps. `--plot FILE.png` draws predicted against measured layers.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.catalog import Catalog
from atoll.catalog.load import load_catalog
from atoll.perf.batch import Batch
from atoll.perf.calibration import Accuracy, accuracy, op_classes, predict
from atoll.perf.constants import ConstantTable, OpConstants, default_constants
from atoll.perf.energy import step_joules
from atoll.perf.layers import model_ops
from atoll.perf.measurements import Points, read_points
from atoll.perf.step import analytic, step_seconds
from benchmarks.report import ROOT, Figure, finish

RESULTS = ROOT / "benchmarks" / "results"
MODELS = {"llama-3.1-8b": "llama-3.1-8b", "llama-3.1-70b": "llama-3-70b"}


def layers(
    catalog: Catalog,
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return (measured, predicted) microseconds of one layer by (model, phase), CUDA graphs only."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    node = catalog.node("H200:1")
    constants = default_constants().for_gpu(node.gpu)
    with (RESULTS / "h200_layers.csv").open() as stream:
        for row in csv.DictReader(stream):
            if row["mode"] != "graph":
                continue
            layer = model_ops(catalog.model(MODELS[row["model"]]).llm, node, 1, constants).layers[0]
            sequences, tokens = float(row["sequences"]), float(row["tokens"])
            batch = (
                Batch.prefill(tokens, sequences)
                if row["phase"] == "prefill"
                else Batch.decode(sequences, float(row["context"]))
            )
            pair = (float(row["latency_us_per_layer"]), layer.seconds(batch) * 1e6)
            found[row["model"], row["phase"]].append(pair)
    return found


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step of a whole model: seconds and joules, measured and predicted; `tokens` are its rows."""

    model: str
    batch: Batch[float]
    seconds: float
    predicted_s: float
    host_s: float
    kernel_s: float
    joules: float
    predicted_j: float

    @property
    def phase(self) -> str:
        """Decode, prefill, or both mixed."""
        if self.batch.prefill_tokens == 0:
            return "decode"
        return "prefill" if self.batch.decode_sequences == 0 else "mixed"


def read_steps(catalog: Catalog, constants: ConstantTable | None = None) -> list[ComparedStep]:
    """Return every measured step beside what the model says of it for the stage engine."""
    found = []
    node = catalog.node("H200:1")
    with (RESULTS / "h200_steps.csv").open() as stream:
        for row in csv.DictReader(stream):
            spec = catalog.model(row["model"]).llm
            model = analytic(spec, node, engine="atoll", constants=constants)
            batch = Batch(
                float(row["prompt_tokens"]),
                float(row["prompts"]),
                float(row["prompt_context"]),
                float(row["decodes"]),
                float(row["decode_context"]),
            )
            found.append(
                ComparedStep(
                    model=row["model"],
                    batch=batch,
                    seconds=float(row["step_ms"]) / 1e3,
                    predicted_s=step_seconds(model, batch, 0, spec.layers),
                    host_s=model.engine.host_seconds(batch.outputs),
                    kernel_s=float(row["kernel_ms"] or "nan") / 1e3,
                    joules=float(row["joules_per_step"]),
                    predicted_j=step_joules(model, batch, 0, spec.layers),
                )
            )
    return found


def show_steps(steps: list[ComparedStep]) -> None:
    """Print every step, its error in time and in energy."""
    head = "model, prompt tokens + past, decodes x context"
    print(f"  {head:50s} {'ms':>8s} {'kernels':>8s} {'model':>8s} {'%':>6s} {'J':>8s} {'%':>6s}")
    for step in steps:
        b = step.batch
        name = (
            f"{step.model:14s} {b.prefill_sequences:.0f} x {b.prompt_length:.0f} + "
            f"{b.prefill_context:.0f}, {b.decode_sequences:.0f} x {b.decode_context:.0f}"
        )
        off = 100 * (step.predicted_s / step.seconds - 1)
        off_j = 100 * (step.predicted_j / step.joules - 1)
        print(
            f"  {name:50s} {1e3 * step.seconds:8.2f} {1e3 * step.kernel_s:8.2f} "
            f"{1e3 * step.predicted_s:8.2f} {off:+6.1f} {step.joules:8.3f} {off_j:+6.1f}"
        )


def of(pairs: list[tuple[float, float]]) -> Accuracy:
    table = np.array(pairs)
    return accuracy(table[:, 1], table[:, 0])


def accuracy_by_phase(
    steps: list[ComparedStep], pair: Callable[[ComparedStep], tuple[float, float]]
) -> dict[str, Accuracy]:
    """Return errors of (measured, predicted) pairs of all steps and by phase."""
    phases = {"all": steps} | {
        phase: [step for step in steps if step.phase == phase]
        for phase in ("decode", "prefill", "mixed")
    }
    return {phase: of([pair(step) for step in part]) for phase, part in phases.items() if part}


def cold(constants: OpConstants) -> OpConstants:
    """Return constants for operands that come from memory, as they were here."""
    from dataclasses import replace

    return replace(constants, hot_bytes=0.0, hot_gain=1.0)


def operators(catalog: Catalog) -> dict[str, Accuracy]:
    """Return the error per operator class; of attention, the fastest kernel of each shape."""
    out = {}
    gpu = catalog.gpu("H200")
    for name in ("h200_gemm.csv", "h200_attention.csv"):
        for op, points in op_classes(_fastest(read_points(RESULTS / name))):
            c = cold(default_constants().gpu("H200").op(op))
            out[op.value] = accuracy(predict(op, c, points, gpu), points.seconds)
    return out


def _fastest(points: Points) -> Points:
    """Keep the fastest implementation of every shape."""
    best: dict[tuple[object, ...], int] = {}
    for index in range(len(points)):
        key = tuple(points.sizes[name][index] for name in points.schema.sizes)
        key += tuple(points.labels[name][index] for name in points.schema.labels)
        if key not in best or points.seconds[index] < points.seconds[best[key]]:
            best[key] = index
    mask = np.zeros(len(points), dtype=np.bool_)
    mask[list(best.values())] = True
    return points.where(mask)


def plot(path: Path, found: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    """Draw predicted against measured layer times."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(9.6, 4.4), layout="constrained")
    left, right = canvas.subplots(1, 2)
    colours = {"llama-3.1-8b": "#1f77b4", "llama-3.1-70b": "#d62728"}
    for (model, phase), pairs in found.items():
        measured, predicted = np.array(pairs).T
        style = {
            "color": colours[model],
            "marker": "o" if phase == "decode" else "^",
            "facecolors": colours[model] if phase == "decode" else "none",
            "label": f"{model} {phase}",
        }
        left.scatter(measured, predicted, s=26, **style)
        right.scatter(measured, predicted / measured, s=26, **style)
    limits = (100.0, 6e4)
    left.plot(limits, limits, color="#888", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    left.set(xlabel="measured, us per layer", ylabel="predicted, us per layer")
    left.legend(frameon=False, fontsize=8)
    right.axhspan(0.9, 1.1, color="#888", alpha=0.15)
    right.axhline(1.0, color="#888", linewidth=0.8)
    right.set(
        xscale="log",
        ylim=(0.7, 1.3),
        xlabel="measured, us per layer",
        ylabel="predicted / measured",
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    canvas.savefig(path, dpi=110)


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    parser.add_argument(
        "--plot", type=Path, help="write a PNG of predicted against measured layers"
    )
    parser.add_argument(
        "--overlay", type=Path, help="predict layers with constants of this overlay"
    )
    arguments = parser.parse_args()
    catalog = Catalog.default()
    measured = load_catalog((arguments.overlay,)) if arguments.overlay else catalog
    found = layers(measured)
    print(f"  {'':32s} points   median      p95   (per cent)")
    by_phase: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (model, phase), pairs in found.items():
        by_phase[phase] += pairs
        _show(f"layer, {model} {phase}", of(pairs))
    every = of(by_phase["prefill"] + by_phase["decode"])
    _show("layer, all", every)
    single = operators(catalog)
    for name, result in single.items():
        _show(name, result)
    steps = read_steps(catalog)
    show_steps(steps)
    times = accuracy_by_phase(steps, lambda s: (s.seconds, s.predicted_s))
    joules = accuracy_by_phase(steps, lambda s: (s.joules, s.predicted_j))
    for phase, result in times.items():
        _show(f"step, {phase}", result)
    for phase, result in joules.items():
        _show(f"joules per token, {phase}", result)
    if arguments.plot:
        plot(arguments.plot, found)
        print(f"wrote {arguments.plot}")
    finish(
        [
            Figure("layer_median", every.median, 10),
            Figure("layer_p95", every.p95),
            Figure("layer_prefill_median", of(by_phase["prefill"]).median),
            Figure("layer_decode_median", of(by_phase["decode"]).median),
            *(Figure(f"{name}_median", result.median) for name, result in single.items()),
            Figure("step_median_err", times["all"].median, 6),
            Figure("step_p95_err", times["all"].p95),
            *(Figure(f"step_{p}_median_err", r.median) for p, r in times.items() if p != "all"),
            Figure("joules_per_token_median_err", joules["all"].median),
            Figure("joules_per_token_p95_err", joules["all"].p95),
        ]
    )


def _show(name: str, result: Accuracy) -> None:
    print(f"  {name:32s} {result.points:6d} {result.median:8.1f} {result.p95:8.1f}")


if __name__ == "__main__":
    main()
