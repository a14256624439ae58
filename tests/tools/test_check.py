"""The summary of all checks: what failed, how many tests ran, what they cost, why some were skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import check
from tools.check import REAL, ROOT, Check, list_costs, list_tests, run_all, run_tests

CASES = """
import pytest

@pytest.fixture(autouse=True)
def cost(record_property):
    record_property("before_cpu_s", 2.0)
    record_property("cpu_s", 0.5)

def test_that_passes():
    pass

@pytest.mark.parametrize("number", range(2))
def test_that_cannot_run(number):
    pytest.skip("there is\\n no such engine")
"""


def test_what_tests_say_is_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither plugins nor their settings: loading them takes longer than all else here.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(check, "KEPT", tmp_path)
    path, plain = tmp_path / "test_cases.py", ("-c", os.devnull, "-p", "no:cacheprovider")
    path.write_text(CASES)
    outcome = run_tests(Check("some", ("pytest", "-q", *plain, str(path))))
    assert "1 passed, 2 skipped" in outcome.said
    assert (outcome.passed, outcome.tests) == (True, 3)
    assert outcome.skipped == {"there is no such engine": 2}
    assert outcome.cpu_s > 0.0
    costs = "\n".join(list_costs([outcome]))
    assert "1.5       3  " in costs
    assert "6.0          imports and collecting, in 1 processes" in costs
    assert costs.count("0.50  ") == 3
    path.write_text("def test_that_fails():\n    assert False\n")
    assert not run_tests(outcome.check).passed


def test_checks_run_side_by_side_tell_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    works = Check("works", ("python", "-c", "print('unheard')"))
    fails = Check("fails", ("python", "-c", "raise SystemExit('heard')"))
    assert [outcome.passed for outcome in run_all([works, fails, works])] == [True, False, True]
    said = capsys.readouterr().out
    assert "heard\n" in said.replace("unheard", "")
    assert "unheard" not in said
    assert said.count("  ok      works") == 2


@pytest.mark.parametrize("full", [False, True])
def test_every_test_is_in_one_part(full: bool) -> None:
    named = [word for check in list_tests(full=full) for word in check.command]
    # Real engines run by themselves.
    named += [REAL] if full else []
    for file in (ROOT / "tests").rglob("test_*.py"):
        path = file.relative_to(ROOT)
        assert sum(named.count(str(each)) for each in (path, *path.parents)) == 1, file


def test_slow_tests_run_only_in_full() -> None:
    assert all("not slow and not aic" in check.command for check in list_tests(full=False))
    assert not any("-m" in check.command for check in list_tests(full=True))
