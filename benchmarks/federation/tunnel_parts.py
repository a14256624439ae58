"""Processes of the tunnel's benchmark: an engine that stamps its tokens, and a plain HTTP proxy before it.

The proxy is as lean as Python can be.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import cast

import uvloop

from atoll.runtime.http.upstream import HttpUpstream, HttpUpstreamPool
from atoll.runtime.pool.member import Backend, Member
from atoll.runtime.pool.outliers import Outliers
from benchmarks.serving.fake_engine import LAST, MODEL, Client, Engine

_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"fake","t":%016d,'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class StampingEngine(Engine):
    """Writes into each token when it was sent, in microseconds of the machine's own clock."""

    def step(self) -> None:
        asyncio.get_running_loop().call_later(self.step_s, self.step)
        for client, left in list(self.streams.items()):
            if left:
                event = _EVENT % (time.monotonic_ns() // 1000)
                client.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
                self.streams[client] = left - 1
            else:
                client.transport.write(LAST)
                del self.streams[client]


class ClosingClient(Client):
    """Closes when asked to, as engines do; whoever looks at their health relies on it."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.buffer and b"connection: close" in data.lower():
            self.transport.close()


class Front(asyncio.Protocol):
    """A client's connection: one request at a time, the answer in chunks."""

    def __init__(self, links: HttpUpstreamPool) -> None:
        self._links = links
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length:")
        if at >= 0 and len(body) < int(head[at + 15 :].split(b"\r\n", 1)[0]):
            return
        self._buffer = b""
        self._send(head.split(b" ", 2)[1], body)

    def _send(self, path: bytes, body: bytes) -> None:
        link = self._links.take()
        if link is not None:
            link.ask(self, path, body, b"")
            return

        def connected(task: asyncio.Task[HttpUpstream]) -> None:
            task.result().ask(self, path, body, b"")

        connecting = asyncio.get_running_loop().create_task(self._links.connect())
        connecting.add_done_callback(connected)

    def on_head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        del retry_after
        self._transport.write(
            b"HTTP/1.1 %d OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
            % (status, content_type)
        )

    def on_body(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def on_end(self) -> None:
        self._transport.write(b"0\r\n\r\n")

    def on_lost(self, reason: str, *, unused: bool) -> None:
        del unused
        print(f"lost: {reason}", flush=True)
        self._transport.abort()


async def listen(factory: Callable[[], asyncio.Protocol], port: int) -> None:
    """Serve for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


async def run(options: argparse.Namespace) -> None:
    """Be one of the processes."""
    if options.part == "engine":
        engine = StampingEngine(options.tokens, options.step_ms / 1e3)
        engine.step()
        await listen(lambda: ClosingClient(engine), options.port)
    else:
        backend = Backend(id="e", url=f"http://127.0.0.1:{options.engine}", models=(MODEL,))
        links = HttpUpstreamPool(Member(backend, Outliers()), asyncio.get_running_loop())
        await listen(lambda: Front(links), options.port)


def main() -> None:
    """Read the options and be that process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["engine", "proxy"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--engine", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=5.0)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
