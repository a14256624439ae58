"""Everything the gateway answers by itself: models, health, its own description; metrics and its console.

The last two are not for everybody: on the public port they ask for the admin token or an API key, and without
either they are not there at all (`admin` has other places for them).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from atoll.core.version import __version__
from atoll.engines.table import find_engine
from atoll.runtime.accounts.grants import role_forbids_error
from atoll.runtime.gateway.backend_question import ask_backend
from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.console.console import Console
from atoll.runtime.gateway.console.console_caller import Caller
from atoll.runtime.gateway.console.route import PagesContext
from atoll.runtime.gateway.dialects import shown_key
from atoll.runtime.gateway.dialects.messages_dialect import (
    asks_for_anthropic,
    describe_model,
    list_models,
)
from atoll.runtime.gateway.openapi import document
from atoll.runtime.gateway.served_choices import Candidate
from atoll.runtime.http.api_route import PREFIX, not_allowed, nothing_at
from atoll.runtime.http.handlers import Response
from atoll.runtime.http.http_server import Connection, Request
from atoll.runtime.openai import FORMS, REQUESTS, ApiError
from atoll.runtime.pool.member import Member
from atoll.runtime.pool.model_facts import ModelFacts, join_facts
from atoll.runtime.pool.policy import Policy
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.metrics import CONTENT_TYPE

_METRICS = "/metrics"
_CONSOLE = PREFIX.encode()
_PRIVATE = (_CONSOLE, _METRICS.encode())
_MAX_POLICIES = 256
"""Policies whose models are kept; at more all are worked out anew."""
_PING = "/ping"
_TOKENIZER = "/tokenizer_info"
_OF_VLLM = ("/version", "/load", _TOKENIZER)
"""Pages that clients of vLLM know it by."""
_PAGES = ("/health", _PING, "/ready", _METRICS, "/openapi.json", "/v1/models", *_OF_VLLM)
_TOKENIZER_S, _TOKENIZER_BYTES = 10.0, 32 * 2**20


class Pages:
    """The gateway's own pages."""

    def __init__(self, context: PagesContext) -> None:
        self._context = context
        self._console = Console(context)
        self._permitted = PermittedModels(context.pool, context.chooser)

    def answer(self, connection: Connection, request: Request) -> None:
        """Answer what came on the public port and needs no backend."""
        path = _path(request)
        if is_private(request.path):
            self._answer_private(connection, request, path, self._console.find_caller(request))
        else:
            self._answer(connection, request, path)

    def answer_admin(self, connection: Connection, request: Request) -> None:
        """Answer what came on the admin socket, which only those who may ask can open."""
        path = _path(request)
        if is_private(request.path):
            self._answer_private(connection, request, path, self._console.find_admin(request))
        else:
            self._answer(connection, request, path)

    def _answer_private(
        self, connection: Connection, request: Request, path: str, caller: Caller
    ) -> None:
        """Answer what is not public to somebody it may be for."""
        if path.startswith(PREFIX):
            self._console.answer(connection, request, caller)
        elif caller.role == "admin":
            self._answer(connection, request, path)
        else:
            raise role_forbids_error(f"A {caller.role} may not do this.")

    def answer_metrics(self, connection: Connection, request: Request) -> None:
        """Answer what came on the port for Prometheus."""
        path = _path(request)
        if path not in (_METRICS, "/health", "/ready"):
            raise nothing_at(path)
        self._answer(connection, request, path)

    def authorize(self, request: Request) -> None:
        """Refuse whoever asks on the public port for what is not public and not for them."""
        caller = self._console.find_caller(request)
        if request.path.startswith(_CONSOLE):
            self._console.check(request, caller)
        elif caller.role != "admin":
            raise role_forbids_error(f"A {caller.role} may not do this.")

    def tick(self, now_s: float) -> None:
        """Give up on clients that stopped reading."""
        self._console.tick(now_s)

    def _answer(self, connection: Connection, request: Request, path: str) -> None:
        if path in REQUESTS or path in FORMS:
            raise not_allowed(request.method, "POST")
        if path not in _PAGES and not path.startswith("/v1/models/"):
            raise nothing_at(path)
        # SageMaker and vLLM take both for this one.
        if request.method not in (b"GET", b"HEAD") and (path, request.method) != (_PING, b"POST"):
            raise not_allowed(request.method, "GET, HEAD")
        self._show(connection, request, path)

    def _show(self, connection: Connection, request: Request, path: str) -> None:
        context = self._context
        if path in ("/health", _PING):
            # Of the gateway itself, whatever its backends do: whoever starts it anew goes by this.
            up = sum(m.state == "up" for m in context.pool.members.values())
            state = "draining" if context.draining else "ok"
            _respond(
                connection,
                503 if context.draining else 200,
                {"status": state, "backends_up": up},
            )
        elif path == "/ready":
            self._show_ready(connection, request)
        elif path == _METRICS:
            page = context.metrics.page(len(context.relays), len(context.connections))
            connection.respond(200, page, CONTENT_TYPE.encode())
        elif path == "/openapi.json":
            _respond(connection, 200, document())
        elif path in _OF_VLLM:
            self._show_as_vllm(connection, request, path)
        else:
            self._show_models(connection, request, path)

    def _show_as_vllm(self, connection: Connection, request: Request, path: str) -> None:
        """Answer what tools for vLLM ask; with keys, strangers are told nothing but the version."""
        context = self._context
        if path == "/version":
            _respond(connection, 200, {"version": __version__})
            return
        if context.accounts is not None:
            context.accounts.authenticate(request.headers.get(b"authorization"))
        if path == "/load":
            _respond(connection, 200, {"server_load": len(context.relays)})
        else:
            answer = self._ask_tokenizer(request)
            self._console.answer_later(connection, request, answer)

    async def _ask_tokenizer(self, request: Request) -> Response:
        """Return what a backend says of its tokenizer: of the model in `?model=`, or of the only one."""
        context = self._context
        names = self._visible(request, hidden=True)
        asked = dict(parse_qsl(request.query.decode("latin-1"))).get("model")
        if asked is None and len(names) != 1:
            raise ApiError(400, "say of which model: ?model=NAME", param="model")
        name = names[0] if asked is None else asked
        if name not in names:
            raise _no_model(name)
        for member, _ in self._members(name):
            if not member.serves:
                continue
            with contextlib.suppress(OSError):
                status, body = await ask_backend(
                    context.upstreams(member),
                    _TOKENIZER,
                    timeout_s=_TOKENIZER_S,
                    max_bytes=_TOKENIZER_BYTES,
                )
                if status == 200:
                    return Response(body)
        message = f"no backend of {name[:200]!r} says anything of its tokenizer"
        raise ApiError(404, message, code="not_found")

    def _members(self, name: str) -> list[tuple[Member, str]]:
        """Return the backends of a model, or of those that a name stands for, each with the model."""
        rings = self._context.pool.rings
        models = [candidate.model for candidate in self._context.chooser.find_candidates(name)]
        return [(m, model) for model in models if model in rings for m in rings[model].members]

    def _visible(self, request: Request, *, hidden: bool) -> list[str]:
        """Return the models there are; with keys, those that the caller's may use."""
        context = self._context
        names = context.chooser.names(hidden=hidden)
        if context.accounts is None:
            return names
        grant = context.accounts.authenticate(shown_key(request.path, request.headers))
        return self._permitted.choose(grant.policy, context.accounts.visible_models(grant, names))

    def _show_ready(self, connection: Connection, request: Request) -> None:
        """Answer whether every model has a backend; with keys, strangers are not told of which."""
        context = self._context
        missing = context.pool.unserved()
        ready = bool(context.pool.rings) and not missing and not context.draining
        page: dict[str, object] = {"status": "ready" if ready else "not ready"}
        if not ready:
            page["reason"] = (
                "draining"
                if context.draining
                else "these models have no backend that is up"
                if missing
                else "there is no backend"
            )
            page["without_backend"] = missing
            if context.accounts is not None and missing:
                try:
                    context.accounts.authenticate(request.headers.get(b"authorization"))
                except ApiError:
                    page["without_backend"] = len(missing)
        _respond(connection, 200 if ready else 503, page)

    def _show_models(self, connection: Connection, request: Request, path: str) -> None:
        """Answer what there is to ask for; with keys, what the caller's may use."""
        context = self._context
        names = self._visible(request, hidden=path != "/v1/models")
        anthropic = asks_for_anthropic(request.headers)
        if path == "/v1/models" and anthropic:
            _respond(connection, 200, list_models(names, context.started_s))
        elif path == "/v1/models":
            data = [self._describe_model(name) for name in names]
            _respond(connection, 200, {"object": "list", "data": data})
        elif (name := unquote(path.removeprefix("/v1/models/"))) in names and anthropic:
            _respond(connection, 200, describe_model(name, context.started_s))
        elif name in names:
            _respond(connection, 200, self._describe_model(name))
        else:
            raise _no_model(name)

    def _describe_model(self, name: str) -> dict[str, object]:
        ring = self._context.pool.rings.get(name)
        # Who stands before this gateway may move streams as Atoll's instances do, if all behind it are.
        by_atoll = ring is not None and all(
            find_engine(m.backend.kind).resume == "tokens" for m in ring.members
        )
        facts = join_facts([_facts(member, model) for member, model in self._members(name)])
        described: dict[str, object] = {
            "id": name,
            "object": "model",
            "created": int(self._context.started_s),
            "owned_by": "atoll" if by_atoll else facts.owned_by or "atoll-gateway",
            "root": facts.root or name,
            "parent": None,
        }
        if facts.max_model_len is not None:
            described["max_model_len"] = facts.max_model_len
        return described


