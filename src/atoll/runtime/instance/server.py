"""The endpoints of an instance of the stage engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from atoll.core.errors import AtollError
from atoll.engine.messages import SamplingParams
from atoll.engine.routes import NodeSpec
from atoll.engine.scheduler import GenerateRequest, Scheduler, SchedulerSettings, TokenEvent
from atoll.engine.text import TextCodec
from atoll.plan.plan import Route
from atoll.runtime.http.handlers import EventStream, HandlerServer, Response
from atoll.runtime.http.server import Request
from atoll.runtime.instance import requests
from atoll.runtime.instance.answers import ChoiceDelta, ChoiceText, ResponseWriter
from atoll.runtime.instance.config import NODES_MISSING, InstanceConfig, InstanceHelpers
from atoll.runtime.instance.metrics import InstanceMetrics
from atoll.runtime.instance.requests import ChoiceRequest, ParsedRequest
from atoll.runtime.instance.routes import PlanRouter
from atoll.runtime.local.placing import scale_layers
from atoll.runtime.openai import ApiError, error_body
from atoll.telemetry.metrics import CONTENT_TYPE

_LOG = logging.getLogger(__name__)
_FRESH_S = 2.0
"""A token this young proves as much as a request made to see one."""
_PROBE_S = 10.0
_SMALL_BODY_BYTES = 2**14
"""Larger requests are read in a thread, so that no stream waits until a long prompt is tokenised."""
_GUIDED = (b'"tools"', b'"response_format"', b'"guided_')
"""So do those whose answer has a form: it is compiled, and the first time the tokenizer is read for it."""
_READERS = 2
_GROW_EVERY = 16
_SMOOTHING = 0.05
_FIRST_GUESS_TOKENS = 128.0


class GenerationError(Exception):
    """The engine gave a request up; the text says why."""


class InstanceServer:
    """An OpenAI endpoint over the nodes of an instance."""

    def __init__(self, config: InstanceConfig, codec: TextCodec) -> None:
        self.config = config
        self.codec = codec
        self.router = PlanRouter(config)
        nodes = _list_nodes(config)
        self._own = {node.name for node in nodes}
        self._nodes = nodes
        self.scheduler = Scheduler(
            nodes,
            self.router,
            eos=codec.eos,
            max_length=codec.max_length,
            settings=SchedulerSettings(
                dead_after_s=config.dead_after_s, no_route_s=config.no_route_s
            ),
            bind=config.scheduler,
        )
        self.metrics = InstanceMetrics(config.models[0])
        self._http = HandlerServer(self.handle)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        self._created = int(time.time())
        self._last_token_s = float("-inf")
        self._typical_tokens = _FIRST_GUESS_TOKENS
        self._draining = False
        self._probe: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Listen; the nodes need not be there yet."""
        await self.scheduler.start()
        return await self._http.start(self.config.host, self.config.port)

    def help_with(self, helpers: InstanceHelpers) -> None:
        """Compute prompts over these prefill instances from now on; what runs over others starts anew."""
        (own, *_) = self.config.parts
        layers = max(node.end for node in own.instance.nodes)
        parts = [
            part.model_copy(update={"instance": scale_layers(part.instance, layers)})
            for part in helpers.parts
        ]
        total = sum(part.instance.throughput_per_s for part in parts)
        routes = tuple(
            Route(
                service=own.instance.service,
                instances=(part.instance.id, own.instance.id),
                share=part.instance.throughput_per_s / total if total > 0.0 else 1.0 / len(parts),
            )
            for part in parts
        )
        changed = self.config.model_copy(update={"parts": (own, *parts), "routes": routes})
        before = {node.name: node for node in self._nodes}
        after = {node.name: node for node in _list_nodes(changed)}
        # Routes first: what is taken off its nodes asks for another one at once.
        self.router.follow(changed)
        for name in before.keys() - after.keys():
            self.scheduler.remove_node(name)
        for name, node in after.items():
            if before.get(name) != node:
                self.scheduler.add_node(node)
        self._nodes = list(after.values())

    async def close(self, drain_s: float) -> None:
        """Take nothing new, finish what runs, and stop."""
        self._draining = True
        await self._http.close(drain_s)
        self._readers.shutdown(wait=False, cancel_futures=True)
        await self.scheduler.close()

    async def handle(self, request: Request) -> Response | EventStream:
        """Answer a request: an endpoint of OpenAI's API, or one of the pages."""
        path, method = request.path.decode("latin-1"), request.method.decode("latin-1")
        if path in ("/v1/chat/completions", "/v1/completions"):
            if method != "POST":
                raise ApiError(405, f"{path} takes POST", allow="POST")
            return await self._generate(path, request.body)
        if method not in ("GET", "HEAD"):
            raise ApiError(404 if path not in _GETS else 405, f"no {method} {path[:100]}")
        if path == "/v1/models":
            return Response(msgspec.json.encode(self._models()))
        if path in ("/health", "/ping"):
            await self._prove_ready()
            return Response(b"{}")
        if path == "/metrics":
            page = self.metrics.page(
                self.scheduler.running,
                self.scheduler.queued,
                self.scheduler.stats(),
                self.scheduler.alive(),
            )
            return Response(page, content_type=CONTENT_TYPE)
        if path == "/atoll/v1/status":
            return Response(msgspec.json.encode(self.status()))
        raise ApiError(404, f"there is no {path[:100]}", code="not_found")

    def status(self) -> dict[str, object]:
        """Return how the instance and its nodes are, for people and supervisors."""
        stats, alive = self.scheduler.stats(), self.scheduler.alive()
        return {
            "name": self.config.name,
            "models": self.config.models,
            "running": self.scheduler.running,
            "waiting": self.scheduler.queued,
            "prompt_tokens": self.metrics.prompt_tokens,
            "generation_tokens": self.metrics.generation_tokens,
            "restarts": self.metrics.restarts,
            "draining": self._draining,
            "nodes": [
                {
                    "name": node.name,
                    "start": node.start,
                    "end": node.end,
                    "alive": node.name in alive,
                    "stats": stats[node.name].model_dump() if node.name in stats else None,
                }
                for node in self._nodes
            ],
        }

    def _models(self) -> dict[str, object]:
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": self._created,
                    "owned_by": "atoll",
                    "max_model_len": self.codec.max_length,
                }
                for name in self.config.models
            ],
        }

    async def _prove_ready(self) -> None:
        """Return if the instance gave a token just now or gives one when asked, else raise 503."""
        if self._draining:
            raise ApiError(503, "stopping", kind="server_error", retry_after_s=1)
        if time.monotonic() - self._last_token_s < _FRESH_S:
            return
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._one_token())
        try:
            await asyncio.wait_for(asyncio.shield(self._probe), _PROBE_S)
        except (TimeoutError, GenerationError) as error:
            missing = sorted(self._own - self.scheduler.alive())
            raise ApiError(
                503,
                f"silent: {', '.join(missing)}" if missing else f"no token: {error}",
                kind="server_error",
                code=NODES_MISSING if missing else None,
            ) from error

    async def _one_token(self) -> None:
        # A single known token: the cheapest question that goes through every stage.
        request = ChoiceRequest((self.codec.eos[0] if self.codec.eos else 0,), _ONE_TOKEN, ())
        async for _ in self.events(request):
            pass

    async def _generate(self, path: str, body: bytes) -> Response | EventStream:
        started_s = time.monotonic()
        if len(body) <= _SMALL_BODY_BYTES and not any(name in body for name in _GUIDED):
            parsed, choices = self._understand(path, body)
        else:
            loop = asyncio.get_running_loop()
            parsed, choices = await loop.run_in_executor(
                self._readers, self._understand, path, body
            )
        if parsed.model not in self.config.models:
            raise ApiError(
                404,
                f"there is no model {parsed.model[:100]!r} here",
                param="model",
                code="model_not_found",
            )
        if self._draining or self.scheduler.queued >= self.config.max_waiting:
            why = "stopping" if self._draining else "too many requests are waiting"
            raise ApiError(503, why, kind="server_error", code="overloaded", retry_after_s=1)
        prompt_tokens = len(parsed.choices[0].prompt)
        prompt_tokens += sum(
            len(choice.prompt)
            for before, choice in zip(parsed.choices, parsed.choices[1:], strict=False)
            if choice.prompt != before.prompt
        )
        self.metrics.prompt_tokens += prompt_tokens
        writer = ResponseWriter(parsed, prompt_tokens)
        answer = _ChoiceMerger(self, parsed, choices, started_s)
        if parsed.stream:
            return EventStream(_stream(answer, writer))
        pieces: list[list[ChoiceDelta]] = [[] for _ in parsed.choices]
        try:
            async with contextlib.aclosing(answer.pieces()) as stream:
                async for piece in stream:
                    pieces[piece.index].append(piece)
        except GenerationError as error:
            raise ApiError(500, str(error), kind="server_error") from error
        return Response(writer.whole(pieces, answer.completion_tokens))

    def _understand(self, path: str, body: bytes) -> tuple[ParsedRequest, list[ChoiceText]]:
        """Read a request and, of an answer that is resumed, the tokens so far; in any thread."""
        parsed = requests.read(path, body, self.codec, self.codec.max_length)
        choices = [
            ChoiceText(index, choice, self.codec) for index, choice in enumerate(parsed.choices)
        ]
        return parsed, choices

    async def events(self, choice: ChoiceRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield the engine's events for one choice, keeping the router's books."""
        name = secrets.token_hex(12)
        most = choice.sampling.max_tokens
        self.router.expect(name, min(most, self._typical_tokens))
        count = 0
        request = GenerateRequest(
            prompt=choice.prompt,
            sampling=choice.sampling,
            id=name,
            deadline_s=self.config.request_s,
            generated=choice.generated,
            embeds=choice.embeds,
        )
        events = self.scheduler.generate(request)
        try:
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if event.error is not None:
                        raise GenerationError(event.error)
                    if event.token is not None:
                        self._last_token_s = time.monotonic()
                        count += 1
                        if count % _GROW_EVERY == 0:
                            self.router.grow(name, len(choice.generated) + count)
                    if event.finish_reason is not None:
                        self.metrics.restarts += event.restarts
                    yield event
        except AtollError as error:
            raise GenerationError(str(error)) from error
        finally:
            self.router.finish(name)
        if choice.sampling is not _ONE_TOKEN:
            self._typical_tokens += _SMOOTHING * (
                len(choice.generated) + count - self._typical_tokens
            )


def _list_nodes(config: InstanceConfig) -> list[NodeSpec]:
    return [
        NodeSpec(
            name=part.node_name(node.id),
            endpoint=part.inboxes[node.id],
            start=node.start,
            end=node.end,
        )
        for part in config.parts
        for node in part.instance.nodes
    ]


_ONE_TOKEN = SamplingParams(max_tokens=1)
_GETS = frozenset({"/v1/models", "/health", "/ping", "/metrics", "/atoll/v1/status"})


class _ChoiceMerger:
    """The pieces of all choices of a request as they come."""

    def __init__(
        self,
        server: InstanceServer,
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

    async def pieces(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield pieces until every choice has ended; GenerationError if one cannot."""
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
        if choice.finish is not None:
            yield choice.owed()
            return
        last_s: float | None = None
        ended = "abort"
        try:
            async with contextlib.aclosing(self._server.events(request)) as events:
                async for event in events:
                    now_s = time.monotonic()
                    if event.token is not None:
                        metrics.generation_tokens += 1
                        if last_s is None:
                            metrics.first_token.observe(now_s - self._started_s)
                        else:
                            metrics.per_token.observe(now_s - last_s)
                        last_s = now_s
                    piece = choice.add(event)
                    if piece is None:
                        continue
                    yield piece
                    if piece.finish is not None:
                        ended = piece.finish
                        break
        except GenerationError:
            ended = "error"
            raise
        finally:
            metrics.finished[ended] += 1
            metrics.whole.observe(time.monotonic() - self._started_s)


async def _stream(answer: _ChoiceMerger, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    first = writer.roles()
    try:
        async with contextlib.aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                yield first + writer.chunk(piece)
                first = b""
    except GenerationError as error:
        yield first + b"data: " + error_body(str(error), "server_error") + b"\n\n"
        return
    yield first + writer.end(answer.completion_tokens)
