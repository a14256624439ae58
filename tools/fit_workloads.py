"""Fit the built-in workloads to public traces; writes src/atoll/workload/data/builtin.yaml.

    python tools/fit_workloads.py [--data ../shared/data/reference]

Kept are facts: rates, burstiness, quantiles of prompt lengths, quantiles of answer lengths for each
eighth of the prompts, hourly means of rates. No row of any trace is kept. The CV of the gaps and the layers
of chance are those under which a long simulated run comes nearest to the measured burstiness.
Needs scipy (extra `calibrate`).
"""

from __future__ import annotations

import argparse
import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from atoll.workload.arrival_rates import Layer, RateClock, Silence, arrivals
from atoll.workload.arrivals import MAX_CV, Renewal
from atoll.workload.requests import Requests
from atoll.workload.stats import Summary, summarise

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src/atoll/workload/data/builtin.yaml"
IN_SHARES = (
    0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75,
    0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1,
)  # fmt: skip
OUT_SHARES = (
    0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 1,
)  # fmt: skip
GROUPS = 8


@dataclass(frozen=True)
class Start:
    """Where a fit starts: the trace, CV of the gaps, layers as (hold, CV), silences as (on, off)."""

    file: str
    cv: float
    layers: tuple[tuple[float, float], ...]
    silence: tuple[float, float] | None = None


TRACES = {
    "azure-code": Start("azure2023_code", 1.3, ((0.5, 1.0), (7.0, 1.5)), (270.0, 110.0)),
    "azure-conv": Start("azure2023_conv", 1.02, ((1.0, 0.14), (600.0, 0.22))),
    "reasoning": Start(
        "servegen/sample_deepseek-r1_1h", 1.2, ((0.5, 0.7), (4.0, 0.3), (300.0, 0.15))
    ),
    "multimodal": Start("servegen/sample_mm-image_1h", 1.1, ((0.3, 0.7), (300.0, 0.1))),
}
ABOUT = {
    "azure-code": "Azure LLM inference trace 2023, code completion: bursts and silences",
    "azure-conv": "Azure LLM inference trace 2023, conversation",
    "burstgpt": "BurstGPT_1, 61 days: rates by hour and day, mean tokens; shape of the lengths assumed",
    "multimodal": "ServeGen, one hour of the image clients (35 clients)",
    "reasoning": "ServeGen, one hour of the DeepSeek-R1 clients (73 clients)",
}


def load(path: Path) -> dict[str, Any]:
    """Read the columns of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def requests(times: Any, trace: dict[str, Any] | None = None) -> Requests:
    ones = np.ones(len(times))
    lengths = [ones, ones] if trace is None else [trace["input_tokens"], trace["output_tokens"]]
    return Requests.of(times, *(column.astype(np.int32) for column in lengths))


def burstiness(summary: Summary) -> list[float]:
    """CV of the gaps and Fano factors in 1, 10, 60 and 300 s."""
    stats = summary.stats()
    counts = summary.counts(300)
    return [
        stats.iat_cv or 0.0,
        *(window.fano or 0.0 for window in stats.windows),
        float(counts.var() / counts.mean()),
    ]


def unpack(x: Any, silent: bool) -> tuple[Renewal, tuple[Layer | Silence, ...]]:
    values = np.exp(np.clip(x, -4.0, 10.0))
    end = len(values) - (2 if silent else 0)
    layers: list[Layer | Silence] = [
        Layer(float(hold), float(min(cv, MAX_CV)))
        for hold, cv in zip(values[1:end:2], values[2:end:2], strict=True)
    ]
    if silent:
        layers.append(Silence(float(values[-2]), float(values[-1])))
    return Renewal("gamma", float(np.clip(values[0], 0.3, 20))), tuple(layers)


def fit(rate: float, measured: list[float], start: Start) -> Any:
    """Return the logs of CV and layers whose simulated burstiness is nearest to `measured`."""
    from scipy.optimize import minimize

    weights = np.array([1.0, 1.0, 1.0, 1.0, 0.3])

    def loss(x: Any) -> float:
        renewal, own = unpack(x, start.silence is not None)
        span = max(150_000 / rate, 40_000.0)
        made = arrivals(renewal, RateClock(rate, layers=own), seed=7, name="fit", end_s=span)
        found = burstiness(summarise(requests(times) for times in made))
        return float(np.sum(weights * (np.log(found) - np.log(measured)) ** 2))

    first = [start.cv, *(v for layer in start.layers for v in layer), *(start.silence or ())]
    simplex = np.log(np.array([first] * (len(first) + 1)))
    simplex[1:] += np.diag(np.full(len(first), 0.4))
    settings = {"maxfev": 350, "xatol": 0.01, "fatol": 1e-4, "initial_simplex": simplex}
    return minimize(loss, simplex[0], method="Nelder-Mead", options=settings)


def digits(values: Any, count: int = 6) -> list[float]:
    return [float(f"{value:.{count}g}") for value in values]


def quantiles(trace: dict[str, Any]) -> dict[str, object]:
    """Quantiles of prompts, and of answers for each eighth of the prompts."""
    order = np.argsort(trace["input_tokens"], kind="stable")
    groups = np.array_split(trace["output_tokens"][order], GROUPS)
    made: dict[str, object] = {
        "input": digits(np.quantile(trace["input_tokens"], IN_SHARES)),
        "output": [digits(np.quantile(group, OUT_SHARES)) for group in groups],
    }
    if "image_count" in trace:
        counts = np.array_split(trace["image_count"][order], GROUPS)
        bounds = [int(part[-1]) for part in np.array_split(np.sort(trace["input_tokens"]), GROUPS)]
        made["items"] = {
            "bounds": bounds[:-1],
            "shares": [
                {int(n): round(float(np.mean(part == n)), 5) for n in np.unique(part)}
                for part in counts
            ],
        }
    return made


def facts(stats: Any) -> dict[str, object]:
    """What was measured, for the table that compares."""
    one, ten, minute = stats.windows
    return {
        "rate_per_s": float(f"{stats.rate_per_s:.5g}"),
        "iat_cv": float(f"{stats.iat_cv:.4g}"),
        "fano_1s": float(f"{one.fano:.4g}"),
        "fano_10s": float(f"{ten.fano:.4g}"),
        "fano_60s": float(f"{minute.fano:.4g}"),
        **{
            f"{side}_{name}": float(f"{value:.6g}")
            for side, length in (("input", stats.input), ("output", stats.output))
            for name, value in (
                ("mean", length.mean), ("mean_square", length.mean_square), ("p50", length.at(0.5)),
                ("p95", length.at(0.95)), ("p99", length.at(0.99)), ("max", length.most),
            )
        },
        "correlation": round(stats.correlation, 3),
    }  # fmt: skip


def burstgpt(folder: Path) -> dict[str, object]:
    """The workload behind BurstGPT's aggregates: rates are measured, the shape of lengths is assumed."""
    series: dict[str, list[float]] = {}
    with (folder / "burstgpt1_aggregates.csv").open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            series.setdefault(row["series"], []).append(float(row["value"]))
    days, tokens = np.array(series["daily_requests"]), np.array(series["daily_tokens"])
    hours = np.array(series["hour_of_day_requests"])
    rate = float(days.sum() / len(days) / 86_400)
    mean = float(tokens.sum() / days.sum())
    spread = float(days.std() / days.mean())
    return {
        "about": ABOUT["burstgpt"],
        "rate_per_s": float(f"{rate:.5g}"),
        "family": "gamma",
        "cv": 1.1,
        # One layer for the minutes of week 1, one for the days.
        "layers": [[600.0, 0.4], [129_600.0, float(f"{spread:.3g}")]],
        "curve": "burstgpt-day",
        # Mean of prompt and answer together is measured; how they share it and their CV are not.
        "lognormal": {"input": [round(mean - 126.0, 1), 1.3], "output": [126.0, 1.2]},
        "measured": {
            "rate_per_s": float(f"{rate:.5g}"),
            "tokens_mean": float(f"{mean:.5g}"),
            "day_cv": float(f"{spread:.4g}"),
            "peak_hour_to_mean": float(f"{hours.max() / hours.mean():.4g}"),
        },
    }


