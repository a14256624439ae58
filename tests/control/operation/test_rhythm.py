"""The rates of past weeks: bounded, kept over a restart, and no rhythm made up where nobody looked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.operation.rhythm import STEP_S, RateHistory, RhythmFile, ServiceRates

DAY = 144


def usual(step: int) -> float:
    return 10.0 + 5.0 * math.sin(2.0 * math.pi * step / DAY)


def watch(history: RateHistory, steps: range, *, every: int = 1) -> None:
    for step in steps:
        for look in range(every):
            history.note((step + look / every) * STEP_S, {"chat": usual(step)})


def test_less_than_a_day_is_no_rhythm() -> None:
    history = RateHistory()
    watch(history, range(DAY))
    assert history.profile("chat") == ((), 86_400.0)
    history.note(DAY * STEP_S, {"chat": 1.0})
    assert len(history.profile("chat")[0]) == DAY
    assert history.profile("other") == ((), 86_400.0)


def test_a_day_and_then_a_week() -> None:
    history = RateHistory()
    watch(history, range(2 * DAY + 1), every=3)
    profile, period_s = history.profile("chat")
    assert period_s == 86_400.0
    assert profile[36] == pytest.approx(15.0, rel=0.02)
    assert profile[108] == pytest.approx(5.0, rel=0.02)
    watch(history, range(2 * DAY + 1, 9 * DAY))
    assert history.profile("chat")[1] == 7 * 86_400.0


def test_gaps_are_as_usual() -> None:
    whole, holes = RateHistory(), RateHistory()
    watch(whole, range(4 * DAY + 1))
    watch(holes, range(DAY + 50))
    watch(holes, range(2 * DAY + 20, 4 * DAY + 1))
    assert holes.profile("chat")[0] == pytest.approx(whole.profile("chat")[0], rel=1e-6)
    # Two looks with a day in between are no day.
    two = RateHistory()
    for day in range(3):
        two.note(day * 86_400.0, {"chat": 1.0})
    assert two.profile("chat")[0] == ()


def test_kept_over_a_restart_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "state" / "rhythm.json"
    history = RateHistory(path)
    watch(history, range(0, 30 * DAY, 18))
    again = RateHistory(path)
    again.note(30 * 86_400.0, {"chat": usual(0)})
    history.note(30 * 86_400.0, {"chat": usual(0)})
    profile, period_s = again.profile("chat")
    assert period_s == 7 * 86_400.0
    assert profile == pytest.approx(history.profile("chat")[0], rel=1e-4)
    assert again.knows("chat", 30 * 86_400.0)
    assert not again.knows("other", 30 * 86_400.0)


def test_file_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "rhythm.json"
    rates = tuple(usual(step) for step in range(21 * DAY))
    path.write_text(RhythmFile(services={"chat": ServiceRates(first=0, rates=rates)}).to_json())
    history = RateHistory(path)
    assert history.problem is None
    for step in range(21 * DAY, 21 * DAY + 5):
        history.note(step * STEP_S, {"chat": 12.345678901})
    kept = RhythmFile.from_json(path.read_text()).services["chat"]
    assert (kept.first, len(kept.rates)) == (5, 21 * DAY)
    assert path.stat().st_size < 25_000


def test_one_look_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rhythm.json"
    for step in range(DAY + 1):
        RateHistory(path).note(step * STEP_S, {"chat": usual(step)})
    assert len(RateHistory(path).profile("chat")[0]) == DAY


def test_what_is_not_to_be_kept_is_read_only(tmp_path: Path) -> None:
    path = tmp_path / "rhythm.json"
    watch(RateHistory(path), range(DAY + 1))
    before = path.read_text()
    reading = RateHistory(path, keep=False)
    assert reading.profile("chat")[0] != ()
    reading.note(10 * 86_400.0, {"chat": 3.0})
    assert path.read_text() == before


@pytest.mark.parametrize(
    "text", ["", "{", '{"services": 1}', "\0" * 100, '{"services": {"a": {}}}']
)
def test_file_that_is_none_costs_the_rhythm_only(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rhythm.json"
    path.write_text(text)
    history = RateHistory(path)
    assert "\n" not in (history.problem or "\n")
    history.note(0.0, {"chat": 1.0})
    # Written anew, it can be read.
    assert (history.problem, RateHistory(path).problem) == (None, None)


@given(st.lists(st.tuples(st.floats(0, 1e10), st.floats(0, 1e6)), max_size=40))
def test_clocks_that_jump_do_no_harm(looks: list[tuple[float, float]]) -> None:
    history = RateHistory()
    for now_s, rate in looks:
        history.note(now_s, {"chat": rate})
        profile, _ = history.profile("chat")
        assert profile == ()  # forty looks are no day
