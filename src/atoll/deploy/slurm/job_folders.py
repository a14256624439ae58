"""The folder of an instance in the work folder: its script, secrets, logs and what its nodes wrote there.

    WORK/f-FLEET/term.json, lock           the newest term that gave orders, and who is at work
    WORK/f-FLEET/i-INSTANCE/job.json       labels and the job's number, for when Slurm has forgotten them
                            run.sh         the batch script
                            secrets/       files of mode 0600; gone when the job ends
                            NODE.log       what a node's command wrote; job.log: what Slurm wrote
                            NODE.state     "ready" and "ended CODE", by the node
                            draining, stopped, dismissed, missing   by the controller, with the time

Folders are of mode 0700. Files that nodes and controllers wait for are there from the beginning and grow: on
NFS opening a file asks its server anew, looking for one that was not there may not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.core.errors import InputError, shorten
from atoll.core.files import atomic_write, read_text_limited
from atoll.core.frozen import Frozen
from atoll.deploy.labels import Labels
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.slurm.script import JOB_LOG, LOG_SUFFIX, SECRETS, SIGNAL_FILE, STATE_SUFFIX
from atoll.deploy.target import DeployError, FailureKind, InstanceState
from atoll.deploy.terms import fence_term
from atoll.plan.plan import Instance

_MAX_SECRET_BYTES = 64 * 2**10
_MAX_STATE_BYTES = 4096
_LONGEST_WORD = 200
_MAX_TAIL_BYTES = 2**18
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9.-]+")


class JobEnd(Frozen):
    """How a job ended, as it was first seen."""

    state: InstanceState
    at_s: float
    reason: str
    kind: FailureKind | None


class JobRecord(Frozen):
    """Record of a job beside Slurm: its number as soon as it is known, and its end."""

    labels: Labels
    nodes: tuple[str, ...]
    ordered_s: float
    ready_s: float
    job: int | None = None
    end: JobEnd | None = None
    instance: Instance | None = None


def plain_name(name: str) -> str:
    """Return a name for a folder, of letters, digits, dots and hyphens, different for different names."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{_NOT_PLAIN.sub('-', name)[:80]}-{digest}"


class JobHome:
    """The folder of one instance."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self, record: JobRecord, commands: Sequence[NodeCommand], script: str) -> Path:
        """Write everything that the job reads; return the script's path."""
        try:
            secrets = self.path / SECRETS
            shutil.rmtree(secrets, ignore_errors=True)
            secrets.mkdir(mode=0o700, parents=True)
            self.path.chmod(0o700)
            for command in commands:
                for variable, source in command.secrets:
                    _copy_secret(Path(source), secrets / f"{command.node}.{variable}")
                for suffix in (LOG_SUFFIX, STATE_SUFFIX):
                    (self.path / f"{command.node}{suffix}").write_bytes(b"")
            (self.path / SIGNAL_FILE).write_bytes(b"")
            self.write(record)
            path = self.path / "run.sh"
            atomic_write(path, script)
        except OSError as error:
            raise _no_access(self.path, error) from error
        return path

    def read(self) -> JobRecord | None:
        """Return what is kept of the job, None where nothing is."""
        try:
            return JobRecord.from_json(read_text_limited(self.path / "job.json"))
        except InputError:
            return None

    def write(self, record: JobRecord) -> None:
        """Keep a record in place of the one before."""
        atomic_write(self.path / "job.json", record.to_json(indent=2) + "\n")

    def mark(self, what: str, now_s: float) -> None:
        """Leave a mark with its time, unless it is there."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError), (self.path / what).open("x") as file:
                file.write(f"{now_s}\n")
        except OSError as error:
            raise _no_access(self.path, error) from error

    def unmark(self, what: str) -> None:
        """Take a mark away."""
        with contextlib.suppress(OSError):
            (self.path / what).unlink(missing_ok=True)

    def marked_s(self, what: str) -> float | None:
        """Return when a mark was left, None without one."""
        try:
            return float((self.path / what).read_text("utf-8") or 0.0)
        except (OSError, ValueError):
            return None

    def node_states(self, nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the lines that each node wrote about itself."""
        states = {}
        for node in nodes:
            try:
                with (self.path / f"{node}{STATE_SUFFIX}").open("rb") as file:
                    text = file.read(_MAX_STATE_BYTES).decode("utf-8", "replace")
            except OSError:
                text = ""
            states[node] = tuple(text.split("\n")[:-1])
        return states

    def last_word(self, node: str) -> str:
        """Return the last line that a node's command wrote, shortened."""
        lines = _last_lines(self.path / f"{node}{LOG_SUFFIX}", 50)
        # Events are for programs.
        last = next((each for each in reversed(lines) if not each.startswith('{"time":')), "")
        return shorten(" ".join(last.split()), _LONGEST_WORD)

    def drop_secrets(self) -> None:
        """Remove the secrets of a job that has ended."""
        shutil.rmtree(self.path / SECRETS, ignore_errors=True)

    def tail(self, nodes: Sequence[str], lines: int) -> str:
        """Return the last lines of every node, with its name before them where there are several."""
        words = [f"{JOB_LOG}: {line}" for line in _last_lines(self.path / JOB_LOG, lines)]
        for node in nodes:
            mark = f"{node}: " if len(nodes) > 1 else ""
            words += [
                f"{mark}{line}" for line in _last_lines(self.path / f"{node}{LOG_SUFFIX}", lines)
            ]
        return "\n".join(words)


class WorkFolder:
    """All that stands in the work folder of a target."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def home(self, fleet: str, instance: str) -> JobHome:
        """Return the folder of an instance, which may not be there."""
        return JobHome(self._fleet(fleet) / f"i-{plain_name(instance)}")

    def homes(self, fleet: str | None = None) -> Iterator[JobHome]:
        """Return the folders of all instances of a fleet, or of all fleets."""
        fleets = [self._fleet(fleet)] if fleet is not None else sorted(self._path.glob("f-*"))
        for folder in fleets:
            for path in sorted(folder.glob("i-*")):
                yield JobHome(path)

    def _fleet(self, fleet: str) -> Path:
        return self._path / f"f-{plain_name(fleet)}"

    def fence(
        self, fleet: str, term: int, *, deadline_s: float
    ) -> contextlib.AbstractContextManager[None]:
        """Work alone on a fleet; refuse a term that is older than one whose orders were followed."""
        folder = self._fleet(fleet)
        return fence_term(folder, fleet, term, lock=folder / "lock", deadline_s=deadline_s)


def _copy_secret(source: Path, target: Path) -> None:
    try:
        with source.open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise DeployError(
            f"cannot read the secret {source}: {(error.strerror or str(error)).lower()}",
            kind="settings",
        ) from error
    if len(content) > _MAX_SECRET_BYTES:
        raise DeployError(
            f"the secret {source} is larger than {_MAX_SECRET_BYTES} bytes", kind="settings"
        )
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _last_lines(path: Path, lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_TAIL_BYTES))
            text = file.read(_MAX_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:] if lines > 0 else []


def _no_access(path: Path, error: OSError) -> DeployError:
    return DeployError(
        f"cannot write {path}: {(error.strerror or str(error)).lower()}",
        kind="settings",
        hint="name a work folder you may write to",
    )
