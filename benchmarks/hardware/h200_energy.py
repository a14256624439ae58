"""Joules per token of stacks of layers on an H200, measured by its energy counter, against the power model.

The measurements are those of `benchmarks.h200_energy_measure`; no constant is fitted on them. "Power" is
the model's error in watts with the time as measured, "joules" with the time as the performance model has it,
kernels alone. Rows with a duty below 1 say whether a GPU that works a share of the time draws that share of
what its steps add to waiting, which is what plans reckon with (`atoll.plan.power`).
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.catalog import Catalog
from atoll.perf.batch import Batch
from atoll.perf.energy import power_model, step_work
from atoll.perf.step import analytic, step_seconds
from benchmarks.report import ROOT, Figure, finish

RESULTS = ROOT / "benchmarks" / "results" / "h200_energy.csv"


@dataclass(frozen=True, slots=True)
class EnergyRow:
    """One point: seconds and joules of a replay, measured and predicted; watts with measured seconds."""

    model: str
    phase: str
    batch: Batch[float]
    tokens: float
    duty: float
    seconds: float
    predicted_s: float
    joules: float
    predicted_j: float
    watts: float
    predicted_w: float

    @property
    def joules_error(self) -> float:
        """Of joules per token, in per cent."""
        return 100.0 * abs(self.predicted_j / self.joules - 1.0)

    @property
    def watts_error(self) -> float:
        """Of watts, in per cent."""
        return 100.0 * abs(self.predicted_w / self.watts - 1.0)


def read_energy(catalog: Catalog, path: Path = RESULTS) -> list[EnergyRow]:
    """Return every measured point beside what the model says of it; idle rows are left out."""
    node = catalog.node("H200:1")
    power = power_model(node.gpu)
    found = []
    with path.open() as stream:
        for row in csv.DictReader(stream):
            if row["phase"] == "idle":
                continue
            spec = catalog.model(row["model"]).llm
            model = analytic(spec, node, engine="atoll")
            sequences, tokens = float(row["sequences"]), float(row["tokens"])
            if row["phase"] == "prefill":
                batch = Batch.prefill(tokens, sequences)
            else:
                batch = Batch.decode(sequences, float(row["context"]))
            # Not the first layer: the embedding was not measured.
            layers = (1, 1 + int(row["layers"]))
            work = step_work(spec, batch, *layers)
            seconds, duty = float(row["replay_ms"]) / 1e3, float(row["duty"])
            predicted_s = step_seconds(model, batch, *layers, host=False)
            busy_w = power.watts(work.moved_bytes / seconds, work.flops / seconds)
            own_w = power.watts(work.moved_bytes / predicted_s, work.flops / predicted_s)
            # In what is left of the time a GPU waits.
            waited = power.idle_w * (1.0 / duty - 1.0)
            found.append(
                EnergyRow(
                    model=row["model"],
                    phase=row["phase"],
                    batch=batch,
                    tokens=tokens,
                    duty=duty,
                    seconds=seconds,
                    predicted_s=predicted_s,
                    joules=float(row["joules_per_replay"]),
                    predicted_j=(own_w + waited) * predicted_s,
                    watts=float(row["watts"]),
                    predicted_w=power.idle_w + duty * (busy_w - power.idle_w),
                )
            )
    return found


def read_idle_w(path: Path = RESULTS) -> list[float]:
    """Return the watts of GPUs that wait with a model loaded."""
    with path.open() as stream:
        return [float(row["watts"]) for row in csv.DictReader(stream) if row["phase"] == "idle"]


def p90(errors: Sequence[float]) -> float:
    """Return what nine of ten errors do not exceed."""
    ordered = sorted(errors)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def show(rows: Iterable[EnergyRow]) -> None:
    """Print every point with its errors."""
    head = "model, phase, sequences x context"
    print(
        f"  {head:44s} {'duty':>5s} {'ms':>8s} {'%':>6s} {'W':>6s} {'%':>6s} "
        f"{'J/token':>10s} {'%':>6s}"
    )
    for row in rows:
        b = row.batch
        shape = (
            f"{b.decode_sequences:.0f} x {b.decode_context:.0f}"
            if row.phase == "decode"
            else f"{b.prefill_sequences:.0f} x {b.prompt_length:.0f}"
        )
        print(
            f"  {row.model + ' ' + row.phase + ' ' + shape:44s} {row.duty:5.2f} "
            f"{1e3 * row.seconds:8.3f} {100 * (row.predicted_s / row.seconds - 1):+6.1f} "
            f"{row.watts:6.0f} {100 * (row.predicted_w / row.watts - 1):+6.1f} "
            f"{row.joules / row.tokens:10.5f} {100 * (row.predicted_j / row.joules - 1):+6.1f}"
        )


def main() -> None:
    """Compare and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the measured CSV")
    options = parser.parse_args()
    catalog = Catalog.default()
    rows = read_energy(catalog, options.results)
    show(rows)
    busy = [row for row in rows if row.duty == 1.0]
    partly = [row for row in rows if row.duty < 1.0]
    decode = [row for row in busy if row.phase == "decode"]
    prefill = [row for row in busy if row.phase == "prefill"]
    idle = read_idle_w(options.results)
    modelled = power_model(catalog.gpu("H200")).idle_w

    def median(errors: Iterable[float]) -> float:
        return statistics.median(errors)

    finish(
        [
            Figure("energy_points", len(rows)),
            Figure("joules_per_token_median_err", median(r.joules_error for r in busy)),
            Figure("joules_per_token_p90_err", p90([r.joules_error for r in busy])),
            Figure("joules_decode_median_err", median(r.joules_error for r in decode)),
            Figure("joules_decode_p90_err", p90([r.joules_error for r in decode])),
            Figure("joules_prefill_median_err", median(r.joules_error for r in prefill)),
            Figure("joules_prefill_p90_err", p90([r.joules_error for r in prefill])),
            Figure("watts_median_err", median(r.watts_error for r in busy)),
            Figure("watts_p90_err", p90([r.watts_error for r in busy])),
            Figure("partly_loaded_watts_median_err", median(r.watts_error for r in partly)),
            Figure("idle_watts_err", 100.0 * abs(modelled / statistics.mean(idle) - 1.0)),
        ]
    )


if __name__ == "__main__":
    main()
