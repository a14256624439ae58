"""The gateway, asked with a session's key or as its operator, and the planner, which runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from atoll.core.roles import Role
from atoll.dashboard.sessions import LoginSession
from atoll.runtime.http.handlers import Answer
from atoll.runtime.http.http_client import (
    FetchError,
    HttpResponse,
    StreamedResponse,
    open_stream,
    request,
)
from atoll.runtime.http.http_request import Request
from atoll.runtime.openai import ApiError

ADMIN_PATH = "/atoll/v1"
_MAX_ANSWER_BYTES = 64 * 2**20
_QUESTION_S = 10.0
_ANSWER_S = 600.0
"""Until the headers of an answer: one that is not streamed comes when it is complete."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """A service: its address, and what its owner asks it with: a socket, or a token."""

    url: str | None = None
    socket: Path | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def is_owned(self) -> bool:
        """Whether it can be asked without anybody's key."""
        return self.socket is not None or self.token is not None

    @property
    def base(self) -> str:
        """Prefix of paths; on a socket the host has no meaning."""
        return (self.url or "http://localhost").rstrip("/")


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """With which credentials a service is asked."""

    address: ServiceAddress
    key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    over_socket: bool = True

    def open(
        self, method: str, target: str, data: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> contextlib.AbstractAsyncContextManager[StreamedResponse]:
        """Ask for a path with its query, and read the answer as it comes."""
        return open_stream(
            self.address.base + target,
            method=method,
            data=data,
            timeout_s=_ANSWER_S,
            api_key=self.key,
            headers={**(headers or {}), **self.headers},
            unix_socket=self._find_socket(),
        )

    async def ask(
        self, method: str, target: str, body: object = None, timeout_s: float = _QUESTION_S
    ) -> HttpResponse:
        """Ask for a path and return the whole answer; FetchError if there is none."""
        data = None if body is None else json.dumps(body).encode()
        return await request(
            self.address.base + target,
            method=method,
            data=data,
            headers={
                **self.headers,
                **({} if data is None else {"content-type": "application/json"}),
            },
            timeout_s=timeout_s,
            api_key=self.key,
            max_bytes=_MAX_ANSWER_BYTES,
            unix_socket=self._find_socket(),
        )

    def _find_socket(self) -> Path | None:
        path = self.address.socket if self.over_socket else None
        if path is not None and not path.exists():
            raise FetchError("it has not started yet, or it has ended")
        return path


class PlansFleets(Protocol):
    """A planner: it answers requests of the API, and tells how fleets stand."""

    async def answer(self, request: Request, role: Role, owner: str = "") -> Answer:
        """Answer a request that somebody makes in a role; ApiError where that cannot be."""
        ...

    def listen(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: how fleets stand, at once and whenever something has changed."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


class ServiceDirectory:
    """The gateway and the planner, either of which may be missing; the gateway may be looked for again."""

    def __init__(
        self,
        gateway: ServiceAddress | None = None,
        planner: PlansFleets | None = None,
        find_gateway: Callable[[], ServiceAddress | None] | None = None,
    ) -> None:
        self.gateway = gateway
        self.planner = planner
        self._find_gateway = find_gateway

    async def look_again(self) -> None:
        """Find out where the gateway is now, where nobody said it for good."""
        if self._find_gateway is not None:
            self.gateway = await asyncio.to_thread(self._find_gateway) or self.gateway

    def need_gateway(self) -> ServiceAddress:
        """Return the gateway, or raise ApiError where none is known."""
        if self.gateway is None:
            raise _not_known("gateway")
        return self.gateway

    def need_planner(self) -> PlansFleets:
        """Return the planner, or raise ApiError where it was left out."""
        if self.planner is None:
            raise _not_known("planner")
        return self.planner

    def call_gateway(self, session: LoginSession) -> ServiceCall:
        """Return how the gateway's own endpoints are asked for a session."""
        address = self.need_gateway()
        if session.kind == "key":
            if address.url is None:
                raise _no_way("the gateway's address is not known, only its socket")
            return ServiceCall(address, session.key, over_socket=False)
        return own(address, session)


def own(address: ServiceAddress, session: LoginSession | None = None) -> ServiceCall:
    """Return how a service is asked by its owner, with no more rights than a session has."""
    if not address.is_owned:
        raise _no_way("this needs a login by key: the dashboard has no rights of its own here")
    headers: dict[str, str] = {}
    if session is not None and session.role != "admin":
        headers["x-atoll-role"] = session.role
        if session.owner:
            # As UTF-8, which headers of the client's are not.
            headers["x-atoll-owner"] = session.owner.encode().decode("latin-1")
    token = None if address.socket is not None else address.token
    return ServiceCall(address, token, headers)


def at_public_port(address: ServiceAddress, key: str | None) -> ServiceCall:
    """Return how models are asked."""
    if address.url is None:
        raise _no_way("the gateway's address is not known, only its socket")
    return ServiceCall(replace(address, socket=None, token=None), key, over_socket=False)


@contextlib.asynccontextmanager
async def reaching_gateway() -> AsyncIterator[None]:
    """Have what goes wrong on the way to the gateway be told as an answer of ours."""
    try:
        yield
    except FetchError as error:
        raise ApiError(
            502,
            f"the gateway does not answer: {error}",
            kind="server_error",
            code="gateway_down",
        ) from error


def _no_way(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="key_needed")


def _not_known(name: str) -> ApiError:
    return ApiError(503, f"no {name} is known here", kind="server_error", code=f"no_{name}")
