"""A planner on loopback, and what it is asked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from atoll.planner.jobs import JobRunner
from atoll.planner.planner_server import ROUTES, PlannerAddress, PlannerOptions, PlannerServer
from atoll.planner.planner_service import PlannerRoute, PlanningService
from atoll.runtime.http.http_client import request


@contextlib.asynccontextmanager
async def running(options: PlannerOptions, *routes: PlannerRoute) -> AsyncIterator[PlannerAddress]:
    server = PlannerServer(
        PlanningService(options.files, options.states, JobRunner(2, modules=())), (*ROUTES, *routes)
    )
    try:
        yield await server.start(options)
    finally:
        await server.close()


async def ask(
    at: PlannerAddress, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await request(
        f"{at.url or 'http://planner'}{path}",
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
