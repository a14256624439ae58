"""The processes of the tunnel's benchmark: an engine that stamps its tokens, an ingress, a worker.

The ingress is as lean as Python can be, and the same for all: behind it is either the engine itself (a
plain HTTP proxy) or the tunnel.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Protocol, cast

import uvloop

from atoll.fabric.identity.access import Access
from atoll.fabric.registry.records import Metadata, SessionState
from atoll.fabric.transport.fabric import Fabric
from atoll.fabric.tunnel.tunnel_client import Receiver, TunnelClient
from atoll.fabric.tunnel.tunnel_frames import TunnelRequest
from atoll.fabric.tunnel.tunnel_server import TunnelServer
from atoll.runtime.http.upstream import HttpUpstream, HttpUpstreamPool
from atoll.runtime.join.bridge import Bridge
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


class Upstream(Protocol):
    """Sends a request somewhere."""

    def __call__(self, path: bytes, body: bytes, receiver: Receiver) -> None: ...


class Front(asyncio.Protocol):
    """A client's connection: one request at a time, the answer in chunks."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
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
        self._upstream(head.split(b" ", 2)[1], body, self)

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


def plain(port: int) -> Upstream:
    """Return the way straight to the engine, over kept connections."""
    loop = asyncio.get_running_loop()
    backend = Backend(id="engine", url=f"http://127.0.0.1:{port}", models=(MODEL,))
    links = HttpUpstreamPool(Member(backend, Outliers()), loop)

    def send(path: bytes, body: bytes, receiver: Receiver) -> None:
        link = links.take()
        if link is not None:
            link.ask(receiver, path, body, b"")
            return

        def connected(task: asyncio.Task[HttpUpstream]) -> None:
            task.result().ask(receiver, path, body, b"")

        loop.create_task(links.connect()).add_done_callback(connected)

    return send


async def tunnel(token: str) -> Upstream:
    """Return the way through the fabric, to the worker of this module."""
    fabric = await Fabric.connect(
        Access.open(token), Metadata(name="ingress", provider="", role="gateway")
    )
    caller = TunnelClient(fabric)

    def workers() -> list[str]:
        peers = fabric.peers()
        return [p.sid for p in peers if p.routable and p.metadata.name.startswith("worker")]

    def send(path: bytes, body: bytes, receiver: Receiver) -> None:
        submit = TunnelRequest(b"POST", path, ((b"content-type", b"application/json"),), body)
        caller.call(workers()[0], submit, receiver)

    while not workers():
        await asyncio.sleep(0.02)
    return send


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
    elif options.part == "worker":
        fabric = await Fabric.connect(
            Access.open(options.fabric), Metadata(name="node", provider="", role="worker")
        )
        bridge = Bridge(f"http://127.0.0.1:{options.engine}")
        bridge.open = True
        answerer = TunnelServer(fabric, bridge.handle)
        await fabric.announce(SessionState.SERVING)
        await asyncio.Event().wait()
        await answerer.close()
    elif options.part == "proxy":
        upstream = plain(options.engine)
        await listen(lambda: Front(upstream), options.port)
    else:
        upstream = await tunnel(options.fabric)
        await listen(lambda: Front(upstream), options.port)


def main() -> None:
    """Read the options and be that process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["engine", "worker", "proxy", "tunnel"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--engine", type=int, default=0)
    parser.add_argument("--fabric", default="")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=5.0)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
