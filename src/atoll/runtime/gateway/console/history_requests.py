"""What a gateway was asked and how busy its machines were, over time."""

from __future__ import annotations

import math
import time
from typing import get_args

from atoll.runtime.gateway.console.route import ANY, LATEST_S, ConsoleCall, ConsoleRoute, show
from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError
from atoll.telemetry.history import LEVELS, MAX_POINTS, Kind

_DAY_S = 86400.0
_POINTS = 160


async def show_history(call: ConsoleCall) -> Response:
    """Return curves of models or machines."""
    query = call.query()
    kind = _kind(query.get("of", "models"))
    until_s = _moment(query.get("until_s"), "until_s", time.time())
    since_s = _moment(query.get("since_s"), "since_s", until_s - _DAY_S)
    points = query.get("points", str(_POINTS))
    if not points.isascii() or not points.isdigit() or not 1 <= int(points[:6]) <= MAX_POINTS:
        raise ApiError(400, f"points is a number from 1 to {MAX_POINTS}", param="points")
    if since_s >= until_s:
        raise ApiError(400, "since_s must be before until_s", param="since_s")
    since_s = max(since_s, until_s - LEVELS[-1].keep_s)
    history = call.context.history
    if not history.is_kept:
        raise ApiError(404, "this gateway keeps no history", code="no_history")
    table, changes = await history.read(kind, since_s, until_s, int(points))
    return show(
        {
            "of": kind,
            "step_s": table.step_s,
            "at_s": table.at_s,
            "series": [{"name": name, **curves} for name, curves in table.series.items()],
            "changes": [{"at_s": change.at_s, "text": change.text} for change in changes],
        }
    )


def _kind(text: str) -> Kind:
    for kind in get_args(Kind):
        if text == kind:
            return kind  # type: ignore[no-any-return]
    raise ApiError(400, "of is models or machines", param="of")


def _moment(text: str | None, name: str, usual_s: float) -> float:
    if text is None:
        return usual_s
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 <= found <= LATEST_S:
        raise ApiError(400, f"{name} is a Unix time in seconds", param=name)
    return found


ROUTES = (
    ConsoleRoute(
        *("GET", "history", ANY, "Curves of models or machines over time", show_history),
        query=("of", "since_s", "until_s", "points"),
    ),
)
