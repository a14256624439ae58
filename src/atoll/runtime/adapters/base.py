"""What an adapter returns, and where processes keep their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.errors import InputError
from atoll.core.files import atomic_write
from atoll.core.frozen import Frozen
from atoll.perf.engines import EngineLaunch
from atoll.plan.plan import Instance
from atoll.runtime.pool.member import Backend
from atoll.runtime.supervise.agent import ProcessSpec

_LONGEST_SOCKET = 100


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A folder for one running fleet: configurations, sockets, logs."""

    folder: Path

    def file(self, name: str, ending: str) -> Path:
        """Return the path of a file that belongs to the process `name`."""
        return self.folder / f"{name.replace('/', '.')}{ending}"

    def write(self, name: str, config: Frozen) -> Path:
        """Write a configuration and return its path."""
        path = self.file(name, ".json")
        atomic_write(path, config.to_json(indent=2) + "\n")
        return path

    def log(self, name: str) -> Path:
        """Return the path of a process' log."""
        return self.file(name, ".log")

    def inbox(self, name: str) -> str:
        """Return a local socket that stays the same over restarts."""
        path = str(self.file(name, ".ipc"))
        if len(path.encode()) > _LONGEST_SOCKET:
            raise InputError(
                "too long for a socket", path=path, hint="choose a folder with a short path"
            )
        return f"ipc://{path}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: the source of the weights and the names requests ask for.

    `launch` are the limits that a plan reckons with; None leaves the engine as it comes.
    """

    source: str
    names: tuple[str, ...]
    launch: EngineLaunch | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An instance made ready to start: node processes first, then the one that listens.

    `held` says what each node process holds: (process, node id, start, end).
    """

    backend: Backend
    instances: tuple[str, ...]
    nodes: tuple[ProcessSpec, ...] = ()
    server: ProcessSpec | None = None
    held: tuple[tuple[str, str, int, int], ...] = ()

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """Every process, in the order of starting."""
        return self.nodes if self.server is None else (*self.nodes, self.server)


@dataclass(frozen=True, slots=True)
class MachineShare:
    """The part of this machine that processes get: cores by process, and memory for KV per node."""

    cpus: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kv_bytes: int | None = None
    dtype: str = "float32"

    def threads(self, name: str) -> int:
        """Return how many threads a process may use."""
        return max(1, len(self.cpus.get(name, ())))


def single_node(instance: Instance, engine: str) -> None:
    """Refuse an instance of several nodes."""
    if len(instance.nodes) > 1:
        raise InputError(
            f"{instance.id} has {len(instance.nodes)} nodes, and {engine} runs on one",
            field="engine",
            hint="use the engine 'atoll'",
        )


def kv_flag(dtype: str, known: Mapping[str, str], engine: str) -> str:
    """Return what an engine calls a number format of the KV cache; one it does not have is refused."""
    if dtype not in known:
        raise InputError(
            f"{engine} has no KV cache in {dtype}",
            field="kv_cache_dtype",
            hint=f"use {' or '.join(known)}",
        )
    return known[dtype]
