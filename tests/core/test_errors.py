from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import (
    AtollError,
    InfeasibleError,
    InputError,
    InternalError,
    MissingDependencyError,
    UnknownNameError,
    UsageError,
    shorten,
)


def test_str_is_one_line_with_field_and_fix() -> None:
    error = AtollError("too\n  slow", hint="buy\nmore", field="models.0")
    assert str(error) == "models.0: too slow (fix: buy more)"
    assert AtollError("slow", field="models\n.0\t").field == "models .0"


def test_a_path_is_shown_on_one_line_and_kept_as_it_is() -> None:
    error = InputError("bad", path="two\nlines.yaml", line=3, field="a\nb")
    assert str(error) == "two lines.yaml:3: a b: bad"
    assert error.path == "two\nlines.yaml"
    long = InputError("bad", path="p" * 5000, field="f" * 5000)
    assert (len(long.path or ""), len(long.field or "")) == (5000, 5000)
    assert len(str(long)) < 500
    assert str(long).endswith("f: bad")


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
    outer = inner.locate(path="a.yaml", line=7, field="other")
    assert (outer.path, outer.line, outer.field, outer.hint) == ("a.yaml", 7, "slo", "better")


def test_unknown_name_suggests_without_regard_to_case() -> None:
    error = UnknownNameError("gpu", "h10", ["H100", "L4", "H200"])
    assert str(error) == "unknown gpu 'h10'; did you mean H100? known: H100, H200, L4"
    assert error.suggestions == ("H100",)


def test_unknown_name_far_from_all_lists_a_limited_number() -> None:
    error = UnknownNameError("model", "zzz", [f"m{i:02}" for i in range(30)])
    text = str(error)
    assert "did you mean" not in text
    assert text.endswith("m23 and 6 more")
    whole = str(UnknownNameError("model", "zzz", [f"m{i:02}" for i in range(24)]))
    assert whole.endswith("m23")


@pytest.mark.parametrize("name", ["x" * 5000, "m" * 100_000, "a\n" * 2000])
def test_very_long_names_are_shortened(name: str) -> None:
    error = UnknownNameError("model", name, ["m1", "m2"])
    assert error.name == name
    assert len(str(error)) < 200
    assert str(error).count("...") == 1
    assert "\n" not in str(error)


def test_very_long_known_names_are_shortened() -> None:
    text = str(UnknownNameError("model", "m" * 200, ["m" * 210, "m" * 5000]))
    assert "did you mean" in text
    assert len(text) < 400


@given(st.text(max_size=300), st.integers(10, 280))
def test_shortened_text_keeps_both_ends(text: str, most: int) -> None:
    short = shorten(text, most)
    if len(text) <= most:
        assert short == text
    else:
        assert len(short) == most
        head, _, tail = short.rpartition("...")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert tail


def test_unknown_name_with_nothing_known() -> None:
    said = "unknown region 'x'; none are known (fix: there is no region yet; make one first)"
    assert str(UnknownNameError("region", "x", [])) == said


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
