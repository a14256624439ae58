"""State of the planner, its questions, and who may ask: types that its modules share.

A module with endpoints has a tuple `ROUTES`; `planner_api` puts them together. An endpoint is

    async def show(planner: PlanningService, request: PlannerRequest) -> Answer: ...
    ROUTES = (PlannerRoute("GET", "fleets/{name}", "viewer", show, "How it stands", gives=Fleet),)

and must not block: what reads files or asks machines goes through `asyncio.to_thread`, what
computes is a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atoll.core.errors import AtollError
from atoll.core.frozen import Frozen
from atoll.core.roles import Role
from atoll.planner.answers import Answers
from atoll.planner.fleets import FleetList, FleetShelf
from atoll.planner.jobs import JobRunner, write_event
from atoll.planner.plans import PlanBook
from atoll.planner.questions import BEFOREHAND, place_of
from atoll.planner.trace_store import TraceStore
from atoll.runtime.http.api_route import ApiRoute, read_object, read_query
from atoll.runtime.http.handlers import Answer, Response
from atoll.runtime.openai import ApiError

Q = TypeVar("Q", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class PlannerRequest:
    """A request whose route was found: `names` are the parts of its path, `role` and `owner` who asks."""

    role: Role
    owner: str = ""
    names: dict[str, str] = field(default_factory=dict)
    query: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    def object(self) -> dict[str, Any]:
        """Return the JSON object of the body; ApiError where it is none."""
        return read_object(self.body)

    def read(self, kind: type[Q]) -> Q:
        """Return the query; ApiError for a field that is unknown or wrong."""
        return read_query(kind, self.query)


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
        self.beforehand: asyncio.Task[None] | None = None
        """Work on a plan before anybody asks, of the fleet `first`: one that is no example."""
        self.first: str | None = None

    async def start(self) -> None:
        """Start a worker, and have it plan before anybody asks."""
        await self.jobs.warm()
        self.beforehand = asyncio.create_task(self._plan_beforehand())

    async def _plan_beforehand(self) -> None:
        try:
            entries = await asyncio.to_thread(self.shelf.entries)
            entry = next((each for each in entries if each.kind != "example"), None)
            if entry is None:
                return
            self.first = entry.name
            place = await asyncio.to_thread(place_of, entry)
            await self.jobs.run(BEFOREHAND, {"place": place.model_dump()})
        except (AtollError, ApiError) as error:
            # Whoever asks is told.
            _LOG.info("nothing is planned beforehand: %s", error)

    async def list_fleets(self) -> FleetList:
        """Return all fleets as they are listed; `plans` rises when more is known of plans."""
        return FleetList(fleets=await self.shelf.describe(), plans=self.plans.version)

    async def close(self) -> None:
        """End its workers and remove its folder."""
        if self.beforehand is not None:
            self.beforehand.cancel()
            await asyncio.gather(self.beforehand, return_exceptions=True)
        # Plans first: they use workers, which end next.
        await self.plans.close()
        await self.jobs.close()
        await self.background.close()
        self._folder.remove()


Endpoint = Callable[[PlanningService, PlannerRequest], Awaitable[Answer]]


PlannerRoute = ApiRoute[Endpoint]


def json_response(data: object, status: int = 200) -> Response:
    """Return plain data as an answer that nobody keeps."""
    text = msgspec.json.encode(data, enc_hook=_plain)
    return Response(text, status, headers=(("cache-control", "no-store"),))


def _plain(value: object) -> object:
    """Return a model of pydantic as plain data."""
    if isinstance(value, Frozen):
        return value.model_dump(mode="json")
    raise NotImplementedError(type(value))


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
Read = Callable[[], Awaitable[FleetList]]
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
                try:
                    async with asyncio.timeout(_BEAT_S):
                        await self._changed.wait()
                except TimeoutError:
                    yield b": \n\n"
        finally:
            self._listeners -= 1
            if not self._listeners and self._task is not None:
                # Forgotten, so that who listens next is not told what is old.
                task, self._task, self._said = self._task, None, b""
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

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
