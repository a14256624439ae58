"""One request while it is answered: what it brought, the way it takes, what it used, when it must end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.core.errors import AtollError, InputError
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
from atoll.workload.classes import INPUTS, OUTPUTS, Modality

if TYPE_CHECKING:
    from numpy.typing import NDArray
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from atoll.tasks.invocation import InvocationRecord
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
        self._run: Run[Any] | None = None
        self.dispatcher: RequestDispatcher | None = None

    @property
    def limits(self) -> MediaLimits:
        """How much of each kind may be brought and asked for."""
        return self._config.limits

    @property
    def records(self) -> Any:
        """The invocations that have ended."""
        return () if self._run is None else self._run.records

    def begin(self, order: object, wants: tuple[Modality, ...], *, seed: int | None = None) -> None:
        """Give the request its way, and let its task begin; what it brings must be taken in by now."""
        self.trace.intake_s = self.trace.now_s()
        kinds = {"text", *self.media.kinds}
        brought = (
            tuple(m for m in INPUTS if m in kinds),
            tuple(m for m in OUTPUTS if m in wants),
        )
        route = self.service.router.route(brought, self._fleet.dead())
        self.trace.klass = route.klass
        self.usage.audio_s = self.media.audio_s
        self.usage.image_pixels = self.media.image_pixels
        self.dispatcher = RequestDispatcher(
            self._fleet,
            self.service.router,
            route,
            self.trace,
            patience_s=self._config.patience_s,
            deadline_s=self._config.request_s,
            dynamic=self._config.routing == "dynamic",
            observe=self._observe,
        )
        drawn = zlib.crc32(self.trace.request.encode()) if seed is None else seed
        task = self.service.tasks[self.endpoint]
        self._run = Run(task, order, self.dispatcher, seed=drawn)

    async def result(self) -> Any:
        """Return the whole answer of the task."""
        assert self._run is not None
        with _as_api_errors():
            answer = await self._run.result()
        self.trace.first()
        self._count()
        return answer

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Yield parts of the answer of the task as they come."""
        assert self._run is not None
        timely = timed(self._run.events(), self._left_s)
        with _as_api_errors():
            async with contextlib.aclosing(timely) as events:
                async for event in events:
                    self.trace.first()
                    yield event
        self._count()

    async def array(self, handle: Any) -> NDArray[Any]:
        """Return the array of a handle in the answer."""
        assert self.dispatcher is not None
        return await self.dispatcher.array(handle)

    async def encode(self, size: int, make: Callable[[], _Made]) -> _Made:
        """Make a part of the answer of `size` bytes, in a thread where that takes long."""
        return await self._intake.encode(size, make)

    def headers(self, *, usage: bool = True) -> Headers:
        """Return the headers that answers have: the way it took, and what is known of its usage."""
        path = "" if self.dispatcher is None else self.dispatcher.route.describe()
        shown = ((PATH_HEADER, path),)
        return (*shown, (USAGE_HEADER, self.usage.header())) if usage else shown

    def extras(self) -> dict[str, Any]:
        """Return what is put into answers of requests that want to be traced."""
        if not self.traced:
            return {}
        self._describe()
        return {"atoll": {"trace": self.trace.shown()}}

    async def close(self, status: int) -> None:
        """End it: nothing of it is kept anywhere."""
        self._describe()
        self.trace.status = status
        self.trace.took_s = self.trace.now_s()
        self.media.close()
        if self.dispatcher is not None:
            await self.dispatcher.close()

    def _describe(self) -> None:
        if self.dispatcher is not None:
            self.trace.path = self.dispatcher.route.describe()
        if self._run is not None:
            self.trace.rounds = self._run.rounds

    def _count(self) -> None:
        self.usage.add_records(self.records)

    def _left_s(self) -> float:
        return self._config.request_s - self.trace.now_s()


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

    def add_records(self, records: Iterable[InvocationRecord]) -> None:
        """Count the tokens that components report of what they did."""
        for record in records:
            outcome = record.outcome
            if not isinstance(outcome, dict):
                continue
            prompt = outcome.get("prompt_tokens")
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
        return _embedded(value.get("content"))
    return 0
