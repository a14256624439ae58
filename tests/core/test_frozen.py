from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen, without_blanks


class Leaf(Frozen):
    name: str
    weight: float = 1.0


class Tree(Frozen):
    title: str
    leaves: tuple[Leaf, ...] = ()
    notes: dict[str, int] = Field(default_factory=dict)


leaves = st.builds(
    Leaf, name=st.text(max_size=8), weight=st.floats(allow_nan=False, allow_infinity=False)
)
trees = st.builds(
    Tree,
    title=st.text(max_size=8),
    leaves=st.lists(leaves, max_size=3).map(tuple),
    notes=st.dictionaries(st.text(max_size=4), st.integers(-(2**53), 2**53), max_size=3),
)


@given(trees)
def test_json_round_trip_keeps_value_and_hash(tree: Tree) -> None:
    for indent in (None, 2):
        again = Tree.from_json(tree.to_json(indent=indent))
        assert again == tree
        assert again.content_hash() == tree.content_hash()


def test_hash_ignores_the_order_of_mappings() -> None:
    one = Tree(title="t", notes={"a": 1, "b": 2})
    other = Tree(title="t", notes={"b": 2, "a": 1})
    assert one.content_hash() == other.content_hash()


@given(trees, trees)
def test_different_values_have_different_hashes(one: Tree, other: Tree) -> None:
    if json.loads(one.to_json()) != json.loads(other.to_json()):
        assert one.content_hash() != other.content_hash()


def test_hash_is_the_same_in_another_process() -> None:
    script = (
        "from atoll.core.frozen import Frozen\n"
        "class Leaf(Frozen):\n    name: str\n    weight: float = 1.0\n"
        "print(Leaf(name='ü').content_hash())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == Leaf(name="ü").content_hash()


def test_values_cannot_be_changed() -> None:
    leaf = Leaf(name="a")
    with pytest.raises(ValidationError):
        leaf.name = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"title": "t", "colour": 1}, "tree.yaml: colour: there is no such field"),
        ({}, "tree.yaml: title: this field is required"),
        ({"title": "t", "leaves": [{"weight": 1}]}, "tree.yaml: leaves.0.name: this field is"),
        ({"title": "t", "leaves": [{"name": "n", "weight": float("inf")}]}, "leaves.0.weight: "),
        ([], "tree.yaml: a mapping is needed"),
    ],
)
def test_parse_names_the_field(data: object, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        Tree.parse(data, path="tree.yaml")
    assert expected in str(caught.value)


def test_parse_counts_further_problems() -> None:
    with pytest.raises(InputError, match="and 2 more problems"):
        Tree.parse({"x": 1, "y": 2})


def test_malformed_json_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"^plan\.json: not valid JSON"):
        Tree.from_json('{"title": ', path="plan.json")


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(InputError) as caught:
        Tree.parse({"title": ["x" * 1000]})
    assert len(str(caught.value)) < 200


def test_sets_are_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="stable order"):

        class Bag(Frozen):
            items: dict[str, frozenset[int] | None]


def test_errors_do_not_show_secrets() -> None:
    class Hidden(Frozen):
        admin_token: str
        inner: str

    with pytest.raises(InputError) as caught:
        Hidden.parse({"admin_token": 12345678, "inner": "x"})
    assert "12345678" not in str(caught.value)
    with pytest.raises(InputError) as caught:
        Hidden.parse({"admin_token": "t", "inner": {"api_key": "sk-hidden"}})
    assert "sk-hidden" not in str(caught.value)


def test_blanks_that_came_later_are_left_out() -> None:
    class Later(Frozen):
        name: str
        count: int = 0
        notes: tuple[str, ...] = ()
        limit: float | None = None
        kept: tuple[str, ...] = ()
        _without_blanks = without_blanks("count", "notes", "limit")

    assert Later(name="").model_dump() == {"name": "", "count": 0, "kept": ()}
    full = Later(name="a", notes=("b",), limit=0.0)
    assert full.model_dump(mode="json") == {
        "name": "a",
        "count": 0,
        "notes": ["b"],
        "limit": 0.0,
        "kept": [],
    }
    assert Later.from_json(full.to_json()) == full
    assert Later.from_json(Later(name="").to_json()) == Later(name="")
