"""Executors of any-to-any models: one process each, for the parts of a model that a plan puts together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import InputError
from atoll.plan.plan import Instance
from atoll.runtime.adapters.base import MachineShare, RunDirectory
from atoll.runtime.adapters.devices import visible_gpus
from atoll.runtime.adapters.probes import InstanceProbe
from atoll.runtime.executor.config import ExecutorConfig
from atoll.runtime.front.config import ExecutorAddress
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.process import Command
from atoll.runtime.supervise.supervision import RestartLimits

_DRAINING = "draining"
"""The code with which an executor that is being stopped answers /health: not its fault."""
_DRAIN_S = 10.0
_LIMITS = RestartLimits(ready_s=600.0, unwell=1, term_s=_DRAIN_S + 5.0)


@dataclass(frozen=True, slots=True)
class ExecutorPlace:
    """Where an executor listens and keeps its arrays.

    host, port: for invocations; health_port: for its pages. store_root: the folder that stores lie in
    (`atoll.runtime.executor.store.default_store_root`); store_bytes: the most that this one may hold. device:
    "cpu", or "cuda:0", counted among the GPUs that the plan gives it.
    """

    port: int
    health_port: int
    store_root: Path
    token_file: Path
    host: str = "127.0.0.1"
    store_bytes: int = 512 * 2**20
    device: str = "cpu"


def list_components(instance: Instance, parts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the components of a planned executor: those that the parts of its model stand for."""
    found: dict[str, None] = {}
    for part in instance.parts:
        if part not in parts:
            raise InputError(
                f"{instance.id} runs {part!r}, and no component is named for it",
                field="parts",
                hint=f"say which components {part!r} stands for",
            )
        found |= dict.fromkeys(parts[part])
    return tuple(found)


def executor_process(
    instance: Instance,
    parts: Mapping[str, Sequence[str]],
    options: Mapping[str, Mapping[str, Any]],
    place: ExecutorPlace,
    home: RunDirectory,
    share: MachineShare,
    *,
    most_waiting: int = 256,
    silent_s: float = 8.0,
) -> tuple[ProcessSpec, ExecutorAddress]:
    """Return the process of an executor of the plan, and where it is asked.

    parts: which components each part of the model stands for; options: of each component, by name. A process
    silent for `silent_s`, or whose components cannot run their examples, is started anew.
    """
    if not instance.is_executor:
        raise InputError(f"{instance.id} is no executor: it runs {instance.role}", field="role")
    name = instance.id
    components = list_components(instance, parts)
    address = f"{place.host}:{place.port}"
    # Fleets on one machine may have executors of the same name.
    fleet = hashlib.blake2b(str(home.folder).encode(), digest_size=6).hexdigest()
    config = ExecutorConfig(
        name=name,
        components={component: dict(options.get(component, {})) for component in components},
        address=address,
        health_port=place.health_port,
        store=str(place.store_root / f"atoll-{fleet}-{name.replace('/', '.')}"),
        store_bytes=place.store_bytes,
        token_file=str(place.token_file),
        device=place.device,
        threads=share.threads(name),
        cpus=share.cpus.get(name, ()),
        most_waiting=most_waiting,
        drain_s=_DRAIN_S,
        ready_file=str(home.file(name, ".ready")),
    )
    command = Command.of_module(
        "atoll.runtime.executor.process",
        ("--config", str(home.write(name, config))),
        home.log(name),
        visible_gpus(instance.nodes),
        cpus=share.cpus.get(name, ()),
        threads=share.threads(name),
    )
    probe = InstanceProbe(f"http://{place.host}:{place.health_port}", _DRAINING, silent_s)
    spec = ProcessSpec(name, command, probe, _LIMITS)
    return spec, ExecutorAddress(id=name, address=address, components=components)
