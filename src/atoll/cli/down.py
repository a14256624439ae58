"""`atoll down`: drain a fleet, end it, and what was started for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import Field

from atoll.cli.operating import STATE_HELP, ask, check_can_ask
from atoll.cli.options import VerbSettings, verb
from atoll.cli.progress import live_line
from atoll.core.errors import AtollError
from atoll.core.quantities import Duration
from atoll.core.units import pluralize
from atoll.report.terminal import console, note

if TYPE_CHECKING:
    from atoll.control.operation.home import FleetHome, FleetRecord
    from atoll.control.operation.operated import FleetLease, TargetLook
    from atoll.deploy.door import Deployer, Standing

app = typer.Typer(add_completion=False)
_LOOK_S = 1.0


class DownSettings(VerbSettings):
    """What `atoll down` is told."""

    fleet: str | None = Field(
        None,
        description="Name or file of a fleet; none: the only one that is up.",
        json_schema_extra={"argument": True},
    )
    yes: bool = Field(False, description="Do not ask.")
    now: bool = Field(False, description="Do not wait for streams: end everything at once.")
    wait: Duration = Field(
        "10min",
        validate_default=True,
        description="How long streams may take; what still runs then is ended.",
    )
    state: Path | None = Field(None, description=STATE_HELP)


@verb(app, DownSettings)
def down(options: DownSettings) -> None:
    """Have every instance of a fleet finish its streams and end, then its gateway and hub.

    History and settings stay, so that `atoll up` brings it back. A controller that operates the fleet has to
    be stopped first.
    """
    from atoll.control.operation.home import find_home
    from atoll.control.operation.operated import look_at_targets
    from atoll.deploy.door import DeployError

    home, record = find_home(options.fleet, options.state)
    check_can_ask(options.yes)
    looks = look_at_targets(home, record)
    for look in looks:
        if look.error is not None:
            raise DeployError(f"{look.target}: {look.error}", kind="unreachable")
    standing = [(look, each) for look in looks for each in look.standings if _stands(each)]
    word = "ended at once" if options.now else "drained and ended"
    for look, each in standing:
        console().print(f"  - {each.labels.instance} on {look.target} ({each.state})")
    own = record.entrance is not None and record.entrance.hub is not None
    besides = " and its gateway and hub" if own else ""
    console().print(
        f"{record.name}: {pluralize(len(standing), 'instance')}{besides} will be {word}"
    )
    if not ask("Go ahead?", options.yes):
        note("nothing was changed")
        return
    _take_down(options, home, record, looks)


def _stands(standing: Standing) -> bool:
    return standing.state != "gone"


def _take_down(
    options: DownSettings, home: FleetHome, record: FleetRecord, looks: tuple[TargetLook, ...]
) -> None:
    from atoll.control.operation.entrance import close_entrance
    from atoll.control.operation.home import write_holder
    from atoll.control.operation.operated import open_lease
    from atoll.control.operation.targets import PoolTarget

    targets = {
        look.target: look.deployer for look in looks if isinstance(look.deployer, PoolTarget)
    }
    lease = open_lease(home, record.name, targets)
    holder = write_holder("down")
    try:
        _end_instances(options, home, record.name, targets, lease, holder)
    finally:
        with contextlib.suppress(AtollError):
            lease.give_back(time.time())
    if record.entrance is not None:
        with live_line("ending gateway and hub"):
            close_entrance(record.entrance)
    home.write(record.model_copy(update={"up": False}))
    _say(home, "note", "taken down")
    note(f"{record.name} is down; `atoll up {record.source}` brings it back")


def _end_instances(
    options: DownSettings,
    home: FleetHome,
    fleet: str,
    targets: Mapping[str, Deployer],
    lease: FleetLease,
    holder: str,
) -> None:
    from atoll.control.operation.operated import VALID_S
    from atoll.deploy.door import DeployError

    until_s = time.monotonic() + (0.0 if options.now else options.wait)
    told: dict[str, str] = {}
    with live_line("draining", None if options.now else options.wait) as say:
        while True:
            term = lease.take(holder, time.time(), VALID_S).term
            # What failed stays listed for a while; stopped, it holds nothing.
            left = [
                (deployer, each)
                for deployer in targets.values()
                for each in deployer.list(fleet)
                if _stands(each)
                and not (each.state == "failed" and told.get(each.labels.instance) == "stop")
            ]
            if not left:
                break
            hurry = time.monotonic() >= until_s
            for deployer, each in left:
                action = "drain" if each.state in ("ready", "draining") and not hurry else "stop"
                name = each.labels.instance
                if told.get(name) == action:
                    continue
                told[name] = action
                _say(home, action, "the fleet is taken down", name, term)
                if action == "drain":
                    deployer.drain(each.handle, term)
                else:
                    deployer.stop(each.handle, term)
            if hurry and time.monotonic() > until_s + 60.0:
                raise DeployError(
                    f"{left[0][1].labels.instance} does not end",
                    kind="unreachable",
                    hint="try again, or end it where it stands",
                )
            say(f"{pluralize(len(left), 'instance')} left")
            time.sleep(_LOOK_S)
    home.store.forget([path.stem for path in home.store.folder.glob("*.json")])


def _say(home: FleetHome, kind: str, text: str, instance: str | None = None, term: int = 0) -> None:
    from atoll.control.operation.history import HistoryEvent

    event = {
        "at_s": time.time(),
        "kind": kind,
        "text": text,
        "instance": instance,
        "term": term,
    }
    home.history.add(HistoryEvent.parse(event))
