"""Executors and a graph server as processes of this machine: one endpoint behind the gateway."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from atoll.core.errors import InputError
from atoll.engines.graph_server import ENGINE as GRAPH_SERVER
from atoll.runtime.endpoints.endpoint import Endpoint, MachineShare, RunDirectory
from atoll.runtime.endpoints.probes import InstanceProbe
from atoll.runtime.executor.executor_config import ExecutorConfig
from atoll.runtime.executor.store import default_store_root, remove_stale_stores
from atoll.runtime.graph_server.graph_config import (
    ENDPOINT_PATHS,
    EXECUTORS_MISSING,
    ExecutorAddress,
    GraphServerConfig,
    modalities,
)
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.local.cores import assign_cores
from atoll.runtime.local.local_endpoints import available_bytes
from atoll.runtime.local.local_fleet import ServiceEndpoint
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.pool.backend_metadata import (
    MODALITIES,
    STAGES,
    BackendStage,
    write_modalities,
    write_stages,
)
from atoll.runtime.pool.member import STAND_IN, Backend
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.supervised_process import Command
from atoll.runtime.supervise.supervision import RestartLimits
from atoll.runtime.task_fleet.deployment import TaskDeployment

SERVER_NAME = "graph-server"
_LLM = "smollm2"
_TOKEN = "executors.token"  # noqa: S105 - the name of the file
_DRAIN_S = 10.0
_EXECUTOR_BYTES = 250 * 2**20
_LLM_BYTES = 900 * 2**20
_STORE_BYTES = 512 * 2**20
_SHOWN = 512
"""Characters of what an executor holds, for those who watch."""
_DRAINING = "draining"
"""Code with which an executor that is being stopped answers /health: not its fault."""
_TERM_SPARE_S = 5.0
"""Time to end after draining, before an executor is killed."""
_CALM_S = 10.0
"""An executor that served so long is started again at once when it ends."""
_MAX_PAUSE_S = 5.0
"""Answers that have begun wait for an executor; a graph server's patience is longer than this and a start."""
_FRONT_LIMITS = RestartLimits(ready_s=660.0, unwell=3, term_s=30.0)
_FRONT_SILENT_S = 10.0
"""Seconds that a graph server may take to answer before it is restarted. It is ready after its executors."""


def task_endpoint(
    deployment: TaskDeployment,
    home: RunDirectory,
    cores: tuple[int, ...],
    *,
    limits: MediaLimits | None = None,
    routing: str = "static",
) -> ServiceEndpoint:
    """Return the graph server of a deployment with its executors, configurations written to `home`."""
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
    server = GraphServerConfig(
        name=SERVER_NAME,
        port=ports.pop(),
        address=f"127.0.0.1:{ports.pop()}",
        services=deployment.services,
        executors=tuple(addresses),
        store=str(store / SERVER_NAME),
        token_file=str(token),
        limits=limits or MediaLimits(),
        routing="dynamic" if routing == "dynamic" else "static",
    )
    endpoint = graph_server_endpoint(server, home)
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
            hint="serve one of the models with `only`, or a smaller plan",
        )


def executor_process(
    config: ExecutorConfig,
    home: RunDirectory,
    environment: Mapping[str, str] | None = None,
    *,
    silent_s: float = 8.0,
) -> ProcessSpec:
    """Return the process of an executor, its configuration written to `home`.

    A process silent for `silent_s`, or whose components cannot run their examples, is started anew.
    `environment` says which GPUs it sees.
    """
    command = Command.of_module(
        "atoll.runtime.executor.executor_process",
        ("--config", str(home.write(config.name, config))),
        home.log(config.name),
        environment,
        cpus=config.cpus,
        threads=config.threads,
    )
    host = config.address.rpartition(":")[0]
    probe = InstanceProbe(f"http://{host}:{config.health_port}", _DRAINING, silent_s)
    limits = RestartLimits(
        ready_s=600.0,
        backoff_max_s=_MAX_PAUSE_S,
        calm_s=_CALM_S,
        unwell=1,
        term_s=config.drain_s + _TERM_SPARE_S,
    )
    return ProcessSpec(config.name, command, probe, limits)


def graph_server_endpoint(
    config: GraphServerConfig,
    home: RunDirectory,
    share: MachineShare | None = None,
    *,
    weight: float = 1.0,
) -> Endpoint:
    """Return the process of a graph server, and the backend that it is to a gateway.

    It is ready when every component that its tasks need has an executor, and is not blamed for one that is
    missing later. Its port must be known before it starts.
    """
    if config.port == 0:
        raise InputError(
            f"{config.name} has no port", field="port", hint="give it one that gateways can know"
        )
    part = share or MachineShare()
    url = f"http://{config.host}:{config.port}"
    server = ProcessSpec(
        config.name,
        Command.of_module(
            "atoll.runtime.graph_server.graph_server_process",
            ("--config", str(home.write(config.name, config))),
            home.log(config.name),
            cpus=part.cpus.get(config.name, ()),
            threads=part.threads(config.name),
        ),
        InstanceProbe(url, EXECUTORS_MISSING, _FRONT_SILENT_S),
        _FRONT_LIMITS,
    )
    backend = Backend(
        id=config.name,
        url=url,
        models=tuple(service.name for service in config.services),
        weight=weight,
        kind=GRAPH_SERVER.kind,
        max_inflight=config.max_requests,
        metadata={
            MODALITIES: write_modalities({s.name: modalities(s.tasks) for s in config.services})
        },
    )
    return Endpoint(backend, (config.name,), server=server)
