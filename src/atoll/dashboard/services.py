"""Addresses of gateway and planner, and how they are asked: with a session's key, or as their operator."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from atoll.dashboard.sessions import LoginSession
from atoll.runtime.http.http_client import (
    FetchError,
    HttpResponse,
    StreamedResponse,
    open_stream,
    request,
)
from atoll.runtime.openai import ApiError

ADMIN_PATH = "/atoll/v1"
_MAX_ANSWER_BYTES = 64 * 2**20
_QUESTION_S = 10.0
_START_S = 20.0
"""How long a service that was started beside may take until it listens."""
_LOOK_S = 0.2
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

    async def wait_until_there(self) -> None:
        """Return as soon as something listens, at once where it does; FetchError if nothing ever does."""
        try:
            async with asyncio.timeout(_START_S):
                while not await self._is_there():
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise FetchError(f"it did not start within {_START_S:.0f} s, or has ended") from error

    async def _is_there(self) -> bool:
        parts = urlsplit(self.address.base)
        usual = 443 if parts.scheme == "https" else 80
        try:
            if self.over_socket and self.address.socket is not None:
                _, writer = await asyncio.open_unix_connection(self.address.socket)
            else:
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or usual)
        except OSError:
            return False
        writer.close()
        return True

    def _find_socket(self) -> Path | None:
        path = self.address.socket if self.over_socket else None
        if path is not None and not path.exists():
            raise FetchError("it has not started yet, or it has ended")
        return path


class ServiceDirectory:
    """The gateway and the planner, either of which may be missing; the gateway may be looked for again."""

    def __init__(
        self,
        gateway: ServiceAddress | None = None,
        planner: ServiceAddress | None = None,
        find_gateway: Callable[[], ServiceAddress | None] | None = None,
    ) -> None:
        self.gateway = gateway
        self.planner = planner
        self._find_gateway = find_gateway

    async def look_again(self) -> None:
        """Find out where the gateway is now, where nobody said it for good."""
        if self._find_gateway is not None:
            self.gateway = await asyncio.to_thread(self._find_gateway) or self.gateway

    def need(self, name: str) -> ServiceAddress:
        """Return a service, or raise ApiError where there is none."""
        address = self.gateway if name == "gateway" else self.planner
        if address is None:
            raise ApiError(
                503,
                f"no {name} is known here",
                kind="server_error",
                code=f"no_{name}",
            )
        return address

    def call_gateway(self, session: LoginSession) -> ServiceCall:
        """Return how the gateway's own endpoints are asked for a session."""
        address = self.need("gateway")
        if session.kind == "key":
            if address.url is None:
                raise _no_way("the gateway's address is not known, only its socket")
            return ServiceCall(address, session.key, over_socket=False)
        return own(address, session)

    def call_planner(self, session: LoginSession) -> ServiceCall:
        """Return how the planner is asked for a session."""
        return own(self.need("planner"), session)


def own(address: ServiceAddress, session: LoginSession | None = None) -> ServiceCall:
    """Return how a service is asked by its owner, with no more rights than a session has."""
    if not address.is_owned:
        raise _no_way("this needs a login by key: the dashboard has no rights of its own here")
    headers = {}
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


def unreachable(name: str, error: FetchError) -> ApiError:
    """Return what a page is told of a service that does not answer."""
    return ApiError(
        502, f"the {name} does not answer: {error}", kind="server_error", code=f"{name}_down"
    )


@contextlib.asynccontextmanager
async def reaching(name: str) -> AsyncIterator[None]:
    """Have what goes wrong on the way to a service be told as an answer of ours."""
    try:
        yield
    except FetchError as error:
        raise unreachable(name, error) from error


def _no_way(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="key_needed")
