"""The home of a fleet: a folder with all that operating it needs and that targets do not say.

    fleet.json      how it is operated: its file, targets, weights, hub and gateway
    fleet.yaml      its file as it was read last
    instances/      what its instances consist of
    seen.json       what targets listed last
    history.jsonl   what was decided and why
    plan.json       the plan in force, and the problem that it was made for
    graph.json      what its graph server answers for, over the paths of the plan in force
    next.json       the change that comes next, and approval.json what was answered to it
    lease.json      who acts
    fabric/         the tokens of its hub, gateway and instances, for their owner alone
    *.log           what hub and gateway say

By default homes are in `atoll/fleets` of the user's state folder.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pydantic import Field

from atoll.control.operation.approval import ChangeBoard
from atoll.control.operation.control_loop import InstanceStore, PlanInForce
from atoll.control.operation.controller_lease import FileLease, Lease
from atoll.control.operation.fleet_history import History, HistoryEvent
from atoll.core.errors import AtollError, InputError, UnknownNameError
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.core.paths import state_dir
from atoll.deploy.commands.node_commands import ServiceWeights
from atoll.deploy.local.daemon import ProcessId, process_start
from atoll.deploy.target_table import TargetSettings
from atoll.engines.table import AUTO
from atoll.plan.choice import ModelMix
from atoll.runtime.task_fleet.parts import ServedParts

_RECORD = "fleet.json"
_PLAN = "plan.json"
MAX_PLAN_BYTES = 256 * 2**20


class Daemon(Frozen):
    """A process of this machine that outlives whoever started it, and where its words go."""

    process: ProcessId
    log: str

    @property
    def is_alive(self) -> bool:
        """Whether it runs; a number that was given to another process does not count."""
        return process_start(self.process.pid) == self.process.start


class GraphDaemon(Daemon):
    """A graph server of a fleet: its name among them, and the port where requests come in."""

    name: str
    port: int


class Entrance(Frozen):
    """How requests and instances come to a fleet: gateways' addresses, and a fabric to join.

    The gateway is asked what it sees on its `admin_socket`, or at its address, and all at `others`, with the
    token in the file `admin_token`. `token` is the file that instances join with, `observer` that of whoever
    looks; `hub` and `gateway` are set where they were started for this fleet, `graphs` are its graph servers,
    where it has any-to-any services.
    """

    url: str | None = None
    others: tuple[str, ...] = ()
    admin_socket: str | None = None
    admin_token: str | None = None
    token: str
    observer: str
    hub: Daemon | None = None
    gateway: Daemon | None = None
    graphs: tuple[GraphDaemon, ...] = ()


class WeightsRecord(Frozen):
    """Weights of a service, as `ServiceWeights` says."""

    source: str
    names: tuple[str, ...]
    engine: str = AUTO
    stand_in: bool = False
    quantization: str | None = None
    gguf: str | None = None

    def as_weights(self) -> ServiceWeights:
        """Return them in the words of commands."""
        return ServiceWeights(
            self.source, self.names, self.engine, self.stand_in, self.quantization, self.gguf
        )


class FleetRecord(Frozen):
    """How a fleet is operated.

    `source` is its fleet file, `hub_token` the file with which nodes fetch weights, `device` what the stage
    engine computes on (None: cores where it pretends, else GPUs), `up` whether it is to stand at all.
    `mixes` say which models answer its choices, `parts` what runs the parts of any-to-any services.
    """

    name: str
    source: str
    targets: TargetSettings
    weights: dict[str, WeightsRecord] = Field(default_factory=dict)
    hub_token: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    entrance: Entrance | None = None
    up: bool = True
    since_s: float = 0.0
    mixes: tuple[ModelMix, ...] = ()
    parts: dict[str, ServedParts] = Field(default_factory=dict)


class FleetHome:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = InstanceStore(folder / "instances")
        self.history = History(folder / "history.jsonl")
        self.lease = FileLease(folder / "lease.json")
        self.board = ChangeBoard(folder)

    def make(self) -> None:
        """Make the folder, for its owner alone."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise InputError(
                f"cannot make this folder: {(error.strerror or str(error)).lower()}",
                path=self.folder,
                hint="name another with `state`",
            ) from error

    def read(self) -> FleetRecord | None:
        """Return how the fleet is operated, None where it never was."""
        path = self.folder / _RECORD
        if not path.exists():
            return None
        return FleetRecord.from_json(read_text_limited(path), path=path)

    def write(self, record: FleetRecord) -> None:
        """Keep how the fleet is operated."""
        atomic_write(self.folder / _RECORD, record.to_json(indent=2) + "\n")

    def keep_file(self, path: Path) -> None:
        """Keep a copy of the fleet file, for whoever looks later."""
        atomic_write(self.folder / "fleet.yaml", read_text_limited(path))

    def write_down(self, kind: str, text: str, **fields: object) -> None:
        """Add to the history, as of now; nothing where it cannot be written."""
        event = {"at_s": time.time(), "kind": kind, "text": text[:4000], **fields}
        with contextlib.suppress(AtollError, OSError):
            self.history.add(HistoryEvent.parse(event))

    def keep_plan(self, found: PlanInForce) -> None:
        """Keep the plan in force, for whoever looks."""
        atomic_write(self.folder / _PLAN, found.to_json() + "\n")

    def read_plan(self) -> PlanInForce | None:
        """Return the plan in force, None where none was ever made."""
        path = self.folder / _PLAN
        if not path.exists():
            return None
        return PlanInForce.from_json(read_text_limited(path, MAX_PLAN_BYTES), path=path)

    def free_lease(self, now_s: float) -> Lease | None:
        """End a lease whose holder was a process of this machine and is dead; return it.

        Its end need not be waited for: nobody can act for it any more.
        """
        lease = self.lease.read()
        if lease is None or now_s >= lease.ends_s or not self.has_dead_holder(lease):
            return None
        self.lease.release(lease, now_s)
        return lease

    def has_dead_holder(self, lease: Lease) -> bool:
        """Whether a lease's holder was a process of this machine and is dead."""
        return is_dead(lease.holder)


