"""The endpoints of a graph server: OpenAI's, for tasks over executors, and pages for those who run it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.core.errors import AtollError
from atoll.runtime.executor.executor_client import Dial
from atoll.runtime.executor.executor_process import split_address
from atoll.runtime.executor.executor_server import ExecutorServer
from atoll.runtime.executor.store import ArrayStore
from atoll.runtime.graph_server.chat_endpoint import answer_chat, read_chat
from atoll.runtime.graph_server.dispatch import LEASE_S
from atoll.runtime.graph_server.embedding_endpoint import answer_embedding, read_embedding
from atoll.runtime.graph_server.executor_links import ExecutorFleet, ExecutorLinks
from atoll.runtime.graph_server.graph_config import (
    ENDPOINT_PATHS,
    EXECUTORS_MISSING,
    Endpoint,
    ExecutorAddress,
    GraphServerConfig,
    GraphService,
)
from atoll.runtime.graph_server.graph_metrics import GraphServerMetrics
from atoll.runtime.graph_server.graph_request import PATH_HEADER, GraphRequest
from atoll.runtime.graph_server.graph_services import LoadedService
from atoll.runtime.graph_server.image_endpoint import answer_image, read_image
from atoll.runtime.graph_server.intake import MediaIntake
from atoll.runtime.graph_server.recovery import out_of_time
from atoll.runtime.graph_server.request_traces import RequestTrace, TraceKeeper
from atoll.runtime.graph_server.speech_endpoint import answer_speech, read_speech
from atoll.runtime.graph_server.transcription_endpoint import (
    answer_transcription,
    read_transcription,
)
from atoll.runtime.http.handlers import (
    Answer,
    ByteStream,
    EventStream,
    HandlerServer,
    Response,
)
from atoll.runtime.http.http_server import ConnectionLimits, Request
from atoll.runtime.openai import ApiError
from atoll.runtime.realtime.realtime_host import REALTIME, RealtimeHost
from atoll.telemetry.metrics import CONTENT_TYPE

_LOG = logging.getLogger(__name__)
_FRESH_S = 5.0
"""An executor that was there so recently counts as there: it may be restarting."""
_SMALL_BODY_BYTES = 2**14
"""Larger requests are read in a thread, so that no stream waits for it."""
_BODY_BYTES = 64 * 2**20
_BUFFERED_BYTES = 512 * 2**20
_READERS = 2
_LAST_TURNS = 100
"""How often a server that stops waits for requests that were cut off."""
_LAST_TURN_S = 0.01
_TRACE_HEADER = b"x-atoll-trace"
_TRACES = "/atoll/v1/traces"


@dataclass(frozen=True, slots=True)
class EndpointHandler:
    """How an endpoint's requests are read (in any thread) and answered."""

    read: Callable[[Request], Any]
    answer: Callable[[Any, GraphRequest], Awaitable[Answer]]