def curves(folder: Path) -> dict[str, object]:
    """Hourly relative rates: Azure's week of 2024 for code and conversation, BurstGPT's mean day."""
    week = {name: np.zeros((168, 2)) for name in ("code", "conv")}
    with (folder / "azure2024_week_rate_digitised.csv").open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            hour = int(float(row["t_s"]) // 3600) % 168
            week[row["trace"]][hour] += (float(row["req_per_min"]), 1.0)
    with (folder / "burstgpt1_aggregates.csv").open(encoding="utf-8") as stream:
        day = [
            float(r["value"]) for r in csv.DictReader(stream) if r["series"].startswith("hour_of")
        ]
    made = {}
    for name, sums in week.items():
        levels = sums[:, 0] / sums[:, 1]
        # The files start on a Friday (code) and a Sunday (conversation); curves start on Monday.
        levels = np.roll(levels, 24 * (4 if name == "code" else 6))
        made[f"{name}-week"] = {"period_s": 604_800, "levels": digits(levels / levels.mean(), 3)}
    weekdays = np.array(made["code-week"]["levels"]).reshape(7, 24)[:5].mean(axis=0)
    own = {"code-day": weekdays, "burstgpt-day": np.array(day)}
    own["conv-day"] = np.array(made["conv-week"]["levels"]).reshape(7, 24)[:5].mean(axis=0)
    for name, levels in own.items():
        made[name] = {"period_s": 86_400, "levels": digits(levels / levels.mean(), 3)}
    return dict(sorted(made.items()))


def main() -> None:
    """Fit all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/reference")
    folder = parser.parse_args().data / "traces"
    workloads: dict[str, object] = {"burstgpt": burstgpt(folder)}
    for name, start in TRACES.items():
        trace = load(folder / f"{start.file}.csv.gz")
        summary = summarise([requests(trace["arrival_s"], trace)])
        measured = burstiness(summary)
        rate = summary.stats().rate_per_s
        found = fit(rate, measured, start)
        renewal, own = unpack(found.x, start.silence is not None)
        print(name, "loss", found.fun, "cv", renewal.cv, own, "measured", np.round(measured, 2))
        workloads[name] = {
            "about": ABOUT[name],
            "rate_per_s": float(f"{rate:.5g}"),
            "family": "gamma",
            "cv": float(f"{renewal.cv:.4g}"),
            "layers": [digits((x.hold_s, x.cv), 4) for x in own if isinstance(x, Layer)],
            "silences": [digits((x.on_s, x.off_s), 4) for x in own if isinstance(x, Silence)],
            **quantiles(trace),
            "measured": facts(summary.stats()),
        }
    data = {
        "input_shares": [float(x) for x in IN_SHARES],
        "output_shares": [float(x) for x in OUT_SHARES],
        "curves": curves(folder),
        "workloads": dict(sorted(workloads.items())),
    }
    header = (
        "# Written by tools/fit_workloads.py from public traces: see docs/internals/workloads.md.\n"
    )
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(header + text, encoding="utf-8")


if __name__ == "__main__":
    main()
