"""What a gateway was asked and how busy its machines were, over time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Required, TypedDict

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


Curve = Sequence[float | None]
"""A figure of each step, null where nothing was seen."""


class ShownCurves(TypedDict, total=False):
    """Curves of a model or a machine (`telemetry.history.FIGURES`)."""

    name: Required[str]
    requests_per_s: Curve
    input_tokens_per_s: Curve
    output_tokens_per_s: Curve
    first_token_s: Curve
    token_s: Curve
    kept: Curve
    usd_per_hour: Curve
    running: Curve
    load: Curve
    kv_share: Curve
    gpu_share: Curve
    memory_share: Curve


class ShownHistory(TypedDict):
    """Curves of models or machines: means over steps that begin at `at_s`, and what changed meanwhile."""

    of: Kind
    step_s: float
    at_s: Sequence[float]
    series: list[ShownCurves]
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
            series=[_show_curves(name, curves) for name, curves in table.series.items()],
            changes=[ShownChange(at_s=change.at_s, text=change.text) for change in changes],
        )
    )


def _show_curves(name: str, curves: Mapping[str, Curve]) -> ShownCurves:
    shown = ShownCurves(name=name)
    shown.update(curves)  # type: ignore[typeddict-item]  # Their names are those of `FIGURES`.
    return shown


ROUTES = (
    ConsoleRoute(
        *("GET", "history", "viewer", show_history, "Curves of models or machines over time"),
        gives=ShownHistory,
        query=HistoryQuery,
    ),
)
