"""The endpoints of an instance of the stage engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

import msgspec

from atoll.core.errors import AtollError
from atoll.core.request_parameters import SamplingParams
from atoll.core.version import __version__
from atoll.engine.engine_messages import ReadOrder
from atoll.engine.pipeline_routes import NodeSpec
from atoll.engine.scheduler import GenerateRequest, Scheduler, SchedulerSettings, TokenEvent
from atoll.engine.text import TextCodec
from atoll.plan.plan import Route
from atoll.runtime.http.handlers import EventStream, HandlerServer, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.choice_merger import ChoiceMerger, GenerationError, begin_stream
from atoll.runtime.instance.choice_request import ChoiceRequest, ParsedRequest
from atoll.runtime.instance.instance_answers import (
    ChoiceDelta,
    ChoiceText,
    ResponseWriter,
    keep_best,
)
from atoll.runtime.instance.instance_config import NODES_MISSING, InstanceConfig, InstanceHelpers
from atoll.runtime.instance.instance_metrics import InstanceMetrics
from atoll.runtime.instance.instance_requests import is_quick
from atoll.runtime.instance.plan_router import PlanRouter
from atoll.runtime.instance.pooling import Vector, embed, find_pooling, read_embedding
from atoll.runtime.instance.request_fields import name_ignored
from atoll.runtime.instance.tokenizing import answer_tokens, read_tokens_request
from atoll.runtime.local.placing import scale_layers
from atoll.runtime.openai import DETOKENIZE, EMBEDDINGS, TOKENIZE, ApiError
from atoll.telemetry.metrics import CONTENT_TYPE

_LOG = logging.getLogger(__name__)
_FRESH_S = 2.0
"""A token this young proves as much as a request made to see one."""
_PROBE_S = 10.0
_READERS = 2
_GROW_EVERY = 16
_SMOOTHING = 0.05
_FIRST_GUESS_TOKENS = 128.0
P = ParamSpec("P")
Result = TypeVar("Result")
Endpoint = Callable[[str, bytes], Awaitable[Response | EventStream]]
"""Answers a request to a path, given its body."""


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
            owner=config.name,
        )
        self.metrics = InstanceMetrics(config.models[0])
        self._http = HandlerServer(self.handle)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        self._created = int(time.time())
        self._last_token_s = float("-inf")
        self._typical_tokens = _FIRST_GUESS_TOKENS
        self._pooling = cache(lambda: find_pooling(codec.folder))
        self._draining = False
        self._probe: asyncio.Task[None] | None = None
        self._endpoints: dict[str, Endpoint] = {
            "/v1/chat/completions": self._generate,
            "/v1/completions": self._generate,
            EMBEDDINGS: self._embed,
            TOKENIZE: self._convert,
            DETOKENIZE: self._convert,
        }

    @property
    def max_length(self) -> int:
        """Positions that prompt and answer have together: as the model allows, and as KV has room for."""
        room = [stats.blocks * stats.block_size for stats in self.scheduler.stats().values()]
        return min(self.codec.max_length, *room) if room else self.codec.max_length

    async def start(self) -> tuple[str, int]:
        """Listen; the nodes need not be there yet."""
        await self.scheduler.start()
        return await self._http.start(self.config.host, self.config.port, field="port")

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
        endpoint = self._endpoints.get(path)
        if endpoint is not None:
            if method != "POST":
                raise ApiError(405, f"{path} takes POST", allow="POST")
            return await endpoint(path, request.body)
        if method not in ("GET", "HEAD"):
            raise ApiError(404 if path not in _GETS else 405, f"no {method} {path[:100]}")
        if path in ("/health", "/ping"):
            await self._prove_ready()
            return Response(b"{}")
        if path in _PAGES:
            return Response(msgspec.json.encode(self._page(path)))
        if path == "/metrics":
            page = self.metrics.page(
                self.scheduler.running,
                self.scheduler.queued,
                self.scheduler.stats(),
                self.scheduler.alive(),
            )
            return Response(page, content_type=CONTENT_TYPE)
        raise ApiError(404, f"there is no {path[:100]}", code="not_found")

    def _page(self, path: str) -> dict[str, Any]:
        if path == "/v1/models":
            return self._models()
        if path == "/version":
            return {"version": __version__}
        if path == "/load":
            return {"server_load": self.scheduler.running + self.scheduler.queued}
        return self.codec.describe() if path == "/tokenizer_info" else self.status()

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
                    "root": name,
                    "parent": None,
                    "max_model_len": self.max_length,
                }
                for name in self.config.models
            ],
        }

    async def _prove_ready(self) -> None:
        """Return if the instance gave a token just now or gives one when asked, else raise 503."""
        if self._draining:
            raise ApiError(503, "stopping", kind="server_error", retry_after_s=1)
        # A token just now is proof enough; nothing need be asked.
        if time.monotonic() - self._last_token_s < _FRESH_S:
            return
        # One question for all who ask at the same time.
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._one_token())
        try:
            # Who asks may lose patience; the question goes on for the others.
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
        parsed, choices = await self._read(body, self._understand, path, body)
        self._admit(parsed.model)
        prompt_tokens = len(parsed.choices[0].prompt)
        # Choices of one prompt stand side by side: the prompt counts once.
        prompt_tokens += sum(
            len(choice.prompt)
            for before, choice in zip(parsed.choices, parsed.choices[1:], strict=False)
            if choice.prompt != before.prompt
        )
        self.metrics.prompt_tokens += prompt_tokens
        writer = ResponseWriter(parsed, prompt_tokens)
        answer = ChoiceMerger(self, parsed, choices, started_s)
        if parsed.stream:
            return await begin_stream(answer, writer, name_ignored(parsed.ignored))
        pieces: list[list[ChoiceDelta]] = [[] for _ in parsed.choices]
        try:
            async with contextlib.aclosing(answer.pieces()) as stream:
                async for piece in stream:
                    pieces[piece.index].append(piece)
        except GenerationError as error:
            raise error.api_error() from error
        pieces = keep_best(pieces, parsed.best_of, parsed.n)
        writer.cached_tokens = answer.cached_tokens
        body = writer.whole(pieces, answer.completion_tokens)
        return Response(body, headers=name_ignored(parsed.ignored))

    async def _embed(self, path: str, body: bytes) -> Response:
        del path
        started_s = time.monotonic()
        try:
            order = ReadOrder(pool=self._pooling())
        except AtollError as error:
            raise ApiError(400, str(error), param="model") from error
        parsed = await self._read(body, read_embedding, body, self.codec, self.max_length)
        self._admit(parsed.model)
        self.metrics.prompt_tokens += parsed.tokens

        async def pool(tokens: tuple[int, ...]) -> Vector:
            asked = ChoiceRequest(tokens, _ONE_TOKEN, (), read=order)
            async for event in self.events(asked):
                if event.reading is not None and event.reading.vector is not None:
                    return event.reading.vector
            raise GenerationError("the request was cancelled")

        ended = "error"
        try:
            answer = await embed(parsed, pool)
            ended = "stop"
        except GenerationError as error:
            raise error.api_error() from error
        finally:
            self.metrics.finished[ended] += 1
            self.metrics.whole.observe(time.monotonic() - started_s)
        return Response(answer)

    async def _convert(self, path: str, body: bytes) -> Response:
        return await self._read(body, self._convert_tokens, path, body)

    def _convert_tokens(self, path: str, body: bytes) -> Response:
        request = read_tokens_request(path, body)
        self._check_model(request.model)
        return answer_tokens(request, body, self.codec, self.max_length)

    def _check_model(self, model: str) -> None:
        if model not in self.config.models:
            message = f"there is no model {model[:100]!r} here"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _admit(self, model: str) -> None:
        """Refuse a request for another model, or for which there is no room now."""
        self._check_model(model)
        if self._draining or self.scheduler.queued >= self.config.max_waiting:
            why = "stopping" if self._draining else "too many requests are waiting"
            raise ApiError(503, why, kind="server_error", code="overloaded", retry_after_s=1)

    async def _read(
        self, body: bytes, function: Callable[P, Result], *arguments: P.args, **named: P.kwargs
    ) -> Result:
        """Read a body: a small one here, a large one, or one of which answers have a form, in a thread."""
        try:
            if is_quick(body):
                return function(*arguments, **named)
            loop = asyncio.get_running_loop()
            call = partial(function, *arguments, **named)
            return await loop.run_in_executor(self._readers, call)
        except RecursionError:
            message = "the request is nested too deeply"
            raise ApiError(400, message, code="invalid_json") from None

    def _understand(self, path: str, body: bytes) -> tuple[ParsedRequest, list[ChoiceText]]:
        """Read a request and, of an answer that is resumed, the tokens so far; in any thread."""
        parsed = requests.read(path, body, self.codec, self.max_length)
        choices = [
            ChoiceText(index, choice, self.codec) for index, choice in enumerate(parsed.choices)
        ]
        return parsed, choices

    async def events(self, choice: ChoiceRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield the engine's events for one choice, keeping the router's books."""
        name = secrets.token_hex(12)
        most = choice.sampling.max_tokens
        # Nobody knows how long the answer will be: as long as usual, but not longer than it may be.
        self.router.expect(name, min(most, self._typical_tokens))
        count = 0
        request = GenerateRequest(
            prompt=choice.prompt,
            sampling=choice.sampling,
            id=name,
            deadline_s=self.config.request_s,
            generated=choice.generated,
            embeds=choice.embeds,
            read=choice.read,
        )
        events = self.scheduler.generate(request)
        try:
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    if event.error is not None:
                        raise GenerationError(event.error, refused=event.refused)
                    if event.token is not None or event.reading is not None:
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
        # Questions about health and prompts that are pooled say nothing about the length of answers.
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
_PAGES = frozenset({"/v1/models", "/version", "/load", "/tokenizer_info", "/atoll/v1/status"})
_GETS = _PAGES | {"/health", "/ping", "/metrics"}
