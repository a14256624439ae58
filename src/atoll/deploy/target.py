"""Interface of a target: what is asked of a deployer, and what it says of its instances.

Calls are idempotent and end within a deadline of their own. An instance carries labels wherever it stands
(a job's comment, a pod's labels, a file beside a process), so that whoever asks later, on another machine,
finds out what runs and why. What is observed is the truth; nobody keeps a second list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from atoll.core.errors import AtollError
from atoll.core.frozen import Frozen
from atoll.deploy.labels import Labels
from atoll.deploy.node_command import NodeCommand

if TYPE_CHECKING:
    # Every daemon of the local target loads this module: problems take longer to load than all else it needs.
    from atoll.catalog.catalog import Catalog
    from atoll.deploy.commands.node_commands import InstanceRecipe
    from atoll.plan.plan import Instance
    from atoll.plan.problem import Offer

InstanceState = Literal["starting", "ready", "draining", "failed", "gone"]
"""`failed`: it will not become ready by itself; `gone`: it has ended and holds nothing any more."""
FailureKind = Literal[
    "capacity", "image", "settings", "memory", "quota", "unreachable", "ended", "superseded"
]
"""Why something did not start or stopped; `unreachable` is for a target that does not answer.

`superseded` is for an order of an older term: a later controller acts, and this one must not any more.
"""


class DeployError(AtollError):
    """A target refused, in one line that says why; `kind` says what to do about it."""

    def __init__(self, message: str, *, kind: FailureKind, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.kind: FailureKind = kind


@dataclass(frozen=True, slots=True)
class StartOrder:
    """An instance to bring up: where it is planned to stand, what its nodes run, and its labels.

    Nodes start together. `ready_s` is how long it may take to become ready. `avoid_hosts` are machines not to
    start on, named as in `InstanceStatus.hosts`; names that a target does not know mean nothing to it.
    `recipe` is what the commands were made of, where an engine's files make them.
    """

    instance: Instance
    labels: Labels
    commands: tuple[NodeCommand, ...]
    ready_s: float = 1800.0
    avoid_hosts: tuple[str, ...] = ()
    recipe: InstanceRecipe | None = None

    @property
    def file_name(self) -> str:
        """Name of a file about it, without a suffix."""
        return self.labels.instance.replace("/", "-")

    def refuse_shares(self, target: str) -> None:
        """Raise DeployError where a node has a share of a GPU, for a target that gives them whole."""
        for node in self.instance.nodes:
            if node.gpu_shares > 1:
                raise DeployError(
                    f"{self.labels.instance} has a share of a GPU, and {target} gives GPUs whole",
                    kind="settings",
                    hint="leave out 'shares' of the fleet file, or bring it up with --on local",
                )


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """An instance as a target sees it.

    `handle` is the target's own name for it (a job, a workload). `since_s` is when it entered its state and
    `ends_s` when its nodes will be taken away, where that is known (wall time, a spot notice), both in
    seconds of Unix time. `reason` is one line, `kind` is set where it failed. `instance` is what it consists
    of, where the target keeps that: a controller elsewhere could not tell otherwise. `unfinished`: whoever
    started it ended halfway, and starting it again finishes it. `leave`: somebody wants one of its hosts
    empty, and waits until it has been replaced, no longer than to `ends_s`.
    """

    handle: str
    labels: Labels
    state: InstanceState
    since_s: float
    ends_s: float | None = None
    reason: str = ""
    kind: FailureKind | None = None
    hosts: tuple[str, ...] = ()
    instance: Instance | None = None
    unfinished: bool = False
    leave: bool = False


class Claim(IntEnum):
    """How strongly a target claims a region of a pool; the strongest claim has it."""

    NONE = 0
    REST = 1
    """Any region that no other target claims."""
    CLOUD = 2
    """Any place of a cloud that no other target names."""
    NAMED = 3


@dataclass(frozen=True, slots=True)
class TargetSite:
    """Arguments of opening a deployer: its part of a fleet's pool, the fleet's folder here, and its name."""

    folder: Path
    pool: Sequence[Offer] = ()
    catalog: Catalog | None = None
    drain_s: float = 600.0
    fleet: str = ""


class DeployerSettings(Frozen):
    """Settings of one target, and what the rest of Atoll asks of it before and beside its deployer.

    A target overrides `open` and `claim`, and the others where the answers here do not fit. One that
    `shares_gpus` gives a GPU to several instances at a time, each a share.
    """

    shares_gpus: ClassVar[bool] = False

    @property
    def pretends(self) -> bool:
        """Whether processes of this machine stand for its machines."""
        return False

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """Return what fields are where nobody sets them and a constant would not do."""
        return {}

    def open(self, site: TargetSite) -> Deployer:
        """Return the deployer; DeployError says why it cannot be reached."""
        raise NotImplementedError

    def claim(self, region: str) -> Claim:
        """Return how strongly the target claims a region."""
        del region
        return Claim.NONE

    def programs(self) -> dict[str, object]:
        """Return what `atoll` and `python` are on its machines, where that is not what they are called.

        Also `compile_cache`, the folder there that keeps what engines compile, if it has one.
        """
        return {}

    def is_untouched(self, folder: Path) -> bool:
        """Whether it need not be asked in a dry run, because nothing was ever started there."""
        del folder
        return False

    def render_orders(
        self, orders: Sequence[StartOrder], deployer: Deployer, catalog: Catalog
    ) -> dict[str, str]:
        """Return orders in the target's own language, for a dry run: texts by name of file."""
        raise NotImplementedError


class Deployer(Protocol):
    """A target. Every call raises `DeployError` where the target refuses or does not answer."""

    name: str

    def offers(self) -> Sequence[Offer]:
        """Return what can be had now, by region, node type and market."""
        ...

    def list(self, fleet: str) -> Sequence[InstanceStatus]:
        """Return every instance of a fleet that stands here, ended ones for a while where it can.

        What is not listed is gone: a target that leaves nothing behind lists nothing that has ended. A list
        is whole or it is an error.
        """
        ...

    def start(self, order: StartOrder) -> InstanceStatus:
        """Bring an instance up; one with the same labels that stands already is returned as it is."""
        ...

    def drain(self, handle: str, term: int) -> None:
        """Have an instance take no new requests and end once its streams have; nothing if it does already."""
        ...

    def stop(self, handle: str, term: int) -> None:
        """End an instance now; nothing if it has ended."""
        ...

    def logs(self, handle: str, lines: int = 100) -> str:
        """Return the last lines that an instance's nodes wrote."""
        ...


_OUT_OF_MEMORY = ("out of memory", "outofmemory", "memoryerror", "cannot allocate memory")


def classify_exit(reason: str, last_line: str) -> FailureKind:
    """Return what a command that ended by itself failed of, by its code and its last word.

    Engines say that memory was short in words only, and the kernel's own killer by signal 9; all else that
    ends a command before it is ready is in what it was told.
    """
    words = last_line.lower()
    if reason == "ended by signal 9" or any(each in words for each in _OUT_OF_MEMORY):
        return "memory"
    return "settings"
