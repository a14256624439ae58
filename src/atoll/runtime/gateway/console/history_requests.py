"""What a gateway was asked and how busy its machines were, over time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import msgspec

from atoll.runtime.gateway.console.route import LATEST_S, ConsoleCall, ConsoleRoute, show
from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError
from atoll.telemetry.history import LEVELS, MAX_POINTS, Kind

_DAY_S = 86400.0
UnixTime = Annotated[float, msgspec.Meta(ge=0.0, le=LATEST_S)]
"""A moment, in seconds since 1970."""


class HistoryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is looked back at, and from when to when: by default until now, and for a day."""

    of: Kind = "models"
    since_s: UnixTime | None = None
    until_s: UnixTime | None = None
    points: Annotated[int, msgspec.Meta(ge=1, le=MAX_POINTS)] = 160


class ShownChange(TypedDict):
    """Something that changed, at a Unix time."""

    at_s: float
    text: str


class ShownHistory(TypedDict):
    """Curves of models or machines: means over steps that begin at `at_s`, and what changed meanwhile."""

    of: Kind
    step_s: float
    at_s: Sequence[float]
    series: list[dict[str, Any]]
    changes: list[ShownChange]


async def show_history(call: ConsoleCall) -> Response:
    """Return curves of models or machines."""
    query = call.query(HistoryQuery)
    until_s = time.time() if query.until_s is None else query.until_s
    since_s = until_s - _DAY_S if query.since_s is None else query.since_s
    if since_s >= until_s:
        raise ApiError(400, "since_s must be before until_s", param="since_s")
    since_s = max(since_s, until_s - LEVELS[-1].keep_s)
    history = call.context.history
    if not history.is_kept:
        raise ApiError(404, "this gateway keeps no history", code="no_history")
    table, changes = await history.read(query.of, since_s, until_s, query.points)
    return show(
        ShownHistory(
            of=query.of,
            step_s=table.step_s,
            at_s=table.at_s,
            series=[{"name": name, **curves} for name, curves in table.series.items()],
            changes=[ShownChange(at_s=change.at_s, text=change.text) for change in changes],
        )
    )


ROUTES = (
    ConsoleRoute(
        *("GET", "history", "viewer", show_history, "Curves of models or machines over time"),
        gives=ShownHistory,
        query=HistoryQuery,
    ),
)
