"""The fleets that a planner knows: those operated or served here, files that it was given, and examples.

Names are looked up in this order. Looking at an operated fleet asks its machines and takes its time: it is
done once for all who ask, in threads, and what was seen last is told meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from atoll.control.operation.fleet_home import (
    MAX_PLAN_BYTES,
    FleetHome,
    FleetRecord,
    list_homes,
)
from atoll.control.operation.fleet_status import FleetStatus, InstanceRow, look_at_fleet
from atoll.core.errors import AtollError, UnknownNameError
from atoll.core.files import read_text_limited
from atoll.plan.files.examples import describe_example, list_examples
from atoll.plan.plan import Plan
from atoll.runtime.local.fleet_state import FleetState, list_running_fleets

_LOG = logging.getLogger(__name__)
_FRESH_S = 2.0
"""For how long what was seen is told again."""
_NO_FILE = "the fleet file of a plan that was served without one"
_PATIENCE_S = 2.0
"""How long a new look is waited for where there is an older one."""

Kind = Literal["operated", "served", "file", "example"]


class ListedFleet(TypedDict, total=False):
    """A fleet as it is listed; what it has of these depends on its kind."""

    name: Required[str]
    kind: Required[Kind]
    title: str
    up: bool
    url: str | None
    since_s: float
    controller: str | None
    usd_per_hour: float | None
    errors: list[str]
    version: str
    """Another one when plan, next change, history or instances are others."""


class FleetList(TypedDict):
    """All fleets; `plans` rises when more is known of plans."""

    fleets: list[ListedFleet]
    plans: int


class ServedFleet(TypedDict):
    """A plan that `atoll serve` serves here; `live` has what its gateway and instances say of themselves."""

    fleet: FleetState
    live: dict[str, Any]


class ShownFleet(ListedFleet):
    """A fleet as it is shown alone: as one that is operated, and as it is served here."""

    instances: tuple[InstanceRow, ...]
    stand_ins: tuple[str, ...]
    status: FleetStatus | None
    served: list[ServedFleet]


Look = Callable[[FleetHome, FleetRecord, float], FleetStatus]


@dataclass(frozen=True, slots=True)
class FleetEntry:
    """A fleet by its name: `source` is its fleet file; `home` and `record` are there if it is operated.

    `served` is there if `atoll serve` serves a plan of it on this machine; without a fleet file that the plan
    was made for, `source` is a file that is not there.
    """

    name: str
    kind: Kind
    source: Path
    title: str | None = None
    home: FleetHome | None = None
    record: FleetRecord | None = None
    served: FleetState | None = None

    def read_plan(self) -> Plan | None:
        """Return the plan in force, with its choices as they are settled; None where nothing stands."""
        if self.served is not None:
            path = self.served.plan_path
            return Plan.from_json(read_text_limited(path, MAX_PLAN_BYTES), path=path)
        if self.home is None or self.record is None or not self.record.up:
            return None
        read = self.home.read_plan()
        return None if read is None else read.plan.model_copy(update={"mixes": self.record.mixes})


@dataclass(frozen=True, slots=True)
class FleetSight:
    """Observation of an operated fleet; without `status`, why there is none."""

    status: FleetStatus | None
    error: str | None = None


class FleetShelf:
    """See the module; `look` asks a fleet's machines, and blocks.

    `states` are folders of fleets that are operated from elsewhere than the user's state folder.
    """

    def __init__(
        self,
        files: tuple[Path, ...] = (),
        look: Look = look_at_fleet,
        states: tuple[Path, ...] = (),
    ) -> None:
        self._files, self._states = files, states
        self._look = look
        self._seen: dict[str, FleetSight] = {}
        self._seen_s = -1e9
        self._looking: asyncio.Task[None] | None = None

    def entries(self) -> tuple[FleetEntry, ...]:
        """Return all fleets; reads their records, so call it in a thread."""
        found = [*_operated(self._states), *_served(), *_named(self._files), *_examples()]
        return tuple({entry.name: entry for entry in reversed(found)}.values())[::-1]

    def find(self, name: str) -> FleetEntry:
        """Return the fleet of this name; reads records, so call it in a thread."""
        known = {entry.name: entry for entry in self.entries()}
        if name not in known:
            raise UnknownNameError("fleet", name, known)
        return known[name]

    async def describe(self) -> list[ListedFleet]:
        """Return all fleets as they are listed, with how operated ones stand."""
        entries = await asyncio.to_thread(self.entries)
        seen = await self.look()
        return [describe_fleet(entry, seen.get(entry.name)) for entry in entries]

    async def look_at(self, entry: FleetEntry) -> FleetSight | None:
        """Return how one fleet stands, for whoever waits for it alone; None of one that is not operated."""
        if entry.record is None:
            return None
        if asyncio.get_running_loop().time() - self._seen_s < _FRESH_S and entry.name in self._seen:
            return self._seen[entry.name]
        return await asyncio.to_thread(self._see, entry)

    async def look(self) -> dict[str, FleetSight]:
        """Return how operated fleets stand, a few seconds old at most unless machines take longer."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._seen_s < _FRESH_S:
            return self._seen
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_again())
        first = self._seen_s < 0
        await asyncio.wait({self._looking}, timeout=None if first else _PATIENCE_S)
        return self._seen

    async def _look_again(self) -> None:
        entries = await asyncio.to_thread(_operated, self._states)
        seen = await asyncio.gather(*(asyncio.to_thread(self._see, entry) for entry in entries))
        self._seen = {entry.name: sight for entry, sight in zip(entries, seen, strict=True)}
        self._seen_s = asyncio.get_running_loop().time()

    def _see(self, entry: FleetEntry) -> FleetSight:
        assert entry.home is not None
        assert entry.record is not None
        try:
            return FleetSight(self._look(entry.home, entry.record, time.time()))
        except AtollError as error:
            return FleetSight(None, str(error))
        except Exception:  # noqa: BLE001 - one fleet must not hide the others
            _LOG.exception("cannot look at %s", entry.name)
            return FleetSight(None, "cannot be looked at: see the log of the planner")


