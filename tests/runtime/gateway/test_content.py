"""What a request may bring besides text, and which URLs never pass."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.gateway.content import check_content
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.openai import CHAT, EMBEDDINGS, IMAGES, SPEECH, ApiError, read_request

PICTURE = "data:image/png;base64," + base64.b64encode(b"not really").decode()
LIMITS = MediaLimits(images=2, image_bytes=300, audios=2, audio_bytes=300, videos=1)


def body(*parts: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def refusal(raw: bytes, path: str = CHAT, limits: MediaLimits = LIMITS) -> ApiError | None:
    try:
        check_content(read_request(path, raw), limits, 8)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "see http://example.com"},
        image(PICTURE),
        {"type": "image_url", "image_url": PICTURE},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}, "cache": {}},
        {"type": "video_url", "video_url": {"url": PICTURE.replace("image/png", "video/mp4")}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAA="}},
        image("data:image/png;charset=utf-8;base64,AA=="),
    ],
)
def test_what_is_sent_along_passes(part: dict[str, Any]) -> None:
    assert refusal(body(part)) is None


BYPASSES = [
    "http://127.0.0.1/",
    "HTTP://127.0.0.1/",
    "hTTpS://127.0.0.1/",
    " http://127.0.0.1/",
    "\thttp://127.0.0.1/",
    "\nhttp://127.0.0.1/",
    "\u00a0http://127.0.0.1/",
    "\u200bhttp://127.0.0.1/",
    "ht\ttp://127.0.0.1/",
    "http:\\\\127.0.0.1",
    "//127.0.0.1/",
    "\uff48ttp://127.0.0.1/",
    "file:///etc/passwd",
    "FILE:/etc/passwd",
    "ftp://127.0.0.1/",
    "gopher://127.0.0.1/",
    "s3://bucket/key",
    "/etc/passwd",
    "../etc/passwd",
    "",
    "x" * 10_000,
    "http://" + "a" * 100_000,
    "data:",
    "data:image/png,http://127.0.0.1/",
    "data:image/png;base64",
    " " + PICTURE,
    "DATA" + PICTURE[4:],
    "data:text/html;base64,AAAA",
    "data:image/svg+xml;base64,AAAA",
    "data:image/SVG+XML;base64,AAAA",
    "data:application/vnd.apple.mpegurl;base64,AAAA",
    "data:audio/wav;base64,AAAA",
    "data:image/png;base64,http://127.0.0.1/",
    "data:image/png;base64,AAA",
    "data:image/png;base64,AA=A",
    "data:image/png;base64,====",
    "data:image/png;base64,AAAA\n",
    "data:image/png;base64,",
    "data:image/png;base64,\u00e9\u00e9\u00e9\u00e9",
    "data:image/png;" + "a" * 1000 + ";base64,AAAA",
]


@pytest.mark.parametrize("url", BYPASSES)
@pytest.mark.parametrize("remote", [False, True])
def test_no_other_url_passes(url: str, remote: bool) -> None:
    if remote and url == "http://127.0.0.1/":
        return
    limits = LIMITS.model_copy(update={"remote_urls": remote})
    for part in (
        image(url),
        {"type": "image_url", "image_url": url},
        # The type says something else than the field that a backend might look at.
        {"type": "text", "text": "x", "image_url": {"url": url}},
        {"type": "text", "text": "x", "video_url": url},
        {"type": "text", "text": "x", "audio_url": {"url": url + "x"}},
    ):
        error = refusal(body(part), limits=limits)
        assert error is not None
        assert error.status == 400
        assert error.code in (
            *("remote_url_refused", "invalid_url", "invalid_base64", "unsupported_media_type"),
        )


def test_escapes_and_repeated_keys_hide_nothing() -> None:
    escaped = body(image("X")).replace(b'"X"', b'"\\u0068\\u0074\\u0074\\u0070://10.0.0.1/"')
    keys = body(image("http://10.0.0.1/")).replace(b'"image_url"', b'"\\u0069mage_url"')
    twice = body(image(PICTURE)).replace(b'{"url"', b'{"url": "http://10.0.0.1/", "url"')
    last = body(image("http://10.0.0.1/")).replace(
        b'{"url"', b'{"url": "%b", "url"' % PICTURE.encode()
    )
    for raw in (escaped, keys, last):
        error = refusal(raw)
        assert error is not None
        assert error.code == "remote_url_refused"
        assert error.param is not None
        assert "data: URL" in error.message
    # The last of repeated keys is what readers of JSON take.
    assert refusal(twice) is None
    assert json.loads(twice)["messages"][0]["content"][0]["image_url"]["url"] == PICTURE


def test_remote_urls_where_they_are_wanted() -> None:
    limits = LIMITS.model_copy(update={"remote_urls": True})
    assert refusal(body(image("https://example.com/a.png?b=c")), limits=limits) is None
    assert refusal(body(image("https://example.com/a b")), limits=limits) is not None


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([image(PICTURE)] * 3, "too_many_parts"),
        ([{"type": "text", "text": "x"}] * 9, "too_many_parts"),
        ([image("data:image/png;base64," + "AAAA" * 101)], "media_too_large"),
        (
            [{"type": "input_audio", "input_audio": {"data": "AAAA" * 101, "format": "wav"}}],
            "media_too_large",
        ),
        (
            [{"type": "input_audio", "input_audio": {"data": "http://x/", "format": "wav"}}],
            "invalid_base64",
        ),
        ([{"type": "file", "file": {"file_id": "x"}}], None),
        ([{"type": "image_url"}], None),
        ([{"type": "image_url", "image_url": None}], None),
        ([{"type": "image_url", "image_url": {}}], None),
        ([{"type": "image_url", "image_url": 7}], None),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA"}}], None),
        ([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "exe"}}], None),
        ([{"image_url": {"url": "http://x/"}}], None),
        (["text"], None),
    ],
)
def test_what_is_too_much_or_shapeless_is_refused(parts: list[Any], code: str | None) -> None:
    error = refusal(body(*parts))
    assert error is not None
    assert (error.status, error.code) == (400, code)
    assert (error.param or "").startswith("messages")


def test_exactly_as_much_as_allowed() -> None:
    assert refusal(body(image("data:image/png;base64," + "AAAA" * 100))) is None
    assert refusal(body(image("data:image/png;base64," + "AAAA" * 100 + "AA=="))) is not None
    assert refusal(body(*[image(PICTURE)] * 2)) is None


def test_large_base64_is_looked_at_from_both_ends() -> None:
    limits = MediaLimits()
    size = 3 * 2**20
    for at in (0, size - 1):
        data = bytearray(b"A" * size)
        data[at] = ord("!")
        error = refusal(body(image("data:image/png;base64," + data.decode())), limits=limits)
        assert error is not None
        assert error.code == "invalid_base64"


@given(st.binary(min_size=1, max_size=200))
def test_all_base64_passes(data: bytes) -> None:
    assert refusal(body(image("data:image/png;base64," + base64.b64encode(data).decode()))) is None


@pytest.mark.parametrize(
    ("path", "data", "param"),
    [
        (SPEECH, {"model": "m", "input": "x" * 4097, "voice": "v"}, "input"),
        (SPEECH, {"model": "m", "input": "", "voice": "v"}, "input"),
        (SPEECH, {"model": "m", "input": "x"}, None),
        (SPEECH, {"model": "m", "input": "x", "voice": "v", "speed": 9}, "speed"),
        (
            SPEECH,
            {"model": "m", "input": "x", "voice": "v", "response_format": "exe"},
            "response_format",
        ),
        (IMAGES, {"model": "m", "prompt": "x", "n": 5}, "n"),
        (IMAGES, {"model": "m"}, None),
        (EMBEDDINGS, {"model": "m", "input": ["x"] * 2049}, "input"),
        (
            EMBEDDINGS,
            {
                "model": "m",
                "input": "x",
                "messages": [{"role": "user", "content": [image("http://x/")]}],
            },
            "messages[0].content[0].image_url.url",
        ),
        (
            CHAT,
            {"model": "m", "messages": [{"role": "user"}], "modalities": ["smell"]},
            "modalities[0]",
        ),
        (
            CHAT,
            {"model": "m", "messages": [{"role": "user"}], "audio": {"format": "exe"}},
            "audio.format",
        ),
    ],
)
def test_other_endpoints_have_limits_too(path: str, data: Any, param: str | None) -> None:
    error = refusal(json.dumps(data).encode(), path)
    assert error is not None
    assert (error.status, error.param) == (400, param)
