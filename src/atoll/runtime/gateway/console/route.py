"""A request that is answered under `/atoll/v1/`: its method and path, who may ask, and who answers.

A handler takes a `ConsoleCall` and returns an answer at once (`Response`, made by `show`), or later: a
coroutine that returns one, or an `EventStream` or `ByteStream` of pieces, which ends when its client goes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from atoll.runtime.accounts.api_keys import ROLES, Role
from atoll.runtime.gateway.console.console_caller import Caller
from atoll.runtime.gateway.console.gate import DatabaseGate
from atoll.runtime.gateway.console.live_feed import LiveAnswer, LiveFeed
from atoll.runtime.gateway.console.snapshot import GatewaySnapshots
from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.gateway.gateway_metrics import GatewayMetrics
from atoll.runtime.gateway.request_log import RequestLog
from atoll.runtime.http.handlers import Answer, Headers, Response
from atoll.runtime.http.http_request import Request
from atoll.runtime.http.upstream import UpstreamPool
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.member import Member
from atoll.telemetry.history import HistoryChange, HistoryTable, Kind

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts

ANY: frozenset[Role] = frozenset(ROLES)
MEMBERS: frozenset[Role] = frozenset({"admin", "operator", "member"})
"""All who may change something."""
OPERATORS: frozenset[Role] = frozenset({"admin", "operator"})
"""Those who run machines, but hand out no keys."""
ADMINS: frozenset[Role] = frozenset({"admin"})
NO_STORE: Headers = (("cache-control", "no-store"),)
LATEST_S = 253_370_764_800.0
"""The year 9999 (Unix time): later dates cannot be shown."""
_MAX_FIELDS = 32
"""Fields of a query."""


class KeepsHistory(Protocol):
    """What was asked and how busy machines were, over time."""

    @property
    def is_kept(self) -> bool:
        """Whether anybody keeps it."""
        ...

    async def read(
        self, kind: Kind, since_s: float, until_s: float, points: int
    ) -> tuple[HistoryTable, list[HistoryChange]]:
        """Return the curves of models or machines, and what changed."""
        ...


class PagesContext(GatewayView, Protocol):
    """A gateway, as far as its own pages and its console know it."""

    metrics: GatewayMetrics
    snapshots: GatewaySnapshots
    live: LiveFeed
    requests: RequestLog

    @property
    def history(self) -> KeepsHistory:
        """What was asked and how busy machines were."""
        ...

    @property
    def accounts(self) -> Accounts | None:
        """Keys and usage, if there are."""
        ...

    def upstreams(self, member: Member) -> UpstreamPool:
        """Return the connections to a backend."""
        ...

    def refused(self, error: ApiError, request: Request | None = None) -> None:
        """Note a request that is answered with an error."""


@dataclass(frozen=True, slots=True)
class ConsoleCall:
    """A request, who asks, and what answers it may use."""

    request: Request
    caller: Caller
    context: PagesContext
    gate: DatabaseGate
    route: ConsoleRoute
    name: str = ""
    """Decoded value of `{id}` in the path."""

    @property
    def accounts(self) -> Accounts:
        """Keys and usage, or 404."""
        accounts = self.context.accounts
        if accounts is None:
            raise ApiError(
                404, "this gateway has no keys, and writes no usage down", code="no_accounts"
            )
        return accounts

    def query(self) -> Mapping[str, str]:
        """Return the fields of the query; 400 for one that is unknown here, or there twice."""
        try:
            pairs = parse_qsl(
                self.request.query.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=_MAX_FIELDS,
            )
        except ValueError:
            raise ApiError(400, "the query cannot be read") from None
        fields = dict(pairs)
        for field in fields.keys() - set(self.route.query):
            raise ApiError(
                400, f"there is no field {field[:100]!r} of the query", param=field[:100]
            )
        if len(fields) != len(pairs):
            raise ApiError(400, "a field of the query is there twice")
        return fields


ConsoleHandler = Callable[[ConsoleCall], Answer | LiveAnswer | Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class ConsoleRoute:
    """One line of the table of requests."""

    method: str
    path: str
    """After `/atoll/v1/`; `{id}` stands for anything, also with slashes in it."""
    roles: frozenset[Role]
    summary: str
    handler: ConsoleHandler
    query: tuple[str, ...] = ()
    """Names of the fields that its query may have."""
    makes: tuple[str, ...] = ("application/json",)
    """Content types of its answers."""


def show(data: Any, status: int = 200) -> Response:
    """Return data as JSON, which nobody in between keeps."""
    return Response(msgspec.json.encode(data), status, headers=NO_STORE)


def nothing_at(path: str) -> ApiError:
    """Return the error for a path where nothing is."""
    return ApiError(404, f"there is nothing at {path[:200]}", code="not_found")


def not_allowed(request: Request, allowed: str) -> ApiError:
    """Return the error for a method that is not one of those allowed (`GET, HEAD`)."""
    method = request.method.decode(errors="replace")
    return ApiError(
        405,
        f"{method} is not allowed here; use {allowed}",
        code="method_not_allowed",
        allow=allowed,
    )
