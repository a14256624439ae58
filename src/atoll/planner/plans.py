"""The plans that a planner can show: those in force where a fleet is operated or served, and those made here.

What binds a plan is worked out once, in the background, when somebody has looked at it; until then it is
None.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from atoll.api.fleet_plan import FleetPlan
from atoll.control.operation.fleet_home import FleetHome, FleetRecord
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.planner.drawn_plan import Drawn
from atoll.planner.fleets import FleetEntry
from atoll.planner.jobs import JobRunner
from atoll.planner.plan_drawing import draw_plan
from atoll.planner.source import read_source
from atoll.planner.worker import Report, Said
from atoll.runtime.openai import ApiError

if TYPE_CHECKING:
    from atoll.solve.explain.plan_explanation import Constraint

_LOG = logging.getLogger(__name__)
_MAX_REMEMBERED = 64
"""Plans, and binds of plans, that are remembered."""


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan, drawn, of Unix time `made_s`; `problem` and `plan` are JSON, to find out what binds."""

    drawn: Drawn
    made_s: float
    problem: str | None = None
    plan: str | None = None


class DrawnPlan(TypedDict):
    """A plan to be drawn, made at a Unix time; without one, why there is none."""

    plan: Drawn | None
    made_s: float | None
    reason: NotRequired[str]


class PlanBook:
    """See the module. `runner` works on what nobody waits for."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner
        self._made: OrderedDict[str, ShownPlan] = OrderedDict()
        self._read: OrderedDict[str, tuple[tuple[int, int], ShownPlan]] = OrderedDict()
        self._binds: OrderedDict[str, list[Any] | None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.version = 0
        """Rises when a plan was made here, or when it is known what binds one."""

    def keep(self, name: str, shown: ShownPlan) -> None:
        """Keep the plan that was made last of a file or an example."""
        _put(self._made, name, shown)
        self.version += 1

    def made_usd(self, name: str) -> float | None:
        """Return what the plan costs an hour that was made last of a file or an example."""
        shown = self._made.get(name)
        return None if shown is None else float(shown.drawn["usd_per_hour"])

    async def show(self, entry: FleetEntry) -> DrawnPlan:
        """Return a fleet's plan to be drawn, or None and a reason."""
        if entry.served is not None:
            shown = await asyncio.to_thread(self._read_served, entry)
            reason = "the fleet file of the plan is not known: serve it with --fleet FILE"
        elif entry.home is None or entry.record is None:
            shown = self._made.get(entry.name)
            reason = "no plan was made of it here yet"
        else:
            shown = await asyncio.to_thread(self._read_operated, entry.home, entry.record)
            reason = (
                "no plan is in force yet"
                if entry.record.up
                else "no plan is in force: the fleet is not up"
            )
        if shown is None:
            return DrawnPlan(plan=None, reason=reason, made_s=None)
        drawn = shown.drawn | {"binds": self._find_binds(shown)}
        return DrawnPlan(plan=drawn, made_s=shown.made_s)

    async def close(self) -> None:
        """Leave what is being worked on."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _read_operated(self, home: FleetHome, record: FleetRecord) -> ShownPlan | None:
        """Return the plan in force, where the fleet is up."""

        def draw() -> ShownPlan | None:
            read = home.read_plan()
            if read is None:
                return None
            return draw_in_force(read.plan, read.problem, record, read.hash, read.made_s)

        return self._draw_once(record.name, home.folder / "plan.json", draw) if record.up else None

    def _read_served(self, entry: FleetEntry) -> ShownPlan | None:
        """Return the plan that is served, where the fleet file is known that it was made for."""
        served = entry.served
        if served is None or not entry.source.is_file():
            return None

        def draw() -> ShownPlan | None:
            plan = entry.read_plan()
            if plan is None:
                return None
            problem = read_source(entry.source).problem
            drawn = draw_plan(FleetPlan.of(plan, problem))
            return ShownPlan(drawn, served.started_s, problem.to_json(), plan.to_json())

        return self._draw_once(entry.name, served.plan_path, draw)

    def _draw_once(
        self, name: str, path: Path, draw: Callable[[], ShownPlan | None]
    ) -> ShownPlan | None:
        """Return a fleet's plan, drawn once for each time that its file is written."""
        try:
            found = path.stat()
        except OSError:
            return None
        mark = (found.st_mtime_ns, found.st_ino)
        known = self._read.get(name)
        if known is not None and known[0] == mark:
            return known[1]
        shown = draw()
        if shown is not None:
            _put(self._read, name, (mark, shown))
        return shown

    def _find_binds(self, shown: ShownPlan) -> list[Any] | None:
        """Return what binds a plan if that is known, and have it found out if not."""
        name = str(shown.drawn["hash"])
        if name in self._binds or shown.plan is None:
            return self._binds.get(name)
        _put(self._binds, name, None)
        task = asyncio.create_task(self._work_out(name, shown))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    async def _work_out(self, name: str, shown: ShownPlan) -> None:
        arguments = {"problem": shown.problem, "plan": shown.plan}
        try:
            said = await self._runner.run(find_binds, arguments)
        except ApiError as error:
            _LOG.warning("what binds plan %s is not known: %s", name, error.message)
            _put(self._binds, name, [])
        else:
            _put(self._binds, name, said["binds"])
        self.version += 1


def draw_in_force(
    plan: Plan, problem: Problem, record: FleetRecord, plan_hash: str, made_s: float
) -> ShownPlan:
    """Return the plan of an operated fleet, drawn; its choices are as its record has them."""
    drawn = draw_plan(FleetPlan.of(plan.model_copy(update={"mixes": record.mixes}), problem))
    # History and labels know it by this name.
    drawn["hash"] = plan_hash or drawn["hash"]
    return ShownPlan(drawn, made_s, problem.to_json(), plan.to_json())


def _put(kept: OrderedDict[str, Any], name: str, value: object) -> None:
    kept[name] = value
    kept.move_to_end(name)
    while len(kept) > _MAX_REMEMBERED:
        kept.popitem(last=False)


_DEADLINE_S = 60.0
_MAX_BINDS = 24


def find_binds(arguments: Said, report: Report) -> Said:
    """Return `binds` of a plan (`worker.Job`); takes the JSON text of `problem` and `plan`."""
    report({"text": "planning again", "share": None})
    problem = Problem.from_json(arguments["problem"])
    plan = FleetPlan.of(Plan.from_json(arguments["plan"]), problem)
    found = plan.explain(repairs=False, deadline_s=_DEADLINE_S)
    return {"binds": [describe_bind(one) for one in found.constraints[:_MAX_BINDS]]}


def describe_bind(constraint: Constraint) -> dict[str, str | None]:
    """Return a constraint as `{"what", "price"}`; the price is None where nobody asked for it."""
    what = constraint.model_copy(update={"worth": None}).text
    if constraint.worth is None:
        return {"what": what, "price": None}
    return {"what": what, "price": f"{constraint.loosened} would {constraint.worth.text}"}
