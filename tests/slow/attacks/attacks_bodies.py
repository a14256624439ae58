"""Attacks with bodies: JSON that is deep, wide, no JSON or no text, forms, URLs, lists without end."""

# ruff: noqa: E501 - a row a line
from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from typing import Any

from benchmarks.serving.fake_engine import MODEL
from tests.slow.attacks.attacks_case import BAD, FINE, MIB, TOO_LARGE, Attack, Statuses, post
from tests.slow.attacks.attacks_engine import MIRROR
from tests.slow.attacks.attacks_site import BODY_BYTES
from tests.slow.attacks.attacks_wire import chat_body

_REST = f'"model":"{MIRROR}","messages":[{{"role":"user","content":"a"}}]'.encode()
_MEDIA_BYTES = 64 * MIB


def _with(extra: bytes) -> bytes:
    """Return a good chat request with more in it."""
    return b"{" + _REST + b"," + extra + b"}"


def _json() -> list[Attack]:
    rows: list[tuple[str, Callable[[], bytes] | bytes, Statuses]] = [
        ("empty body", b"", BAD),
        ("no JSON", b"hello", BAD),
        ("a list", b"[1,2,3]", BAD),
        ("a number", b"1e400", BAD),
        ("null", b"null", BAD),
        ("half of it", chat_body(MIRROR)[:30], BAD),
        ("two of them", chat_body(MIRROR) * 2, BAD),
        ("a comment", b"/* x */" + chat_body(MIRROR), BAD),
        ("a BOM", b"\xef\xbb\xbf" + chat_body(MIRROR), BAD),
        ("UTF-16", chat_body(MIRROR).decode().encode("utf-16"), BAD),
        ("bad UTF-8", b'{"model":"mirror","messages":[{"role":"user","content":"\xff\xfe"}]}', BAD),
        ("overlong UTF-8", b'{"model":"mirror","messages":[{"role":"user","content":"\xc0\xaf"}]}', BAD),
        ("a lone surrogate", _with(rb'"user":"\ud800"'), BAD),
        ("surrogates as bytes", _with(b'"user":"\xed\xa0\x80"'), BAD),
        ("NUL in a text", _with(rb'"user":"\u0000"'), FINE),
        ("a raw control byte", _with(b'"user":"\x01"'), BAD),
        ("depth 100,000", b"[" * 100_000 + b"]" * 100_000, BAD),
        ("depth 100,000 in a field", _with(b'"x":' + b"[" * 100_000 + b"]" * 100_000), BAD),
        ("depth 900 in a field", _with(b'"x":' + b"[" * 900 + b"]" * 900), FINE),
        ("objects 50,000 deep", _with(b'"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000), BAD),
        ("1,000,000 fields", lambda: _with(b",".join(b'"k%d":1' % i for i in range(1_000_000))), BAD),
        ("5,000,000 numbers", lambda: _with(b'"x":[' + b"1," * 5_000_000 + b"1]"), TOO_LARGE),
        ("2,000,000 lists", lambda: _with(b'"x":[' + b"[]," * 2_000_000 + b"[]]"), TOO_LARGE),
        ("2,000,000 messages", lambda: b'{"model":"mirror","messages":[' + b'{"role":"a"},' * 2_000_000 + b'{"role":"a"}]}', TOO_LARGE),
        ("100,000 messages", lambda: json.dumps({"model": MIRROR, "messages": [{"role": "user", "content": "a"}] * 100_000}).encode(), FINE),
        ("30 MB of text", lambda: chat_body(MIRROR, "word " * 6_000_000), FINE),
        ("33 MiB", lambda: chat_body(MIRROR, "a" * (33 * MIB)), frozenset({413})),
        ("a number of 1,000,000 digits", lambda: _with(b'"seed":' + b"9" * 1_000_000), BAD),
        ("a number of 1,000,000 digits that is not read", lambda: _with(b'"x":' + b"9" * 1_000_000), FINE),
        ("an exponent of 10^9", _with(b'"temperature":1e999999999'), BAD),
        ("NaN", _with(b'"temperature":NaN'), BAD),
        ("Infinity", _with(b'"top_p":Infinity'), BAD),
        ("NaN that is not read", _with(b'"x":NaN'), BAD),
        ("duplicate keys", b'{"model":"none","model":"mirror","messages":[{"role":"user","content":"a"}]}', FINE),
        ("true as a number", _with(b'"n":true'), BAD),
        ("a string as a number", _with(b'"max_tokens":"9"'), BAD),
        ("1.5 tokens", _with(b'"max_tokens":1.5'), BAD),
        ("max_tokens -1", _with(b'"max_tokens":-1'), BAD),
        ("max_tokens 10^30", _with(b'"max_tokens":1' + b"0" * 30), BAD),
        ("n 0", _with(b'"n":0'), BAD),
        ("n 10^9", _with(b'"n":1000000000'), BAD),
        ("temperature 10^308", _with(b'"temperature":1e308'), BAD),
        ("temperature -0.1", _with(b'"temperature":-0.1'), BAD),
        ("a million stops", lambda: _with(b'"stop":[' + b'"a",' * 1_000_000 + b'"a"]'), BAD),
        ("a stop of 20 MB", lambda: _with(b'"stop":"' + b"a" * 20_000_000 + b'"'), BAD),
        ("no messages", b'{"model":"mirror","messages":[]}', BAD),
        ("messages as a text", b'{"model":"mirror","messages":"hello"}', BAD),
        ("an unknown role", b'{"model":"mirror","messages":[{"role":"root","content":"a"}]}', BAD),
        ("an unknown modality", _with(b'"modalities":["smell"]'), BAD),
    ]  # fmt: skip
    return [
        post(
            "json",
            name,
            body,
            allowed,
            quick=isinstance(body, bytes),
            held_bytes=BODY_BYTES if callable(body) else 0,
            read_s=20.0,
        )
        for name, body, allowed in rows
    ]


def _encodings() -> list[Attack]:
    good = chat_body(MODEL)
    bomb = gzip.compress(b'{"a":"' + b"a" * 2_000_000 + b'"}')
    return [
        post("encodings", "gzip", gzip.compress(good), BAD, headers=("content-encoding: gzip",), quick=True),
        post("encodings", "a gzip bomb", bomb, BAD, headers=("content-encoding: gzip",), quick=True),
        post("encodings", "gzip that is none", good, FINE, headers=("content-encoding: gzip",), quick=True),
        post("encodings", "br", b"\x0b\x02\x80hello\x03", BAD, headers=("content-encoding: br",), quick=True),
        post("encodings", "text/plain", good, FINE, kind="text/plain", quick=True),
        post("encodings", "a form", b"model=fake&messages=a", BAD, kind="application/x-www-form-urlencoded", quick=True),
        post("encodings", "no content type", good, FINE, kind=None, quick=True),
        post("encodings", "XML with entities", b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>', BAD, kind="application/xml", quick=True),
        post("encodings", "charset utf-7", b"+AHsAfQ-", BAD, kind="application/json; charset=utf-7", quick=True),
    ]  # fmt: skip


def _pictures() -> list[Attack]:
    def picture(url: object, kind: str = "image_url") -> bytes:
        part = (
            {"type": kind, kind: {"url": url}}
            if kind != "input_audio"
            else {"type": kind, kind: url}
        )
        return chat_body(MODEL, [part])

    urls = [
        "file:///etc/passwd",
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost:8080/atoll/v1/status",
        "https://[::ffff:169.254.169.254]/",
        "HTTP://EXAMPLE.COM/a.png",
        "ftp://a/b",
        "gopher://127.0.0.1:6379/_FLUSHALL",
        "//evil.example/a.png",
        " http://evil.example/",
        "data:text/html;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png,notbase64",
        "data:image/png;base64,####",
        "data:image/png;base64,",
        "\\\\evil\\share\\a.png",
        "javascript:alert(1)",
        "",
    ]
    made = [post("media", f"picture {url[:44]!r}", picture(url), quick=True) for url in urls]

    def big() -> bytes:
        return picture("data:image/png;base64," + "A" * (28 * MIB))

    pixel = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    made += [
        post("media", "a picture of 21 MB", big, held_bytes=BODY_BYTES),
        post("media", "17 pictures", chat_body(MODEL, [{"type": "image_url", "image_url": {"url": pixel}}] * 17), quick=True),
        post("media", "3,000 pieces", chat_body(MODEL, [{"type": "text", "text": "a"}] * 3000), quick=True),
        post("media", "a piece without a type", chat_body(MODEL, [{"text": "a"}]), quick=True),
        post("media", "a piece of no known type", chat_body(MODEL, [{"type": "file", "file": {"file_id": "/etc/passwd"}}]), quick=True),
        post("media", "a URL as a list", picture(["http://a"]), quick=True),
        post("media", "sound from a file", picture({"data": "file:///etc/passwd", "format": "wav"}, "input_audio"), quick=True),
        post("media", "a video URL", picture("http://169.254.169.254/", "video_url"), quick=True),
        post("media", "a URL in a text piece", chat_body(MODEL, [{"type": "text", "text": "a", "image_url": {"url": "http://a/"}}]), quick=True),
    ]  # fmt: skip
    return made


def _speech() -> list[Attack]:
    def say(**fields: Any) -> dict[str, Any]:
        return {"model": "speech", "input": "Hello", "voice": "alloy"} | fields

    def draw(**fields: Any) -> dict[str, Any]:
        return {"model": "image", "prompt": "a cat"} | fields

    speech, images, vectors = "/v1/audio/speech", "/v1/images/generations", "/v1/embeddings"
    rows: list[tuple[str, str, object]] = [
        ("5,000 characters", speech, say(input="a" * 5000)),
        ("20 MB of text", speech, lambda: json.dumps(say(input="a" * 20_000_000)).encode()),
        ("speed 1e9", speech, say(speed=1e9)),
        ("a voice of 10 kB", speech, say(voice="v" * 10_000)),
        ("a voice with a path", speech, say(voice="../../etc/passwd\0", response_format="exe")),
        ("deep", speech, b'{"model":"speech","voice":' + b"[" * 100_000),
        ("a million pictures", images, draw(n=1_000_000)),
        ("a prompt of 100 kB", images, draw(prompt="a" * 100_000)),
        ("a size of 10 kB", images, draw(size="9" * 10_000)),
        ("no prompt", images, draw(prompt="")),
        ("deep", images, b'{"model":"image","prompt":' + b"[" * 100_000),
        ("3,000 texts", vectors, {"model": MODEL, "input": ["a"] * 3000}),
        ("no text", vectors, {"model": MODEL, "input": []}),
        ("negative tokens", vectors, {"model": MODEL, "input": [-1, -2]}),
        ("deep", vectors, b'{"model":"fake","input":' + b"[" * 100_000),
        ("dimensions 10^12", vectors, {"model": MODEL, "input": "a", "dimensions": 10**12}),
    ]
    return [
        post("media", f"{path.rpartition('/')[2]}: {name}", body, path=path, quick="20 MB" not in name,
             held_bytes=BODY_BYTES if "20 MB" in name else 0)
        for name, path, body in rows
    ]  # fmt: skip


def _forms() -> list[Attack]:
    path = "/v1/audio/transcriptions"
    kind = "multipart/form-data; boundary=b"

    def field(name: str, value: bytes, more: bytes = b"") -> bytes:
        return b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
            name.encode(),
            more,
            value,
        )

    file = field("file", b"RIFF" + b"\0" * 100, b'; filename="a.wav"')
    model = field("model", b"speech")
    end = b"--b--\r\n"
    rows: list[tuple[str, Callable[[], bytes] | bytes, str]] = [
        ("JSON where a form is due", b'{"model":"speech"}', "application/json"),
        ("no boundary", model + file + end, "multipart/form-data"),
        ("another boundary", model + file + end, "multipart/form-data; boundary=c"),
        ("a boundary of 10 kB", model + file + end, "multipart/form-data; boundary=" + "b" * 10_000),
        ("a boundary with a line end", model + file + end, 'multipart/form-data; boundary="b\\r\\n"'),
        ("no end", model + file, kind),
        ("no file", model + end, kind),
        ("no model", file + end, kind),
        ("two models", model + field("model", b"fake") + file + end, kind),
        ("the model as a file", field("model", b"speech", b'; filename="m"') + file + end, kind),
        ("a model of 1 MB", field("model", b"m" * MIB) + file + end, kind),
        ("10,000 parts", b"".join(field(f"f{i}", b"") for i in range(10_000)) + model + file + end, kind),
        ("a part header of 1 MB", b"--b\r\nx: " + b"y" * MIB + b"\r\n\r\nz\r\n" + model + file + end, kind),
        ("text before the first part", b"x" * 100_000 + model + file + end, kind),
        ("only dashes", b"-" * 1_000_000, kind),
        ("false boundaries", model + field("file", b"\r\n--" * 1_000_000, b'; filename="a"') + b"--", kind),
        ("65 MiB", lambda: model + field("file", b"\0" * (65 * MIB), b'; filename="a"') + end, kind),
    ]  # fmt: skip
    return [
        post(
            "forms",
            name,
            body,
            TOO_LARGE if name == "65 MiB" else BAD,
            path=path,
            kind=made_of,
            quick=isinstance(body, bytes),
            held_bytes=_MEDIA_BYTES if callable(body) else 4 * MIB,
        )
        for name, body, made_of in rows
    ]


def _services() -> list[Attack]:
    path = f"/services/{MIRROR}/x"
    return [
        post("services", "33 MiB", lambda: b"a" * (33 * MIB), frozenset({413}), path=path),
        post("services", "20 MiB", lambda: b"a" * (20 * MIB), FINE, path=path, held_bytes=BODY_BYTES),
        post("services", "a content type with a line end", b"a", BAD, path=path, kind="a/b\rx-evil: c", quick=True),
    ]  # fmt: skip


def attacks() -> list[Attack]:
    """Return the attacks with bodies."""
    return [*_json(), *_encodings(), *_pictures(), *_speech(), *_forms(), *_services()]
