"""Attacks on the younger endpoints: other dialects, tokens, vectors, their keys, and services that lie."""

# ruff: noqa: E501 - a row a line
from __future__ import annotations

import asyncio
import json
from typing import Any

from benchmarks.serving.fake_engine import MODEL
from tests.slow.attacks.attacks_case import (
    ABSENT,
    BAD,
    FINE,
    KEYLESS,
    METHOD,
    TOO_LARGE,
    Attack,
    Row,
    Statuses,
    admin_closed,
    ask_model,
    deep_schema,
    judge,
    raw,
)
from tests.slow.attacks.attacks_engine import LIES, MIRROR
from tests.slow.attacks.attacks_site import BODY_BYTES, TINY, AttackedSite
from tests.slow.attacks.attacks_wire import (
    CHAT,
    chat_body,
    chunk,
    head_of,
    request_of,
    talk,
)

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
EMBEDDINGS = "/v1/embeddings"
ALL = (
    RESPONSES,
    MESSAGES,
    COUNT,
    TOKENIZE,
    DETOKENIZE,
    EMBEDDINGS,
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/images/generations",
)
"""What is asked with POST, besides chat."""


def _rows(family: str, path: str, rows: list[Row]) -> list[Attack]:
    # What is translated is there as it came, as it was read and as it is passed on: the gateway counts all
    # of these.
    return ask_model(family, path, rows, held_bytes=2 * BODY_BYTES, named=True)


def _respond(**fields: object) -> dict[str, Any]:
    return {"model": TINY, "input": "Hello", "max_output_tokens": 4} | fields


def _message(**fields: object) -> dict[str, Any]:
    turn = {"role": "user", "content": "Hello"}
    return {"model": TINY, "messages": [turn], "max_tokens": 4} | fields


def _turn(*blocks: object, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}]


def _responses() -> list[Attack]:
    def tool(name: object = "f", parameters: object = None, **more: object) -> dict[str, Any]:
        return {"type": "function", "name": name, "parameters": parameters} | more

    rows: list[Row] = [
        ("deep input", b'{"model":"tiny","input":' + b"[" * 100_000, BAD),
        ("an item of no known type", _respond(input=[{"type": "x"}]), BAD),
        ("input that is a number", _respond(input=5), BAD),
        ("no input", {"model": TINY}, BAD),
        ("an unknown field", _respond(instruction="a"), BAD),
        ("a previous response", _respond(previous_response_id="../x"), BAD),
        ("in the background", _respond(background=True), BAD),
        ("a file to fetch", _respond(input=_turn({"type": "input_file", "file_url": "http://169.254.169.254/"})), BAD),
        ("a picture to fetch", _respond(input=_turn({"type": "input_image", "image_url": "file:///etc/passwd"})), BAD),
        ("a tool of no known type", _respond(tools=[{"type": "code_interpreter"}]), BAD),
        ("a server to call", _respond(tools=[{"type": "mcp", "server_url": "http://169.254.169.254/"}]), BAD),
        ("a tool without a name", _respond(tools=[tool(None)]), BAD),
        ("a tool with a bad name", _respond(tools=[tool('f"}\n<end>')], tool_choice="required"), BAD),
        ("a name of 100 kB", _respond(tools=[tool("f" * 100_000)]), BAD),
        ("deep parameters", _respond(tools=[tool("f", deep_schema(400))], tool_choice="required"), BAD),
        ("parameters that are none", _respond(tools=[tool("f", {"type": "elephant"})], tool_choice="required"), BAD),
        ("a tool_choice that is not there", _respond(tools=[tool()], tool_choice={"type": "function", "name": "g"}), BAD),
        ("a call without a name", _respond(input=[{"type": "function_call", "call_id": "a", "arguments": "{}"}]), BAD),
        ("an output without a call", _respond(input=[{"type": "function_call_output", "output": "a"}]), BAD),
        ("a schema that is none", _respond(text={"format": {"type": "json_schema", "name": "s", "schema": {"type": "elephant"}}}), BAD),
        ("max_output_tokens -1", _respond(max_output_tokens=-1), BAD),
        ("50,000 metadata", _respond(metadata={f"k{i}": "v" for i in range(50_000)}), BAD),
        ("stream as a text", _respond(stream="yes"), BAD),
        ("30 MB of text", lambda: json.dumps(_respond(input="word " * 6_000_000)).encode(), BAD),
        ("100,000 tools", lambda: json.dumps(_respond(tools=[tool(f"f{i}", {}) for i in range(100_000)])).encode(), BAD),
        ("200,000 items", lambda: json.dumps(_respond(input=[{"role": "user", "content": "a"}] * 200_000)).encode(), BAD),
        ("3,000,000 items", lambda: b'{"model":"tiny","input":[' + b'{"a":1},' * 3_000_000 + b'{"a":1}]}', TOO_LARGE),
    ]  # fmt: skip
    return _rows("responses", RESPONSES, rows)


