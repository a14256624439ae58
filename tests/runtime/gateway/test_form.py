"""Forms: which model is asked, and everything that two readers could understand differently."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.form import read_form
from atoll.runtime.openai import ApiError

TYPE = b"multipart/form-data; boundary=bound"
FILE = ('name="file"; filename="a.wav"', b"RIFF\r\n--boun\r\n\0\xff")


def form(*parts: tuple[str, bytes], boundary: bytes = b"bound", end: bytes = b"--\r\n") -> bytes:
    made = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary, name.encode(), v)
        for name, v in parts
    )
    return made + b"--" + boundary + end


MODEL = ('name="model"', b"whisper")


def test_only_the_model_and_the_stream_are_read() -> None:
    raw = form(FILE, MODEL, ('name="stream"', b"true"), ('name="language"', b"en"))
    read = read_form(TYPE, raw)
    assert (read.request.model, read.request.stream) == ("whisper", True)
    assert read.content_type == TYPE
    assert read_form(TYPE, form(MODEL, FILE)).request.stream is False
    assert read_form(b'Multipart/Form-Data;boundary="bound"', form(MODEL, FILE)).request.model


@given(
    st.binary(max_size=300).filter(lambda data: b"--bound" not in data),
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=40),
    st.booleans(),
)
def test_a_model_is_found_and_replaced_whatever_is_around_it(
    data: bytes, model: str, first: bool
) -> None:
    parts = [('name="file"; filename="x"', data), ('name="model"', model.encode())]
    raw = form(*(parts if first else parts[::-1]))
    read = read_form(TYPE, raw)
    assert read.request.model == model
    renamed = read.with_model(raw, "another")
    assert read_form(TYPE, renamed).request.model == "another"
    assert renamed.replace(b"another", model.encode()) == raw or b"another" in raw


@pytest.mark.parametrize(
    "content_type",
    [
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=" + b"b" * 71,
        b"multipart/form-data; boundary=bound\x00",
        b"multipart/form-data; boundary=a; boundary=bound",
        b"multipart/mixed; boundary=bound",
    ],
)
def test_a_form_needs_its_boundary(content_type: bytes) -> None:
    assert refusal(form(MODEL, FILE), content_type).code == "invalid_form"


def refusal(raw: bytes, content_type: bytes = TYPE) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_form(content_type, raw)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"--bound",
        b"nothing at all",
        form(MODEL, FILE)[:-4],
        form(MODEL, FILE, end=b"\r\n"),
        form(MODEL, FILE)[:40],
        b"preamble\r\n" + form(MODEL, FILE),
        b"\r\n" + form(MODEL, FILE),
        form(MODEL, FILE) + b"epilogue",
        form(MODEL, FILE) + form(('name="model"', b"other"), FILE),
        form(MODEL, MODEL, FILE),
        form(MODEL, ('name="model"', b"other"), FILE),
        form(MODEL, FILE, ('name="stream"', b"true"), ('name="stream"', b"false")),
        form(('name="model"; filename="x"', b"whisper"), FILE),
        form(("name=\"model\"; filename*=UTF-8''x", b"whisper"), FILE),
        form(("name=model", b"whisper"), FILE),
        form(('name="a"; name="model"', b"whisper"), FILE),
        form(('name="mod\\"el"', b"whisper"), MODEL, FILE),
        form(("", b"x"), MODEL, FILE),
        form(MODEL, FILE, *[(f'name="f{i}"', b"x") for i in range(5000)]),
        form(MODEL, ('name="file"; filename="x"', b"\r\n--boundX" * 65)),
        form(MODEL, FILE, (f'name="{"n" * 100_000}"', b"x")),
        form(MODEL, FILE, ('name="x"\r\n' + "a: b\r\n" * 50 + "c: d", b"x")),
        form(MODEL, FILE, ('name="x"\r\nlong: ' + "a" * 5000, b"x")),
        form(MODEL, FILE, ('name="x"\r\nContent-Disposition: form-data; name="model"', b"x")),
        form(MODEL, FILE, ('name="x"\r\n folded: y', b"x")),
    ],
)
def test_what_is_broken_or_means_two_things_is_refused(raw: bytes) -> None:
    assert refusal(raw).code == "invalid_form"


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([], "file"),
        ([FILE], "model"),
        ([MODEL], "file"),
        ([MODEL, ('name="file"', b"no file")], "file"),
        ([('name="model"', b""), FILE], "model"),
        ([('name="model"', b"x" * 600), FILE], "model"),
        ([('name="model"', b"\xff\xfe"), FILE], "model"),
        ([('name="model"', b"a\r\nb"), FILE], "model"),
        ([MODEL, FILE, ('name="stream"', b"maybe")], "stream"),
        ([MODEL, FILE, ('name="stream"', b"true" * 100)], "stream"),
    ],
)
def test_fields_are_named_that_are_wrong(parts: list[tuple[str, bytes]], param: str) -> None:
    assert refusal(form(*parts)).param == param


@given(st.data())
def test_no_bytes_break_it(data: st.DataObject) -> None:
    raw = bytearray(form(MODEL, FILE, ('name="stream"', b"false")))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    with contextlib.suppress(ApiError):
        # Anything else that is raised fails the test.
        read = read_form(TYPE, bytes(raw))
        start, end = read.model_at
        assert raw[start:end].decode() == read.request.model
