"""A check ends with an error where what must be 0 is not, and only there."""

from __future__ import annotations

import json

import pytest

from benchmarks.report import Figure
from tests.slow.verdict import conclude, percentile_ms


def test_only_what_must_be_0_and_is_not_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    fine = [
        Figure("errors", 0, 0),
        Figure("not_run", None, 0),
        Figure("told", 7),
        Figure("late_ms", 9.0, 5),
        Figure("cases", 3, 0, at_least=True),
    ]
    conclude(fine)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        conclude([*fine, Figure("lost", 2, 0)], more=1)
    assert ended.value.code == "must be 0: lost 2"
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["lost"], found["more"]) == (2, 1)


def test_percentiles_are_in_milliseconds() -> None:
    assert percentile_ms([0.1, 0.2, 0.3], 50) == 200.0
    assert percentile_ms([], 50) is None
