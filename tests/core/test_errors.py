from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from atoll.core.errors import (
    AtollError,
    InfeasibleError,
    InputError,
    InternalError,
    MissingDependencyError,
    UnknownNameError,
    UsageError,
)


def test_str_is_one_line_with_field_and_fix() -> None:
    error = AtollError("too\n  slow", hint="buy\nmore", field="models.0")
    assert str(error) == "models.0: too slow (fix: buy more)"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, "bad"),
        ({"field": "slo"}, "slo: bad"),
        ({"path": Path("a.yaml")}, "a.yaml: bad"),
        ({"path": "a.yaml", "line": 3}, "a.yaml:3: bad"),
        ({"path": "a.yaml", "line": 3, "field": "slo"}, "a.yaml:3: slo: bad"),
        ({"line": 3, "field": "slo"}, "line 3: slo: bad"),
    ],
)
def test_input_error_says_where(where: dict[str, object], expected: str) -> None:
    assert str(InputError("bad", **where)) == expected  # type: ignore[arg-type]


def test_located_fills_only_what_is_unknown() -> None:
    inner = InputError("bad", field="slo", hint="better")
    outer = inner.located(path="a.yaml", line=7, field="other")
    assert (outer.path, outer.line, outer.field, outer.hint) == ("a.yaml", 7, "slo", "better")


def test_unknown_name_suggests_without_regard_to_case() -> None:
    error = UnknownNameError("gpu", "h10", ["H100", "L4", "H200"])
    assert str(error) == "unknown gpu 'h10'; did you mean H100? known: H100, H200, L4"
    assert error.suggestions == ("H100",)


def test_unknown_name_far_from_all_lists_a_limited_number() -> None:
    error = UnknownNameError("model", "zzz", [f"m{i:02}" for i in range(20)])
    text = str(error)
    assert "did you mean" not in text
    assert text.endswith("m11 and 8 more")


def test_unknown_name_with_nothing_known() -> None:
    assert str(UnknownNameError("region", "x", [])) == "unknown region 'x'; none are known"


def test_missing_dependency_names_the_extra() -> None:
    error = MissingDependencyError("scipy", "calibrate", needed_for="fitting")
    assert str(error) == (
        "fitting needs the package 'scipy', which is not installed"
        " (fix: pip install 'atoll[calibrate]')"
    )


ERRORS = [
    AtollError("a", hint="h", field="f"),
    UsageError("a"),
    InputError("a", path="p", line=1, field="f", hint="h"),
    UnknownNameError("gpu", "x", ["y"], field="f"),
    InfeasibleError("a", hint="h"),
    MissingDependencyError("scipy", "calibrate"),
    InternalError("a"),
]


def test_exit_codes_are_distinct_and_non_zero() -> None:
    codes = [error.exit_code for error in ERRORS]
    assert codes == [1, 2, 3, 4, 5, 6, 70]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_cross_process_boundaries_whole(error: AtollError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
