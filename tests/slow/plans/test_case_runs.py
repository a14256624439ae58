"""Checks of random cases count what they find, go on where they ended, and fail by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slow.plans import promise_truth
from tests.slow.plans.case_runs import list_seeds
from tests.slow.plans.promise_fleets import kind_of
from tests.slow.plans.promise_truth import Outcome


def test_faults_end_a_check_with_an_error_and_known_cases_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def fake(seed: int) -> Outcome:
        ran.append(seed)
        faults = {"bound_false": ["a", "b"]} if seed == 1 else {}
        outcome = Outcome(seed, kind_of(seed), overrun_s=float(seed), cpu_s=2.0, faults=faults)
        outcome.cut_short = seed == 2
        return outcome

    monkeypatch.setattr(promise_truth, "run_case", fake)
    monkeypatch.setattr(promise_truth, "count_family_mutants", lambda: (3, []))
    results = tmp_path / "results.jsonl"

    def check(cases: int) -> dict[str, float]:
        words = ["promise_truth", "--results", str(results), "--cases", str(cases)]
        monkeypatch.setattr("sys.argv", words)
        promise_truth.main()
        return said()

    def said() -> dict[str, float]:
        found: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    assert check(1)["bound_false"] == 0
    for _ in range(2):
        with pytest.raises(SystemExit, match="must be 0: bound_false 1"):
            check(3)
        figures = said()
        assert figures["cases"] == 3
        assert (figures["bound_false"], figures["cheaper_keeps"]) == (1, 0)
        assert (figures["deadline_overrun_s_max"], figures["cpu_s"]) == (2.0, 6.0)
        assert figures["cut_short"] == 1
    assert ran == [0, 1, 2]
    assert len(results.read_text("utf-8").splitlines()) == 3


def test_seeds_are_named_one_by_one_or_as_spans() -> None:
    assert list(list_seeds("7,100:102", 5)) == [7, 100, 101]
    assert list(list_seeds(None, 3)) == [0, 1, 2]
