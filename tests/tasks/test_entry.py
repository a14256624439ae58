from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.tasks.entry import entry_form, has_same_inputs
from atoll.tasks.forms import snapshot
from atoll.tasks.recording import Recording
from atoll.tasks.task import UnitTask

_BOOK = Recording(None, None)
_UNIT = UnitTask("unit")
_PENDING = [_BOOK.call(_UNIT, {"n": n}, False) for n in range(2)]
_PARTS = [*_PENDING, _PENDING[0]["text"], _PENDING[1]["text"], _PENDING[0]["other"]]
# Indices stand for placeholders, whose truth and equality hypothesis would look at.
_LEAVES = st.sampled_from([0, 1, True, False, 1.0, 0.0, -0.0, "a", "", b"a", None])
_VALUES = st.recursive(
    _LEAVES | st.builds(lambda n: ("part", n), st.integers(0, len(_PARTS) - 1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)
_INPUTS = st.dictionaries(st.sampled_from(["x", "y"]), _VALUES, max_size=2)


def _build(value: Any) -> Any:
    if isinstance(value, tuple):
        return _PARTS[value[1]]
    if isinstance(value, list):
        return [_build(item) for item in value]
    if isinstance(value, dict):
        return {key: _build(item) for key, item in value.items()}
    return value


@given(_INPUTS, _INPUTS, st.booleans())
def test_what_is_quickly_seen_to_be_the_same_is_the_same(
    one: dict[str, Any], other: dict[str, Any], again: bool
) -> None:
    before = {name: snapshot(_build(value), _BOOK, []) for name, value in one.items()}
    inputs = {name: _build(value) for name, value in (one if again else other).items()}
    now = {name: snapshot(value, _BOOK, []) for name, value in inputs.items()}
    if has_same_inputs(before, inputs):
        assert entry_form(_UNIT, before, "") == entry_form(_UNIT, now, "")


def test_lists_are_compared_item_by_item() -> None:
    for items, other in (
        ([1], [True]),
        ([0.0], [-0.0]),
        (["a"], ["b"]),
        ([_PARTS[2]], [_PARTS[3]]),
    ):
        before = {"x": snapshot(items, _BOOK, [])}
        assert has_same_inputs(before, {"x": items})
        assert not has_same_inputs(before, {"x": other})
        assert not has_same_inputs(before, {"x": [*items, *items]})
    # What can change is not told by being the same object.
    inner: list[int] = []
    assert not has_same_inputs({"x": [inner]}, {"x": [inner]})


def test_parts_are_the_same_objects_whatever_their_order() -> None:
    whole = _BOOK.call(_UNIT, {"n": 9}, False)
    keys = ["a", 0, "b", 1, "a", 1, 0, "b"]
    parts = [whole[key] for key in keys]
    assert [part._path for part in parts] == [(key,) for key in keys]
    assert len({id(part) for part in parts}) == 4
    assert whole["a"]["b"]._path == ("a", "b")
    assert whole["a"]["b"] is whole["a"]["b"]
