"""Questions that take a while: what-ifs and simulations, as they are asked and handed to a worker.

What answers them is in `whatif` and `plan_simulation`, which load all that plans and simulates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.planner.change import DialChange
from atoll.planner.fleet_edit import MAX_LETTERS, FleetEdit
from atoll.planner.fleets import FleetEntry
from atoll.planner.source import WrittenFleet, read_edited, read_sent, read_source

if TYPE_CHECKING:
    from atoll.api.fleet_plan import FleetPlan

WHATIF = "atoll.planner.whatif:find_whatif"
SIMULATION = "atoll.planner.plan_simulation:find_simulation"
BEFOREHAND = "atoll.planner.whatif:plan_beforehand"
"""Jobs (`worker.Job`), named, so that whoever asks need not load them."""


class FleetAsk(Frozen):
    """Which fleet is asked about: one that the planner knows by `fleet`, or the text of a `file`."""

    fleet: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    file: Annotated[str, Field(max_length=MAX_LETTERS)] | None = None

    def check(self) -> None:
        """Refuse to be asked about no fleet, or about two."""
        if (self.fleet is None) == (self.file is None):
            raise InputError("which fleet?", field="fleet", hint="give either 'fleet' or 'file'")


class WhatIfAsk(FleetAsk, DialChange):
    """Question of a what-if: a change of a fleet, and how long it is simulated, in seconds.

    Plans come soon, from little work, or are those that `atoll plan` would make (`exact`), with their bound.

    `edit` is made first, and only of a fleet that the planner knows by name: a file is sent as it is to be.
    """

    edit: FleetEdit | None = None
    simulate_s: Annotated[float, Field(strict=True, ge=10, le=1800)] = 120.0
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31)] = 0
    exact: bool = False

    @property
    def change(self) -> DialChange:
        """The turn of dials that is asked about."""
        return DialChange(**{name: getattr(self, name) for name in DialChange.model_fields})

    def describe(self) -> str:
        """Return what is asked about in a few words, for people."""
        if self.edit is None:
            return self.change.describe()
        turned = "" if self.change.is_none else f"; {self.change.describe()}"
        return self.edit.describe() + turned

    def check(self) -> None:
        """Refuse to be asked about no fleet, about two, or about an edit of a file that is sent."""
        super().check()
        if self.edit is not None and self.fleet is None:
            raise InputError("a file is sent as it is to be", field="edit", hint="give 'fleet'")


class AskedFleet(Frozen):
    """Where a worker finds a fleet: the path of its file, or the text of one.

    `plan` is the JSON of the plan in force, with its mixes, where there is one.
    """

    path: str | None = None
    text: str | None = None
    plan: str | None = None

    def read(self) -> WrittenFleet:
        """Read the fleet."""
        return read_source(self.path) if self.path is not None else read_sent(self.text or "")

    def read_edited(self, edit: FleetEdit) -> WrittenFleet:
        """Read the fleet as it is with an edit made."""
        assert self.path is not None
        return read_edited(self.path, edit)

    def read_plan(self, problem: Problem) -> FleetPlan | None:
        """Read the plan in force; None where there is none, or one that serves other services."""
        from atoll.api.fleet_plan import FleetPlan

        if self.plan is None:
            return None
        found = FleetPlan.of(Plan.from_json(self.plan), problem)
        known = {service.name for service in found.problem.services}
        fits = bool(found.instances) and {*found.served_services} <= known
        return found if fits else None


def place_of(entry: FleetEntry) -> AskedFleet:
    """Return where a worker finds a fleet that the planner knows, with the plan in force."""
    plan = entry.read_plan()
    return AskedFleet(path=str(entry.source), plan=None if plan is None else plan.to_json())


class SimulateAsk(FleetAsk):
    """A fleet's plan to simulate under a trace, `speed` times as fast, for `duration_s` seconds of it.

    Without a trace it is the fleet's own demand. With `service` all requests are for that one.
    """

    trace: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    service: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    speed: Annotated[float, Field(strict=True, ge=0.001, le=1000)] = 1.0
    duration_s: Annotated[float, Field(strict=True, ge=1, le=86_400)] = 600.0
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31)] = 0
