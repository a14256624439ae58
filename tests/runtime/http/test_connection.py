"""A connection without a socket: what it holds, what it refuses by headers, clients that say no more."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.http.http_request import IncomingBody
from atoll.runtime.http.http_server import Application, Connection, ConnectionLimits, Request
from atoll.runtime.openai import ApiError

MIB = 2**20
POST = b"POST /x HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


class Clock:
    """What a connection needs of a loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.later: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.later.append((self.now_s, call, args))

    def call_later(self, wait_s: float, call: Callable[..., None], *args: Any) -> None:
        self.later.append((self.now_s + wait_s, call, args))

    def run(self, until_s: float) -> None:
        while due := [item for item in self.later if item[0] <= until_s]:
            first = min(due, key=lambda item: item[0])
            self.later.remove(first)
            self.now_s = max(self.now_s, first[0])
            first[1](*first[2])
        self.now_s = until_s


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.paused = False
        self.protocol: Connection | None = None
        self.deaf = False
        """Whether the client is gone: the write after the first one fails."""

    def write(self, data: bytes) -> None:
        if self.deaf and self.written:
            self.abort()
            return
        self.written += data

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            assert self.protocol is not None
            self.protocol.connection_lost(None)

    close = abort

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Call:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class App(Application):
    """An application that answers when it is told to."""

    def __init__(self, **limits: int) -> None:
        super().__init__(ConnectionLimits(**limits))
        self.date = b"now"
        self.clock = Clock()
        self.loop = cast("asyncio.AbstractEventLoop", self.clock)
        self.asked: list[Request] = []
        self.errors: list[ApiError] = []
        self.expected: list[Request] = []
        self.call = Call()
        self.stranger = False

    def expect(self, request: Request) -> None:
        self.expected.append(request)
        if self.stranger:
            raise ApiError(401, "who are you?", kind="authentication_error")

    def handle(self, connection: Connection, request: Request) -> None:
        request.id = b"r"
        self.asked.append(request)
        connection.exchange = self.call

    def refused(self, error: ApiError) -> None:
        self.errors.append(error)


def connect(app: App) -> tuple[Connection, Wire]:
    wire = Wire()
    connection = Connection(app)
    wire.protocol = connection
    connection.connection_made(cast("asyncio.BaseTransport", wire))
    return connection, wire


def status(wire: Wire) -> int:
    return int(wire.written.split(b" ", 2)[1])


# What is held


@given(pieces=st.lists(st.binary(max_size=9), max_size=300), every=st.integers(1, 80))
def test_body_is_what_came(pieces: list[bytes], every: int) -> None:
    body = IncomingBody()
    for number, piece in enumerate(pieces):
        body.append(piece)
        if number % every == 0:
            body.fold()
    assert body.take() == b"".join(pieces)
    assert (body.fold(), body.take()) == (0, b"")


def test_tiny_chunks_cost_what_they_say() -> None:
    """Each was an object of 35 bytes and a place in a list: seven times its bytes on the wire."""
    app = App(body_bytes=4 * MIB)
    connection, _ = connect(app)
    piece = b"2\r\nab\r\n" * 9000
    connection.data_received(CHUNKED)
    tracemalloc.start()
    try:
        sent = 0
        while sent + len(piece) < MIB // 2:
            connection.data_received(piece)
            sent += len(piece)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent > MIB // 4
    assert held < 1.3 * sent
    assert app.buffered >= held / 1.3
    connection.data_received(b"0\r\n\r\n")
    assert app.asked[0].body == b"ab" * (sent // 7)
    connection.respond(200, b"")
    assert app.buffered == 0


def test_everything_held_counts_against_one_limit() -> None:
    app = App(buffered_bytes=100_000, header_bytes=30_000)
    wires = [connect(app) for _ in range(10)]
    # Headers that do not end, bodies that do not, and requests that wait for an answer before them.
    for number, (connection, _) in enumerate(wires):
        connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\nx: ")
        connection.data_received(b"a" * 20_000)
        assert app.buffered <= 1.3 * 100_000 or number > 4
    assert [status(wire) for _, wire in wires if wire.written] == [503] * 6
    assert app.buffered <= 100_000
    for connection, wire in wires:
        wire.abort()
        assert connection not in app.connections
    assert app.buffered == 0


def test_requests_that_wait_are_few_and_counted() -> None:
    app = App()
    connection, wire = connect(app)
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 30)
    assert (len(app.asked), wire.paused) == (1, True)
    assert app.buffered >= 29 * 1024
    connection.respond(200, b"one")
    app.clock.run(1.0)
    assert len(app.asked) == 2
    other, _ = connect(app)
    before = app.buffered
    other.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 3000)
    assert app.buffered == before
    # What was asked first is answered, and nothing after it.
    other.respond(200, b"")
    assert len(app.asked) == 3