def _messages() -> list[Attack]:
    def tool(name: object = "f", schema: object = None) -> dict[str, Any]:
        return {"name": name, "input_schema": schema or {"type": "object"}}

    picture = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}
    rows: list[Row] = [
        ("deep messages", b'{"model":"tiny","max_tokens":4,"messages":' + b"[" * 100_000, BAD),
        ("deep blocks", _message(messages=_turn(_nested(300))), BAD),
        ("no max_tokens", {"model": TINY, "messages": [{"role": "user", "content": "a"}]}, BAD),
        ("max_tokens 10^30", _message(max_tokens=10**30), BAD),
        ("an unknown role", _message(messages=[{"role": "x", "content": "a"}]), BAD),
        ("a picture to fetch", _message(messages=_turn(picture)), BAD),
        ("a document to fetch", _message(messages=_turn({"type": "document", "source": {"type": "url", "url": "file:///etc/passwd"}})), BAD),
        ("a tool result of nothing", _message(messages=_turn({"type": "tool_result"})), BAD),
        ("a call without an id", _message(messages=_turn({"type": "tool_use", "name": "f", "input": {}}, role="assistant")), BAD),
        ("a block of no known type", _message(messages=_turn({"type": "x"})), BAD),
        ("a schema that is a number", _message(tools=[tool("f", 5)]), BAD),
        ("a schema that is none", _message(tools=[tool("f", {"type": "elephant"})], tool_choice={"type": "any"}), BAD),
        ("a deep schema", _message(tools=[tool("f", deep_schema(400))], tool_choice={"type": "any"}), BAD),
        ("a tool with a bad name", _message(tools=[tool('f"}\n<end>')], tool_choice={"type": "any"}), BAD),
        ("a name of 100 kB", _message(tools=[tool("f" * 100_000)]), BAD),
        ("a tool of the server", _message(tools=[{"type": "bash_20250124", "name": "bash"}]), BAD),
        ("a tool_choice that is not there", _message(tools=[tool()], tool_choice={"type": "tool", "name": "g"}), BAD),
        ("servers to call", _message(mcp_servers=[{"url": "http://169.254.169.254/"}]), BAD),
        ("system as a number", _message(system=5), BAD),
        ("a million stops", lambda: json.dumps(_message(stop_sequences=["a"] * 1_000_000)).encode(), BAD),
        ("30 MB of text", lambda: json.dumps(_message(messages=[{"role": "user", "content": "word " * 6_000_000}])).encode(), BAD),
        ("100,000 tools", lambda: json.dumps(_message(tools=[tool(f"f{i}") for i in range(100_000)])).encode(), BAD),
    ]  # fmt: skip
    counts: list[Row] = [
        ("deep", b'{"model":"tiny","messages":' + b"[" * 100_000, BAD),
        ("a picture to fetch", {"model": TINY, "messages": _turn(picture)}, BAD),
        ("no messages", {"model": TINY, "messages": []}, BAD),
        ("max_tokens", _message(), BAD),
        ("a deep schema", {"model": TINY, "messages": _turn({"type": "text", "text": "a"}), "tools": [tool("f", deep_schema(400))]}, BAD),
        ("30 MB of text", lambda: json.dumps({"model": TINY, "messages": [{"role": "user", "content": "word " * 6_000_000}]}).encode(), BAD),
    ]  # fmt: skip
    return [*_rows("messages", MESSAGES, rows), *_rows("messages", COUNT, counts)]


def _nested(depth: int) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": "a"}
    for _ in range(depth):
        block = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    return block


