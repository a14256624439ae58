"""Connections to backends: what a backend says too much of, and what it says after its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

pytest.importorskip("httptools", reason="needs the extra 'serve'")

from atoll.runtime.http.upstream import HttpUpstreamPool
from atoll.runtime.pool.member import Backend, Member
from atoll.runtime.pool.outliers import Outliers

PATIENCE_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\n"


class Kept:
    """A receiver that keeps what it hears."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, bytes, bytes]] = []
        self.lost = ""
        self.over = asyncio.Event()

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        self.heads.append((status, content_type, retry_after))

    def on_body(self, data: bytes) -> None:
        del data

    def on_end(self) -> None:
        self.over.set()

    def on_lost(self, reason: str, *, unused: bool) -> None:
        del unused
        self.lost = reason
        self.over.set()


def ask(answers: Sequence[bytes]) -> list[Kept]:
    """Ask a backend once for each of its answers, on one connection; return what was heard."""

    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for data in answers:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(data)
            # The end of the connection is the other side's.
            await reader.read()
        writer.transport.abort()
        ended.set()

    async def go() -> list[Kept]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        backend = Backend(id="b", url=f"http://127.0.0.1:{port}", models=("m",))
        pool = HttpUpstreamPool(Member(backend, Outliers()), asyncio.get_running_loop())
        upstream = await pool.connect()
        heard = []
        for _ in answers:
            receiver = Kept()
            upstream.ask(receiver, b"/", b"", b"")
            async with asyncio.timeout(PATIENCE_S):
                await receiver.over.wait()
            heard.append(receiver)
        upstream.close()
        server.close()
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
        await asyncio.sleep(0)
        return heard

    return asyncio.run(go())


def test_headers_without_end_are_not_kept() -> None:
    (heard,) = ask([HEAD + b"".join(b"H%d: x\r\n" % number for number in range(5000))])
    assert heard.lost == "the answer has too many headers"


def test_trailers_are_no_headers_of_the_next_answer() -> None:
    first = HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nretry-after: 9\r\n\r\n"
    _, second = ask([first, HEAD + b"content-type: a/b\r\ncontent-length: 0\r\n\r\n"])
    assert second.heads == [(200, b"a/b", b"")]


@pytest.mark.parametrize(
    "endless",
    [
        HEAD + b"x-long: " + b"x" * 600_000,
        HEAD + b"x: y\r\n" * 100_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 24_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-long: " + b"x" * 600_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"x: y\r\n" * 100_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 600_000,
    ],
    ids=["a header", "one header again", "interim", "a trailer", "one trailer again", "extension"],
)
def test_what_is_around_a_body_has_an_end(endless: bytes) -> None:
    (heard,) = ask([endless])
    assert heard.lost == "the headers or trailers of the answer are too large"


def test_a_large_body_is_not_around_itself() -> None:
    body = b"%x\r\n%b\r\n" % (700_000, b"x" * 700_000)
    (heard,) = ask([HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"])
    assert heard.lost == ""


@pytest.mark.parametrize("more", [HEAD, HEAD + b"content-length: 1\r\n\r\nb", b"HTTP/1.1 2"])
async def test_an_answer_that_nobody_asked_for_goes_to_nobody(more: bytes) -> None:
    """Of two answers at once the second is not that to the next request."""

    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"content-length: 1\r\n\r\na" + more)
        await reader.read()
        writer.transport.abort()
        ended.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    backend = Backend(id="b", url=f"http://127.0.0.1:{port}", models=("m",))
    pool = HttpUpstreamPool(Member(backend, Outliers()), asyncio.get_running_loop())
    upstream, receiver = await pool.connect(), Kept()
    upstream.ask(receiver, b"/", b"", b"")
    async with asyncio.timeout(PATIENCE_S):
        await receiver.over.wait()
    # Neither now, as others would take it who waited for a place, nor later.
    assert pool.take() is None
    await asyncio.sleep(0)
    assert pool.take() is None
    upstream.close()
    server.close()
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    await asyncio.sleep(0)


async def test_a_connection_that_still_sends_is_not_kept() -> None:
    """A backend may answer before it has read: what it has not would come before the next request."""

    ended, over = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"content-length: 1\r\n\r\na")
        # It reads no more.
        await over.wait()
        writer.transport.abort()
        ended.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=2**16)
    port = server.sockets[0].getsockname()[1]
    backend = Backend(id="b", url=f"http://127.0.0.1:{port}", models=("m",))
    pool = HttpUpstreamPool(Member(backend, Outliers()), asyncio.get_running_loop())
    upstream, receiver = await pool.connect(), Kept()
    upstream.ask(receiver, b"/", b"x" * 32 * 2**20, b"")
    async with asyncio.timeout(PATIENCE_S):
        await receiver.over.wait()
    assert receiver.lost == ""
    assert pool.take() is None
    upstream.close()
    over.set()
    server.close()
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    await asyncio.sleep(0)