def home_of(name: str) -> FleetHome:
    """Return the home of a fleet by its name, which may not be there yet."""
    return FleetHome(homes_folder() / quote(name, safe=""))


def homes_folder() -> Path:
    """Return where homes are unless somebody names another place."""
    return state_dir() / "fleets"


def list_homes(states: Iterable[Path] = ()) -> tuple[FleetHome, ...]:
    """Return the homes of all fleets that were ever operated from here, by name; `states` come first.

    Those are folders that somebody named as the home of a fleet.
    """
    found = sorted(path.parent for path in homes_folder().glob(f"*/{_RECORD}"))
    return tuple(FleetHome(folder) for folder in (*states, *found))


def find_home(fleet: str | None, state: Path | None) -> tuple[FleetHome, FleetRecord]:
    """Return a fleet that is or was operated: by its name, file or folder; the only one if none is named."""
    if state is not None:
        home = FleetHome(state)
        record = home.read()
        if record is None:
            raise InputError("no fleet is operated from here", path=state, hint="atoll up FLEET")
        return home, record
    known = {
        record.name: (home, record) for home in list_homes() if (record := home.read()) is not None
    }
    if fleet is None:
        up = [name for name, (_, record) in known.items() if record.up]
        if len(up) == 1:
            return known[up[0]]
        raise UnknownNameError("fleet", "", known, hint="name one of them")
    if fleet in known:
        return known[fleet]
    path = Path(fleet)
    if path.exists():
        named = str(path.resolve())
        for home, record in known.values():
            if record.source == named:
                return home, record
    raise UnknownNameError("fleet", fleet, known)


def write_holder(verb: str) -> str:
    """Return what a controller is called in a lease: what it does, where, and which process it is."""
    pid = os.getpid()
    return f"atoll {verb} of process {pid}.{process_start(pid) or ''} on {socket.gethostname()}"


def is_holder(holder: str, pid: int) -> bool:
    """Whether a controller, as `write_holder` calls it, is a process of this machine."""
    return f" process {pid}." in holder and holder.endswith(f" on {socket.gethostname()}")


def is_dead(holder: str) -> bool:
    """Whether a controller, as `write_holder` calls it, was a process of this machine and is dead."""
    head, _, host = holder.rpartition(" on ")
    process = head.rpartition(" ")[2]
    pid, _, start = process.partition(".")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    return process_start(int(pid)) != start