def _tokens() -> list[Attack]:
    texts: list[Row] = [
        ("20 MB", lambda: b'{"model":"tiny","prompt":"' + b"a" * 20_000_000 + b'"}', BAD),
        ("20 MB of emoji", lambda: json.dumps({"model": TINY, "prompt": "\U0001f600" * 5_000_000}, ensure_ascii=False).encode(), BAD),
        ("a number", {"model": TINY, "prompt": 5}, BAD),
        ("nothing", {"model": TINY}, BAD),
        ("both", {"model": TINY, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}, BAD),
        ("an unknown role", {"model": TINY, "messages": [{"role": "root", "content": "a"}]}, BAD),
        ("deep", b'{"model":"tiny","prompt":' + b"[" * 100_000, BAD),
        ("a picture to fetch", {"model": TINY, "messages": _turn({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}})}, BAD),
    ]  # fmt: skip
    ids: list[Row] = [
        ("tokens too large", {"model": TINY, "tokens": [10**9]}, BAD),
        ("tokens of 10^30", {"model": TINY, "tokens": [10**30]}, BAD),
        ("negative tokens", {"model": TINY, "tokens": [-1]}, BAD),
        ("text", {"model": TINY, "tokens": "abc"}, BAD),
        ("halves", {"model": TINY, "tokens": [1.5]}, BAD),
        ("5,000,000 tokens", lambda: json.dumps({"model": TINY, "tokens": [1] * 5_000_000}).encode(), TOO_LARGE),
        ("1,000,000 tokens", lambda: json.dumps({"model": TINY, "tokens": [1] * 1_000_000}).encode(), BAD),
    ]  # fmt: skip
    vectors: list[Row] = [
        ("20 MB", lambda: b'{"model":"tiny","input":"' + b"a" * 20_000_000 + b'"}', BAD),
        ("tokens too large", {"model": TINY, "input": [10**9]}, BAD),
        ("dimensions 10^9", {"model": TINY, "input": "a", "dimensions": 10**9}, BAD),
        ("2,000 long texts", {"model": TINY, "input": ["a" * 2000] * 2000}, BAD),
        ("an unknown form", {"model": TINY, "input": "a", "encoding_format": "pickle"}, BAD),
        ("nothing", {"model": TINY, "input": [""]}, BAD),
        ("lists in lists", {"model": TINY, "input": [[[1]]]}, BAD),
    ]  # fmt: skip
    return [
        *_rows("tokens", TOKENIZE, texts),
        *_rows("tokens", DETOKENIZE, ids),
        *_rows("tokens", EMBEDDINGS, vectors),
    ]


def _keys() -> list[Attack]:
    """Keys in Anthropic's header, and two of them in one request."""

    def shown(name: str, path: str, allowed: Statuses, *headers: str) -> Attack:
        """Return an attack that shows the key where a header says KEY."""

        async def run(site: AttackedSite) -> str:
            body = chat_body(MODEL) if path == CHAT else json.dumps(_message(model=MODEL)).encode()
            named = [header.replace("KEY", site.key) for header in headers]
            reply = await talk(site.ports["keyed"], [request_of(body, path, *named)], read_s=8.0)
            leaked = site.key.encode() in reply.raw
            return judge(reply, allowed) or ("the key is in the answer" if leaked else "")

        return Attack("api keys", f"{path} {name}", run, quick=True)

    def late(path: str, header: str) -> Attack:
        """Return an attack that shows the key in a trailer."""

        async def run(site: AttackedSite) -> str:
            body = json.dumps(_message(model=MODEL)).encode()
            head = head_of("POST", path, "transfer-encoding: chunked") + b"\r\n"
            trailer = f"{header.replace('KEY', site.key)}\r\n".encode()
            sent = head + chunk(body) + b"0\r\n" + trailer + b"\r\n"
            return judge(await talk(site.ports["keyed"], [sent], read_s=8.0), KEYLESS)

        return Attack("api keys", f"{path} in a trailer", run, quick=True)

    key, bearer = "x-api-key: KEY", "authorization: Bearer KEY"
    other, stranger = "x-api-key: x", "authorization: Bearer x"
    made = []
    for path in (MESSAGES, COUNT):
        made += [
            shown("none", path, KEYLESS),
            shown("wrong", path, KEYLESS, "x-api-key: atoll-aaaaaaaaaaaa-" + "b" * 43),
            shown("empty", path, KEYLESS, "x-api-key: "),
            shown("of 20 kB", path, KEYLESS, "x-api-key: " + "k" * 20_000),
            shown("with a prefix", path, KEYLESS, "x-api-key: Bearer KEY"),
            shown("doubled", path, BAD, key, key),
            shown("doubled, one wrong", path, BAD, key, other),
            shown("the other one wrong", path, BAD, key, stranger),
            shown("the first one wrong", path, BAD, other, bearer),
            shown("a list of keys", path, KEYLESS, "x-api-key: KEY, x"),
            shown("as a cookie", path, KEYLESS, "cookie: x-api-key=KEY"),
            late(path, key),
        ]
    made += [
        shown("both the same", MESSAGES, FINE, key, bearer),
        shown("as x-api-key", MESSAGES, FINE, key),
        shown("as x-api-key", CHAT, KEYLESS, key),
        shown("the other one wrong", CHAT, FINE, bearer, other),
        shown("the first one wrong", CHAT, KEYLESS, stranger, key),
        late(CHAT, bearer),
    ]
    for path in ALL:
        sent = head_of("POST", path, "content-length: 20000000", "x-api-key: x") + b"\r\n{"
        made.append(
            raw("api keys", f"{path} not waited for", sent, KEYLESS, target="keyed", read_s=3.0)
        )
    return made