def test_many_requests_at_once_leave_room_for_others() -> None:
    """Answered at once or not, no more of them are than a few before others have their turn."""

    class Quick(App):
        def handle(self, connection: Connection, request: Request) -> None:
            super().handle(connection, request)
            connection.respond(200, b"one")

    app = Quick()
    connection, wire = connect(app)
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 60)
    assert (len(app.asked), wire.paused) == (16, True)
    app.clock.run(1.0)
    assert (len(app.asked), wire.paused) == (60, False)
    assert wire.written.count(b"HTTP/1.1 200") == 60
    assert app.buffered == 0
    # More than may wait: the first that waits is the last that is answered.
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 600)
    app.clock.run(1.0)
    assert len(app.asked) == 60 + 17
    assert wire.written.count(b"HTTP/1.1 ") == 60 + 17
    assert (wire.closed, app.buffered) == (True, 0)


def test_what_cannot_be_expected_is_told_at_once() -> None:
    connection, wire = connect(App())
    connection.data_received(POST + b"expect: 200-ok\r\ncontent-length: 9\r\n\r\n")
    assert status(wire) == 417
    connection, wire = connect(App())
    connection.data_received(POST + b"expect: 100-Continue\r\ncontent-length: 9\r\n\r\n")
    assert wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_a_body_of_many_chunks_is_read_a_little_at_a_time() -> None:
    app = App()
    connection, wire = connect(app)
    connection.data_received(CHUNKED + b"2\r\nab\r\n" * 500)
    seen = [wire.paused]
    connection.data_received(b"2\r\nab\r\n" * 600)
    seen.append(wire.paused)
    app.clock.run(0.0)
    assert [*seen, wire.paused] == [False, True, False]
    connection.data_received(b"0\r\n\r\n")
    assert len(app.asked[0].body) == 2200


def test_a_client_that_does_not_read_is_not_answered_further() -> None:
    class Quick(App):
        def handle(self, connection: Connection, request: Request) -> None:
            super().handle(connection, request)
            connection.respond(200, b"one")
            if len(self.asked) == 3:
                connection.pause_writing()

    app = Quick()
    connection, wire = connect(app)
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 10)
    app.clock.run(1.0)
    assert (len(app.asked), wire.paused) == (3, True)
    connection.resume_writing()
    app.clock.run(1.0)
    assert (len(app.asked), wire.paused) == (10, False)


def test_whole_large_bodies_count_until_they_are_answered() -> None:
    app = App(buffered_bytes=100_000)
    first, _ = connect(app)
    first.data_received(POST + b"content-length: 60000\r\n\r\n" + b"a" * 60_000)
    assert app.buffered == 60_000
    second, wire = connect(app)
    second.data_received(POST + b"content-length: 60000\r\n\r\n" + b"a" * 60_000)
    assert (status(wire), app.buffered) == (503, 60_000)
    with pytest.raises(ApiError) as caught:
        first.hold(50_000)
    # That is more than all requests together may take: there is no use in coming again.
    assert caught.value.status == 413
    first.respond(200, b"")
    assert app.buffered == 0