class TaskGraphServer:
    """Answers requests with the tasks of its services."""

    def __init__(
        self,
        config: GraphServerConfig,
        token: str,
        fleet: ExecutorFleet | None = None,
        dial: Dial = asyncio.open_connection,
    ) -> None:
        self.config = config
        self.executors = config.executors
        self.services = {
            service.name: LoadedService(service, config.executors) for service in config.services
        }
        self.metrics = GraphServerMetrics()
        self.traces = TraceKeeper()
        self._links = ExecutorLinks(config.executors, token, config.name, dial)
        self._fleet: ExecutorFleet = fleet or self._links
        self.store = ArrayStore(Path(config.store), config.store_bytes, owner=config.name)
        # Executors on other hosts fetch what clients sent through a door of its own.
        self._door = ExecutorServer(config.name, token, self.store, dial=dial)
        # No request lives longer than its time, so what it brought needs no renewing.
        self.intake = MediaIntake(config.limits, self.store, config.request_s + LEASE_S)
        self._realtime = RealtimeHost(config.realtime)
        self._http = HandlerServer(
            self.handle,
            ConnectionLimits(body_bytes=_BODY_BYTES, buffered_bytes=_BUFFERED_BYTES),
            upgrades={REALTIME: self._realtime.open},
        )
        self._handlers: dict[Endpoint, EndpointHandler] = {
            "chat": EndpointHandler(read_chat, answer_chat),
            "transcriptions": EndpointHandler(
                lambda request: read_transcription(request, config.limits), answer_transcription
            ),
            "speech": EndpointHandler(read_speech, answer_speech),
            "images": EndpointHandler(read_image, answer_image),
            "embeddings": EndpointHandler(read_embedding, answer_embedding),
        }
        self._active: set[GraphRequest] = set()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        self._created = int(time.time())
        self._draining = False
        self._keeper: asyncio.Task[None] | None = None

    def change(
        self, services: Sequence[GraphService], executors: Sequence[ExecutorAddress]
    ) -> None:
        """Have requests from now on answered by these services over these executors.

        Requests that run keep their path, and go to other executors where those of it are gone; a service
        that is not among them any more is not known from now on.
        """
        changed: dict[str, LoadedService] = {}
        for service in services:
            known = self.services.get(service.name)
            again = None if known is None else known.over(service, executors)
            changed[service.name] = again or LoadedService(service, executors)
        self.services, self.executors = changed, tuple(executors)
        for running in self._active:
            running.service.router.use(executors)
        named = {
            name
            for service in services
            for path in service.paths
            for step in path.steps
            for name in step.instances
        }
        self._links.use(executors, named - {executor.id for executor in executors})

    async def start(self) -> tuple[str, int]:
        """Listen; the executors need not be there yet."""
        for name, components in self.unserved().items():
            _LOG.warning("%s: no executor runs %s", name, ", ".join(components))
        await self._door.start(*split_address(self.config.address))
        self._links.start()
        self._keeper = asyncio.create_task(self._keep_leases())
        address = await self._http.start(self.config.host, self.config.port, field="port")
        self._realtime.listens_at(*address)
        return address

    async def close(self, drain_s: float) -> None:
        """Take nothing new, finish what runs, and stop."""
        # First nothing new comes in; what requests still need to end is closed after them.
        self._draining = True
        self._realtime.close()
        await self._http.close(drain_s)
        if self._keeper is not None:
            self._keeper.cancel()
        # Requests that were cut off give back what they hold before the connections go.
        for _ in range(_LAST_TURNS):
            if not self._active:
                break
            await asyncio.sleep(_LAST_TURN_S)
        await self._links.close()
        await self._door.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.intake.close()
        self.store.close()

    async def handle(self, request: Request) -> Answer:
        """Answer a request: an endpoint of OpenAI's API, or one of the pages."""
        path, method = request.path.decode("latin-1"), request.method.decode("latin-1")
        endpoint = ENDPOINT_PATHS.get(path)
        if endpoint is not None:
            if method != "POST":
                raise ApiError(405, f"{path} takes POST", allow="POST")
            return await self._answer(endpoint, request)
        if method not in ("GET", "HEAD"):
            raise ApiError(404 if path not in _PAGES else 405, f"no {method} {path[:100]}")
        return self._page(path)

    # Requests

    async def _answer(self, endpoint: Endpoint, request: Request) -> Answer:
        if self._draining or len(self._active) >= self.config.max_requests:
            why = "stopping" if self._draining else "too many requests are being answered"
            raise ApiError(503, why, kind="server_error", code="overloaded", retry_after_s=1)
        handler = self._handlers[endpoint]
        order = await self._read(handler, request)
        # It is understood: a large body need not live as long as the answer.
        request.body = b""
        current = self._begin(endpoint, order.model, request)
        try:
            try:
                async with asyncio.timeout(self.config.request_s):
                    answer = await handler.answer(order, current)
            except TimeoutError:
                raise out_of_time("the request took too long") from None
        except ApiError as error:
            headers = current.headers(usage=False)
            await self._end(current, error.status)
            return _error(error, headers)
        except BaseException:
            await self._end(current, 500)
            raise
        if isinstance(answer, Response):
            await self._end(current, answer.status)
            return answer
        pieces = self._watched(answer.pieces, current)
        if isinstance(answer, EventStream):
            return EventStream(with_heartbeats(pieces), answer.headers)
        return ByteStream(pieces, answer.content_type, answer.headers)

    async def _read(self, handler: EndpointHandler, request: Request) -> Any:
        if len(request.body) <= _SMALL_BODY_BYTES:
            return handler.read(request)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, handler.read, request)

    def _begin(self, endpoint: Endpoint, model: str, request: Request) -> GraphRequest:
        service = self.services.get(model)
        if service is None or endpoint not in service.tasks:
            known = f"there is no model {model[:100]!r} here"
            if service is not None:
                known = f"{model[:100]!r} does not answer {request.path.decode('latin-1')}"
            raise ApiError(404, known, param="model", code="model_not_found")
        trace = RequestTrace(request.id.decode("latin-1"), endpoint, service.name)
        traced = request.headers.get(_TRACE_HEADER) == b"1" or request.query == b"trace=1"
        current = GraphRequest(
            self.config,
            service,
            endpoint,
            trace,
            self._fleet,
            self.intake,
            self.metrics.observe,
            traced=traced,
        )
        self._active.add(current)
        self.traces.add(trace)
        return current

    async def _watched(
        self, pieces: AsyncGenerator[bytes, None], current: GraphRequest
    ) -> AsyncGenerator[bytes, None]:
        # As long as nothing else is known, the client has left.
        status = 499
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
            status = 200
        except Exception:
            status = 500
            raise
        finally:
            await self._end(current, status)

    async def _end(self, current: GraphRequest, status: int) -> None:
        self._active.discard(current)
        await current.close(status)
        trace, usage = current.trace, current.usage
        self.metrics.requests.child(trace.endpoint, trace.service, str(status)).add()
        if trace.klass:
            self.metrics.classes.child(trace.service, trace.klass).add()
        if trace.took_s is not None:
            self.metrics.seconds.child(trace.endpoint).observe(trace.took_s)
        if trace.first_s is not None:
            self.metrics.first.child(trace.endpoint).observe(trace.first_s)
        for kind, amount in (
            ("prompt_tokens", usage.prompt_tokens),
            ("completion_tokens", usage.completion_tokens),
            ("audio_seconds", usage.audio_s),
            ("speech_seconds", usage.speech_s),
            ("image_pixels", usage.image_pixels),
        ):
            if amount:
                self.metrics.used.child(trace.service, kind).add(amount)

    async def _keep_leases(self) -> None:
        """Renew what requests hold, as long as they live."""
        while True:
            # Three times in each lease, so that one failure does not end it.
            await asyncio.sleep(LEASE_S / 3.0)
            # A copy: requests come and go while this one is waited for.
            for current in list(self._active):
                try:
                    await current.renew()
                except AtollError as error:
                    _LOG.warning("leases were not renewed: %s", error)

    # Pages

    def _page(self, path: str) -> Response:
        if path == "/v1/models":
            data = [service.shown(self._created) for service in self.services.values()]
            return Response(msgspec.json.encode({"object": "list", "data": data}))
        if path in ("/health", "/ping"):
            return self._health()
        if path == "/metrics":
            return Response(self._figures(), content_type=CONTENT_TYPE)
        if path == "/atoll/v1/status":
            return Response(msgspec.json.encode(self.status()))
        if path == _TRACES:
            return Response(msgspec.json.encode({"traces": self.traces.ids()}))
        if path.startswith(f"{_TRACES}/"):
            trace = self.traces.get(path.removeprefix(f"{_TRACES}/"))
            if trace is None:
                raise ApiError(404, "no trace of that request is kept", code="not_found")
            return Response(msgspec.json.encode(trace.shown()))
        raise ApiError(404, f"there is no {path[:100]}", code="not_found")

    def missing(self) -> dict[str, list[str]]:
        """Return, by service, the components whose executors are all gone, for more than a moment.

        Those that no executor runs and no path leads over are not among them (`unserved`): a task may name
        units that its options never let it use.
        """
        missing: dict[str, list[str]] = {}
        for service in self.services.values():
            needed = service.router.components
            for component in service.components:
                names = service.router.candidates(component)
                if not names and component not in needed:
                    continue
                if not any(self._fleet.silent_s(name) < _FRESH_S for name in names):
                    missing.setdefault(service.name, []).append(component)
        return missing

    def unserved(self) -> dict[str, list[str]]:
        """Return, by service, the components that no executor is configured for; asked for, they are 503."""
        return {
            service.name: found
            for service in self.services.values()
            if (found := [c for c in service.components if not service.router.candidates(c)])
        }

    def _health(self) -> Response:
        if self._draining:
            raise ApiError(503, "stopping", kind="server_error", retry_after_s=1)
        missing = self.missing()
        if missing:
            listed = "; ".join(f"{name}: {', '.join(of)}" for name, of in missing.items())
            raise ApiError(
                503, f"no executor runs {listed}", kind="server_error", code=EXECUTORS_MISSING
            )
        return Response(b"{}")

    def status(self) -> dict[str, object]:
        """Return how the graph server and its executors are, for people and supervisors."""
        dead = self._fleet.dead()
        return {
            "name": self.config.name,
            "models": list(self.services),
            "running": len(self._active),
            "draining": self._draining,
            "routing": self.config.routing,
            "missing": self.missing(),
            "unserved": self.unserved(),
            "decoding_bytes": self.intake.busy_bytes,
            "stored_bytes": self.store.used_bytes,
            "executors": [
                {
                    "id": executor.id,
                    "address": executor.address,
                    "components": executor.components,
                    "connected": executor.id not in dead,
                }
                for executor in self.executors
            ],
        }

    def _figures(self) -> bytes:
        dead = self._fleet.dead()
        gauges = (
            ("atoll_graph_running", "Requests being answered.", float(len(self._active))),
            (
                "atoll_graph_decoding_bytes",
                "Bytes that clients sent and that are being decoded.",
                float(self.intake.busy_bytes),
            ),
            (
                "atoll_graph_stored_bytes",
                "Bytes of arrays that clients brought.",
                float(self.store.used_bytes),
            ),
        )
        up = [(executor.id, executor.id not in dead) for executor in self.executors]
        return self.metrics.page(gauges, up)


