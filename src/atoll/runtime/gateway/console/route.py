"""A request that the gateway answers under `/atoll/v1/`: who asks, and what answers may use.

A handler takes a `ConsoleCall` and returns an answer at once (`Response`, made by `show`), or later: a
coroutine that returns one, or an `EventStream` or `ByteStream` of pieces, which ends when its client goes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from atoll.runtime.gateway.console.console_caller import Caller
from atoll.runtime.gateway.console.gate import DatabaseGate
from atoll.runtime.gateway.console.live_feed import LiveAnswer, LiveFeed
from atoll.runtime.gateway.console.snapshot import GatewaySnapshots
from atoll.runtime.gateway.console.view import GatewayView
from atoll.runtime.gateway.gateway_metrics import GatewayMetrics
from atoll.runtime.gateway.request_log import RequestLog
from atoll.runtime.http.api_route import ApiRoute, read_query
from atoll.runtime.http.handlers import Answer, Headers, Response
from atoll.runtime.http.http_request import Request
from atoll.runtime.http.upstream import UpstreamPool
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.member import Member
from atoll.telemetry.history import HistoryChange, HistoryTable, Kind

if TYPE_CHECKING:
    from atoll.runtime.accounts.accounts import Accounts

Q = TypeVar("Q", bound=msgspec.Struct)
NO_STORE: Headers = (("cache-control", "no-store"),)
LATEST_S = 253_370_764_800.0
"""The year 9999 (Unix time): later dates cannot be shown."""


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
    name: str = ""
    """Decoded value of the name in the path."""

    @property
    def accounts(self) -> Accounts:
        """Keys and usage, or 404."""
        accounts = self.context.accounts
        if accounts is None:
            raise ApiError(
                404, "this gateway has no keys, and writes no usage down", code="no_accounts"
            )
        return accounts

    def query(self, kind: type[Q]) -> Q:
        """Return the query; 400 for a field that is unknown here, there twice, or wrong."""
        return read_query(kind, self.request.query)


ConsoleHandler = Callable[[ConsoleCall], Answer | LiveAnswer | Awaitable[Answer]]


ConsoleRoute = ApiRoute[ConsoleHandler]


def show(data: Any, status: int = 200) -> Response:
    """Return data as JSON, which nobody in between keeps."""
    return Response(msgspec.json.encode(data), status, headers=NO_STORE)
