"""From a plan to endpoints that can be started here."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from atoll.core.errors import InputError
from atoll.engine.batcher import MaxInFlight
from atoll.perf.engines import EngineLaunch
from atoll.plan.plan import Instance, Plan
from atoll.runtime.adapters.base import Endpoint, MachineShare, RunDirectory, ServedModel
from atoll.runtime.adapters.llamacpp import llamacpp_endpoint
from atoll.runtime.adapters.sglang import sglang_endpoint
from atoll.runtime.adapters.stage import format_name, list_unkept, stage_endpoint
from atoll.runtime.adapters.vllm import vllm_endpoint
from atoll.runtime.instance.config import engine_name
from atoll.runtime.local.cores import assign_cores, usable_cores
from atoll.runtime.local.fleet import LivenessTracker, ServiceEndpoint
from atoll.runtime.local.placing import PlannedEndpoint, standings
from atoll.runtime.pool.member import INSTANCE, STAND_IN
from atoll.runtime.pool.stages import STAGES, BackendStage, write_stages
from atoll.runtime.supervise.agent import ProcessSpec

Engine = Literal["atoll", "llamacpp", "vllm", "sglang"]
ENGINES: tuple[Engine, ...] = ("atoll", "llamacpp", "vllm", "sglang")
_NO_OPTIONS = ("host", "promised_ttft_s")
"""What a plan tells engines that is no option of theirs: what was measured, and what is promised."""
_NODE_BYTES = 450 * 2**20
"""What a node process of a small model takes at least."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What serves a service here: where the weights came from, and where they lie."""

    source: str
    folder: Path
    stand_in: str | None = None
    """Which weights serve instead of which, where they are not those of the plan."""

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return int(self._config()["num_hidden_layers"])

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and answer together, if its configuration says so."""
        most = self._config().get("max_position_embeddings")
        return most if isinstance(most, int) and most > 0 else None

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(
            (self.folder / "config.json").read_text(encoding="utf-8")
        )
        return config.get("text_config") or config


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How to stand here: the engine, KV memory per node, number format, routing policy.

    `max_in_flight` is how many batches of tokens a pipeline of the stage engine has under way.
    `dead_after_s` is the silence after which an instance gives a node up, `silent_s` that after which a
    process is started anew.
    """

    engine: Engine = "atoll"
    kv_bytes: int = 128 * 2**20
    dtype: str = "float32"
    policy: str = "iwrr"
    max_in_flight: MaxInFlight = "auto"
    dead_after_s: float = 2.0
    silent_s: float = 8.0
    cores: tuple[int, ...] = field(default_factory=usable_cores)


def build(
    plan: Plan,
    models: Mapping[str, LocalModel],
    home: RunDirectory,
    liveness: LivenessTracker,
    options: LocalOptions | None = None,
) -> tuple[ServiceEndpoint, ...]:
    """Return the endpoints of the services in `models`, with configurations written to `home`."""
    chosen = options or LocalOptions()
    planned = standings(plan, {service: model.layers for service, model in models.items()})
    _check_memory(planned)
    share = MachineShare(_cores(planned, chosen), chosen.kv_bytes, chosen.dtype)
    ports = free_ports(len(planned))
    named = []
    for standing, port in zip(planned, ports, strict=True):
        model = models[standing.service]
        launch = plan.engines.get(standing.service, EngineLaunch())
        endpoint = _endpoint(standing, model, launch, port, home, share, liveness, chosen)
        kinds = {
            engine_name(instance.id, node.id): node.node_type
            for instance in standing.instances
            for node in instance.nodes
        }
        endpoint = _describe(endpoint, model, kinds, share)
        if model.stand_in is not None:
            endpoint = _mark(endpoint, model.stand_in)
        named.append(ServiceEndpoint(endpoint, standing.service, kinds))
    return tuple(named)


def list_warnings(plan: Plan, services: Iterable[str], options: LocalOptions) -> tuple[str, ...]:
    """Return a line for each limit of a plan that the engine of these services does not keep."""
    lines = []
    for service in services:
        launch = plan.engines.get(service, EngineLaunch())
        if options.engine == "atoll":
            unkept = list_unkept(launch, options.dtype)
        elif options.engine == "llamacpp":
            unkept = tuple(
                f"{name} {value}" for name, value in launch.given.items() if name not in _NO_OPTIONS
            )
        else:
            # Their adapters pass everything on, or refuse it.
            unkept = ()
        lines += [
            f"{service}: the engine '{options.engine}' does not keep the plan's {each}"
            for each in unkept
        ]
    return tuple(lines)


