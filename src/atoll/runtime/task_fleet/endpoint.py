"""Executors and a front as processes of this machine: one endpoint behind the gateway."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

from atoll.core.errors import InputError
from atoll.runtime.adapters.base import MachineShare, RunDirectory
from atoll.runtime.adapters.executor import executor_process
from atoll.runtime.adapters.front import front_endpoint
from atoll.runtime.executor.config import ExecutorConfig
from atoll.runtime.executor.store import default_store_root, remove_stale_stores
from atoll.runtime.front.config import ENDPOINT_PATHS, ExecutorAddress, FrontConfig
from atoll.runtime.local.build import available_bytes, free_ports
from atoll.runtime.local.cores import assign_cores
from atoll.runtime.local.fleet import ServiceEndpoint
from atoll.runtime.media.limits import MediaLimits
from atoll.runtime.pool.member import STAND_IN
from atoll.runtime.pool.stages import STAGES, BackendStage, write_stages
from atoll.runtime.task_fleet.deployment import TaskDeployment

FRONT = "front"
_LLM = "smollm2"
_TOKEN = "executors.token"  # noqa: S105 - the name of the file
_DRAIN_S = 10.0
_EXECUTOR_BYTES = 250 * 2**20
_LLM_BYTES = 900 * 2**20
_STORE_BYTES = 512 * 2**20
_SHOWN = 512
"""Characters of what an executor holds, for those who watch."""


def task_endpoint(
    deployment: TaskDeployment,
    home: RunDirectory,
    cores: tuple[int, ...],
    *,
    limits: MediaLimits | None = None,
    routing: str = "static",
) -> ServiceEndpoint:
    """Return the front of a deployment with its executors, configurations written to `home`."""
    check_memory(deployment)
    token = home.folder / _TOKEN
    descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    store = store_folder(home)
    work = {executor.id: executor.work for executor in deployment.executors}
    share = MachineShare(assign_cores(work, cores))
    ports = free_ports(2 * len(deployment.executors) + 2)
    processes, addresses = [], []
    for executor in deployment.executors:
        port, health = ports.pop(), ports.pop()
        config = ExecutorConfig(
            name=executor.id,
            components={name: dict(given) for name, given in executor.components.items()},
            address=f"127.0.0.1:{port}",
            health_port=health,
            store=str(store / executor.id),
            token_file=str(token),
            device=executor.device,
            threads=executor.threads or share.threads(executor.id),
            cpus=() if executor.threads else share.cpus.get(executor.id, ()),
            drain_s=_DRAIN_S,
        )
        processes.append(executor_process(config, home))
        addresses.append(
            ExecutorAddress(
                id=executor.id, address=config.address, components=tuple(executor.components)
            )
        )
    front = FrontConfig(
        name=FRONT,
        port=ports.pop(),
        address=f"127.0.0.1:{ports.pop()}",
        services=deployment.services,
        executors=tuple(addresses),
        store=str(store / FRONT),
        token_file=str(token),
        limits=limits or MediaLimits(),
        routing="dynamic" if routing == "dynamic" else "static",
    )
    endpoint = front_endpoint(front, home)
    known = endpoint.backend.metadata | {
        STAGES: write_stages(
            BackendStage(
                executor.id,
                executor.id,
                holds="+".join(executor.parts or executor.components)[:_SHOWN],
                cores=executor.threads or share.threads(executor.id),
                planned=executor.node_type or "",
            )
            for executor in deployment.executors
        )
    }
    if deployment.stand_ins:
        known[STAND_IN] = "; ".join(deployment.stand_ins.values())
    endpoint = replace(
        endpoint,
        backend=endpoint.backend.model_copy(update={"metadata": known}),
        instances=tuple(executor.id for executor in deployment.executors),
        nodes=tuple(processes),
        held=tuple((executor.id, "n0", 0, 1) for executor in deployment.executors),
    )
    names = tuple(service.name for service in deployment.services)
    paths = {endpoint: path for path, endpoint in ENDPOINT_PATHS.items()}
    return ServiceEndpoint(
        endpoint,
        ", ".join(names),
        {executor.id: executor.node_type or executor.device for executor in deployment.executors},
        holds={
            executor.id: "+".join(executor.parts or executor.components)
            for executor in deployment.executors
        },
        answers={
            service.name: tuple(paths[endpoint] for endpoint in service.tasks)
            for service in deployment.services
        },
    )


def store_folder(home: RunDirectory) -> Path:
    """Return where the arrays of a fleet lie; it goes with the fleet's own folder."""
    root = default_store_root(home.folder, _STORE_BYTES)
    remove_stale_stores(root)
    folder = root / f"atoll-{home.folder.name}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def remove_store(home: RunDirectory) -> None:
    """Remove the arrays of a fleet that has ended, wherever they lay."""
    for root in {default_store_root(home.folder, 0), default_store_root(home.folder, _STORE_BYTES)}:
        shutil.rmtree(root / f"atoll-{home.folder.name}", ignore_errors=True)


def uses_engine(deployment: TaskDeployment) -> bool:
    """Return whether an executor runs a language model, for which Atoll's engine is needed."""
    return any(_LLM in executor.components for executor in deployment.executors)


def language_models(deployment: TaskDeployment) -> tuple[str, ...]:
    """Return the folders of the language models that executors run, so that they start faster."""
    from atoll.engine.weights.sources import DEFAULT_MODEL, resolve

    sources = {
        str(options.get("model", DEFAULT_MODEL))
        for executor in deployment.executors
        for name, options in executor.components.items()
        if name == _LLM
    }
    return tuple(str(resolve(source)) for source in sorted(sources))


def check_memory(deployment: TaskDeployment) -> None:
    """Refuse what this machine has no memory for, before anything is started."""
    needed = sum(
        _EXECUTOR_BYTES + _LLM_BYTES * (_LLM in executor.components)
        for executor in deployment.executors
    )
    free = available_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"{len(deployment.executors)} executors need about {needed / 2**30:.1f} GiB of memory, "
            f"and {free / 2**30:.1f} are free",
            field="executors",
            hint="serve one of the models with --only, or a smaller plan",
        )
