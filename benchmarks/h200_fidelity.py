"""Predicted against measured on an H200: whole decoder layers, matrix products, attention.

The measurements in `benchmarks/results` were taken with `benchmarks/h200_measure.py`; no constant is
fitted on them. `--plot FILE.png` draws predicted against measured layers.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from atoll.catalog import Catalog
from atoll.perf.batch import Batch
from atoll.perf.calibrate import Accuracy, accuracy, op_classes, predict
from atoll.perf.constants import OpConstants, default_constants
from atoll.perf.layers import model_ops
from atoll.perf.measurements import Points, read_points
from benchmarks.report import ROOT, Figure, finish

RESULTS = ROOT / "benchmarks" / "results"
MODELS = {"llama-3.1-8b": "llama-3.1-8b", "llama-3.1-70b": "llama-3-70b"}


def layers(catalog: Catalog) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return (measured, predicted) microseconds of one layer by (model, phase), CUDA graphs only."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    constants = default_constants().gpu("H200")
    node = catalog.node("H200:1")
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


def of(pairs: list[tuple[float, float]]) -> Accuracy:
    table = np.array(pairs)
    return accuracy(table[:, 1], table[:, 0])


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
    arguments = parser.parse_args()
    catalog = Catalog.default()
    found = layers(catalog)
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
        ]
    )


def _show(name: str, result: Accuracy) -> None:
    print(f"  {name:32s} {result.points:6d} {result.median:8.1f} {result.p95:8.1f}")


if __name__ == "__main__":
    main()
