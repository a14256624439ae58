"""State of the planner, its questions, and who may ask: types that its modules share.

A module with endpoints has a tuple `ROUTES`; `planner_server` puts them together. An endpoint is

    async def show(planner: PlanningService, request: PlannerRequest) -> Answer: ...
    ROUTES = (PlannerRoute("GET", "/atoll/v1/fleets/{name}", "viewer", show, "How it stands"),)

and must not block: what reads files or asks machines goes through `asyncio.to_thread`, what
computes is a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, unquote

from atoll.core.frozen import Frozen
from atoll.planner.answers import Answers
from atoll.planner.fleets import FleetShelf
from atoll.planner.jobs import JobRunner, write_event
from atoll.planner.plans import PlanBook
from atoll.planner.trace_store import TraceStore
from atoll.runtime.http.handlers import Answer, Response
from atoll.runtime.openai import ApiError

Role = Literal["viewer", "member", "operator", "admin"]
"""Viewers look, members also ask what-if and simulate, operators also change fleets and approve plans."""
EVENTS = "text/event-stream"
_RANK = {role: rank for rank, role in enumerate(get_args(Role))}


@dataclass(frozen=True, slots=True)
class PlannerRequest:
    """A request whose route was found: `names` are the parts of its path, `role` who asks."""

    role: Role
    names: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    def object(self) -> dict[str, Any]:
        """Return the JSON object of the body; ApiError where it is none."""
        try:
            # JSON has no NaN and no Infinity, though Python reads them.
            found = json.loads(self.body, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "the body is no JSON") from error
        if not isinstance(found, dict):
            raise ApiError(400, "the body must be a JSON object")
        return found

    def number(self, name: str, usual: int, *, min_value: int, max_value: int) -> int:
        """Return a whole number of the query."""
        text = self.query.get(name, str(usual))
        if not re.fullmatch(r"\d{1,9}", text) or not min_value <= int(text) <= max_value:
            raise ApiError(
                400, f"{name} must be a number from {min_value} to {max_value}", param=name
            )
        return int(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


class PlanningService:
    """The state of a planner: its fleets, its workers, and a folder of its own that goes when it ends.

    `jobs` answers people who wait, `background` works on what nobody waits for.
    """

    def __init__(
        self,
        files: Iterable[Path] = (),
        states: Iterable[Path] = (),
        jobs: JobRunner | None = None,
    ) -> None:
        # One more than the dashboard lets one person have.
        self.jobs = jobs or JobRunner(3)
        # Nobody waits for these, so they give way to others.
        self.background = JobRunner(1, nice=10)
        self.shelf = FleetShelf(tuple(files), states=tuple(states))
        self.watch = FleetWatch(self.list_fleets)
        self.plans = PlanBook(self.background)
        self._folder = PlannerFolder()
        self.folder = self._folder.path
        self.answers = Answers()
        self.traces = TraceStore(self.folder / "traces")

    async def list_fleets(self) -> dict[str, Any]:
        """Return all fleets as they are listed; `plans` rises when more is known of plans."""
        return await self.shelf.describe() | {"plans": self.plans.version}

    async def close(self) -> None:
        """End its workers and remove its folder."""
        # Plans first: they use workers, which end next.
        await self.plans.close()
        await self.jobs.close()
        await self.background.close()
        self._folder.remove()


Endpoint = Callable[[PlanningService, PlannerRequest], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class PlannerRoute:
    """A method and a path ("/atoll/v1/fleets/{name}"), the least role that may ask, and what answers.

    `takes` is what its body is read as (None: it has none, or one that is no JSON), `query` the names that
    its query may have, `makes` the content types of its answers.
    """

    method: str
    path: str
    role: Role
    endpoint: Endpoint
    summary: str
    takes: type[Frozen] | None = None
    query: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("application/json",)

    @property
    def segments(self) -> tuple[str, ...]:
        """The path in its parts."""
        return tuple(self.path.split("/"))

    def match(self, segments: tuple[str, ...]) -> dict[str, str] | None:
        """Return the named parts of a path, None where it is another path."""
        own = self.segments
        if len(own) != len(segments):
            return None
        names = {}
        for mine, given in zip(own, segments, strict=True):
            if mine.startswith("{"):
                names[mine[1:-1]] = unquote(given)
            elif mine != given:
                return None
        return names


def find_route(
    routes: Iterable[PlannerRoute], method: str, path: str, role: Role
) -> tuple[PlannerRoute, dict[str, str]]:
    """Return what answers a request, with the names in its path; ApiError where nothing does or may."""
    segments = tuple(path.split("/"))
    found = [(route, names) for route in routes if (names := route.match(segments)) is not None]
    if not found:
        raise ApiError(404, f"nothing is at {path[:200]}", code="not_found")
    for route, names in found:
        if route.method == method:
            if _RANK[role] < _RANK[route.role]:
                raise ApiError(
                    403,
                    f"{'an' if route.role[0] in 'ao' else 'a'} {route.role} may do this, not a {role}",
                    kind="permission_error",
                    code="role_forbids",
                )
            return route, names
    allow = ", ".join(sorted({route.method for route, _ in found}))
    raise ApiError(405, f"{method} is not for {path[:200]}", allow=allow)


def read_role(headers: dict[bytes, bytes]) -> Role:
    """Return the role that a request is made in: what its header lowers it to, else admin."""
    said = headers.get(b"x-atoll-role", b"admin").decode("latin-1")
    for role in get_args(Role):
        if said == role:
            return role  # type: ignore[no-any-return]
    raise ApiError(400, "x-atoll-role is viewer, member, operator or admin", param="x-atoll-role")


def read_query(query: bytes) -> dict[str, str]:
    """Return the names and values of a query, the last of each name."""
    return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=64))


def json_response(data: object, status: int = 200) -> Response:
    """Return plain data as an answer that nobody keeps."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status, headers=(("cache-control", "no-store"),))