def _endpoint(
    standing: PlannedEndpoint,
    model: LocalModel,
    launch: EngineLaunch,
    port: int,
    home: RunDirectory,
    share: MachineShare,
    liveness: LivenessTracker,
    options: LocalOptions,
) -> Endpoint:
    if options.engine == "atoll":
        served = ServedModel(str(model.folder), (standing.service,), launch)
        return stage_endpoint(
            *(standing.name, standing.instances, served, port, home, share, liveness.silent_s),
            routes=standing.routes,
            weight=standing.weight,
            policy=options.policy,
            dead_after_s=options.dead_after_s,
            silent_s=options.silent_s,
            max_in_flight=options.max_in_flight,
        )
    served = ServedModel(model.source, (standing.service,), launch)
    make = {
        "llamacpp": llamacpp_endpoint,
        "vllm": vllm_endpoint,
        "sglang": sglang_endpoint,
    }[options.engine]
    return make(_only_one(standing), served, port, home, share, weight=standing.weight)


def _describe(
    endpoint: Endpoint, model: LocalModel, kinds: Mapping[str, str], share: MachineShare
) -> Endpoint:
    """The endpoint that says of itself what those who watch want to know: who holds which layers, on what.

    What types of nodes were planned is said apart: it is no hardware of this machine.
    """
    processes = dict.fromkeys(process for process, _, _, _ in endpoint.held)
    known = {
        INSTANCE: endpoint.backend.id,
        "cores": str(sum(len(share.cpus.get(process, ())) for process in processes)),
    }
    if endpoint.nodes:
        known["precision"] = format_name(share.dtype)
        known["context"] = "" if model.context is None else str(model.context)
        known[STAGES] = write_stages(
            BackendStage(
                process,
                process.rpartition("/")[0] or process,
                (start, end),
                cores=len(share.cpus.get(process, ())),
                planned=kinds.get(process, ""),
            )
            for process, _, start, end in endpoint.held
        )
    metadata = endpoint.backend.metadata | {name: text for name, text in known.items() if text}
    return replace(endpoint, backend=endpoint.backend.model_copy(update={"metadata": metadata}))


def _mark(endpoint: Endpoint, stand_in: str) -> Endpoint:
    """The endpoint whose answers, and every line of its logs, say that they are those of other weights."""

    def mark(spec: ProcessSpec) -> ProcessSpec:
        return replace(spec, command=replace(spec.command, mark=f"[stand-in, {stand_in}] "))

    known = endpoint.backend.metadata | {STAND_IN: stand_in}
    return replace(
        endpoint,
        backend=endpoint.backend.model_copy(update={"metadata": known}),
        nodes=tuple(map(mark, endpoint.nodes)),
        server=endpoint.server and mark(endpoint.server),
    )


def _only_one(standing: PlannedEndpoint) -> Instance:
    if len(standing.instances) > 1:
        raise InputError(
            f"{standing.service} runs prompts and answers on instances of their own",
            field="engine",
            hint="use the engine 'atoll', or plan with 'phases: together'",
        )
    return standing.instances[0]


def _cores(
    planned: tuple[PlannedEndpoint, ...], options: LocalOptions
) -> dict[str, tuple[int, ...]]:
    """Share the cores out over node processes by the layers they hold."""
    work: dict[str, float] = {}
    for standing in planned:
        for instance in standing.instances:
            if options.engine == "atoll":
                for node in instance.nodes:
                    work[engine_name(instance.id, node.id)] = node.layers
            else:
                work[instance.id] = sum(node.layers for node in instance.nodes)
    return assign_cores(work, options.cores)


def _check_memory(planned: tuple[PlannedEndpoint, ...]) -> None:
    nodes = sum(standing.nodes for standing in planned)
    free = available_bytes()
    if free is not None and nodes * _NODE_BYTES > free:
        raise InputError(
            f"{nodes} node processes need about {nodes * _NODE_BYTES / 2**30:.0f} GiB of memory,"
            f" and {free / 2**30:.0f} are free",
            field="instances",
            hint="serve one of the models with --only, or a smaller plan",
        )


def available_bytes() -> int | None:
    """Return the memory that is free on this machine, None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
