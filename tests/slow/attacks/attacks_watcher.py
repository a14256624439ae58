"""Well-behaved clients that stream all the time, in a process of their own, and write down when they waited.

`python -m benchmarks.attacks_watcher FILE NAME=PORT,MODEL[,KEY] ...` streams one answer after the other from
each and adds a line to FILE for every gap worth telling: when it ended (s, monotonic), its length (s), whose
it was, and what went wrong, if anything did. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import IO, NamedTuple

from tests.slow.attacks.attacks_wire import HOST, head_of

WORTH_S = 0.02
"""Shorter gaps are not told."""
_TOKENS = 100
_AGAIN_S = 0.05
_HUNG_S = 30.0


class Gap(NamedTuple):
    """A time without a token, of one client."""

    ended_s: float
    length_s: float
    client: str
    wrong: str
    """What went wrong; empty: nothing but time."""


def read_gaps(path: Path) -> list[Gap]:
    """Return all gaps told so far."""
    gaps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        ended, length, client, wrong = line.split("\t", 3)
        gaps.append(Gap(float(ended), float(length), client, wrong))
    return gaps


class StreamingClient:
    """Streams from one model, again and again."""

    def __init__(self, name: str, port: int, model: str, key: str | None, sink: IO[str]) -> None:
        self._name = name
        self._port = port
        self._sink = sink
        fields = {
            "model": model,
            "prompt" if model == "tiny" else "messages": "Good day. "
            if model == "tiny"
            else [{"role": "user", "content": "Good day."}],
            "max_tokens": _TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        path = "/v1/completions" if model == "tiny" else "/v1/chat/completions"
        body = json.dumps(fields, separators=(",", ":")).encode()
        head = head_of("POST", path, "content-type: application/json", key=key)
        self._request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        self._last_s = time.monotonic()

    async def run(self) -> None:
        """Stream for ever."""
        while True:
            try:
                wrong = await asyncio.wait_for(self._stream(), _HUNG_S)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                self._tell(time.monotonic() - self._last_s, wrong)
                await asyncio.sleep(_AGAIN_S)

    def _tell(self, length_s: float, wrong: str = "") -> None:
        said = " ".join(wrong.split())[:300]
        self._sink.write(f"{time.monotonic():.4f}\t{length_s:.4f}\t{self._name}\t{said}\n")
        self._sink.flush()

    async def _stream(self) -> str:
        """Stream one answer; return what was wrong with it."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(self._request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                return f"{head[9:12].decode()} {(await reader.read(300)).decode(errors='replace')}"
            tail = b""
            while True:
                data = await reader.read(65536)
                if not data:
                    return "the stream was cut"
                now_s = time.monotonic()
                if now_s - self._last_s > WORTH_S:
                    self._tell(now_s - self._last_s)
                self._last_s = now_s
                tail = tail[-64:] + data
                if b'data: {"error"' in tail:
                    return f"the stream failed: {tail.decode(errors='replace')}"
                if tail.endswith(b"0\r\n\r\n"):
                    return "" if b"data: [DONE]" in tail else "no end mark"
        finally:
            writer.transport.abort()


async def _watch(path: Path, clients: list[str]) -> None:
    with path.open("a", encoding="utf-8") as sink:
        tasks = []
        for client in clients:
            name, _, where = client.partition("=")
            port, model, *key = where.split(",")
            streaming = StreamingClient(name, int(port), model, key[0] if key else None, sink)
            tasks.append(asyncio.create_task(streaming.run()))
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def main() -> None:
    """Watch until told to end."""
    asyncio.run(_watch(Path(sys.argv[1]), sys.argv[2:]))


if __name__ == "__main__":
    main()
