from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.core.ids import (
    NodeTypeId,
    Phase,
    RoleId,
    format_node_type,
    parse_node_type,
    parse_role,
    slug,
)

part = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
names = st.lists(part, min_size=1, max_size=3).map("/".join)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("L40S:2", ("L40S", 2)),
        ("L40S", ("L40S", 1)),
        (" A100-80:8 ", ("A100-80", 8)),
        ("RTX 3090:4", ("RTX 3090", 4)),
    ],
)
def test_node_types(text: str, expected: tuple[str, int]) -> None:
    assert parse_node_type(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":2", "L40S:", "L40S:0", "L40S:-1", "L40S:2.5", "L40S:two", "L40S:1:2", "a/b:1", "L40S:٣"],
)
def test_bad_node_types(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_node_type(text, field="pool.0")
    assert caught.value.field == "pool.0"
    assert "L40S:2" in str(caught.value)


@pytest.mark.parametrize("text", ["a" * 5000, "a" * 5000 + ":1", "L40S:" + "1" * 5000])
def test_very_long_node_types_are_shortened(text: str) -> None:
    with pytest.raises(InputError, match="is not a node type") as caught:
        parse_node_type(text)
    assert len(str(caught.value)) < 200


@given(part, st.integers(min_value=1, max_value=99_999))
def test_node_types_round_trip(gpu: str, gpu_count: int) -> None:
    text = format_node_type(gpu, gpu_count)
    assert parse_node_type(text) == NodeTypeId(gpu, gpu_count)
    assert str(parse_node_type(text)) == text


def test_role_of_a_model_with_slashes() -> None:
    role = parse_role("Qwen/Qwen3-32B/llm/decode")
    assert role == RoleId("Qwen/Qwen3-32B", "llm", Phase.DECODE)


@pytest.mark.parametrize("text", ["", "llm/decode", "m/llm/sleep", "m//decode", "/llm/decode"])
def test_bad_roles(text: str) -> None:
    with pytest.raises(InputError):
        parse_role(text)


@given(names, part, st.sampled_from(Phase))
def test_roles_round_trip(model: str, component: str, phase: Phase) -> None:
    role = RoleId(model, component, phase)
    assert parse_role(str(role)) == role


@given(names)
def test_valid_names_are_returned_unchanged(name: str) -> None:
    assert slug(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a b",
        "../etc/passwd",
        "a/../b",
        "/a",
        "a/",
        "a//b",
        ".hidden",
        "a\n",
        "ä",
        "x" * 201,
    ],
)
def test_names_that_are_not_safe_paths_are_refused(name: str) -> None:
    with pytest.raises(InputError):
        slug(name)
