"""`atoll tasks trace`: where the time of one request to an any-to-any model went."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from atoll.core.errors import InputError, UsageError
from atoll.report.terminal import emit, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR = 40
_TRACES = "/atoll/v1/traces"


def add_trace(app: typer.Typer) -> None:
    """Add the command to `atoll tasks`."""
    app.command("trace")(trace)


def trace(
    request: Annotated[
        str | None,
        typer.Argument(
            help="Its x-request-id. Default: the newest that a graph server still knows."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="The graph server to ask. Default: those that run here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in seconds.")] = False,
) -> None:
    """Show where the time of a request went: every invocation, its executor, waiting and running."""
    found = asyncio.run(_find(request, [url] if url else _graph_servers()))
    emit(found, as_json, lambda: draw_trace(found))


def _graph_servers() -> list[str]:
    from atoll.runtime.local.fleet_state import list_running_fleets

    urls = [
        endpoint.url
        for fleet in list_running_fleets()
        for endpoint in fleet.endpoints
        if endpoint.kind == "tasks"
    ]
    if not urls:
        raise UsageError(
            "no any-to-any model is served here", hint="start one with `atoll serve`, or name --url"
        )
    return urls


async def _find(request: str | None, urls: Sequence[str]) -> dict[str, Any]:
    for url in urls:
        name = request
        if name is None:
            known = (await _get(url, _TRACES) or {}).get("traces", [])
            name = known[0] if known else None
        if name is not None:
            found = await _get(url, f"{_TRACES}/{quote(name, safe='')}")
            if found is not None:
                return found
    what = "no request yet" if request is None else f"no trace of {request[:100]!r}"
    raise InputError(
        what, field="request", hint="the last 200 requests are kept; see the header x-request-id"
    )


async def _get(url: str, path: str) -> dict[str, Any] | None:
    from atoll.runtime.http.http_client import fetch

    status, body = await fetch(f"{url.rstrip('/')}{path}")
    if status != 200:
        return None
    found = json.loads(body)
    return found if isinstance(found, dict) else None


def draw_trace(trace: Mapping[str, Any]) -> RenderableType:
    """Return a trace as a table with a bar for each invocation on the request's own time axis."""
    from rich.console import Group

    invocations = trace["invocations"]
    whole_s = max(
        [trace["took_s"] or 0.0, *(i["started_s"] + (i["took_s"] or 0.0) for i in invocations)]
    )
    rows = [
        (
            each["component"] if each["piece"] is None else f"{each['component']} #{each['piece']}",
            each["executor"],
            _milliseconds(each["started_s"]),
            _milliseconds(each["waited_s"]),
            _milliseconds(each["ran_s"]),
            _milliseconds(each["took_s"]),
            each["batch"] or None,
            each["attempts"] if each["attempts"] > 1 else None,
            draw_bar(each["started_s"], each["took_s"], whole_s),
        )
        for each in invocations
    ]
    columns = ("component", "executor", "from", "waited", "ran", "took", "batch", "tries", "")
    first = "" if trace["first_s"] is None else f", first piece after {trace['first_s']:.3f} s"
    took = "still running" if trace["took_s"] is None else f"{trace['took_s']:.3f} s"
    title = f"{trace['id']}: {trace['endpoint']} of {trace['model']}, {took}{first}"
    troubles = [
        f"{each['component']}: {trouble}" for each in invocations for trouble in each["troubles"]
    ]
    shown = table(
        columns,
        rows,
        title=title,
        caption=f"class {trace['class'] or '-'}, over {trace['path'] or '-'}; milliseconds",
        right=columns[2:8],
    )
    return Group(shown, *troubles)


def draw_bar(started_s: float, took_s: float | None, whole_s: float, width: int = _BAR) -> str:
    """Return where a stretch of time lies in the whole, as text of `width` characters."""
    if whole_s <= 0.0:
        return ""
    end_s = whole_s if took_s is None else min(whole_s, started_s + took_s)
    first = min(width - 1, int(width * started_s / whole_s))
    last = max(first + 1, round(width * end_s / whole_s))
    return " " * first + "█" * (last - first) + " " * (width - last)


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1000.0 * seconds:,.1f}"
