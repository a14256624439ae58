"""An engine that answers with fixed bytes: as little work as Python can do, so that proxies are measured.

Every stream gets its first token at once and one token a step after that; a step takes `--step-ms` and serves
all streams, as engines do. Requests that do not stream are answered at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import cast

import uvloop

MODEL = "fake"
TEXT = " token"
USAGE = {"prompt_tokens": 10, "completion_tokens": 100, "total_tokens": 110}


def _chunk(**fields: object) -> bytes:
    data = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    event = f"data: {json.dumps(data | fields, separators=(',', ':'))}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _choice(finish: str | None = None, **delta: str) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = HEAD + _chunk(choices=[_choice(role="assistant", content="")])
TOKEN = _chunk(choices=[_choice(content=TEXT)])
LAST = (
    _chunk(choices=[_choice("length")])
    + _chunk(choices=[], usage=USAGE)
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)


def _whole(data: object) -> bytes:
    body = json.dumps(data).encode()
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


ANSWER = _whole(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT * 20},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": USAGE,
    }
)
MODELS = _whole({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "x"}]})


class Engine:
    """The streams that run."""

    def __init__(self, tokens: int, step_s: float) -> None:
        self.tokens = tokens
        self.step_s = step_s
        self.streams: dict[Client, int] = {}

    def step(self) -> None:
        """Give every stream a token."""
        asyncio.get_running_loop().call_later(self.step_s, self.step)
        for client, left in list(self.streams.items()):
            if left:
                client.transport.write(TOKEN)
                self.streams[client] = left - 1
            else:
                client.transport.write(LAST)
                del self.streams[client]


class Client(asyncio.Protocol):
    """A connection; requests come whole or in pieces, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.engine.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET"):
            self.buffer = b""
            self.transport.write(MODELS)
            return
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at < 0:
            # Chunked: the end mark is enough to look for.
            if not body.endswith(b"0\r\n\r\n"):
                return
        elif len(body) < int(lower[at + 15 :].split(b"\r\n", 1)[0]):
            return
        self.buffer = b""
        if b'"stream":true' in body or b'"stream": true' in body:
            self.transport.write(FIRST)
            self.engine.streams[self] = self.engine.tokens
        else:
            self.transport.write(ANSWER)


async def serve(port: int, tokens: int, step_s: float) -> None:
    """Serve for ever; the port is printed once it is open."""
    engine = Engine(tokens, step_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(engine), "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    engine.step()
    await server.serve_forever()


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=10.0)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.tokens, options.step_ms / 1e3))


if __name__ == "__main__":
    main()