def test_a_request_that_never_fits_is_told_apart_from_one_that_comes_too_early() -> None:
    app = App(buffered_bytes=100_000)
    first, _ = connect(app)
    first.data_received(POST + b"content-length: 60000\r\n\r\n" + b"a" * 60_000)
    second, _ = connect(app)
    second.data_received(POST + b"content-length: 30000\r\n\r\n" + b"a" * 30_000)
    with pytest.raises(ApiError) as caught:
        second.hold(30_000)
    assert caught.value.status == 503
    whole, wire = connect(app)
    whole.data_received(POST + b"content-length: 120000\r\n\r\n" + b"a" * 120_000)
    assert status(wire) == 413
    pieces, wire = connect(App(buffered_bytes=100_000))
    pieces.data_received(POST + b"content-length: 120000\r\n\r\n")
    pieces.data_received(b"a" * 110_000)
    assert status(wire) == 413


@pytest.mark.parametrize(
    "around",
    [b"1;" + b"e" * 200 + b"\r\na\r\n", b"1\r\na\r\n1;x=" + b"e" * 70_000],
    ids=["extensions", "one long extension"],
)
def test_extensions_of_chunks_are_limited(around: bytes) -> None:
    app = App(header_bytes=8192)
    connection, wire = connect(app)
    connection.data_received(CHUNKED)
    for _ in range(200):
        if not app.errors:
            connection.data_received(around)
    assert status(wire) == 431
    assert app.buffered == 0


@pytest.mark.parametrize("size", [1000, 16_384, 200_000], ids=["pieces", "reads", "at once"])
def test_an_extension_of_60_kb_is_too_long_however_it_comes(size: int) -> None:
    app = App(header_bytes=32 * 2**10)
    connection, wire = connect(app)
    raw = CHUNKED + b"1;x=" + b"e" * 60_000 + b"\r\na\r\n0\r\n\r\n"
    for at in range(0, len(raw), size):
        connection.data_received(raw[at : at + size])
        if app.errors:
            break
    assert (status(wire), app.asked) == (431, [])
    assert app.buffered == 0


def test_what_follows_a_body_in_chunks_is_no_extension() -> None:
    app = App(header_bytes=8192)
    connection, _ = connect(app)
    following = POST + b"content-length: 60000\r\n\r\n" + b"b" * 60_000
    connection.data_received(CHUNKED + b"1\r\na\r\n0\r\n\r\n" + following)
    assert app.errors == []
    assert (len(app.asked), len(connection._queue)) == (1, 1)


def test_one_long_trailer_is_no_body() -> None:
    app = App(header_bytes=8192)
    connection, wire = connect(app)
    connection.data_received(CHUNKED + b"0\r\nx: ")
    for _ in range(20):
        connection.data_received(b"t" * 1000)
    assert status(wire) == 431


@pytest.mark.parametrize("line", [b"t%d: x\r\n", b"t: %d\r\n"], ids=["many", "one"])
@pytest.mark.parametrize("trailers", [False, True])
def test_headers_are_counted_whatever_they_are_called(line: bytes, trailers: bool) -> None:
    app = App(headers=100)
    connection, wire = connect(app)
    lines = b"".join(line % number for number in range(200))
    head = CHUNKED + b"0\r\n" if trailers else b"GET /x HTTP/1.1\r\nhost: a\r\n"
    connection.data_received(head + lines + b"\r\n")
    assert (status(wire), app.asked) == (431, [])


# What the headers decide


