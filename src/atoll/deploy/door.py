"""The door to every target: what is asked of a deployer, and what it says.

Calls are idempotent and end within a deadline of their own. An instance carries labels wherever it stands
(a job's comment, a pod's labels, a file beside a process), so that whoever asks later, on another machine,
finds out what runs and why. What is observed is the truth; nobody keeps a second list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from atoll.core.errors import AtollError
from atoll.core.frozen import Frozen
from atoll.plan.plan import Instance
from atoll.plan.problem import Offer

StandingState = Literal["starting", "ready", "draining", "failed", "gone"]
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


class Labels(Frozen):
    """What an instance carries wherever it stands.

    `fleet` names the fleet it belongs to, `instance` is its id, unique in that fleet and never used again,
    `plan` the hash of the plan that asked for it, `placement` that of its layout, and `term` the term of the
    controller that started it: a deployer refuses orders of an older one.
    """

    fleet: str
    instance: str
    plan: str
    placement: str
    service: str
    role: str
    term: int = 0


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """What one node of an instance runs.

    `env` is for everyone to see. `secrets` are files by the environment variable that names them; what is in
    them goes by file or the target's own secrets, never into a command line, a log or `env`. `gpus` are taken
    of the node, `{port}` in `argv` is a free port there.
    """

    node: str
    node_type: str
    argv: tuple[str, ...]
    gpus: int
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StartOrder:
    """An instance to bring up: where it is planned to stand, what its nodes run, and its labels.

    Nodes start together. `ready_s` is how long it may take to become ready. `avoid_hosts` are machines not to
    start on, by the names that `Standing.hosts` gave; names that a target does not know mean nothing to it.
    """

    instance: Instance
    labels: Labels
    commands: tuple[NodeCommand, ...]
    ready_s: float = 1800.0
    avoid_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """An instance as a target sees it.

    `handle` is the target's own name for it (a job, a workload). `since_s` is when it entered its state and
    `ends_s` when its nodes will be taken away, where that is known (wall time, a spot notice), both in
    seconds of Unix time. `reason` is one line, `kind` is set where it failed. `instance` is what it consists
    of, where the target keeps that: a controller elsewhere could not tell otherwise.
    """

    handle: str
    labels: Labels
    state: StandingState
    since_s: float
    ends_s: float | None = None
    reason: str = ""
    kind: FailureKind | None = None
    hosts: tuple[str, ...] = ()
    instance: Instance | None = None


class Deployer(Protocol):
    """A target. Every call raises `DeployError` where the target refuses or does not answer."""

    name: str

    def offers(self) -> Sequence[Offer]:
        """Return what can be had now, by region, node type and market."""
        ...

    def list(self, fleet: str) -> Sequence[Standing]:
        """Return every instance of a fleet that stands here, ended ones for a while where it can.

        What is not listed is gone: a target that leaves nothing behind lists nothing that has ended. A list
        is whole or it is an error.
        """
        ...

    def start(self, order: StartOrder) -> Standing:
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
