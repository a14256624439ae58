"""Atoll's own stage engine: a process per node, and one in front that listens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll.engine.batcher import MaxInFlight
from atoll.engine.node import NodeConfig
from atoll.engines.engine import ServedModel
from atoll.engines.limits import EngineLaunch
from atoll.engines.stage import ENGINE as STAGE
from atoll.plan.engine_layout import engine_layout, gpu_kinds
from atoll.plan.plan import Instance, Route
from atoll.runtime.endpoints.compile_cache import KeptLaunch
from atoll.runtime.endpoints.devices import show_nodes
from atoll.runtime.endpoints.endpoint import Endpoint, MachineShare, RunDirectory
from atoll.runtime.endpoints.probes import InstanceProbe, NodeProbe
from atoll.runtime.instance.instance_config import (
    NODES_MISSING,
    InstanceConfig,
    InstancePart,
    engine_name,
)
from atoll.runtime.pool.member import Backend
from atoll.runtime.supervise.agent import ProcessSpec
from atoll.runtime.supervise.supervised_process import Command
from atoll.runtime.supervise.supervision import RestartLimits

_LIMITS = RestartLimits(ready_s=STAGE.ready_s, unwell=STAGE.failed_probes, term_s=STAGE.stop_s)
_NODE_DRAIN_S = 8.0


def stage_endpoint(
    name: str,
    instances: Sequence[Instance],
    served: ServedModel,
    port: int,
    home: RunDirectory,
    share: MachineShare,
    silent: Callable[[str], float],
    *,
    routes: Sequence[Route] = (),
    weight: float = 1.0,
    policy: str = "iwrr",
    dead_after_s: float = 2.0,
    silent_s: float = 8.0,
    max_in_flight: MaxInFlight = "auto",
    helpers: str | None = None,
    compiled: Path | None = None,
) -> Endpoint:
    """Return the processes of an endpoint over instances of the plan.

    One instance for both phases, or those of prefill and those of decode with the `routes` over them. Layer
    ranges must be those of the model that is served. A node is one process, however many copies of its
    layers it has on cores, or one a GPU, and sees the GPUs that the plan gives it. A node silent for
    `dead_after_s` is given up by the instance; a process silent for `silent_s` is started anew.
    `max_in_flight` paces its pipelines. `helpers` is a file that names prefill instances for one that
    decodes (see `InstanceConfig`). `compiled` is the folder that keeps what nodes compile for GPUs; None: as
    the environment says.
    """
    nodes: list[ProcessSpec] = []
    held: list[tuple[str, str, int, int]] = []
    parts: list[InstancePart] = []
    for instance in instances:
        kept = KeptLaunch(STAGE, engine_layout(instance), served, gpu_kinds(instance))
        inboxes = {}
        for node in instance.nodes:
            process = engine_name(instance.id, node.id)
            inboxes[node.id] = home.inbox(process)
            config = NodeConfig(
                name=process,
                model=served.source,
                start=node.start,
                end=node.end,
                bind=inboxes[node.id],
                ready_file=str(home.file(process, ".ready")),
                dtype=share.dtype,
                device=share.device,
                tp=share.tp(node),
                threads=share.threads(process),
                cpus=share.cpus.get(process, ()),
                kv_bytes=node.kv_bytes if share.kv_bytes is None else share.kv_bytes,
                max_in_flight=max_in_flight,
                drain_s=_NODE_DRAIN_S,
                **_limits(served),
            )
            path = str(home.write(process, config))
            command = _python(home, process, share, "atoll.engine.node", path, show_nodes([node]))
            if share.device != "cpu":
                words = kept.wrap(command.arguments, sys.executable, compiled)
                command = replace(command, arguments=tuple(words))
            nodes.append(
                ProcessSpec(
                    process,
                    command,
                    NodeProbe(home.file(process, ".ready"), process, silent, silent_s),
                    _LIMITS,
                )
            )
            held.append((process, node.id, node.start, node.end))
        parts.append(InstancePart(instance=instance, inboxes=inboxes))
    config_of_server = InstanceConfig(
        name=name,
        model=served.source,
        models=served.names,
        parts=tuple(parts),
        routes=tuple(routes),
        port=port,
        scheduler=home.inbox(f"{name}.scheduler"),
        policy=policy,
        dead_after_s=dead_after_s,
        helpers=helpers,
    )
    url = f"http://127.0.0.1:{port}"
    listening = str(home.write(name, config_of_server))
    server = ProcessSpec(
        name,
        _python(home, name, share, "atoll.runtime.instance.instance_process", listening),
        InstanceProbe(url, NODES_MISSING, silent_s),
        _LIMITS,
    )
    return Endpoint(
        Backend(id=name, url=url, models=served.names, weight=weight, kind=STAGE.kind),
        tuple(instance.id for instance in instances),
        tuple(nodes),
        server,
        tuple(held),
    )


def _limits(served: ServedModel) -> dict[str, Any]:
    """The limits of a node that a plan sets, and its promise; a row is a token of a prompt or a sequence."""
    launch = served.launch or EngineLaunch()
    limits = {
        "prefix_caching": launch.prefix_caching,
        "token_budget": launch.max_num_batched_tokens,
        "max_sequences": launch.max_num_seqs,
        "promised_ttft_s": launch.promised_ttft_s,
        "scheduling": launch.scheduling,
        "quantization": launch.quantization,
        "kv_dtype": "fp8" if launch.kv_cache_dtype == "fp8" else None,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _python(
    home: RunDirectory,
    name: str,
    share: MachineShare,
    module: str,
    config: str,
    environment: Mapping[str, str] | None = None,
) -> Command:
    command = Command.of_module(
        module,
        ("--config", config),
        home.log(name),
        environment,
        cpus=share.cpus.get(name, ()),
        threads=share.threads(name),
    )
    # What a fork server forks has its environment, and sees its GPUs.
    return command if share.device == "cpu" else replace(command, module=None)