def test_a_stranger_is_refused_before_the_body() -> None:
    for head, more in (
        (POST + b"content-length: 1000000\r\nexpect: 100-continue\r\n\r\n", b""),
        (POST + b"content-length: 1000000\r\n\r\n", b"a" * 1000),
        (CHUNKED, b"3e8\r\n" + b"a" * 1000),
    ):
        app = App()
        app.stranger = True
        connection, wire = connect(app)
        connection.data_received(head + more)
        assert status(wire) == 401
        assert b"connection: close" in wire.written
        connection.data_received(b"a" * 100_000)
        assert (app.buffered, app.asked) == (0, [])


def test_trailers_are_no_headers() -> None:
    app = App()
    connection, _ = connect(app)
    trailers = b"authorization: Bearer x\r\nHost: b\r\nHost: c\r\n"
    connection.data_received(CHUNKED + b"1\r\na\r\n0\r\n" + trailers + b"\r\n")
    connection.respond(200, b"")
    connection.data_received(CHUNKED + b"0\r\n" + trailers + b"\r\n")
    connection.respond(200, b"")
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: d\r\n\r\n")
    assert [r.headers[b"host"] for r in app.asked] == [b"a", b"a", b"d"]
    assert not any(b"authorization" in r.headers for r in app.asked)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /x HTTP/1.1\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\nauthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a b\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a/b\r\n\r\n",
        b"GET /x\r\n\r\n",
        b"GET /x HTTP/2.0\r\nhost: a\r\n\r\n",
        b"GET /x HTTP/0.9\r\n\r\n",
        POST + b"content-length: 1\r\ncontent-length: 1\r\n\r\na",
        POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /x HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\nx: a\rb: c\r\n\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\n x: folded\r\n\r\n",
    ],
)
def test_ambiguous_requests_are_refused(raw: bytes) -> None:
    app = App()
    connection, wire = connect(app)
    connection.data_received(raw)
    assert (status(wire), app.asked) == (400, [])


def test_http_1_0_needs_no_host() -> None:
    app = App()
    connection, _ = connect(app)
    connection.data_received(b"GET /x HTTP/1.0\r\n\r\n")
    assert len(app.asked) == 1


# Clients that say no more


def test_a_half_closed_client_has_its_answer() -> None:
    app = App()
    connection, wire = connect(app)
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
    assert connection.eof_received()
    app.clock.run(20.0)
    assert not app.call.cancelled
    assert set(wire.written.split(b"\r\n\r\n")) == {b"HTTP/1.1 100 Continue", b""}
    connection.respond(200, b"here")
    assert wire.written.endswith(b"here")
    assert wire.closed


def test_a_client_that_left_costs_nothing_more() -> None:
    app = App()
    connection, wire = connect(app)
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
    wire.deaf = True
    assert connection.eof_received()
    app.clock.run(0.1)
    assert (app.call.cancelled, wire.closed) == (True, True)
    # One that waits for nothing is gone, too.
    idle, _ = connect(app)
    assert not idle.eof_received()


def test_a_half_closed_client_hears_nothing_within_its_stream() -> None:
    app = App()
    connection, wire = connect(app)
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
    connection.begin_stream()
    before = wire.written
    assert connection.eof_received()
    app.clock.run(20.0)
    assert wire.written == before
    connection.end_stream(b"data: x\n\n")
    assert wire.closed


def test_a_half_closed_client_of_http_1_0_waits_for_a_limited_time() -> None:
    app = App()
    connection, wire = connect(app)
    connection.data_received(b"GET /x HTTP/1.0\r\n\r\n")
    assert connection.eof_received()
    app.clock.run(30.0)
    assert (wire.written, app.call.cancelled) == (b"", False)
    app.clock.run(120.0)
    assert app.call.cancelled


def test_queued_requests_of_a_half_closed_client_are_served() -> None:
    app = App()
    connection, wire = connect(app)
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 2)
    assert connection.eof_received()
    connection.respond(200, b"one")
    app.clock.run(0.01)
    assert len(app.asked) == 2
    connection.respond(200, b"two")
    assert wire.written.endswith(b"two")
    assert wire.closed