def _doors() -> list[Attack]:
    """The admin API by way of each endpoint, and each with methods it does not have, behind a proxy."""
    rows: list[tuple[str, bytes, Statuses]] = []
    for path in (*ALL, f"/services/{MIRROR}"):
        up = "/.." * path.count("/")
        dotted = BAD if path.startswith("/services/") else ABSENT
        for way, target, allowed in (
            ("dots", f"{path}{up}/atoll/v1/status", dotted),
            ("coded dots", f"{path}{up.replace('.', '%2e')}/metrics", dotted),
            ("coded slashes", f"{path}{up.replace('/', '%2f')}%2fatoll%2fv1%2fbackends", ABSENT),
        ):
            sent = head_of("GET", target, "x-forwarded-for: 127.0.0.1") + b"\r\n"
            rows.append((f"{path} {way}", sent, allowed))
    evil = json.dumps({"id": "evil", "url": "http://127.0.0.1:9", "models": [MODEL]}).encode()
    headers = ("x-original-url: /atoll/v1/backends", "x-atoll-node: fake-0")
    for path in ALL:
        override = head_of("GET", path, "x-http-method-override: POST") + b"\r\n"
        rows.append((f"GET {path}", override, METHOD))
        rows.append((f"a backend to {path}", request_of(evil, path, *headers), BAD))
    return [
        raw("doors", name, sent, allowed, target="proxied", check=admin_closed)
        for name, sent, allowed in rows
    ]


def _meters() -> list[Attack]:
    """What is said of a usage is a backend's word: it breaks nothing, whatever it is."""

    def told(name: str, path: str, *, stream: bool = False) -> Attack:
        async def run(site: AttackedSite) -> str:
            content = f"usage-{name}"
            asked: dict[str, object] = {"stream": True} if stream else {}
            body = chat_body(MIRROR, content, **asked)
            for target, key in (("open", None), ("keyed", site.key)):
                sent = request_of(body, path, key=key)
                reply = await talk(site.ports[target], [sent], read_s=10.0)
                wrong = judge(reply, FINE, near=target)
                if wrong or not reply.whole:
                    return wrong or f"{target}: the answer has no end"
            return ""

        kind = "stream" if stream else "answer"
        return Attack("meters", f"{path} {name} ({kind})", run, quick=True)

    service = f"/services/{MIRROR}/x"
    made = [told(name, path) for name in LIES for path in (CHAT, service)]
    made += [told(name, CHAT, stream=True) for name in LIES]

    async def keyless(site: AttackedSite) -> str:
        before = len(site.mirror.requests)
        reply = await talk(site.ports["keyed"], [request_of(b"{}", service)])
        seen = len(site.mirror.requests) - before
        return judge(reply, KEYLESS) or ("the service was asked" if seen else "")

    async def counted(site: AttackedSite) -> str:
        """Twenty at once, of which some leave: the gateway goes on to count."""
        sent = request_of(chat_body(MIRROR, "slowly"), service, key=site.key)

        async def leave() -> None:
            await talk(site.ports["keyed"], [sent], read_s=0.1)

        await asyncio.gather(*(leave() for _ in range(20)))
        return judge(await talk(site.ports["keyed"], [sent], read_s=10.0), FINE)

    made += [
        Attack("meters", "a service without a key", keyless, quick=True),
        Attack("meters", "a service, left", counted, quick=True),
    ]
    return made


def attacks() -> list[Attack]:
    """Return the attacks on the younger endpoints."""
    return [*_responses(), *_messages(), *_tokens(), *_keys(), *_doors(), *_meters()]
