"""History in a file: sums stay sums however wide the steps, and the file stays small."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.telemetry.history import (
    LEVELS,
    MAX_SERIES,
    HistoryStore,
    MachineSums,
    ModelSums,
    bucket_of,
)
from tests.seeds import examples

NOW_S = 1_800_000_000


def record(store: HistoryStore, steps: int, begin_s: int = NOW_S, step_s: int = 10) -> None:
    """Record a model that is asked 2 requests a second, half of them kept, for $3.6 an hour."""
    for n in range(steps):
        sums = ModelSums(step_s, 2.0 * step_s, 100.0 * step_s, judged=4.0, kept=2.0, usd=0.01)
        store.add(begin_s + n * step_s, {"m": sums}, {})


def test_rates_and_shares_are_those_of_what_was_seen() -> None:
    store = HistoryStore(None)
    record(store, 60)
    found = store.read("models", NOW_S, NOW_S + 600, 10)
    assert found.step_s == 60
    assert found.at_s[0] == NOW_S
    curves = found.series["m"]
    assert curves["requests_per_s"][:10] == [2] * 10
    assert curves["kept"][:10] == [0.5] * 10
    assert curves["usd_per_hour"][:10] == [3.6] * 10
    # Nobody timed a stream.
    assert set(curves["first_token_s"]) == {None}


@pytest.mark.parametrize(("age_s", "step_s"), [(3600, 10), (86400, 60), (30 * 86400, 900)])
def test_the_finest_steps_that_are_kept_are_read(age_s: int, step_s: int) -> None:
    store = HistoryStore(None)
    record(store, 2, NOW_S)
    assert store.read("models", NOW_S - age_s, NOW_S + 20, 1000).step_s % step_s == 0
    # All levels have all of it.
    found = store.read("models", NOW_S - age_s, NOW_S + 20, 1)
    assert [v for v in found.series["m"]["requests_per_s"] if v is not None] == [2]


@examples(30)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40))
def test_every_level_counts_the_same(requests: list[int]) -> None:
    store = HistoryStore(None)
    for n, number in enumerate(requests):
        store.add(NOW_S + 10 * n, {"m": ModelSums(10.0, number)}, {})
    for age_s in (0, 5 * 3600, 20 * 86400):
        found = store.read("models", NOW_S - age_s, NOW_S + 10 * len(requests), 1000)
        seen = [v for v in found.series["m"]["requests_per_s"] if v is not None]
        counted = [v for v in seen if v]
        assert bool(counted) == any(requests)
    # One bucket of all: the mean over what was seen.
    whole = store.read("models", NOW_S, NOW_S + 10 * len(requests), 1).series["m"]["requests_per_s"]
    mean = sum(requests) / (10 * len(requests))
    assert sum(v or 0 for v in whole) == pytest.approx(mean, rel=1e-3, abs=1e-4) or len(whole) > 1


def test_a_machine_of_which_nobody_says_how_busy_it_is_has_no_such_curve() -> None:
    store = HistoryStore(None)
    store.add(NOW_S, {}, {"a": MachineSums(10.0, 30.0), "b": MachineSums(10.0, 0, gpus=10, gpu=9)})
    found = store.read("machines", NOW_S - 60, NOW_S + 60, 1000).series
    assert [v for v in found["a"]["running"] if v is not None] == [3]
    assert set(found["a"]["gpu_share"]) == {None}
    assert [v for v in found["b"]["gpu_share"] if v is not None] == [0.9]


def test_what_is_old_goes_and_so_do_names_of_which_nothing_is_left() -> None:
    store = HistoryStore(None)
    record(store, 1, NOW_S)
    store.add(NOW_S, {}, {"gone": MachineSums(10.0)}, ["another plan is in force"])
    later = NOW_S + LEVELS[-1].keep_s + 3600
    record(store, 1, later)
    assert store.read("models", NOW_S, later, 1000).series["m"]["requests_per_s"][0] is None
    assert "gone" not in store.read("machines", NOW_S, later, 1000).series
    assert store.changes(0, later) == []


def test_names_are_bounded() -> None:
    store = HistoryStore(None)
    store.add(NOW_S, {f"m{n}": ModelSums(10.0, 1.0) for n in range(MAX_SERIES + 5)}, {})
    assert len(store.read("models", NOW_S - 10, NOW_S + 10, 10).series) == MAX_SERIES


def test_a_file_is_read_again_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.db"
    first = HistoryStore(path)
    record(first, 3)
    first.add(NOW_S + 30, {}, {}, ["machine a joined"])
    first.close()
    assert path.stat().st_mode & 0o077 == 0
    again = HistoryStore(path)
    assert list(again.read("models", NOW_S, NOW_S + 60, 100).series) == ["m"]
    assert [change.text for change in again.changes(NOW_S, NOW_S + 60)] == ["machine a joined"]
    again.close()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="history cannot be kept"):
        HistoryStore(tmp_path / "file" / "history.db")


def test_buckets_are_whole_steps() -> None:
    assert bucket_of(10, 0, 3600, 160) == 30
    assert bucket_of(900, 0, 30 * 86400, 160) == 18 * 900
    assert bucket_of(60, 0, 30, 5) == 60
