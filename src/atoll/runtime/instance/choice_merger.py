"""The answers to one request as they come, from all its choices, and as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from atoll.engine.scheduler import TokenEvent
from atoll.runtime.http.handlers import EventStream, Headers
from atoll.runtime.instance.choice_request import ChoiceRequest, ParsedRequest
from atoll.runtime.instance.instance_answers import ChoiceDelta, ChoiceText, ResponseWriter
from atoll.runtime.instance.instance_metrics import InstanceMetrics
from atoll.runtime.openai import ApiError, error_body


class GenerationError(Exception):
    """The engine gave a request up; the text says why. `refused`: it lies in what was asked."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused

    def api_error(self) -> ApiError:
        """Return what the client is told: that it is at fault, or that we are."""
        if self.refused:
            return ApiError(400, str(self))
        return ApiError(500, str(self), kind="server_error")


class ChoiceSource(Protocol):
    """Whoever has choices generated, and counts them."""

    metrics: InstanceMetrics

    def events(self, choice: ChoiceRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield the engine's events for one choice; GenerationError if it cannot go on."""
        ...


class ChoiceMerger:
    """The pieces of all choices of a request as they come."""

    def __init__(
        self,
        server: ChoiceSource,
        parsed: ParsedRequest,
        choices: list[ChoiceText],
        started_s: float,
    ) -> None:
        self._server = server
        self._parsed = parsed
        self._started_s = started_s
        self._choices = choices
        self._queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue()

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices, those generated elsewhere included."""
        return sum(choice.completion_tokens for choice in self._choices)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were not computed anew; those of a prompt count once."""
        return sum(choice.cached for choice in self._choices[:: self._parsed.best_of])

    async def pieces(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield pieces until every choice has ended; GenerationError if one cannot."""
        # A single choice needs neither a task nor a queue.
        if len(self._choices) == 1:
            only = self._stream_choice(self._choices[0], self._parsed.choices[0])
            async with contextlib.aclosing(only) as pieces:
                async for piece in pieces:
                    yield piece
            return
        tasks = [
            asyncio.create_task(self._collect(choice, request))
            for choice, request in zip(self._choices, self._parsed.choices, strict=True)
        ]
        left = len(tasks)
        try:
            while left:
                item = await self._queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.finish is not None
                yield item
        finally:
            # Whoever leaves or fails ends the other choices as well.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(self, choice: ChoiceText, request: ChoiceRequest) -> None:
        try:
            async with contextlib.aclosing(self._stream_choice(choice, request)) as pieces:
                async for piece in pieces:
                    self._queue.put_nowait(piece)
        except GenerationError as error:
            self._queue.put_nowait(error)

    async def _stream_choice(
        self, choice: ChoiceText, request: ChoiceRequest
    ) -> AsyncGenerator[ChoiceDelta, None]:
        metrics = self._server.metrics
        # It ended before it came here: only what the client has not seen is left to give.
        if choice.finish is not None:
            yield choice.owed()
            return
        if request.echo is not None and request.read is None:
            yield choice.echo(request, None)
        if request.is_silent and request.read is None:
            yield ChoiceDelta(choice.index, finish="length")
            return
        last_s: float | None = None
        # Unless something else is said, the client has left.
        ended = "abort"
        try:
            async with contextlib.aclosing(self._server.events(request)) as events:
                async for event in events:
                    if event.token is not None:
                        last_s = self._note_token(last_s)
                    # What is read of the prompt comes with the first event.
                    if request.read is not None and event.index == 0:
                        for piece in choice.tell_prompt(request, event.reading):
                            yield piece
                        if request.is_silent:
                            ended = "length"
                            yield ChoiceDelta(choice.index, finish="length")
                            break
                    new = choice.add(event)
                    if new is None:
                        continue
                    yield new
                    if new.finish is not None:
                        ended = new.finish
                        break
        except GenerationError:
            ended = "error"
            raise
        finally:
            metrics.finished[ended] += 1
            metrics.whole.observe(time.monotonic() - self._started_s)

    def _note_token(self, last_s: float | None) -> float:
        """Note how long a token took after the one before; return when it came."""
        metrics, now_s = self._server.metrics, time.monotonic()
        metrics.generation_tokens += 1
        if last_s is None:
            metrics.first_token.observe(now_s - self._started_s)
        else:
            metrics.per_token.observe(now_s - last_s)
        return now_s


async def begin_stream(
    answer: ChoiceMerger, writer: ResponseWriter, headers: Headers = ()
) -> EventStream:
    """Return the stream once its first piece is there: what fails before has a status of its own."""
    pieces = answer.pieces()
    try:
        first = await anext(pieces)
    except GenerationError as error:
        raise error.api_error() from error
    except BaseException:
        await pieces.aclose()
        raise
    writer.cached_tokens = answer.cached_tokens
    return EventStream(_stream(answer, pieces, first, writer), headers)


async def _stream(
    answer: ChoiceMerger,
    pieces: AsyncGenerator[ChoiceDelta, None],
    first: ChoiceDelta,
    writer: ResponseWriter,
) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(pieces):
            yield writer.roles() + writer.chunk(first)
            async for piece in pieces:
                yield writer.chunk(piece)
    except GenerationError as error:
        kind = error.api_error().kind
        yield b"data: " + error_body(str(error), kind) + b"\n\n"
        return
    writer.cached_tokens = answer.cached_tokens
    yield writer.end(answer.completion_tokens)