def describe_fleet(entry: FleetEntry, sight: FleetSight | None) -> ListedFleet:
    """Return a fleet as it is listed."""
    said = ListedFleet(name=entry.name, kind=entry.kind)
    if entry.served is not None:
        served = entry.served
        said.update({"up": True, "url": served.url, "since_s": served.started_s})
    if entry.title is not None:
        said["title"] = entry.title
    if entry.record is None:
        return said
    record = entry.record
    status = None if sight is None else sight.status
    errors = () if sight is None else (sight.error,) if status is None else status.errors
    said.update(
        {
            "up": record.up,
            "controller": None if status is None else status.controller,
            "url": None if record.entrance is None else record.entrance.url,
            "since_s": record.since_s,
            "usd_per_hour": None if status is None else status.usd_per_hour,
            "errors": [error for error in errors if error],
            "version": _version(entry, status),
        }
    )
    return said


def describe_status(
    entry: FleetEntry, sight: FleetSight | None, served: list[ServedFleet]
) -> ShownFleet:
    """Return a fleet as it is shown alone."""
    status = None if sight is None else sight.status
    return ShownFleet(
        **describe_fleet(entry, sight),
        instances=() if status is None else status.instances,
        stand_ins=() if status is None else status.stand_ins,
        status=status,
        served=served,
    )


def _version(entry: FleetEntry, status: FleetStatus | None) -> str:
    """Return a word that is another one when plan, next change, history or instances are others."""
    assert entry.home is not None
    marks: list[object] = []
    for name in ("plan.json", "next.json", "history.jsonl", "fleet.json"):
        try:
            found = (entry.home.folder / name).stat()
            marks.append((name, found.st_mtime_ns, found.st_size))
        except OSError:
            marks.append(name)
    if status is not None:
        marks += [(row.instance, row.state, row.reason) for row in status.instances]
    return hashlib.sha256(repr(marks).encode()).hexdigest()[:12]


def _served() -> list[FleetEntry]:
    """Plans that are served here, the newest first."""
    return [
        FleetEntry(state.name, "served", Path(state.source or _NO_FILE), served=state)
        for state in reversed(list_running_fleets())
        if state.plan_path.is_file()
    ]


def _operated(states: tuple[Path, ...]) -> list[FleetEntry]:
    found = []
    for home in list_homes(states):
        try:
            record = home.read()
        except AtollError as error:
            _LOG.warning("left out: %s", error)
            continue
        if record is not None:
            source = Path(record.source)
            kept = home.folder / "fleet.yaml"
            # Somebody may have moved it; the home has a copy.
            at = source if source.is_file() or not kept.is_file() else kept
            found.append(FleetEntry(record.name, "operated", at, home=home, record=record))
    return found


def _named(files: tuple[Path, ...]) -> list[FleetEntry]:
    """Files by their name, or by their path where two have the same name."""
    names = [path.name for path in files]
    return [
        FleetEntry(path.name if names.count(path.name) == 1 else str(path), "file", path.resolve())
        for path in files
    ]


@cache
def _examples() -> tuple[FleetEntry, ...]:
    return tuple(
        FleetEntry(name, "example", path, title=describe_example(path))
        for name, path in list_examples().items()
        if path.suffix == ".yaml"
    )
