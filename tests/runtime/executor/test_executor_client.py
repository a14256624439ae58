"""A client and an executor that answers when nobody waits any more."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from atoll.runtime.executor.executor_client import ExecutorClient
from atoll.runtime.executor.executor_messages import (
    VERSION,
    Cancel,
    ExecutorWelcome,
    Finished,
    Invoke,
    ReleaseArrays,
    StreamPiece,
)
from atoll.runtime.executor.executor_wire import FrameDecoder, decode_call, encode_frame, pack_value
from atoll.tasks.values import Handle


def handle(number: int) -> Handle:
    return Handle(f"{number:032x}", "e", "127.0.0.1:1", "h", "/nowhere", "float32", (3,), 0)


class LateExecutor:
    """Answers an invocation only once it was cancelled, or gives pieces and never an end."""

    def __init__(self, pieces: int) -> None:
        self.released: set[str] = set()
        self.all_released = asyncio.Event()
        self.left = asyncio.Event()
        self._pieces = pieces
        self._ends = 0 if pieces else 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak with one caller."""
        decoder, greeted = FrameDecoder(), False

        def tell(message: msgspec.Struct) -> None:
            writer.write(encode_frame(message))

        def value(number: int) -> object:
            return pack_value({"sound": [handle(number)]})

        while data := await reader.read(65536):
            for body in decoder.feed(data):
                if not greeted:
                    greeted = True
                    tell(ExecutorWelcome(VERSION, "e", "h", ["c"]))
                    continue
                message, _ = decode_call(body)
                if isinstance(message, Invoke):
                    for number in range(self._pieces):
                        tell(StreamPiece(message.id, value(number)))
                elif isinstance(message, Cancel):
                    for number in range(self._ends):
                        tell(Finished(message.id, value(self._pieces + number)))
                elif isinstance(message, ReleaseArrays):
                    self.released |= set(message.handles)
                    if len(self.released) == self._pieces + self._ends:
                        self.all_released.set()
        writer.close()
        await writer.wait_closed()
        self.left.set()


@pytest.mark.parametrize(("pieces", "streams"), [(0, False), (2, False), (3, True)])
async def test_arrays_that_nobody_takes_are_given_back(pieces: int, streams: bool) -> None:
    executor = LateExecutor(pieces)
    server = await asyncio.start_server(executor.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = ExecutorClient(f"127.0.0.1:{port}", "t", "me")
    await client.connect()

    async def leave_after_one() -> None:
        async with aclosing(client.stream("c", {})) as items:
            async for item in items:
                # What was taken is for the taker to release.
                await client.release([item.value["sound"][0]])
                await asyncio.sleep(0)
                break

    async def call() -> None:
        await client.call("c", {})

    task = asyncio.create_task(leave_after_one() if streams else call())
    if streams:
        await task
    else:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    async with asyncio.timeout(60):
        await executor.all_released.wait()
        await client.close()
        await executor.left.wait()
    server.close()
    await asyncio.gather(task, return_exceptions=True)
