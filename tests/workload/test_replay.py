from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import AtollError
from atoll.workload.requests import Requests, collect
from atoll.workload.spec import replay_of, workload_of
from atoll.workload.stats import TraceStats, summarise
from atoll.workload.writing import write_trace

COUNT = 6_000


@pytest.fixture(scope="module")
def bursty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with bursts, its first arrival late."""
    path = tmp_path_factory.mktemp("replay") / "bursty.csv"
    own = collect(workload_of(f"azure-code n={COUNT} model=m"), 2)
    write_trace(path, [own.at(own.arrival_s + 500.0)])
    return path


def found(spec: str, seed: int = 0) -> Requests:
    return collect(workload_of(spec), seed)


def stats(requests: Requests) -> TraceStats:
    return summarise([requests]).stats()


def test_as_it_is(bursty: Path) -> None:
    own = found(str(bursty))
    assert len(own) == COUNT
    assert own.arrival_s[0] == 0.0
    assert own.models == ("m",)
    assert set(found(f"{bursty} model=other").models) == {"other"}


@pytest.mark.parametrize("pace", ["25/s", "x0.3", pytest.param("1/min", marks=pytest.mark.slow)])
def test_keeping_gaps_keeps_every_gap(bursty: Path, pace: str) -> None:
    own, other = found(str(bursty)), found(f"{bursty}@{pace}")
    ratio = np.diff(other.arrival_s)[np.diff(own.arrival_s) > 1e-3]
    ratio = ratio / np.diff(own.arrival_s)[np.diff(own.arrival_s) > 1e-3]
    assert np.allclose(ratio, ratio[0], rtol=1e-6)
    assert np.array_equal(own.input, other.input)
    assert stats(own).iat_cv == pytest.approx(stats(other).iat_cv, rel=1e-6)
    wanted = {"25/s": 25.0, "x0.3": 0.3 * stats(own).rate_per_s, "1/min": 1 / 60}[pace]
    assert stats(other).rate_per_s == pytest.approx(wanted, rel=1e-6)


def test_keeping_the_clock_fills_gaps(bursty: Path) -> None:
    own, more = found(str(bursty)), found(f"{bursty}@x3 keep=clock")
    assert len(more) == 3 * COUNT
    assert more.arrival_s[-1] == pytest.approx(own.arrival_s[-1])
    before, after = stats(own), stats(more)
    assert after.iat_cv == pytest.approx(before.iat_cv, rel=0.01)
    assert after.windows[2].peak_to_mean == pytest.approx(before.windows[2].peak_to_mean, rel=0.02)
    # Each request comes three times, the last time when it came before.
    assert np.array_equal(np.sort(more.input), np.sort(np.repeat(own.input, 3)))
    assert np.allclose(more.arrival_s[2::3], own.arrival_s, atol=1e-6)
    assert np.array_equal(more.input[2::3], own.input)


def test_keeping_the_clock_at_an_odd_rate(bursty: Path) -> None:
    more = found(f"{bursty}@x1.7 keep=clock")
    assert len(more) == pytest.approx(1.7 * COUNT, abs=2)
    assert np.all(np.diff(more.arrival_s) >= 0)


def test_keeping_the_clock_thins(bursty: Path) -> None:
    own, less = found(str(bursty)), found(f"{bursty}@x0.25 keep=clock")
    assert len(less) == pytest.approx(COUNT / 4, rel=0.05)
    assert np.isin(less.arrival_s, own.arrival_s).all()
    assert not np.array_equal(
        less.arrival_s[:50], found(f"{bursty}@x0.25 keep=clock", 1).arrival_s[:50]
    )
    again = found(f"{bursty}@x0.25 keep=clock")
    assert np.array_equal(less.arrival_s, again.arrival_s)


def test_ends(bursty: Path) -> None:
    own = found(str(bursty))
    assert found(f"{bursty} n=10").arrival_s.tolist() == own.arrival_s[:10].tolist()
    part = found(f"{bursty} for=10min")
    assert part.arrival_s[-1] < 600.0
    assert own.arrival_s[len(part)] >= 600.0


def test_traces_mix_with_what_is_drawn(bursty: Path) -> None:
    both = found(f"{bursty} n=100 + poisson:1/s model=new n=100")
    assert sorted(both.models) == ["m", "new"]
    assert len(both) == 200


def test_what_cannot_be_replayed(bursty: Path, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("arrival_s,input_tokens,output_tokens\n5,1,1\n5,1,1\n")
    with pytest.raises(AtollError, match="have no rate"):
        workload_of(f"{tmp_path}/one.csv@5/s")
    assert len(found(f"{tmp_path}/one.csv")) == 2
    with pytest.raises(AtollError, match="1e-6 to 1e6"):
        workload_of(f"{bursty}@x1e9")
    with pytest.raises(AtollError, match="no unit"):
        replay_of(str(bursty), "5")