_PAGES = frozenset({"/v1/models", "/health", "/ping", "/metrics", "/atoll/v1/status", _TRACES})


def _error(error: ApiError, headers: tuple[tuple[str, str], ...]) -> Response:
    """Return an error as an answer, with the way that the request took."""
    extra = tuple((name, value) for name, value in headers if name == PATH_HEADER)
    if error.retry_after_s is not None:
        extra = (*extra, ("retry-after", str(error.retry_after_s)))
    return Response(error.body(), error.status, headers=extra)


HEARTBEAT = b": waiting\n\n"
EVERY_S = 5.0


async def with_heartbeats(
    pieces: AsyncGenerator[bytes, None], every_s: float = EVERY_S
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces, and after the first one a comment whenever none comes for `every_s` seconds."""
    begun = False
    async with contextlib.aclosing(pieces):
        while True:
            coming = asyncio.create_task(_next(pieces))
            try:
                while not (await asyncio.wait({coming}, timeout=every_s))[0]:
                    if begun:
                        yield HEARTBEAT
            finally:
                # Left in between: what makes the next piece must end before its generator is closed.
                if not coming.done():
                    coming.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await coming
            piece = coming.result()
            if piece is None:
                return
            begun = True
            yield piece


async def _next(pieces: AsyncGenerator[bytes, None]) -> bytes | None:
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        return None
