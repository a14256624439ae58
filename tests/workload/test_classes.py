"""Names of request classes, and sizes and promises that go with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.core.errors import InputError
from atoll.workload.classes import (
    INPUTS,
    OUTPUTS,
    ImageOutput,
    Images,
    RequestClass,
    Video,
    parse_class_name,
)

blanks = st.sampled_from(["", " "])
labels = st.from_regex(r"[A-Za-z0-9._-][A-Za-z0-9 ._-]{0,38}[A-Za-z0-9._-]", fullmatch=True)


@given(
    st.lists(st.sampled_from(INPUTS), min_size=1, max_size=4),
    st.lists(st.sampled_from(OUTPUTS), max_size=3),
    st.none() | labels,
    blanks,
)
def test_names_say_what_requests_bring_and_want(
    brings: list[str], wants: list[str], label: str | None, blank: str
) -> None:
    plus = f"{blank}+{blank}"
    name = plus.join(brings) + (f"{blank}->{blank}{plus.join(wants)}" if wants else "")
    name += f" ({label})" if label else ""
    found_in, found_out = parse_class_name(name)
    assert set(found_in) == {*brings, "text"}
    # Text is written where nothing else is wanted, and beside speech.
    spoken = {"text"} if "image" not in wants or "text" in wants else set()
    assert set(found_out) == {*wants, *spoken}
    assert list(found_in) == [m for m in INPUTS if m in found_in]
    assert list(found_out) == [m for m in OUTPUTS if m in found_out]


@given(st.text(max_size=130))
def test_any_text_is_a_name_or_an_input_error(name: str) -> None:
    refused: InputError | None = None
    try:
        brings, wants = parse_class_name(name)
    except InputError as error:
        refused = error
    else:
        assert "text" in brings
        assert wants
    assert refused is None or refused.hint


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "Text",
        "texts",
        " text",
        "text ",
        "+",
        "text+",
        "+text",
        "text -> ",
        "-> audio",
        "text -> video",
        "text => audio",
        "text -> audio -> image",
        "image+text ()",
        "image+text (a) (b)",
        "image+text (a)b",
        "text\n",
        "a" + " " * 100_000 + "!",
        "text+" * 40_000 + "text",
    ],
    ids=lambda name: repr(name[:20]),
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_class_name(name)
    assert caught.value.hint is not None
    assert len(caught.value.message) < 200


def test_the_side_of_the_arrow_matters() -> None:
    assert parse_class_name("video")[0] == ("text", "video")
    with pytest.raises(InputError, match="nothing that requests want"):
        parse_class_name("text -> video")
    with pytest.raises(InputError, match="nothing that requests bring"):
        parse_class_name("smell -> text")


# Classes


def klass(name: str, **fields: object) -> RequestClass:
    return RequestClass.model_validate({"name": name, "share": 1.0, **fields})


def test_every_field() -> None:
    full = klass(
        "image+video+audio -> audio+image (all)",
        share=0.25,
        input_tokens=10,
        output_tokens=20,
        input_cv=0.5,
        output_cv=1.5,
        images=Images(count=0.5, width_px=100, height_px=200),
        video=Video(frames=8),
        audio_s=3.0,
        speech_s=4.0,
        image_output=ImageOutput(steps=3, guided=True),
        ttft_s=1.0,
        tpot_s=0.1,
        ahead_s=0.0,
        image_s=9.0,
    )
    assert RequestClass.model_validate_json(full.model_dump_json()) == full
    assert hash(full) == hash(RequestClass.model_validate_json(full.model_dump_json()))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("text", {"share": 0.0}),
        ("text", {"share": 1.01}),
        ("text", {"share": float("nan")}),
        ("text", {"input_tokens": 0}),
        ("text", {"input_tokens": 1e8}),
        ("text", {"output_tokens": float("inf")}),
        ("text", {"input_cv": -0.1}),
        ("text", {"images": Images()}),
        ("text", {"speech_s": 1.0}),
        ("text", {"image_output": ImageOutput()}),
        ("text", {"ahead_s": 1.0}),
        ("text", {"image_s": 1.0}),
        ("text", {"ttft_s": 0.0}),
        ("text", {"unknown": 1}),
        ("image+text", {}),
        ("video", {"images": Images()}),
        ("audio", {"audio_s": 0.0}),
        ("text -> audio", {}),
        ("text -> audio", {"speech_s": 10.0, "ahead_s": 10.0}),
        ("text -> audio", {"speech_s": 10.0, "ahead_s": -1.0}),
        ("text -> image", {}),
        ("text -> image", {"image_output": {"steps": 0}}),
        ("text -> image", {"image_output": {"width_px": 100_000}}),
        ("nonsense", {}),
        ("text" * 31, {}),
    ],
)
def test_classes_that_contradict_themselves(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        klass(name, **fields)
    with pytest.raises(InputError):
        RequestClass.parse({"name": name, "share": 1.0, **fields})
