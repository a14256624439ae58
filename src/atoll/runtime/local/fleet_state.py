"""Fleets that run on this machine: a small file per running fleet, for `atoll status`.

Files and sockets of running fleets lie in folders of their own in `core.paths.runtime_dir`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from pydantic import Field

from atoll.core.errors import AtollError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.core.paths import runtime_dir
from atoll.runtime.local.instance_runner import InstanceRunner

_FILE = "fleet.json"
_PLAN = "plan.json"


class NodeState(Frozen):
    """A node process: what it holds of which instance."""

    process: str
    instance: str
    node: str
    node_type: str
    start: int
    end: int
    log: str
    holds: str = ""
    """Its work where that is not layers: the parts or components of an executor."""


class EndpointState(Frozen):
    """An instance: where it listens and what is behind it."""

    id: str
    service: str
    url: str
    kind: str
    weight: float
    nodes: tuple[NodeState, ...] = ()
    stand_in: str = ""
    """Which weights serve instead of which, where they are not those of the plan."""
    answers: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """By model, the paths that it answers, where it is not only text."""


class FleetState(Frozen):
    """A running fleet."""

    name: str
    pid: int
    url: str
    started_s: float
    folder: str
    admin_socket: str = ""
    """Where the gateway is asked for its status."""
    source: str = ""
    """The fleet file that its plan was made for, where that is known."""
    endpoints: tuple[EndpointState, ...] = ()
    instances: tuple[InstanceRunner, ...] = ()
    """What runs each instance of the plan here, those that are left out too."""

    @property
    def plan_path(self) -> Path:
        """Where the plan that it serves is kept; not there where it serves none."""
        return Path(self.folder) / _PLAN


def new_home() -> Path:
    """Make the folder of a new fleet."""
    return Path(tempfile.mkdtemp(prefix="run-", dir=runtime_dir()))


def write_state(state: FleetState, plan: str | None = None) -> None:
    """Let others know of a running fleet, and of the plan (JSON) that it serves."""
    if plan is not None:
        atomic_write(state.plan_path, plan + "\n")
    atomic_write(Path(state.folder) / _FILE, state.to_json(indent=2) + "\n")


def remove_home(folder: Path) -> None:
    """Forget a fleet, with its logs and sockets."""
    shutil.rmtree(folder, ignore_errors=True)


def list_running_fleets() -> tuple[FleetState, ...]:
    """Return the fleets that run, oldest first; what is left of dead ones is removed."""
    fleets = []
    for path in runtime_dir().glob(f"run-*/{_FILE}"):
        with contextlib.suppress(AtollError, OSError):
            state = FleetState.from_json(read_text_limited(path), path=path)
            if _is_alive(state.pid):
                fleets.append(state)
            else:
                remove_home(path.parent)
    return tuple(sorted(fleets, key=lambda state: state.started_s))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
