"""One request while it is answered: what it brought, the way it takes, what it used, when it must end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.core.errors import AtollError, InputError
from atoll.runtime.front.config import Endpoint, FrontConfig
from atoll.runtime.front.dispatch import Observer, RequestDispatcher
from atoll.runtime.front.fleet import ExecutorFleet
from atoll.runtime.front.intake import MediaIntake, RequestMedia
from atoll.runtime.front.recovery import out_of_time
from atoll.runtime.front.services import LoadedService
from atoll.runtime.front.traces import RequestTrace
from atoll.runtime.front.usage import USAGE_HEADER, UsageCount
from atoll.runtime.http.handlers import Headers
from atoll.runtime.media.limits import MediaLimits
from atoll.runtime.openai import ApiError
from atoll.tasks.answer import AnswerEvent
from atoll.tasks.run import Run
from atoll.workload.classes import INPUTS, OUTPUTS, Modality

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOG = logging.getLogger(__name__)
PATH_HEADER = "x-atoll-path"
_Made = TypeVar("_Made")
_Item = TypeVar("_Item")


class FrontRequest:
    """One request to one endpoint of a service."""

    def __init__(
        self,
        config: FrontConfig,
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
