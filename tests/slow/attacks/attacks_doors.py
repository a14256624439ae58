"""Attacks on doors: paths, methods, headers that are believed or passed on, keys, proxies in front."""

# ruff: noqa: E501 - a row a line
from __future__ import annotations

import asyncio
import json
import time

from benchmarks.serving.fake_engine import MODEL
from tests.slow.attacks.attacks_case import (
    ABSENT,
    BAD,
    FINE,
    FORBIDDEN,
    KEYLESS,
    METHOD,
    TOO_LARGE,
    Attack,
    Statuses,
    admin_closed,
    judge,
    post,
    raw,
)
from tests.slow.attacks.attacks_engine import MIRROR
from tests.slow.attacks.attacks_site import AttackedSite
from tests.slow.attacks.attacks_wire import Reply, chat_body, head_of, request_of, talk

_ADMIN = ("/atoll/v1/status", "/atoll/v1/backends", "/atoll/v1/keys", "/metrics")
_LOCAL = (
    "x-forwarded-for: 127.0.0.1",
    "x-real-ip: 127.0.0.1",
    "forwarded: for=127.0.0.1;host=localhost;proto=http",
    "x-forwarded-host: localhost",
    "x-original-url: /atoll/v1/status",
    "x-rewrite-url: /atoll/v1/status",
    "x-http-method-override: DELETE",
    "x-atoll-node: fake-0",
    "x-atoll-role: admin",
    "x-atoll-owner: root",
)
_UNMET = frozenset({503})
"""A policy that nobody meets."""
_EVIL = {"id": "evil", "url": "http://127.0.0.1:9", "models": [MODEL], "weight": 1000}


def _get(path: str, *headers: str, host: str | None = "attack.example") -> bytes:
    return head_of("GET", path, *headers, host=host) + b"\r\n"


def _admin() -> list[Attack]:
    evil = json.dumps(_EVIL).encode()
    rows = [
        (target, name, sent)
        for target in ("open", "keyed", "proxied")
        for name, sent in (
            *((path, _get(path)) for path in _ADMIN),
            ("add a backend", request_of(evil, "/atoll/v1/backends", *_LOCAL[:5])),
        )
    ]
    delete = head_of("DELETE", "/atoll/v1/backends/fake-0", *_LOCAL) + b"\r\n"
    hosts = ("localhost", "127.0.0.1", "[::1]", "localhost:8080@evil", "unix")
    proxied = (
        ("delete a backend", delete),
        ("put routes", request_of(b"{}", "/atoll/v1/routes", method="PUT")),
        *((f"with {h.partition(':')[0]}", _get("/atoll/v1/status", h)) for h in _LOCAL),
        *((f"host {host}", _get("/metrics", host=host)) for host in hosts),
    )
    rows += [("proxied", name, sent) for name, sent in proxied]
    return [
        raw("admin", f"{target} {name}", sent, FORBIDDEN, target=target, check=admin_closed)
        for target, name, sent in rows
    ]


def _path_status(path: str, target: str) -> Statuses:
    """Return what a path gets: those of the admin API are forbidden, whatever follows; others are none."""
    if path.startswith("\\"):
        return BAD
    if "%00." in path and target == "proxied":
        # nginx does not pass it on.
        return FORBIDDEN | BAD
    private = path.startswith(("/atoll/", "/metrics")) and "//" not in path
    return FORBIDDEN if private else ABSENT


def _paths() -> list[Attack]:
    paths = [
        "//atoll/v1/status",
        "/atoll//v1/status",
        "/./atoll/v1/status",
        "/v1/../atoll/v1/status",
        "/v1/%2e%2e/atoll/v1/status",
        "/%61toll/v1/status",
        "/atoll%2fv1%2fstatus",
        "/ATOLL/V1/STATUS",
        "/atoll/v1/status;x=y",
        "/;/atoll/v1/status",
        "/atoll/v1/status%00.json",
        "/atoll/v1/status?admin=1",
        "/atoll/v1/status#x",
        "/atoll/v1/status/",
        "/metrics/",
        "/metrics;x",
        "//metrics",
        "/v1/models/../../metrics",
        "/v1/models/%2e%2e%2f%2e%2e%2fmetrics",
        "\\atoll\\v1\\status",
        "http://127.0.0.1/atoll/v1/status",
        "http://127.0.0.1:80/metrics",
        "/services/../atoll/v1/status",
        "/services/%2e%2e/atoll/v1/status",
        "/services//atoll/v1/status",
        "/services/",
        "/services/nobody/x",
        "/services/%00/x",
        "/v1/models/" + "a" * 5000,
        "/v1/models/%ff%fe",
        "*",
    ]
    made = []
    for target in ("open", "proxied"):
        some = paths if target == "open" else [p for p in paths if p.startswith("/")][:17]
        made += [
            raw(
                "paths",
                f"{target} {path[:40]}",
                _get(path),
                _path_status(path, target),
                target=target,
                check=admin_closed,
            )
            for path in some
        ]
    made += [
        raw("paths", "bytes that are no text", b"GET /\xff\xfe\x80 HTTP/1.1\r\nhost: a\r\n\r\n", BAD),
        raw("paths", "NUL", b"GET /v1/models\0x HTTP/1.1\r\nhost: a\r\n\r\n", BAD),
        raw("paths", "absolute form", b"GET http://evil/v1/models HTTP/1.1\r\nhost: a\r\n\r\n", ABSENT),
        _service("a path with a line end", "/services/mirror/a%0d%0aX-Evil:%20y"),
        _service("dots", "/services/mirror/../../health", BAD),
        _service("an encoded query", "/services/mirror/a%3fb%23c?d=%0d%0a"),
        _service("another host", "/services/mirror//evil.example/"),
    ]  # fmt: skip
    return made


