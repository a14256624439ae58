"""One request while it is answered: what it brought, the way it takes, what it used, when it must end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.core.errors import AtollError, InputError
from atoll.runtime.graph_server.answer_shapes import AnswerExtras
from atoll.runtime.graph_server.dispatch import Observer, RequestDispatcher
from atoll.runtime.graph_server.executor_links import ExecutorFleet
from atoll.runtime.graph_server.graph_config import Endpoint, GraphServerConfig
from atoll.runtime.graph_server.graph_services import LoadedService
from atoll.runtime.graph_server.intake import MediaIntake, RequestMedia
from atoll.runtime.graph_server.recovery import out_of_time
from atoll.runtime.graph_server.request_traces import RequestTrace
from atoll.runtime.http.handlers import Headers
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.openai import ApiError
from atoll.tasks.run import AnswerEvent, Run
from atoll.tasks.task import Task
from atoll.workload.classes import INPUTS, OUTPUTS, Modality

if TYPE_CHECKING:
    from numpy.typing import NDArray
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from atoll.tasks.invocation import Final, Invocation, InvocationRecord
from atoll.tasks.values import Handle, Value

_LOG = logging.getLogger(__name__)
PATH_HEADER = "x-atoll-path"
_Made = TypeVar("_Made")
_Item = TypeVar("_Item")


class GraphRequest:
    """One request to one endpoint of a service."""

    def __init__(
        self,
        config: GraphServerConfig,
        service: LoadedService,
        endpoint: Endpoint,
        trace: RequestTrace,
        fleet: ExecutorFleet,
        intake: MediaIntake,
        observe: Observer,
        *,
        traced: bool = False,
    ) -> None:
        self.service = service
        self.endpoint = endpoint
        self.trace = trace
        self.traced = traced
        self.usage = UsageCount()
        self.media = RequestMedia(intake, trace.request)
        self._config = config
        self._fleet = fleet
        self._intake = intake
        self._observe = observe
        self.answers: list[RequestAnswer] = []
        """What its task is asked: one, or as many as the client wants choices."""

    @property
    def limits(self) -> MediaLimits:
        """How much of each kind may be brought and asked for."""
        return self._config.limits

    @property
    def task(self) -> Task[Any, Any]:
        """The task that answers."""
        return self.service.tasks[self.endpoint]

    def begin(self, *orders: object, wants: tuple[Modality, ...], seed: int | None = None) -> None:
        """Give each order its way, and let the task begin; what the request brings is taken in by now."""
        self.trace.intake_s = self.trace.now_s()
        kinds = {"text", *self.media.kinds}
        brought = (
            tuple(m for m in INPUTS if m in kinds),
            tuple(m for m in OUTPUTS if m in wants),
        )
        self.usage.audio_s = self.media.audio_s
        self.usage.image_pixels = self.media.image_pixels
        drawn = zlib.crc32(self.trace.request.encode()) if seed is None else seed
        for number, order in enumerate(orders):
            route = self.service.router.route(brought, self._fleet.dead())
            self.trace.klass = self.trace.klass or route.klass
            dispatcher = RequestDispatcher(
                self._fleet,
                self.service.router,
                route,
                self.trace,
                patience_s=self._config.patience_s,
                deadline_s=self._config.request_s,
                dynamic=self._config.routing == "dynamic",
                observe=self._observe,
            )
            self.answers.append(RequestAnswer(self.task, order, dispatcher, drawn + number))

    async def result(self) -> Any:
        """Return the whole answer of the task, where it was asked for one."""
        return (await self.results())[0]

    async def results(self) -> list[Any]:
        """Return all answers of the task, whole."""
        running = [asyncio.ensure_future(answer.run.result()) for answer in self.answers]
        try:
            with _as_api_errors():
                whole = await asyncio.gather(*running)
        finally:
            # Where one has failed, nobody waits for the others.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        self.trace.first()
        self._count()
        return whole

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Yield parts of the answer of the task as they come, where it was asked for one."""
        async with contextlib.aclosing(self.all_events()) as events:
            async for _, event in events:
                yield event

    async def all_events(self) -> AsyncGenerator[tuple[int, AnswerEvent], None]:
        """Yield the parts of all answers as they come, each with the number of its answer."""
        timely = timed(merged([answer.run.events() for answer in self.answers]), self._left_s)
        with _as_api_errors():
            async with contextlib.aclosing(timely) as events:
                async for event in events:
                    self.trace.first()
                    yield event
        self._count()

    async def array(self, handle: Any, number: int = 0) -> NDArray[Any]:
        """Return the array of a handle in an answer."""
        return await self.answers[number].dispatcher.array(handle)

    async def encode(self, size: int, make: Callable[[], _Made]) -> _Made:
        """Make a part of the answer of `size` bytes, in a thread where that takes long."""
        return await self._intake.encode(size, make)

    def headers(self, *, usage: bool = True) -> Headers:
        """Return the headers that answers have: the way it took, and what is known of its usage."""
        shown = ((PATH_HEADER, self._path()),)
        return (*shown, (USAGE_HEADER, self.usage.header())) if usage else shown

    async def more(self, answer: Any, number: int = 0) -> dict[str, Any]:
        """Return what an answer of the task holds that the shape of its endpoint does not know."""
        dispatcher = self.answers[number].dispatcher
        return await AnswerExtras(self.endpoint, dispatcher.array).write(answer)

    def extras(self, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the extension field of a body: `more` of the answer, and the trace where that is wanted."""
        shown: dict[str, Any] = {"answer": more} if more else {}
        if self.traced:
            self._describe()
            shown["trace"] = self.trace.shown()
        return {"atoll": shown} if shown else {}

    async def close(self, status: int) -> None:
        """End it: nothing of it is kept anywhere."""
        self._describe()
        self.trace.status = status
        self.trace.took_s = self.trace.now_s()
        self.media.close()
        for answer in self.answers:
            await answer.dispatcher.close()

    async def renew(self) -> None:
        """Renew the leases of everything that it holds."""
        for answer in self.answers:
            await answer.dispatcher.renew()

    def _path(self) -> str:
        """Return the way it took: that of its first answer."""
        return self.answers[0].dispatcher.route.describe() if self.answers else ""

    def _describe(self) -> None:
        self.trace.path = self._path()
        self.trace.rounds = sum(answer.run.rounds for answer in self.answers)

    def _count(self) -> None:
        for number, answer in enumerate(self.answers):
            # What all answers are given counts once, as with OpenAI.
            self.usage.add_records(answer.run.records, prompts=number == 0)

    def _left_s(self) -> float:
        return self._config.request_s - self.trace.now_s()


class RequestAnswer:
    """One answer of a task to a request, and what its components say of it beside its text."""

    def __init__(
        self, task: Task[Any, Any], order: object, dispatcher: RequestDispatcher, seed: int
    ) -> None:
        self.dispatcher = dispatcher
        self.run: Run[Any] = Run(task, order, self, seed=seed)
        self.calls: list[dict[str, Any]] = []
        """Pieces of calls, as OpenAI writes them in a stream; whoever has sent them takes them out."""
        self.logprobs: list[dict[str, Any]] = []
        """How likely its tokens were; the same."""

    async def call(self, invocation: Invocation) -> Value:
        """Run an invocation and return what it gives."""
        return await self.dispatcher.call(invocation)

    async def stream(self, invocation: Invocation) -> AsyncGenerator[Value | Final, None]:
        """Run an invocation, yield what comes, and note what tasks do not see of it."""
        async with contextlib.aclosing(self.dispatcher.stream(invocation)) as items:
            async for item in items:
                if isinstance(item, dict):
                    self.calls += _listed(item, "tool_calls")
                    self.logprobs += _listed(item, "logprobs")
                yield item

    @property
    def finish_reason(self) -> str:
        """Why the text ended, as the last component that says so has it."""
        for record in reversed(self.run.records):
            if isinstance(record.outcome, dict):
                reason = record.outcome.get("finish_reason")
                if isinstance(reason, str):
                    return reason
        return "stop"


def _listed(piece: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = piece.get(key)
    return found if isinstance(found, list) else []


async def merged(
    sources: Sequence[AsyncGenerator[_Item, None]],
) -> AsyncGenerator[tuple[int, _Item], None]:
    """Yield what comes of several sources, each with its number; all are closed whatever happens."""
    if len(sources) == 1:
        # Most requests want one answer: no task is made for each of its pieces.
        async with contextlib.aclosing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(source)): n for n, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(sources[number]))] = number
                yield number, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def timed(
    items: AsyncIterator[_Item], left_s: Callable[[], float]
) -> AsyncGenerator[_Item, None]:
    """Yield what comes, as long as there is time; the source is closed whatever happens."""
    try:
        while True:
            try:
                async with asyncio.timeout(max(0.0, left_s())):
                    item = await anext(items)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise out_of_time("the request took too long") from None
            yield item
    finally:
        closing = getattr(items, "aclose", None)
        if closing is not None:
            await closing()


async def prime(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Return a stream whose first piece is there already, so that what fails before it is a plain error."""
    try:
        first = await anext(pieces)
    except StopAsyncIteration:
        first = b""
    except BaseException:
        await pieces.aclose()
        raise
    return _chain(first, pieces)


async def _chain(first: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(pieces):
        yield first
        async for piece in pieces:
            yield piece


@contextlib.contextmanager
def _as_api_errors() -> Generator[None, None, None]:
    """Turn what the code of a task raises into errors of the API: bad inputs are 400, the rest is 500."""
    try:
        yield
    except ApiError:
        raise
    except InputError as error:
        raise ApiError(400, error.message, param=error.field) from error
    except Exception as error:
        _LOG.exception("a task failed")
        message = error.message if isinstance(error, AtollError) else "the task failed"
        raise ApiError(500, message, kind="server_error") from error


USAGE_HEADER = "x-atoll-usage"


@dataclass(slots=True)
class UsageCount:
    """audio_s: seconds of sound heard, speech_s: spoken. image_pixels: seen and drawn. characters: to speak.

    Tokens of pictures that are part of a prompt are in `prompt_tokens`, and in `image_tokens` on their own.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    audio_s: float = 0.0
    speech_s: float = 0.0
    image_pixels: int = 0
    characters: int = 0

    def add_records(self, records: Iterable[InvocationRecord], *, prompts: bool = True) -> None:
        """Count the tokens that components report of what they did; those of prompts if `prompts`."""
        for record in records:
            outcome = record.outcome
            if not isinstance(outcome, dict):
                continue
            prompt = outcome.get("prompt_tokens") if prompts else None
            completion = outcome.get("completion_tokens")
            self.prompt_tokens += prompt if isinstance(prompt, int) else 0
            self.completion_tokens += completion if isinstance(completion, int) else 0
            if isinstance(prompt, int):
                self.image_tokens += _embedded(record.invocation.inputs.get("messages"))

    def media(self) -> dict[str, Any]:
        """Return what is not counted in tokens, under Atoll's names."""
        shown: dict[str, Any] = {}
        if self.audio_s:
            shown["audio_seconds"] = round(self.audio_s, 3)
        if self.speech_s:
            shown["speech_seconds"] = round(self.speech_s, 3)
        if self.image_pixels:
            shown["image_pixels"] = self.image_pixels
        return shown

    def chat(self) -> dict[str, Any]:
        """Return it as chat completions have it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "text_tokens": self.prompt_tokens - self.image_tokens,
                "image_tokens": self.image_tokens,
                "audio_tokens": 0,
                "cached_tokens": 0,
            },
            "completion_tokens_details": {
                "text_tokens": self.completion_tokens,
                "audio_tokens": 0,
                "reasoning_tokens": 0,
            },
            **self.media(),
        }

    def header(self) -> str:
        """Return what is known of it now, for the header `x-atoll-usage`; what is not known is not there."""
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "characters": self.characters,
        }
        shown = {name: count for name, count in counts.items() if count} | self.media()
        return msgspec.json.encode(shown).decode()


def _embedded(value: Value) -> int:
    """Return how many vectors stand in the messages of a chat instead of tokens."""
    if isinstance(value, list):
        return sum(_embedded(part) for part in value)
    if isinstance(value, dict):
        found = value.get("embeds")
        if isinstance(found, Handle):
            return found.shape[0] if found.shape else 0
        # A part holds all that its encoder gives, vectors among it.
        return _embedded(value.get("content") if found is None else found)
    return 0
