"""Attacks on where a request ends: two lengths, odd chunks, lines that end otherwise, other protocols.

Whatever one reader takes for the end of a request and another for its middle lets a client speak in the name
of others. Each of these is refused, or the connection closed; none may be answered twice.
"""

# ruff: noqa: E501 - a row a line
from __future__ import annotations

from benchmarks.serving.fake_engine import MODEL
from tests.slow.attacks.attacks_case import BAD, FINE, KEYLESS, LATE, TOO_LARGE, Attack, raw
from tests.slow.attacks.attacks_site import DEADLINES, AttackedSite
from tests.slow.attacks.attacks_wire import Reply, chat_body, chunk, head_of

_BODY = chat_body(MODEL)
_HEAD = head_of() + b"content-type: application/json\r\n"
_INNER = b"GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_END = b"0\r\n\r\n"
_LARGE = frozenset({431})
_WHOLE = chunk(_BODY) + _END


def _sized(body: bytes = _BODY) -> bytes:
    return b"content-length: %d\r\n" % len(body)


def _smuggled(site: AttackedSite, reply: Reply) -> str:
    del site
    return "the inner request was answered" if b"/smuggled" in reply.raw else ""


def _lengths() -> list[Attack]:
    rows: list[tuple[str, bytes]] = [
        ("CL.TE", _HEAD + _sized() + _CHUNKED + b"\r\n" + _END + _INNER),
        ("TE.CL", _HEAD + _CHUNKED + b"content-length: 4\r\n\r\n" + chunk(_INNER) + _END),
        ("TE twice", _HEAD + _CHUNKED + b"transfer-encoding: x\r\n\r\n" + _WHOLE + _INNER),
        ("TE identity", _HEAD + b"transfer-encoding: identity\r\n" + _sized() + b"\r\n" + _BODY),
        ("TE gzip, chunked", _HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n" + _WHOLE),
        ("TE xchunked", _HEAD + b"transfer-encoding: xchunked\r\n\r\n" + _WHOLE + _INNER),
        ("TE with a tab", _HEAD + b"transfer-encoding:\tchunked\r\n" + _sized() + b"\r\n" + _WHOLE),
        ("TE quoted", _HEAD + b'transfer-encoding: "chunked"\r\n' + _sized() + b"\r\n" + _WHOLE),
        ("TE folded", _HEAD + b"transfer-encoding:\r\n chunked\r\n" + _sized() + b"\r\n" + _WHOLE),
        ("TE with a vertical tab", _HEAD + b"transfer-encoding: \x0bchunked\r\n" + _sized() + b"\r\n" + _WHOLE),
        ("space before the colon", _HEAD + b"transfer-encoding : chunked\r\n" + _sized() + b"\r\n" + _WHOLE),
        ("two lengths", _HEAD + _sized() + b"content-length: 5\r\n\r\n" + _BODY + _INNER),
        ("two equal lengths", _HEAD + _sized() + _sized() + b"\r\n" + _BODY + _INNER),
        ("a list of lengths", _HEAD + b"content-length: %d, 4\r\n\r\n" % len(_BODY) + _BODY),
        ("length with plus", _HEAD + b"content-length: +%d\r\n\r\n" % len(_BODY) + _BODY),
        ("negative length", _HEAD + b"content-length: -1\r\n\r\n" + _BODY),
        ("length in hex", _HEAD + b"content-length: 0x10\r\n\r\n" + _BODY),
        ("length with a space inside", _HEAD + b"content-length: 1 0\r\n\r\n" + _BODY),
        ("length of 20 digits", _HEAD + b"content-length: 99999999999999999999\r\n\r\n" + _BODY),
        ("length beyond the limit", _HEAD + b"content-length: 9999999999\r\n\r\n" + _BODY),
        ("no digits in the length", _HEAD + b"content-length: \r\n\r\n" + _BODY),
        ("length with an underscore", _HEAD + b"content-length: 1_0\r\n\r\n" + _BODY),
    ]  # fmt: skip
    return [
        raw("smuggling", name, sent, TOO_LARGE if "limit" in name else BAD, check=_smuggled)
        for name, sent in rows
    ]


def _chunks() -> list[Attack]:
    head = _HEAD + _CHUNKED + b"\r\n"
    rows: list[tuple[str, bytes]] = [
        ("chunk size overflow", head + b"fffffffffffffffff\r\n" + _BODY),
        ("negative chunk size", head + b"-5\r\n" + _BODY + b"\r\n" + _END),
        ("chunk size 0x5", head + b"0x5\r\n" + _BODY),
        ("chunk size with a space", head + b" 5\r\nhello\r\n" + _END),
        ("empty chunk size", head + b"\r\n" + _WHOLE),
        ("chunk longer than said", head + b"3\r\n" + _BODY + b"\r\n" + _END + _INNER),
        ("bare LF after a chunk size", head + b"%x\n" % len(_BODY) + _BODY + b"\n0\n\n" + _INNER),
        ("bare CR after a chunk size", head + b"%x\r" % len(_BODY) + _BODY + b"\r\n" + _END),
        ("LF in a chunk extension", head + b"%x;a\nb\r\n" % len(_BODY) + _BODY + b"\r\n" + _END),
        ("NUL in a chunk extension", head + b"%x;\0\r\n" % len(_BODY) + _BODY + b"\r\n" + _END),
    ]
    made = [raw("chunks", name, sent, BAD, check=_smuggled) for name, sent in rows]
    # Whatever its length, it is waited for as long as for any body.
    made.append(
        raw("chunks", "chunk size of 2^64 - 1", head + b"ffffffffffffffff\r\n" + _BODY, LATE,
            check=_smuggled, read_s=DEADLINES["body_s"] + 3.0, quick=False)
    )  # fmt: skip
    made.append(raw("chunks", "chunk extensions", head + chunk(_BODY, b";a=b;c") + _END, FINE))
    # Nothing of it is held, but what comes is bounded, too.
    long = [head, b"5;", *([b"e" * 250_000] * 160), b"\r\nhello\r\n" + _END]
    # Who still sends when it is answered may find the connection closed.
    made.append(raw("chunks", "extension of 40 MB", long, _LARGE, may_close=True, quick=False))
    return made


def _lines() -> list[Attack]:
    get = b"GET /v1/models HTTP/1.1\r\n"
    rows: list[tuple[str, bytes]] = [
        ("bare LF everywhere", (_HEAD + _sized() + b"\r\n").replace(b"\r\n", b"\n") + _BODY),
        ("bare CR in a value", get + b"host: a\r\nx: a\rtransfer-encoding: chunked\r\n\r\n"),
        ("obs-fold", get + b"host: a\r\nx: a\r\n transfer-encoding: chunked\r\n\r\n"),
        ("NUL in a value", get + b"host: a\r\nx: a\0b\r\n\r\n"),
        ("NUL in a name", get + b"host: a\r\nx\0y: a\r\n\r\n"),
        ("space in a name", get + b"host: a\r\nx y: a\r\n\r\n"),
        ("header without a name", get + b"host: a\r\n: a\r\n\r\n"),
        ("header without a colon", get + b"host: a\r\nfoo\r\n\r\n"),
        ("space before the first header", get + b" host: a\r\n\r\n"),
        ("no host", get + b"\r\n"),
        ("two hosts", get + b"host: a\r\nhost: b\r\n\r\n"),
        ("a host with a space", get + b"host: a b\r\n\r\n"),
        ("HTTP/0.9", b"GET /v1/models\r\n\r\n"),
        ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 64),
        ("HTTP/1.2", b"GET /v1/models HTTP/1.2\r\nhost: a\r\n\r\n"),
        ("HTTP/9.9", b"GET /v1/models HTTP/9.9\r\nhost: a\r\n\r\n"),
        ("a method in small letters", b"get /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"),
        ("tab in the first line", b"GET\t/v1/models\tHTTP/1.1\r\nhost: a\r\n\r\n"),
        ("TLS on a plain port", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200),
        ("random bytes", bytes((i * 197 + 31) % 256 for i in range(5000))),
        ("a first line of 100 kB", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"),
        ("a header of 100 kB", get + b"host: a\r\nx: " + b"a" * 100_000 + b"\r\n\r\n"),
        ("5,000 headers", get + b"host: a\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(5000)) + b"\r\n"),
        ("one header 5,000 times", get + b"host: a\r\n" + b"x: y\r\n" * 5000 + b"\r\n"),
    ]  # fmt: skip
    large = (
        "a first line of 100 kB",
        "a header of 100 kB",
        "5,000 headers",
        "one header 5,000 times",
    )
    made = [raw("lines", name, sent, _LARGE if name in large else BAD) for name, sent in rows]
    # Readers may take several spaces for one.
    spaced = b"GET  /v1/models  HTTP/1.1\r\nhost: a\r\n\r\n"
    made.append(raw("lines", "two spaces in the first line", spaced, FINE))
    made.append(
        raw("lines", "empty lines before a request", b"\r\n" * 3 + get + b"host: a\r\n\r\n", FINE)
    )
    return made


def _trailers() -> list[Attack]:
    head = head_of("POST", "/v1/chat/completions", "content-type: application/json") + _CHUNKED
    body = chunk(_BODY) + b"0\r\n"

    def with_key(site: AttackedSite, reply: Reply) -> str:
        del site
        return "" if b"chatcmpl" not in reply.raw else "a trailer passed for a header"

    rows: list[tuple[str, list[bytes], frozenset[int], str]] = [
        ("authorization", [b"authorization: Bearer KEY\r\n"], KEYLESS, "keyed"),
        ("content-length", [b"content-length: 0\r\n"], BAD, "open"),
        ("host", [b"host: evil\r\nx-request-id: evil\r\n"], FINE, "open"),
        ("transfer-encoding", [b"transfer-encoding: chunked\r\n"], BAD, "open"),
        ("10,000 trailers", [b"t%d: y\r\n" % i for i in range(10_000)], _LARGE, "open"),
        ("one trailer of 40 MB", [b"t: ", *([b"x" * 250_000] * 160), b"\r\n"], _LARGE, "open"),
        ("one trailer 500,000 times", [b"t: y\r\n" * 5000] * 100, _LARGE, "open"),
    ]
    made = [
        raw(
            "trailers",
            name,
            [head + b"\r\n" + body, *([b"".join(lines)] if len(lines) > 1000 else lines), b"\r\n"],
            allowed,
            target=target,
            may_close=len(lines) in (100, 162),
            check=with_key if target == "keyed" else _smuggled,
            quick=len(lines) != 100 and len(lines) != 162,
        )
        for name, lines, allowed, target in rows
    ]
    # A second request, to see that the trailers of the first are not its headers.
    again = head_of("GET", "/v1/models") + b"\r\n"
    real = b"authorization: Bearer atoll-x-y\r\n\r\n"
    made.append(
        raw(
            "trailers",
            "trailers and the next request",
            head + b"\r\n" + body + real + again,
            KEYLESS,
            target="keyed",
            most=2,
        )
    )
    return made


def attacks() -> list[Attack]:
    """Return the attacks on framing."""
    return [*_lengths(), *_chunks(), *_lines(), *_trailers()]
