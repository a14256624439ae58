"""The summary of all checks says how many tests there were, and why some were skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check import REAL, Check, list_tests, run_tests

CASES = """
import pytest

def test_that_passes():
    pass

@pytest.mark.parametrize("number", range(2))
def test_that_cannot_run(number):
    pytest.skip("there is\\n no such engine")
"""


def test_skips_are_counted_by_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_cases.py"
    path.write_text(CASES)
    outcome = run_tests(Check("some", ("pytest", "-q", "-p", "no:cacheprovider", str(path))))
    assert "1 passed, 2 skipped" in capfd.readouterr().out
    assert (outcome.passed, outcome.tests) == (True, 3)
    assert outcome.skipped == {"there is no such engine": 2}
    path.write_text("def test_that_fails():\n    assert False\n")
    assert not run_tests(outcome.check).passed


def test_real_engines_run_once_and_only_in_full() -> None:
    assert REAL not in [word for check in list_tests(full=False) for word in check.command]
    most, real = list_tests(full=True)
    assert most.command[-2:] == ("--ignore", REAL)
    assert real.command[-1] == REAL
