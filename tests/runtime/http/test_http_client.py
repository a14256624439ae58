"""An answer is complete when HTTP says so, however its bytes arrive, and never before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.http.handlers import ByteStream, HandlerServer
from atoll.runtime.http.http_client import (
    FetchError,
    HttpResponse,
    ResponseReader,
    fetch,
    open_stream,
    request,
    stream_lines,
)
from atoll.runtime.http.http_server import Request

BODY = json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()
# What ends an answer in chunks, inside of one.
TRAP = b"before\r\n0\r\n\r\nafter"


def sized(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def chunked(*pieces: bytes, trailers: bytes = b"") -> bytes:
    written = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
    return head + written + b"0\r\n" + trailers + b"\r\n"


def read(pieces: Sequence[bytes], *, is_head: bool = False) -> ResponseReader:
    """Read as the client does: until the answer is complete, or there is nothing more."""
    reader = ResponseReader(is_head=is_head)
    for piece in pieces:
        if not reader.complete:
            reader.feed(piece)
    return reader


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (sized(BODY), BODY),
        (sized(b""), b""),
        (chunked(BODY[:5], BODY[5:]), BODY),
        (chunked(), b""),
        (chunked(TRAP), TRAP),
        (chunked(b"abc", trailers=b"x-checksum: 1\r\nx-more: 2\r\n"), b"abc"),
        (b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\n" + chunked(b"abc"), b"abc"),
    ],
)
def test_the_whole_is_complete_and_no_beginning_of_it_is(answer: bytes, body: bytes) -> None:
    for end in range(len(answer)):
        # In one read, and in two that are cut here.
        assert not read([answer[:end]]).complete
        whole = read([answer[:end], answer[end:]])
        assert whole.complete
        assert (whole.response().status, whole.response().body) == (200, body)
    bytewise = read([answer[at : at + 1] for at in range(len(answer))])
    assert bytewise.complete
    assert bytewise.response().body == body


def test_trailers_and_interim_answers_are_no_headers() -> None:
    answer = chunked(b"abc", trailers=b"x-late: 1\r\ntransfer-encoding: no\r\n")
    found = read([b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + answer]).response()
    assert found.headers == {"transfer-encoding": "Chunked"}


bodies = st.lists(
    st.one_of(st.binary(max_size=40), st.sampled_from([b"\r\n", b"0\r\n\r\n", b"\r\n0\r\n\r\n"])),
    max_size=8,
)


@given(bodies, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_chunks_and_reads_may_be_cut_anywhere(
    pieces: list[bytes], places: list[int], has_trailers: bool
) -> None:
    answer = chunked(*pieces, trailers=b"x-a: 0\r\n" if has_trailers else b"")
    parts = cut(answer, places)
    assert not read(parts[:-1]).complete
    found = read(parts)
    assert found.complete
    assert found.response().body == b"".join(pieces)


@given(st.binary(max_size=200), st.lists(st.integers(0, 10_000), max_size=5))
def test_without_a_length_only_the_end_of_the_connection_ends_it(
    body: bytes, places: list[int]
) -> None:
    reader = read(cut(b"HTTP/1.0 200 OK\r\nserver: x\r\n\r\n" + body, places))
    assert not reader.complete
    reader.end()
    assert (reader.complete, reader.response().body) == (True, body)


@pytest.mark.parametrize(
    ("status", "is_head"), [(204, False), (304, False), (200, True), (404, True)]
)
@pytest.mark.parametrize("more", [b"", b"content-length: 7\r\n"])
def test_what_has_no_body_ends_with_its_headers(status: int, is_head: bool, more: bytes) -> None:
    answer = b"HTTP/1.1 %d X\r\n%b\r\n" % (status, more)
    reader = read([answer], is_head=is_head)
    assert reader.complete
    assert reader.response() == HttpResponse(status, {"content-length": "7"} if more else {}, b"")


@pytest.mark.parametrize(
    "answer",
    [
        sized(BODY)[:-1],
        chunked(BODY)[:-1],
        chunked(BODY, trailers=b"x-a: 1\r\n")[:-2],
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"",
    ],
)
def test_an_answer_cut_short_is_none(answer: bytes) -> None:
    reader = read([answer])
    assert not reader.complete
    with pytest.raises(ValueError, match="closed before the answer was complete"):
        reader.end()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n...",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000,
    ],
)
def test_what_is_no_http_is_refused(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"HTTP|headers"):
        read([answer])


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(*pieces: bytes, then_close: bool = True) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if not then_close:
            # Until the client has closed.
            await reader.read()
        writer.close()

    return serve


def asked(serve: Serve, **more: Any) -> HttpResponse:
    async def go() -> HttpResponse:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await request(f"http://127.0.0.1:{port}/x?y=z", **more)

    return asyncio.run(go())


def test_a_server_that_keeps_the_connection_open_is_not_waited_for() -> None:
    for answer in (sized(TRAP), chunked(TRAP), chunked(TRAP, trailers=b"x-a: 1\r\n")):
        assert asked(answering(answer, then_close=False), timeout_s=60.0).body == TRAP


def test_a_chunk_that_looks_like_the_end_is_read_on() -> None:
    answer = chunked(TRAP, BODY)
    at = answer.index(b"0\r\n\r\n") + 5
    assert asked(answering(answer[:at], answer[at:])).body == TRAP + BODY


def test_early_close_too_much_and_nonsense_are_errors_of_the_server() -> None:
    given: list[tuple[Serve, dict[str, Any], str]] = [
        (answering(sized(BODY)[:-1]), {}, "closed before"),
        (answering(), {}, "closed before"),
        (answering(sized(b"x" * 10_000)), {"max_bytes": 5000}, "more than 5000 bytes"),
        (answering(b"\x00\x01\x02"), {}, "no HTTP"),
        (answering(sized(BODY)[:-1], then_close=False), {"timeout_s": 0.05}, "within 0.05 s"),
    ]
    for serve, more, said in given:
        with pytest.raises(FetchError, match=said):
            asked(serve, **more)


def test_nobody_there_and_impossible_addresses() -> None:
    for url in ("http://127.0.0.1:1/", "http://127.0.0.1:99999/", "http://[::1/"):
        with pytest.raises(FetchError):
            asyncio.run(request(url, timeout_s=5.0))
    with pytest.raises(FetchError, match="line break"):
        asyncio.run(request("http://127.0.0.1:1/", headers={"x": "a\r\nhost: b"}))


def test_what_is_sent() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        seen.append(head + await reader.readexactly(length))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    asked(serve)
    asked(serve, body={"a": 1}, api_key="k", headers={"x-more": "yes"})
    asked(serve, method="HEAD")
    first, second, third = seen
    assert first.startswith(b"GET /x?y=z HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"connection: close\r\n" in first
    assert second.startswith(b"POST /x?y=z HTTP/1.1\r\n")
    for line in (b"content-type: application/json", b"authorization: Bearer k", b"x-more: yes"):
        assert line + b"\r\n" in second
    assert second.endswith(b'\r\n\r\n{"a": 1}')
    assert third.startswith(b"HEAD ")


def test_unix_sockets(tmp_path: Path) -> None:
    async def go() -> tuple[int, bytes]:
        path = tmp_path / "admin.sock"
        server = await asyncio.start_unix_server(answering(chunked(BODY)), path)
        async with server:
            return await fetch("http://gateway/atoll/v1/status", unix_socket=path)

    assert asyncio.run(go()) == (200, BODY)
    with pytest.raises(FetchError):
        asyncio.run(fetch("http://gateway/", unix_socket=tmp_path / "none.sock"))


def lines_of(serve: Serve, **more: Any) -> list[bytes]:
    async def go() -> list[bytes]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}/x"
            return [line async for line in stream_lines(url, body={}, **more)]

    return asyncio.run(go())


def test_lines_are_whole_however_they_come() -> None:
    # Cut in the middle of lines by chunks, and of chunks by reads.
    answer = chunked(b"data: 1\n\nda", b"ta: 2\n", b"\ndata: [DO", b"NE]")
    for at in range(len(answer)):
        serve = answering(answer[:at], answer[at:], then_close=False)
        assert lines_of(serve) == [b"data: 1", b"", b"data: 2", b"", b"data: [DONE]"]


def test_lines_come_before_the_answer_is_complete() -> None:
    seen = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, last = chunked(b"1\n"), b"2\r\n2\n\r\n0\r\n\r\n"
        writer.write(first.removesuffix(b"0\r\n\r\n"))
        # Nothing more until the client has the first line.
        await seen.wait()
        writer.write(last)
        writer.close()

    async def go() -> list[bytes]:
        found = []
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async for line in stream_lines(f"http://127.0.0.1:{port}/", body={}):
                found.append(line)
                seen.set()
        return found

    assert asyncio.run(go()) == [b"1", b"2"]


def test_a_stream_that_fails_says_so() -> None:
    for serve, more, said in (
        (answering(chunked(b"1\n")[:-1]), {}, "closed before"),
        (answering(sized(b"x").replace(b"200 OK", b"503 No")), {}, "status 503: x"),
        (answering(chunked(b"1\n")[:-1], then_close=False), {"timeout_s": 0.05}, "for 0.05 s"),
    ):
        with pytest.raises(FetchError, match=said):
            lines_of(serve, **more)


async def test_a_streamed_answer_comes_piece_by_piece() -> None:
    more = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await more.wait()
        yield b"second"

    async def answer(asked: Request) -> ByteStream:
        assert (asked.method, asked.body, asked.peer) == (b"PATCH", b"{}", "127.0.0.1")
        assert asked.headers[b"accept"] == b"text/plain"
        return ByteStream(pieces(), "text/plain", (("x-atoll-node", "gpu1"),))

    server = HandlerServer(answer)
    host, port = await server.start("127.0.0.1", 0)
    async with open_stream(
        f"http://{host}:{port}/", method="PATCH", data=b"{}", headers={"accept": "text/plain"}
    ) as streamed:
        assert (streamed.status, streamed.headers["x-atoll-node"]) == (200, "gpu1")
        got = streamed.pieces(30.0, beat_s=0.01)
        assert await anext(got) == b"first"
        assert await anext(got) == b""  # nothing came for a while
        more.set()
        assert [piece async for piece in got if piece] == [b"second"]
    await server.close()


async def test_a_streamed_answer_that_stops_is_no_answer() -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await asyncio.sleep(60.0)

    async def answer(_: Request) -> ByteStream:
        return ByteStream(pieces(), "text/plain")

    server = HandlerServer(answer)
    host, port = await server.start("127.0.0.1", 0)
    async with open_stream(f"http://{host}:{port}/") as streamed:
        got = streamed.pieces(0.05)
        assert await anext(got) == b"first"
        with pytest.raises(FetchError, match="said nothing"):
            await anext(got)
    await server.close()
    opened = open_stream(f"http://{host}:{port}/")
    with pytest.raises(FetchError, match="did not answer"):
        await opened.__aenter__()
