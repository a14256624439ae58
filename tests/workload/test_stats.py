from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.workload import stats as stats_module
from atoll.workload.requests import Requests
from atoll.workload.spec import workload_of
from atoll.workload.stats import QUANTILES, summarise

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "data" / "reference"
FILES = {
    "azure2023_code": "azure2023_code",
    "azure2023_conv": "azure2023_conv",
    "mooncake_conversation": "mooncake_conversation",
    "mooncake_synthetic": "mooncake_synthetic",
    "servegen_sample_mm-image_1h": "servegen/sample_mm-image_1h",
}
LONG = ("mooncake_conversation", "servegen_sample_mm-image_1h")
lengths = st.integers(1, 5000)


@given(
    st.lists(st.tuples(st.floats(0, 300), lengths, lengths), min_size=3, max_size=80),
    st.integers(1, 30),
)
def test_statistics_are_those_of_numpy(rows: list[tuple[float, int, int]], cut: int) -> None:
    times = np.sort([row[0] for row in rows])
    prompts, answers = (np.array([row[i] for row in rows], np.int32) for i in (1, 2))
    whole = Requests.of(times, prompts, answers)
    parts = [whole.take(slice(0, cut)), whole.take(slice(cut, None))]
    stats = summarise(parts).stats()
    assert stats.requests == len(rows)
    assert stats.input.quantiles == pytest.approx(np.quantile(prompts, QUANTILES).tolist())
    assert stats.output.mean_square == pytest.approx(float((answers.astype(float) ** 2).mean()))
    assert (stats.input.least, stats.input.most) == (prompts.min(), prompts.max())
    gaps = np.diff(times)
    if gaps.mean() > 1e-3:
        assert stats.iat_cv == pytest.approx(gaps.std() / gaps.mean(), rel=1e-6)
    whole_windows = int((times[-1] - times[0]) // 10)
    if whole_windows >= 2:
        counts = np.bincount(((times - times[0]) // 10).astype(int))[:whole_windows]
        if counts.any():
            assert stats.windows[1].fano == pytest.approx(counts.var() / counts.mean())
            assert stats.windows[1].peak_to_mean == pytest.approx(counts.max() / counts.mean())
    if prompts.std() > 0 and answers.std() > 0:
        expected = np.corrcoef(prompts, answers)[0, 1]
        assert stats.correlation == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else []) for name in FILES],
)
def test_public_traces_give_their_published_statistics(name: str) -> None:
    path = REFERENCE / "traces" / f"{FILES[name]}.csv.gz"
    if not path.exists():
        pytest.skip("the public reference data is not here")
    with (REFERENCE / "trace_stats.csv").open(encoding="utf-8") as stream:
        known = next(row for row in csv.DictReader(stream) if row["name"] == name)
    stats = summarise(workload_of(str(path)).chunks()).stats()
    one, ten, minute = stats.windows
    found = {
        "n": stats.requests, "span_s": stats.span_s, "rate": stats.rate_per_s, "iat_cv": stats.iat_cv,
        "fano_1s": one.fano, "fano_10s": ten.fano, "fano_60s": minute.fano,
        "peak2mean_60s": minute.peak_to_mean, "corr": stats.correlation,
        "in_mean": stats.input.mean, "in_p95": stats.input.at(0.95), "in_max": stats.input.most,
        "out_mean": stats.output.mean, "out_p50": stats.output.at(0.5), "out_p99": stats.output.at(0.99),
    }  # fmt: skip
    for key, value in found.items():
        assert value == pytest.approx(float(known[key]), rel=2e-3, abs=6e-3), key


def test_a_very_long_span_is_counted_in_wider_bins() -> None:
    ones = np.ones(3, np.int32)
    summary = summarise([Requests.of(np.array([0.0, 10.0, 5e8]), ones, ones)])
    assert summary.width_s > 1.0
    assert summary.stats().windows[0].fano is None
    assert summary.counts(1e8).sum() == 2


def test_too_few_requests_for_a_statistic() -> None:
    one = np.ones(1, np.int32)
    stats = summarise([Requests.of(np.zeros(1), one, one)]).stats()
    assert (stats.requests, stats.iat_cv, stats.correlation) == (1, None, None)
    assert [window.fano for window in stats.windows] == [None] * 3
    with pytest.raises(InputError, match="no requests"):
        summarise([]).stats()


def test_requests_out_of_order_are_refused() -> None:
    ones = np.ones(2, np.int32)
    with pytest.raises(InputError, match="order"):
        summarise([Requests.of(np.array([2.0, 1.0]), ones, ones)])


def test_wider_bins_lose_no_request() -> None:
    """Bins double in width when they would be too many; an odd last one must not be dropped."""
    far = 1.5 * stats_module._MAX_BINS
    parts = [
        Requests.of(np.array(times), np.ones(len(times), np.int32), np.ones(len(times), np.int32))
        for times in ([0.0, 3000.5], [far])
    ]
    assert int(summarise(parts)._bins.sum()) == 3