def _service(name: str, path: str, allowed: Statuses = FINE) -> Attack:
    """Return an attack that asks the mirror as a service, which must get one request and no new headers."""

    async def run(site: AttackedSite) -> str:
        before = len(site.mirror.requests)
        reply = await talk(site.ports["open"], [_get(path)], read_s=8.0)
        wrong = judge(reply, allowed)
        for request in site.mirror.requests[before:]:
            if b"\r\nx-evil" in request.lower() or request.count(b"HTTP/1.1\r\n") != 1:
                wrong = wrong or f"the service got {request[:120]!r}"
        if len(site.mirror.requests) > before + 1:
            wrong = wrong or "the service got several requests"
        return wrong

    return Attack("paths", f"service: {name}", run, quick=True)


def _methods() -> list[Attack]:
    rows: list[tuple[str, str, Statuses]] = [
        ("OPTIONS", "/v1/chat/completions", METHOD),
        ("OPTIONS", "*", ABSENT),
        ("TRACE", "/v1/models", METHOD),
        ("CONNECT", "127.0.0.1:22", BAD),
        ("PUT", "/v1/chat/completions", METHOD),
        ("DELETE", "/v1/models/fake", METHOD),
        ("PATCH", "/health", METHOD),
        ("PROPFIND", "/", ABSENT),
        ("GET", "/v1/chat/completions", METHOD),
        ("FOO", "/v1/models", BAD),
    ]
    made = [
        raw("methods", f"{method} {path}", head_of(method, path) + b"\r\n", allowed)
        for method, path, allowed in rows
    ]
    made += [
        raw("methods", "HEAD /v1/models", head_of("HEAD", "/v1/models") + b"\r\n", FINE, head_only=True),
        raw("methods", "HEAD of a chat", head_of("HEAD", "/v1/chat/completions") + b"\r\n", METHOD, head_only=True),
        raw("methods", "websocket", head_of("GET", "/v1/models", "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==") + b"\r\n", BAD),
        raw("methods", "h2c upgrade", head_of("GET", "/atoll/v1/status", "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA") + b"\r\n", BAD, check=admin_closed),
        raw("methods", "h2c through the proxy", head_of("GET", "/atoll/v1/status", "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA") + b"\r\n", FORBIDDEN | BAD, target="proxied", check=admin_closed),
        raw("methods", "expect something else", head_of("POST", "/v1/chat/completions", "expect: 200-ok", "content-length: 10") + b"\r\n", frozenset({417})),
        raw("methods", "expect, then a large length", head_of("POST", "/v1/chat/completions", "expect: 100-continue", "content-length: 99999999") + b"\r\n", TOO_LARGE),
        raw("methods", "expect on GET", head_of("GET", "/v1/models", "expect: 100-continue") + b"\r\n", FINE),
        raw("methods", "expect without a key", head_of("POST", "/v1/chat/completions", "expect: 100-continue", "content-length: 1000") + b"\r\n", KEYLESS, target="keyed", check=_no_continue, read_s=9.0, quick=False),
    ]  # fmt: skip
    return made


def _no_continue(site: AttackedSite, reply: Reply) -> str:
    del site
    return "a stranger was told to go on" if b" 100 " in reply.raw[:20] else ""


