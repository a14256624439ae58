"""The workloads that ship follow the traces they say they follow."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import UnknownNameError
from atoll.workload.builtin import ALIASES, CURVES, NAMES, curve, get_builtin, lengths_like
from atoll.workload.lengths import BUILT_IN, LengthMix
from atoll.workload.requests import collect
from atoll.workload.spec import workload_of
from atoll.workload.stats import TraceStats, summarise

MEASURED = [name for name in NAMES if name != "burstgpt"]


DRAWN = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "azure-conv" else pytest.mark.slow)
        for name in MEASURED
    ],
)


@cache
def drawn(name: str) -> TraceStats:
    """Statistics over a run far longer than the slowest layer of chance."""
    return summarise(workload_of(f"{name} n=300k").chunks(11)).stats()


@DRAWN
def test_rates_and_burstiness(name: str) -> None:
    measured, found = get_builtin(name).measured, drawn(name)
    assert found.rate_per_s == pytest.approx(measured["rate_per_s"], rel=0.1)
    assert found.iat_cv == pytest.approx(measured["iat_cv"], rel=0.2)
    for window in found.windows:
        assert window.fano == pytest.approx(measured[f"fano_{window.window_s}s"], rel=0.3)


@DRAWN
def test_lengths(name: str) -> None:
    measured, found = get_builtin(name).measured, drawn(name)
    for side, length in (("input", found.input), ("output", found.output)):
        assert length.mean == pytest.approx(measured[f"{side}_mean"], rel=0.02)
        assert length.mean_square == pytest.approx(measured[f"{side}_mean_square"], rel=0.12)
        assert length.at(0.5) == pytest.approx(measured[f"{side}_p50"], rel=0.02, abs=1)
        assert length.at(0.95) == pytest.approx(measured[f"{side}_p95"], rel=0.04, abs=1)
        assert length.at(0.99) == pytest.approx(measured[f"{side}_p99"], rel=0.05, abs=1)
        assert length.most <= measured[f"{side}_max"]
    assert found.correlation == pytest.approx(measured["correlation"], abs=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_planning_and_drawing_use_the_same_lengths(name: str) -> None:
    mix, planned = get_builtin(name).lengths.mix(), BUILT_IN[name]
    assert mix.input_mean == pytest.approx(planned.input_mean, rel=0.015)
    assert mix.output_mean == pytest.approx(planned.output_mean, rel=0.015)
    assert mix.input_mean_square == pytest.approx(planned.input_mean_square, rel=0.05)
    assert mix.output_mean_square == pytest.approx(planned.output_mean_square, rel=0.1)
    assert mix.decode_context == pytest.approx(planned.decode_context, rel=0.02)


@pytest.mark.slow
def test_burstgpt_follows_its_aggregates() -> None:
    measured = get_builtin("burstgpt").measured
    days, hours, tokens = [], np.zeros(24), []
    # Days and hours do not depend on the rate, and fewer requests are quicker to count.
    for seed in range(8):
        found = collect(workload_of("burstgpt@0.03/s for=61d"), seed)
        days.append(np.histogram(found.arrival_s, 61, (0.0, 61 * 86_400.0))[0] / 86_400)
        hours += np.histogram(found.arrival_s % 86_400, 24, (0.0, 86_400.0))[0]
        tokens.append(float(found.input.mean() + found.output.mean()))
    rates = np.concatenate(days)
    assert rates.mean() == pytest.approx(0.03, rel=0.2)
    assert rates.std() / rates.mean() == pytest.approx(measured["day_cv"], rel=0.25)
    assert hours.max() / hours.mean() == pytest.approx(measured["peak_hour_to_mean"], rel=0.15)
    assert np.mean(tokens) == pytest.approx(measured["tokens_mean"], rel=0.01)


def test_images_come_with_multimodal_requests() -> None:
    found = collect(workload_of("multimodal n=50k"))
    assert found.items is not None
    assert found.classes == ("text", "image")
    assert np.array_equal(found.klass > 0, found.items > 0)
    assert found.items.mean() == pytest.approx(1.55, abs=0.1)
    # Prompts with many images are long.
    few, many = found.items <= 1, found.items >= 4
    assert found.input[many].mean() > 2 * found.input[few].mean()
    other = collect(workload_of("multimodal n=50 lengths=10x10"))
    assert other.items is None


def test_curves_by_name() -> None:
    for name in (*CURVES, *ALIASES):
        assert curve(name).period_s in (86_400, 604_800)
        assert len(curve(name).levels) == curve(name).period_s / 3600
        assert np.mean(curve(name).levels) == pytest.approx(1.0, abs=0.01)
    week = np.array(curve("code-week").levels).reshape(7, 24).mean(axis=1)
    assert week[:5].min() > 1.5 * week[5:].max()  # Monday first: programmers rest at the weekend


def test_lengths_with_the_moments_of_a_mix() -> None:
    assert lengths_like(BUILT_IN["azure-conv"]) is get_builtin("azure-conv").lengths
    tail = replace(BUILT_IN["azure-conv"], input_tail=8000.0)
    assert lengths_like(tail) is get_builtin("azure-conv").lengths
    for mix in (LengthMix(500.0, 20.0, 4e5, 2e3), LengthMix.fixed(64, 8), BUILT_IN["long-context"]):
        assert dataclasses.astuple(lengths_like(mix).mix()) == pytest.approx(
            dataclasses.astuple(mix)
        )


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="azure-conv"):
        get_builtin("azure")


def test_no_rows_of_traces_ship() -> None:
    text = (files("atoll.workload") / "data" / "builtin.yaml").read_text(encoding="utf-8")
    assert len(text) < 20_000  # a trace is a hundred times that


def test_the_table_of_the_documentation_shows_what_was_measured() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/internals/workloads.md").read_text("utf-8")
    lines = page[page.index("| Statistic |") :].split("\n\n")[0].splitlines()
    names = [cell.strip(" `") for cell in lines[0].strip("|").split("|")][1:]
    assert sorted(names) == MEASURED
    shown = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines[2:]]
    for statistic, *cells in shown:
        for name, cell in zip(names, cells, strict=True):
            measured, drawn = (float(part.replace(",", "")) for part in cell.split(" / "))
            assert measured == pytest.approx(
                get_builtin(name).measured[statistic], rel=1e-3, abs=5e-4
            )
            assert drawn == pytest.approx(measured, rel=0.2, abs=0.03)
    assert {row[0] for row in shown} == set(get_builtin("azure-conv").measured)
