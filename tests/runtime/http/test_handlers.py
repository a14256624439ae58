"""The server with an async function behind it: order, leaving clients, limits, deadlines, draining."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from atoll.runtime.http.handlers import (
    ByteStream,
    EventStream,
    Handler,
    HandlerServer,
    Response,
)
from atoll.runtime.http.http_client import request
from atoll.runtime.http.http_server import ConnectionDeadlines, ConnectionLimits, Request
from atoll.runtime.openai import ApiError
from tests.runtime.waiting import until

PATIENCE_S = 30.0


class Client:
    """A connection on which bytes are written and read as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readuntil(end)

    async def rest(self) -> bytes:
        """Read until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read()


class Bench:
    """A server and connections to it."""

    def __init__(self, server: HandlerServer, url: str, port: int) -> None:
        self.server = server
        self.url = url
        self._port = port
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self._port))
        self._clients.append(client)
        return client

    def leave(self) -> None:
        for client in self._clients:
            client.writer.close()


@contextlib.asynccontextmanager
async def serving(
    handler: Handler,
    limits: ConnectionLimits | None = None,
    deadlines: ConnectionDeadlines | None = None,
) -> AsyncIterator[Bench]:
    server = HandlerServer(handler, limits, deadlines)
    host, port = await server.start("127.0.0.1", 0)
    bench = Bench(server, f"http://{host}:{port}", port)
    try:
        yield bench
    finally:
        bench.leave()
        await server.close()


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


async def echo(asked: Request) -> Response:
    return Response(asked.method + b" " + asked.path + b" " + asked.body)


async def test_whole_answers_and_errors() -> None:
    async def handler(asked: Request) -> Response:
        if asked.path == b"/refused":
            raise ApiError(503, "no", kind="server_error", retry_after_s=7)
        if asked.path == b"/broken":
            raise RuntimeError("a bug")
        return await echo(asked)

    async with serving(handler) as bench:
        answer = await request(bench.url + "/a?b", body={}, headers={"x-request-id": "mine"})
        assert (answer.status, answer.body) == (200, b"POST /a {}")
        assert answer.headers["x-request-id"] == "mine"
        refused = await request(bench.url + "/refused")
        assert (refused.status, refused.headers["retry-after"]) == (503, "7")
        assert b'"type":"server_error"' in refused.body
        assert (await request(bench.url + "/broken")).status == 500
        head = await request(bench.url + "/a", method="HEAD")
        assert (head.status, head.headers["content-length"], head.body) == (200, "8", b"")


_IN_CHUNKS = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
async def test_trailers_are_no_headers(pause_s: float) -> None:
    seen: list[Request] = []

    async def keep(request: Request) -> Response:
        seen.append(request)
        return Response(b"{}")

    async with serving(keep) as bench:
        client = await bench.connect()
        client.send(_IN_CHUNKS)
        # Without a pause everything is there in one read.
        await asyncio.sleep(pause_s)
        client.send(b"Authorization: Bearer stranger\r\nHost: b\r\n\r\n")
        assert b" 200 " in await client.until(b"{}")
    (request,) = seen
    assert request.body == b"x"
    assert request.headers == {b"host": b"a", b"transfer-encoding": b"chunked"}


async def test_trailers_are_no_more_than_headers_may_be() -> None:
    async with serving(echo, ConnectionLimits(headers=10)) as bench:
        client = await bench.connect()
        client.send(_IN_CHUNKS)
        await asyncio.sleep(0.05)
        client.send(b"".join(b"T%d: x\r\n" % number for number in range(20)))
        assert b" 431 " in await client.rest()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def handler(asked: Request) -> Response:
        # Those that came later would be ready earlier.
        await asyncio.sleep({b"/1": 0.03, b"/2": 0.01}.get(asked.path, 0.0))
        return await echo(asked)

    async with serving(handler) as bench:
        client = await bench.connect()
        client.send(b"".join(get(f"/{n}") for n in range(1, 6)) + get("/6", "connection: close"))
        answered = await client.rest()
        places = [answered.index(b"GET /%d " % n) for n in range(1, 7)]
        assert places == sorted(places)
        assert answered.count(b"HTTP/1.1 200 OK") == 6


async def test_a_stream_comes_in_pieces_and_an_empty_piece_does_not_end_it() -> None:
    gate = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await gate.wait()
        yield b""
        yield b"data: 2\n\n"

    async def handler(asked: Request) -> EventStream:
        return EventStream(pieces())

    async with serving(handler) as bench:
        client = await bench.connect()
        client.send(get("/") + get("/", "connection: close"))
        first = await client.until(b"data: 1\n\n\r\n")
        assert b"content-type: text/event-stream" in first
        gate.set()
        assert (await client.until(b"0\r\n\r\n")).endswith(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")
        assert (await client.rest()).endswith(b"data: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n")


async def test_a_client_that_leaves_cancels_what_is_done_for_it() -> None:
    ended: list[bytes] = []

    async def forever(name: bytes) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0.001)
        finally:
            ended.append(name)

    async def handler(asked: Request) -> Response | EventStream:
        if asked.path == b"/stream":
            return EventStream(forever(asked.path))
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asked.path)
        raise AssertionError

    async with serving(handler) as bench:
        client = await bench.connect()
        client.send(get("/stream"))
        await client.until(b"data: x")
        client.writer.close()
        await until(lambda: ended == [b"/stream"])
        client = await bench.connect()
        client.send(get("/whole"))
        await until(lambda: bool(bench.server.running))
        client.writer.close()
        await until(lambda: ended == [b"/stream", b"/whole"])
        await until(lambda: not bench.server.running and not bench.server.connections)


async def test_a_stream_that_fails_is_cut_off_not_ended() -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise RuntimeError("a bug")

    async def handler(asked: Request) -> EventStream:
        return EventStream(pieces())

    async with serving(handler) as bench:
        client = await bench.connect()
        client.send(get("/"))
        await client.until(b"data: 1\n\n\r\n")
        try:
            rest = await client.rest()
        except ConnectionError:
            rest = b""
        assert b"0\r\n\r\n" not in rest


async def test_the_source_waits_for_a_client_that_does_not_read() -> None:
    made = 0

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal made
        while True:
            made += 1
            yield b"x" * 2**16
            await asyncio.sleep(0)

    async def handler(asked: Request) -> EventStream:
        return EventStream(endless())

    async with serving(handler, deadlines=ConnectionDeadlines(client_s=0.2)) as bench:
        client = await bench.connect()
        client.send(get("/"))
        # It stops, and after `client_s` the connection is given up.
        await until(lambda: bool(bench.server.running))
        await until(lambda: not bench.server.connections)
        # Whatever the buffers of the system hold, it is not what a loop makes in this time.
        assert made < 2000
        await until(lambda: not bench.server.running)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000, 413),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nfa0\r\n"
            + b"x" * 4000,
            413,
        ),
        (get("/", "x: " + "a" * 3000), 431),
        (get("/", *(f"x-{n}: 1" for n in range(200))), 431),
        (get("/", "x: " + "a" * 40_000)[:-4], 431),
        (get("/" + "a" * 40_000), 431),
        (b"nonsense\r\n\r\n", 400),
        (get("/", "broken"), 400),
        (get("/").replace(b"/", b"/\xff", 1), 400),
        (get("/", "content-length: -1"), 400),
        (get("/", "content-length: 5", "transfer-encoding: chunked"), 400),
        (get("/", "connection: upgrade", "upgrade: h2c"), 400),
        (get("/")[:-2], 408),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nabc", 408),
    ],
)
async def test_limits_and_deadlines(raw: bytes, status: int) -> None:
    async with serving(
        echo,
        ConnectionLimits(body_bytes=1000, header_bytes=2000, headers=50),
        ConnectionDeadlines(header_s=0.05, body_s=0.05) if status == 408 else None,
    ) as bench:
        client = await bench.connect()
        client.send(raw)
        assert (await client.rest()).startswith(b"HTTP/1.1 %d " % status)
        assert not bench.server.running


async def test_an_idle_connection_is_closed() -> None:
    async with serving(echo, deadlines=ConnectionDeadlines(idle_s=0.05)) as bench:
        client = await bench.connect()
        client.send(get("/a"))
        assert (await client.rest()).endswith(b"GET /a ")


async def test_draining_lets_what_runs_end() -> None:
    gate = asyncio.Event()

    async def handler(asked: Request) -> Response:
        await gate.wait()
        return await echo(asked)

    async with serving(handler) as bench:
        idle, busy = await bench.connect(), await bench.connect()
        busy.send(get("/a"))
        await until(lambda: bool(bench.server.running) and len(bench.server.connections) == 2)
        closing = asyncio.create_task(bench.server.close(PATIENCE_S))
        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await bench.connect()
        gate.set()
        answered = await busy.rest()
        assert b"connection: close" in answered
        assert answered.endswith(b"GET /a ")
        await closing
        assert not bench.server.connections


async def test_what_does_not_end_in_time_is_cut_off() -> None:
    async def handler(asked: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(handler) as bench:
        client = await bench.connect()
        client.send(get("/a"))
        await until(lambda: bool(bench.server.running))
        await bench.server.close(0.01)
        with contextlib.suppress(ConnectionError):
            assert await client.rest() == b""
        await until(lambda: not bench.server.running)


async def test_answers_have_headers_and_streams_their_own_type() -> None:
    async def sound() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b""
        yield b"two"

    async def handler(asked: Request) -> Response | ByteStream | EventStream:
        headers = (("x-path", "a=b"),)
        if asked.path == b"/whole":
            return Response(b"{}", 201, headers=headers)
        if asked.path == b"/events":
            return EventStream(sound(), headers)
        return ByteStream(sound(), "audio/wav", headers)

    async with serving(handler) as bench:
        whole = await request(bench.url + "/whole")
        assert (whole.status, whole.headers["x-path"]) == (201, "a=b")
        stream = await request(bench.url + "/sound")
        assert stream.body == b"onetwo"
        assert (stream.headers["content-type"], stream.headers["x-path"]) == ("audio/wav", "a=b")
        events = await request(bench.url + "/events")
        assert events.headers["content-type"].startswith("text/event-stream")
        assert events.headers["x-path"] == "a=b"


async def test_a_stream_that_is_refused_before_it_begins_is_an_error() -> None:
    async def pieces(*, late: bool) -> AsyncGenerator[bytes, None]:
        if late:
            yield b"one"
        raise ApiError(429, "too many", kind="rate_limit_error", retry_after_s=3)

    async def handler(asked: Request) -> EventStream:
        return EventStream(pieces(late=asked.path == b"/late"))

    async with serving(handler) as bench:
        client = await bench.connect()
        for _ in range(2):
            client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await client.until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 3" in head
            await client.until(b"}}")
        client.send(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not (await client.rest()).endswith(b"0\r\n\r\n")


async def test_a_header_that_would_be_two_lines_is_not_sent() -> None:
    async def handler(asked: Request) -> Response:
        return Response(b"{}", headers=(("x-path", "a\r\nset-cookie: b"),))

    async with serving(handler) as bench:
        client = await bench.connect()
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"set-cookie" not in await client.rest()


async def test_a_byte_stream_that_fails_is_not_ended_as_if_it_were_whole() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise ApiError(500, "broken")

    async def handler(asked: Request) -> ByteStream:
        return ByteStream(broken(), "audio/pcm")

    async with serving(handler) as bench:
        client = await bench.connect()
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert not (await client.rest()).endswith(b"0\r\n\r\n")
