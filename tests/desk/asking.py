"""A desk on loopback, and what it is asked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from atoll.desk.desk import DeskRoute, PlanDesk
from atoll.desk.jobs import JobRunner
from atoll.desk.server import ROUTES, DeskAddress, DeskOptions, DeskServer
from atoll.runtime.http.client import request


@contextlib.asynccontextmanager
async def running(options: DeskOptions, *routes: DeskRoute) -> AsyncIterator[DeskAddress]:
    server = DeskServer(PlanDesk(options.files, JobRunner(2, modules=())), (*ROUTES, *routes))
    try:
        yield await server.start(options)
    finally:
        await server.close()


async def ask(
    at: DeskAddress, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await request(
        f"{at.url or 'http://desk'}{path}",
        method=method,
        data=data,
        headers=named,
        unix_socket=at.socket,
        timeout_s=60.0,
    )
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return answer.status, events(answer.body)
    return answer.status, json.loads(answer.body)


def events(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found
