"""A planner, and what it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

from atoll.core.roles import Role
from atoll.planner.jobs import JobMessage, JobRunner
from atoll.planner.planner_api import ROUTES, PlannerApi
from atoll.planner.planner_service import PlannerRoute, PlanningService
from atoll.planner.worker import Job, NamedJob, Said, name_of
from atoll.runtime.http.handlers import Answer, Response
from atoll.runtime.http.http_request import Request
from atoll.runtime.openai import ApiError


class JobsHere(JobRunner):
    """Does jobs in this process: a worker takes longer to load what plans than most jobs take."""

    async def messages(self, job: NamedJob, arguments: Said) -> AsyncGenerator[JobMessage, None]:
        module, _, name = name_of(job).partition(":")
        work: Job = getattr(import_module(module), name)
        told: list[Said] = []
        # As it travels.
        said = await asyncio.to_thread(work, json.loads(json.dumps(arguments)), told.append)
        for each in told:
            yield JobMessage("progress", json.loads(json.dumps(each)))
        yield JobMessage("result", json.loads(json.dumps(said, allow_nan=False)))


@contextlib.asynccontextmanager
async def running(
    *routes: PlannerRoute, files: tuple[Path, ...] = (), jobs: JobRunner | None = None
) -> AsyncIterator[PlannerApi]:
    service = PlanningService(files, jobs=jobs or JobRunner(2, modules=()))
    planner = PlannerApi(service, (*ROUTES, *routes))
    try:
        yield planner
    finally:
        await planner.close()


async def open_answer(
    at: PlannerApi,
    method: str,
    path: str,
    body: object = None,
    *,
    role: Role = "admin",
    owner: str = "",
    **headers: str,
) -> Answer:
    named = {name.replace("_", "-").encode(): text.encode() for name, text in headers.items()}
    path, _, query = path.partition("?")
    request = Request(method.encode(), path.encode(), named, query.encode())
    request.body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await at.answer(request, role, owner)


async def ask(
    at: PlannerApi, method: str, path: str, body: object = None, **more: Any
) -> tuple[int, Any]:
    try:
        answer = await open_answer(at, method, path, body, **more)
        if isinstance(answer, Response):
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(answer.body) if is_json else answer.body
        return 200, events(b"".join([piece async for piece in answer.pieces]))
    except ApiError as error:
        return error.status, json.loads(error.body())


def events(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in body.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found
