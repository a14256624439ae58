"""Fleets on their targets: bring one up, find one that runs, end it; and operation in virtual time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack
from urllib.parse import urlsplit

from atoll.api.shown import Shown
from atoll.control.virtual.operation_page import draw_contenders, render_operation_page
from atoll.control.virtual.operator_comparison import summarize_operations
from atoll.core.errors import UsageError
from atoll.core.extras import require_extras

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from atoll.control.operation.fleet_home import FleetHome, FleetRecord
    from atoll.control.operation.options import OperationListener, OperationOptions
    from atoll.control.operation.rollout import UpRequest
    from atoll.control.virtual.operator_comparison import OperationSummary
    from atoll.control.virtual.virtual_run import OperationResult
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

_OWN_FILE = "problem.json"
"""File of a fleet that was made in Python, in its home."""


class UpArguments(TypedDict, total=False):
    """Arguments of `UpRequest` that are passed on as they are."""

    plan: Plan
    plan_name: str
    deadline_s: float
    wait_s: float


@dataclass(frozen=True)
class RunningFleet:
    """A fleet that runs on its targets, whoever started it: instances, and usually a gateway and a hub."""

    home: FleetHome
    record: FleetRecord
    instances: tuple[str, ...] = ()
    """Names of the instances that its plan wants."""
    serves: bool = True
    """False where nobody waited until all of them serve."""

    @classmethod
    def find(cls, fleet: str | None = None, *, state: Path | None = None) -> RunningFleet:
        """Return a fleet that was brought up from here: by name, file or folder; else the only one."""
        from atoll.control.operation.fleet_home import find_home

        home, record = find_home(fleet, state)
        return cls(
            home, record, tuple(sorted(file.stem for file in home.store.folder.glob("*.json")))
        )

    @property
    def name(self) -> str:
        """The name of the fleet; `atoll status NAME` shows how it is."""
        return self.record.name

    @property
    def url(self) -> str | None:
        """Address of its gateway, below which `/v1` answers; None where the fabric's own is to be asked."""
        return None if self.record.entrance is None else self.record.entrance.url

    @property
    def services(self) -> tuple[str, ...]:
        """The names to ask for as models; what is behind a choice is left out."""
        mixes = self.record.mixes
        behind = {name for mix in mixes for name in mix.shares}
        known = (*self.record.weights, *self.record.parts)
        return (*(mix.name for mix in mixes), *(name for name in known if name not in behind))

    @property
    def asks_for_keys(self) -> bool:
        """Whether its own gateway listens beyond this machine, where it asks for keys."""
        from atoll.fabric.identity.access import is_loopback

        entrance, host = self.record.entrance, urlsplit(self.url or "").hostname
        own = entrance is not None and entrance.gateway is not None
        return own and host is not None and not is_loopback(host)

    def to_dict(self) -> dict[str, object]:
        """Return where it is and what it serves, as plain data."""
        entrance = self.record.entrance
        return {
            "fleet": self.name,
            "home": str(self.home.folder),
            "url": self.url,
            "admin_socket": None if entrance is None else entrance.admin_socket,
            "services": list(self.services),
            "instances": list(self.instances),
            "targets": list(self.record.targets.names),
        }

    def down(self, *, wait_s: float = 600.0, listener: OperationListener | None = None) -> bool:
        """Drain every instance and end it, then gateway and hub, as `atoll down` does.

        Streams may take `wait_s` seconds; what still runs then is ended, with 0 at once. False where the
        listener does not agree.
        """
        from atoll.control.operation.options import OperationListener
        from atoll.control.operation.takedown import TakeDown

        return TakeDown(self.home, self.record, wait_s).run(listener or OperationListener())

    def __repr__(self) -> str:
        return f"<RunningFleet {self.name}: {len(self.instances)} instances, {self.url}>"


def choose_options(target: str | None, options: OperationOptions | None) -> OperationOptions:
    """Return how to operate a fleet: the options, on that target where one is named."""
    from atoll.control.operation.options import OperationOptions

    options = options or OperationOptions()
    return options if target is None else options.model_copy(update={"on": target})


def find_source(problem: Problem, source: Path | None, options: OperationOptions) -> Path:
    """Return the file of a fleet; one that was made in Python gets its own in the fleet's home."""
    from atoll.control.operation.options import home_for

    return (source or home_for(problem, options.state).folder / _OWN_FILE).resolve()


def keep_source(problem: Problem, source: Path, options: OperationOptions) -> None:
    """Write the file of a fleet that was made in Python, which `atoll operate` follows."""
    from atoll.control.operation.options import home_for
    from atoll.core.files import atomic_write

    home = home_for(problem, options.state)
    if source == (home.folder / _OWN_FILE).resolve():
        home.make()
        atomic_write(source, problem.to_json(indent=1) + "\n")


def request_up(
    problem: Problem,
    source: Path | None,
    target: str | None,
    options: OperationOptions | None,
    **how: Unpack[UpArguments],
) -> UpRequest:
    """Return what bringing a fleet up takes."""
    from atoll.control.operation.rollout import UpRequest

    require_extras("serve", "fabric")
    chosen = choose_options(target, options)
    return UpRequest(problem, find_source(problem, source, chosen), options=chosen, **how)


def bring_fleet_up(request: UpRequest, listener: OperationListener | None) -> RunningFleet:
    """Bring a fleet up, by a plan if there is one; ChangeRefusedError where the listener does not agree."""
    from atoll.control.operation.options import OperationListener
    from atoll.control.operation.rollout import ChangeRefusedError, bring_up

    keep_source(request.problem, request.source, request.options)
    up = bring_up(request, listener or OperationListener())
    if up is None:
        raise ChangeRefusedError(
            f"nothing of {request.problem.name} was changed: the listener did not agree"
        )
    return RunningFleet(up.home, up.record, up.instances, up.serves)


def find_plans_fleet(path: str | os.PathLike[str], plan: Plan) -> Path:
    """Return the fleet file that a plan was brought up with before; an error asks for it."""
    from atoll.control.operation.fleet_home import list_homes

    records = [home.read() for home in list_homes()]
    known = [r.source for r in records if r is not None and r.name == plan.problem_name]
    if not known:
        raise UsageError(
            f"{os.fspath(path)} does not say what is asked of {plan.problem_name}",
            field="fleet",
            hint="name the fleet file that the plan was made for",
        )
    return Path(known[-1])


@dataclass(frozen=True)
class FleetOperations(Shown):
    """Cost and kept promises of a fleet operated in virtual time: Atoll's controller first, then others."""

    name: str
    results: Sequence[OperationResult]

    @property
    def summaries(self) -> list[OperationSummary]:
        """Cost and promises kept of each, in rows."""
        return summarize_operations(self.results)

    def to_page(self) -> str:
        """Return the report as the text of one HTML file."""
        return render_operation_page(self.results, self.name)

    def _draw(self, width: int) -> RenderableType:
        del width
        return draw_contenders(self.results)

    def _to_html(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __repr__(self) -> str:
        shown = ", ".join(f"{one.name} ${one.usd:,.0f}" for one in self.results)
        return f"<FleetOperations {self.name}: {shown}>"
