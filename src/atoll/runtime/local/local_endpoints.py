"""From a plan to endpoints that can be started here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.core.errors import InputError
from atoll.engine.batcher import MaxInFlight
from atoll.engines.engine import Engine, ServedModel
from atoll.engines.limits import EngineLaunch
from atoll.engines.stage import format_name
from atoll.engines.table import find_launched
from atoll.plan.engine_layout import launch_of
from atoll.plan.plan import Instance, Plan
from atoll.runtime.endpoints.compile_cache import own_folder
from atoll.runtime.endpoints.endpoint import (
    Endpoint,
    MachineShare,
    RunDirectory,
    server_endpoint,
)
from atoll.runtime.endpoints.stage_endpoint import stage_endpoint
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.instance.instance_config import engine_name
from atoll.runtime.local.cores import assign_cores, usable_cores
from atoll.runtime.local.instance_runner import InstanceRunner
from atoll.runtime.local.local_fleet import LivenessTracker, ServiceEndpoint
from atoll.runtime.local.placing import PlannedEndpoint, plan_endpoints
from atoll.runtime.pool.backend_metadata import STAGES, BackendStage, write_stages
from atoll.runtime.pool.member import INSTANCE, STAND_IN
from atoll.runtime.supervise.agent import ProcessSpec

_GPU_DTYPES = {None: "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What the stage engine computes in on GPUs, by the number format of a launch."""
_NODE_BYTES = 450 * 2**20
"""Least memory of a node process, with a small model."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """Weights that serve a service here: where they came from, and where they lie.

    `stand_in` says which serve instead of which, where they are not those of the plan. Without a folder an
    engine fetches them by itself, and turns them into the format `quantization`.
    """

    source: str
    folder: Path | None
    stand_in: str | None = None
    quantization: str | None = None

    @property
    def layers(self) -> int:
        """How many layers the model in the folder has."""
        return int(self._config()["num_hidden_layers"])

    @property
    def context(self) -> int | None:
        """Limit of prompt and answer together, in tokens, if its configuration says so."""
        if self.folder is None:
            return None
        tokens = self._config().get("max_position_embeddings")
        return tokens if isinstance(tokens, int) and tokens > 0 else None

    def _config(self) -> dict[str, Any]:
        assert self.folder is not None
        config: dict[str, Any] = json.loads(
            (self.folder / "config.json").read_text(encoding="utf-8")
        )
        # Models of more than text keep the figures of their language model in a section of its own.
        return config.get("text_config") or config


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How to stand here: the engine, KV memory per node, number format, routing policy.

    `max_in_flight` is how many batches of tokens a pipeline of the stage engine has under way.
    `dead_after_s` is the silence after which an instance gives a node up, `silent_s` that after which a
    process is started anew. `runners` say what runs instances otherwise: engines on GPUs of this machine.
    """

    engine: str = "atoll"
    kv_bytes: int = 128 * 2**20
    dtype: str = "float32"
    policy: str = "iwrr"
    max_in_flight: MaxInFlight = "auto"
    dead_after_s: float = 2.0
    silent_s: float = 8.0
    cores: tuple[int, ...] = field(default_factory=usable_cores)
    runners: Mapping[str, InstanceRunner] = field(default_factory=dict)

    def engine_of(self, instance: Instance) -> Engine:
        """Return what runs an instance."""
        runner = self.runners.get(instance.id)
        return find_launched(self.engine if runner is None else runner.engine)

    def gpus_of(self, instance: Instance) -> InstanceRunner | None:
        """Return what runs an instance on GPUs; None: it is on cores."""
        runner = self.runners.get(instance.id)
        return runner if runner is not None and runner.gpus else None


def build(
    plan: Plan,
    models: Mapping[str, LocalModel],
    home: RunDirectory,
    liveness: LivenessTracker,
    options: LocalOptions | None = None,
) -> tuple[ServiceEndpoint, ...]:
    """Return the endpoints of the services in `models`, with configurations written to `home`."""
    chosen = options or LocalOptions()
    layers = {name: model.layers if model.folder else None for name, model in models.items()}
    planned = plan_endpoints(plan, layers)
    _check_memory(planned)
    share = MachineShare(_cores(planned, chosen), chosen.kv_bytes, chosen.dtype)
    ports = free_ports(len(planned))
    named = []
    for each, port in zip(planned, ports, strict=True):
        model = models[each.service]
        launch = launch_of(plan, each.instances[0])
        if model.quantization is not None:
            launch = launch.model_copy(update={"quantization": model.quantization})
        own = _share_of(each, share, launch, chosen)
        endpoint = _endpoint(each, model, launch, port, home, own, liveness, chosen)
        kinds = {
            engine_name(instance.id, node.id): node.node_type
            for instance in each.instances
            for node in instance.nodes
        }
        runners = filter(None, map(chosen.gpus_of, each.instances))
        gpus = ",".join(runner.gpu for runner in runners for _ in runner.gpus)
        endpoint = _describe(endpoint, model, kinds, own, gpus)
        if model.stand_in is not None:
            endpoint = _mark(endpoint, model.stand_in)
        named.append(ServiceEndpoint(endpoint, each.service, kinds))
    return tuple(named)


