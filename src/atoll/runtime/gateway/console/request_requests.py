"""The last requests that a gateway answered, and the way that one of them took."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, TypedDict
from urllib.parse import quote

import msgspec

from atoll.engines.graph_server import ENGINE as GRAPH_SERVER
from atoll.runtime.gateway.backend_question import ask_backend
from atoll.runtime.gateway.console.route import ConsoleCall, ConsoleRoute, show
from atoll.runtime.gateway.request_log import (
    LoggedRequest,
    RequestSpan,
    RequestSummary,
    RequestWay,
    executor_spans,
)
from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError

_TRACES = "/atoll/v1/traces"
_ASK_S = 3.0
_MAX_BYTES = 2 * 2**20


class RequestsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests are meant, and of which model."""

    last: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    model: str | None = None


class RequestList(TypedDict):
    """The last requests, the newest first."""

    requests: list[RequestSummary]


def show_requests(call: ConsoleCall) -> Response:
    """Return the last requests; for members, those of their own keys."""
    query = call.query(RequestsQuery)
    found = [
        one
        for one in call.context.requests.last()
        if _may_see(call, one) and query.model in (None, one.model)
    ]
    return show(RequestList(requests=[one.summary() for one in found[: query.last]]))


async def show_request(call: ConsoleCall) -> Response:
    """Return where the time of a request went: gateway, prefill, decode, executors."""
    found = call.context.requests.get(call.name)
    if found is None or not _may_see(call, found):
        raise ApiError(404, "no request of this id is kept", code="not_found")
    spans = [*found.spans(), *await _ask_executors(call, found)]
    return show(RequestWay(**found.summary(), spans=spans))


def _may_see(call: ConsoleCall, request: LoggedRequest) -> bool:
    """Whether a caller looks at everything, or asked this with a key of its own."""
    if call.caller.role != "member":
        return True
    accounts = call.context.accounts
    key = None if accounts is None or request.key_id is None else accounts.key(request.key_id)
    return key is not None and call.caller.owns(key)


async def _ask_executors(call: ConsoleCall, found: LoggedRequest) -> list[RequestSpan]:
    """Return what a graph server that worked on a request says of its executors."""
    spans: list[RequestSpan] = []
    for tried in found.tried:
        member = call.context.pool.members.get(tried.name)
        if member is None or member.backend.kind != GRAPH_SERVER.name:
            continue
        # What it does not keep any more, or cannot say, is left out.
        with contextlib.suppress(OSError, TimeoutError, msgspec.DecodeError, KeyError, TypeError):
            status, body = await ask_backend(
                call.context.upstreams(member),
                f"{_TRACES}/{quote(found.id, safe='')}",
                timeout_s=_ASK_S,
                max_bytes=_MAX_BYTES,
            )
            if status == 200:
                told = msgspec.json.decode(body, type=dict[str, Any])
                spans += executor_spans(told, tried.began_s)
    return spans


ROUTES = (
    ConsoleRoute(
        *("GET", "requests", "viewer", show_requests, "The last requests"),
        gives=RequestList,
        query=RequestsQuery,
    ),
    ConsoleRoute(
        *("GET", "requests/{id}", "viewer", show_request, "The way that a request took"),
        gives=RequestWay,
    ),
)