def _injections() -> list[Attack]:
    def carried(header: str, allowed: Statuses) -> Attack:
        evil = b"\nx-evil"

        async def run(site: AttackedSite) -> str:
            before = len(site.mirror.requests)
            sent = request_of(chat_body(MIRROR), "/v1/chat/completions", header)
            reply = await talk(site.ports["open"], [sent], read_s=8.0)
            wrong = judge(reply, allowed)
            for request in site.mirror.requests[before:]:
                head = request.partition(b"\r\n\r\n")[0]
                if evil in head.lower() or b"\r\r" in head or b"attack-key" in head:
                    wrong = wrong or f"the backend got {head[:200]!r}"
            if any(evil in head.lower() for head in reply.heads):
                wrong = wrong or f"the client got {reply.heads[0][:200]!r}"
            return wrong

        return Attack("headers", header.partition("\r")[0].partition("\n")[0][:40], run, quick=True)

    headers: list[tuple[str, Statuses]] = [
        ("x-request-id: a\rx-evil: b", BAD),
        ("x-request-id: a%0d%0ax-evil: b", FINE),
        ("x-request-id: " + "a" * 10_000, FINE),
        ("x-request-id: \u2028x-evil", FINE),
        ("traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01\rx-evil: b", BAD),
        ("traceparent: 00-" + "0" * 32 + "-" + "0" * 16 + "-01", FINE),
        ("traceparent: " + "z" * 5000, FINE),
        ("tracestate: a=b\rx-evil: c", BAD),
        ("tracestate: " + "a=b," * 5000, FINE),
        ("authorization: Bearer attack-key", FINE),
        ("cookie: attack-key", FINE),
        ("x-atoll-providers: a\rx-evil: b", BAD),
        ("x-atoll-session: a\x0bx-evil", BAD),
        ("x-atoll-min-context: 99999999999999999999999", BAD),
        ("x-atoll-min-precision: nonsense", BAD),
        ("x-atoll-node: ../../etc", _UNMET),
        ("x-atoll-fallback: " + ",".join(f"m{i}" for i in range(3000)), BAD),
        ("accept-encoding: gzip, identity;q=0", FINE),
        ("content-encoding: gzip", FINE),
        ("te: trailers", FINE),
        ("range: bytes=0-1", FINE),
    ]  # fmt: skip
    made = [carried(header, allowed) for header, allowed in headers]
    line = {"model": f"{MODEL}\r\nx-evil: b", "messages": [{"role": "user", "content": "a"}]}
    made += [
        post("headers", "a model with a line end", line, ABSENT, quick=True),
        post("headers", "a model of 100 kB", line | {"model": "m" * 100_000}, quick=True),
        post("headers", "a model with NUL", line | {"model": "fake\0"}, ABSENT, quick=True),
        post("headers", "an empty model", line | {"model": ""}, quick=True),
        post("headers", "a path as model", line | {"model": "../../fake"}, ABSENT, quick=True),
        post("headers", "fallbacks without end", line | {"model": MODEL, "models": [MODEL] * 5000}, quick=True),
    ]  # fmt: skip
    return made


def _keys() -> list[Attack]:
    body = chat_body(MODEL)

    def with_header(name: str, *headers: str, path: str = "/v1/chat/completions") -> Attack:
        sent = request_of(body, path, *headers)
        allowed = frozenset({431}) if "60 kB" in name else KEYLESS
        return raw("keys", name, sent, allowed, target="keyed")

    async def expired(site: AttackedSite) -> str:
        await asyncio.sleep(max(0.0, site.expired_s - time.monotonic()))
        sent = request_of(body, key=site.expired_key)
        return judge(await talk(site.ports["keyed"], [sent]), KEYLESS)

    async def in_query(site: AttackedSite) -> str:
        sent = request_of(body, f"/v1/chat/completions?key={site.key}&api_key={site.key}")
        reply = await talk(site.ports["keyed"], [sent])
        log = (site.folder / "keyed.jsonl").read_text(errors="replace")
        return judge(reply, KEYLESS) or ("the key is in the log" if site.key in log else "")

    async def twice(site: AttackedSite) -> str:
        sent = request_of(body, "/v1/chat/completions", "authorization: Bearer x", key=site.key)
        return judge(await talk(site.ports["keyed"], [sent]), BAD)

    async def services(site: AttackedSite) -> str:
        reply = await talk(site.ports["keyed"], [_get("/services/mirror/x")])
        return judge(reply, KEYLESS)

    return [
        with_header("none"),
        with_header("wrong", "authorization: Bearer atoll-aaaaaaaaaaaa-" + "b" * 43),
        with_header("not a bearer", "authorization: Basic YTpi"),
        with_header("empty", "authorization: Bearer "),
        with_header("of 20 kB", "authorization: Bearer " + "k" * 20_000),
        with_header("of 60 kB", "authorization: Bearer " + "k" * 60_000),
        with_header("unicode", "authorization: Bearer \u00e9\u4e2d\U0001f600"),
        with_header("with SQL", "authorization: Bearer atoll-' OR 1=1 --"),
        with_header("with a NUL escape", "authorization: Bearer atoll-%00-x"),
        with_header("as x-api-key", "x-api-key: atoll-a-b"),
        with_header("for /v1/embeddings", path="/v1/embeddings"),
        with_header("for speech", path="/v1/audio/speech"),
        with_header("for pictures", path="/v1/images/generations"),
        with_header("for transcripts", path="/v1/audio/transcriptions"),
        raw("keys", "for /v1/models", _get("/v1/models"), KEYLESS, target="keyed"),
        Attack("keys", "expired", expired, quick=True),
        Attack("keys", "in the query", in_query, quick=True),
        Attack("keys", "two headers", twice, quick=True),
        Attack("keys", "for a service", services, quick=True),
    ]


def attacks() -> list[Attack]:
    """Return the attacks on doors."""
    return [*_admin(), *_paths(), *_methods(), *_injections(), *_keys()]