def list_warnings(plan: Plan, services: Iterable[str], options: LocalOptions) -> tuple[str, ...]:
    """Return a line for each limit of a plan that the engine of these services does not keep."""
    lines = dict[str, None]()
    for service in services:
        launch = plan.engines.get(service, EngineLaunch())
        runners = [i for i in plan.instances if i.service == service and i.id in options.runners]
        for engine in {options.engine_of(i) for i in runners} or {find_launched(options.engine)}:
            on_gpus = any(options.gpus_of(i) is not None for i in runners)
            dtype = _GPU_DTYPES[launch.dtype] if on_gpus else options.dtype
            for each in engine.list_unkept(launch, dtype):
                lines[f"{service}: the engine '{engine.name}' does not keep the plan's {each}"] = (
                    None
                )
    return tuple(lines)


def _share_of(
    each: PlannedEndpoint, share: MachineShare, launch: EngineLaunch, options: LocalOptions
) -> MachineShare:
    """The part of this machine that an endpoint gets: its GPUs, with what they have left for KV, or cores."""
    if options.gpus_of(each.instances[0]) is None:
        return share
    return MachineShare(share.cpus, None, _GPU_DTYPES[launch.dtype], "cuda")


def _endpoint(
    each: PlannedEndpoint,
    model: LocalModel,
    launch: EngineLaunch,
    port: int,
    home: RunDirectory,
    share: MachineShare,
    liveness: LivenessTracker,
    options: LocalOptions,
) -> Endpoint:
    engine = options.engine_of(each.instances[0])
    source = str(model.folder) if engine.weights == "folder" else model.source
    served = ServedModel(source, (each.service,), launch)
    if not engine.staged:
        instance = _only_one(each)
        return server_endpoint(engine, instance, served, port, home, share, weight=each.weight)
    return stage_endpoint(
        *(each.name, each.instances, served, port, home, share, liveness.silent_s),
        routes=each.routes,
        weight=each.weight,
        policy=options.policy,
        dead_after_s=options.dead_after_s,
        silent_s=options.silent_s,
        max_in_flight=options.max_in_flight,
        compiled=own_folder(),
    )


def _describe(
    endpoint: Endpoint,
    model: LocalModel,
    kinds: Mapping[str, str],
    share: MachineShare,
    gpus: str,
) -> Endpoint:
    """The endpoint that says of itself what those who watch want to know: who holds which layers, on what.

    What types of nodes were planned is said apart: it is no hardware of this machine.
    """
    processes = dict.fromkeys(process for process, _, _, _ in endpoint.held)
    known = {
        INSTANCE: endpoint.backend.id,
        "cores": str(sum(len(share.cpus.get(process, ())) for process in processes)),
    }
    if gpus:
        known |= {"cores": "", "gpus": gpus}
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


def _only_one(each: PlannedEndpoint) -> Instance:
    if len(each.instances) > 1:
        raise InputError(
            f"{each.service} runs prompts and answers on instances of their own",
            field="engine",
            hint="use the engine 'atoll', or plan with 'phases: together'",
        )
    return each.instances[0]


def _cores(
    planned: tuple[PlannedEndpoint, ...], options: LocalOptions
) -> dict[str, tuple[int, ...]]:
    """Share the cores out over node processes by the layers they hold."""
    work: dict[str, float] = {}
    for each in planned:
        for instance in each.instances:
            if options.gpus_of(instance) is not None:
                continue
            if options.engine_of(instance).staged:
                for node in instance.nodes:
                    work[engine_name(instance.id, node.id)] = node.layers
            else:
                work[instance.id] = sum(node.layers for node in instance.nodes)
    return assign_cores(work, options.cores)


def _check_memory(planned: tuple[PlannedEndpoint, ...]) -> None:
    nodes = sum(each.nodes for each in planned)
    free = available_bytes()
    if free is not None and nodes * _NODE_BYTES > free:
        raise InputError(
            f"{nodes} node processes need about {nodes * _NODE_BYTES / 2**30:.0f} GiB of memory,"
            f" and {free / 2**30:.0f} are free",
            field="instances",
            hint="serve one of the models with `only`, or a smaller plan",
        )


def available_bytes() -> int | None:
    """Return the memory that is free on this machine, None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            # The kernel says how many KiB.
            return int(line.split()[1]) * 1024
    return None
