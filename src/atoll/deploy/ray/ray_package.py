"""Package of an instance's job: its order and its secrets, as files in the folder where all of it runs.

Job records of Ray are there for everybody to read, in its dashboard too; what is in a package is not shown,
and only the user whom Ray runs as may read its files.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.files import read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.ray.ray_machines import ACCELERATOR, GPU, SHARE
from atoll.deploy.target import DeployError, FailureKind, InstanceState

ORDER = "order.json"
SECRETS = "secrets"
STATE_PREFIX = "atoll-state "
"""How a line of a job's log begins that says how the instance is."""
NAMESPACE = "atoll"
GROUP_VARIABLE = "ATOLL_RAY_GROUP"
"""Names the placement group whose bundles are for the workers of a command's server."""
_PRIVATE = 0o600
_MAX_SECRET_BYTES = 2**16
_EPOCH = (1980, 1, 1, 0, 0, 0)


class RayCommand(Frozen):
    """Command of one node: `accelerator` is Ray's type (None: any), `only` the one machine it may stand on.

    `secrets` are variables that name files of the package. One without `argv` has its node for the first.
    """

    node: str
    argv: tuple[str, ...]
    gpus: int
    accelerator: str | None = None
    only: str | None = None
    env: dict[str, str]
    secrets: tuple[str, ...] = ()


class RayOrder(Frozen):
    """Order of a job: the commands of an instance, and machines (ids of Ray) that it must not stand on."""

    job: str
    commands: tuple[RayCommand, ...]
    avoid: tuple[str, ...] = ()
    cpus_per_gpu: float = 1.0
    ready_s: float
    drain_s: float
    schedule_s: float

    @property
    def wanted(self) -> str:
        """What it takes, for people: "2 L4 + 4 T4"."""
        return " + ".join(f"{each.gpus} {each.accelerator or GPU}" for each in self.commands)

    @property
    def spread(self) -> bool:
        """Whether one command has the nodes of several for itself, whose workers Ray starts."""
        return any(not command.argv for command in self.commands)

    def bundles(self, command: RayCommand) -> list[dict[str, float]]:
        """Return what a node takes of its machine, as bundles of a placement group.

        Ray's workers have a GPU each, and so do their bundles.
        """
        if not self.spread:
            return [self._bundle(command, command.gpus)]
        return [self._bundle(command, 1) for _ in range(command.gpus)]

    def _bundle(self, command: RayCommand, gpus: int) -> dict[str, float]:
        wanted = {"CPU": self.cpus_per_gpu * max(gpus, 1), GPU: float(gpus)}
        if gpus and command.accelerator is not None:
            wanted[f"{ACCELERATOR}{command.accelerator}"] = SHARE
        # Ray takes no bundle of nothing.
        return {name: n for name, n in wanted.items() if n} or {"CPU": SHARE}


class RayNode(Frozen):
    """Where a node of an instance stands: the machine by Ray's id and by its name, and the log there."""

    node: str
    machine: str
    host: str
    log: str = ""


class RayState(Frozen):
    """State of an instance as its job sees it; `since_s` in seconds of Unix time."""

    state: InstanceState
    since_s: float
    reason: str = ""
    kind: FailureKind | None = None
    nodes: tuple[RayNode, ...] = ()

    def line(self) -> str:
        """Return the line that a job writes."""
        return f"{STATE_PREFIX}{self.to_json()}"


def name_actor(job: str, node: str) -> str:
    """Return the name of a node's actor."""
    return f"{job}:{node}"


def read_secrets(files: Mapping[str, str]) -> dict[str, str]:
    """Return what secrets are, by variable; DeployError names the file that cannot be read."""
    found = {}
    for variable, path in sorted(files.items()):
        try:
            found[variable] = read_text_limited(Path(path).expanduser(), _MAX_SECRET_BYTES)
        except AtollError as error:
            raise DeployError(
                f"the file of {variable} cannot be read: {error.message}",
                kind="settings",
                hint="check its path",
            ) from error
    return found


def pack(order: RayOrder, secrets: Mapping[str, str]) -> tuple[str, bytes]:
    """Return the package of an order under the name that Ray wants; the same for the same content."""
    files = {ORDER: order.to_json()} | {f"{SECRETS}/{name}": secrets[name] for name in secrets}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, text in sorted(files.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            # Ray unpacks with the modes that files have here.
            info.external_attr = _PRIVATE << 16
            packed.writestr(info, text)
    content = stream.getvalue()
    return f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:40]}.zip", content