_PREFIX = "atoll-planner-"
_LOCK = "lock"


class PlannerFolder:
    """A folder that only this user can open; those that killed planners left are removed when one is made."""

    def __init__(self) -> None:
        _remove_left()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Held as long as the process is there, however it ends.
        self._lock: int | None = os.open(
            self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_left() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        # What is of another user, or goes meanwhile, is not ours to remove.
        with contextlib.suppress(OSError):
            if path.parent.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # A lock that can be taken has no planner any more.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(lock)


_LOG = logging.getLogger(__name__)
EVERY_S = 3.0
"""How often somebody looks while others listen."""
_BEAT_S = 15.0
"""After so long with nothing to say a comment is sent, so that nobody in between gives up."""
Read = Callable[[], Awaitable[dict[str, Any]]]
"""Returns all fleets as they are listed."""


class FleetWatch:
    """Looks at fleets for all listeners together, and only while there are any."""

    def __init__(self, read: Read, every_s: float = EVERY_S) -> None:
        self._read = read
        self._every_s = every_s
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._said = b""
        self._changed = asyncio.Event()

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Yield `fleets` at once, and whenever something has changed."""
        self._listeners += 1
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        told = b""
        try:
            # Whoever is in between knows at once that this is a stream.
            yield b": \n\n"
            while True:
                # Before waiting: what came while the last one was sent would be missed otherwise.
                if self._said != told:
                    told = self._said
                    yield told
                    continue
                changed = asyncio.ensure_future(self._changed.wait())
                done, _ = await asyncio.wait({changed}, timeout=_BEAT_S)
                changed.cancel()
                if not done:
                    yield b": \n\n"
        finally:
            self._listeners -= 1
            if not self._listeners and self._task is not None:
                self._task.cancel()
                # Forgotten, so that who listens next is not told what is old.
                self._task, self._said = None, b""

    async def _watch(self) -> None:
        while True:
            try:
                said = write_event("fleets", await self._read())
            except Exception:  # noqa: BLE001 - what cannot be read now may be in a moment
                _LOG.exception("cannot look at fleets")
                said = self._said
            if said != self._said:
                self._said = said
                self._changed.set()
                # This one stays set, so those who wait next get another.
                self._changed = asyncio.Event()
            await asyncio.sleep(self._every_s)