def _facts(member: Member, model: str) -> ModelFacts:
    """Return what a backend says of a model, or the node that it is of."""
    facts = (member.listed or {}).get(model) or ModelFacts(root=model)
    context = member.offer(model).context
    return facts if facts.max_model_len is not None else facts._replace(max_model_len=context)


def _no_model(name: str) -> ApiError:
    return ApiError(404, f"The model {name[:200]!r} does not exist", code="model_not_found")


def is_private(path: bytes) -> bool:
    """Whether what is asked for is for those who run the gateway only."""
    return path.startswith(_PRIVATE)


def _path(request: Request) -> str:
    try:
        return request.path.decode("ascii")
    except UnicodeDecodeError:
        raise ApiError(404, "there is nothing here") from None


def _respond(connection: Connection, status: int, data: Any) -> None:
    connection.respond(status, msgspec.json.encode(data))


class PermittedModels:
    """Models that a key may see: those that some node serves which its policy permits.

    Worked out once for a policy and kept until backends, aliases or choices change, which is seen by the
    tables themselves: each change makes them anew.
    """

    def __init__(self, pool: BackendPool, finder: BackendChooser) -> None:
        self._pool = pool
        self._finder = finder
        self._seen: tuple[object, ...] = ()
        """The tables that the answers below are about; held, so that no other takes their place."""
        self._known: dict[Policy, dict[str, bool]] = {}

    def choose(self, policy: Policy | None, names: Iterable[str]) -> list[str]:
        """Return those names, in their order, that a node permitted by a policy serves."""
        if policy is None:
            return list(names)
        now = (self._pool.rings, *self._finder.tables())
        if len(now) != len(self._seen) or any(
            a is not b for a, b in zip(now, self._seen, strict=True)
        ):
            self._seen = now
            self._known.clear()
        elif len(self._known) >= _MAX_POLICIES and policy not in self._known:
            self._known.clear()
        known = self._known.setdefault(policy, {})
        return [name for name in names if self._permits(policy, name, known)]

    def _permits(self, policy: Policy, name: str, known: dict[str, bool]) -> bool:
        answer = known.get(name)
        if answer is None:
            answer = known[name] = any(
                policy.refusal(member.offer(candidate.model)) is None
                for candidate in self._finder.find_candidates(name)
                for member in self._members(candidate)
            )
        return answer

    def _members(self, candidate: Candidate) -> list[Member]:
        model, alias = candidate.model, candidate.alias
        ring = self._pool.rings.get(model)
        members = [] if ring is None else ring.members
        return [m for m in members if not alias or m.backend.aliases.get(alias) == model]
