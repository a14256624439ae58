"""From an instance of a plan to what its nodes run: the simplest engine that carries it.

| Instance | Runs |
|---|---|
| one node, or equal nodes in a row, uneven layers too | `vllm serve` with its TP, PP and DP options |
| GGUF weights on one node | llama.cpp |
| unlike nodes, several nodes in a stage, overlapping ranges | Atoll's stage engine |
| parts of an any-to-any model | an executor; graph servers find it in the fleet's pool (`executor_node`) |
| prefill or decode alone | vLLM or SGLang where the plan says so: both listen, and gateways ask both |
| | else Atoll's stage engine: decode listens, prefill helps it (`helpers`) |

Every leading node joins a fabric with the instance's labels, so gateways need no list of addresses. Secrets
are named as files (`NodeCommand.secrets`): the fabric's token as ATOLL_FABRIC, the hub's as HF_TOKEN_PATH.
Which GPUs a process sees is the target's to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.deploy.commands.executor_node import TOKEN_VARIABLE, offer_executor, pool_of
from atoll.deploy.commands.instance_member import HELPERS, PEERS
from atoll.deploy.commands.prefill_helpers import offer_of
from atoll.deploy.commands.stage_node import StageOrder
from atoll.deploy.commands.stored_weights import WEIGHTS, check_source, is_stored
from atoll.deploy.labels import Labels
from atoll.deploy.node_command import NodeCommand
from atoll.engines.engine import Engine, ServedModel, ServerCommand, ServerHost
from atoll.engines.limits import EngineLaunch
from atoll.engines.stage import ENGINE as STAGE
from atoll.engines.table import AUTO, find_launched, list_launched
from atoll.plan.engine_layout import engine_layout, gpu_kinds, launch_of
from atoll.plan.plan import Instance, Node, Plan
from atoll.runtime.endpoints.compile_cache import KeptLaunch
from atoll.runtime.endpoints.devices import assign_devices
from atoll.runtime.task_fleet.deployment import components_of
from atoll.runtime.task_fleet.parts import ServedParts

FABRIC_VARIABLE = "ATOLL_FABRIC"
HUB_VARIABLE = "HF_TOKEN_PATH"
_PORT = "{port}"
_PREFIX = "atoll."
HANDOVER_LABEL = "atoll.handover"
"""With it a node says which phase it runs alone, and how KV cache goes from one to the other."""
BOOTSTRAP_LABEL = "atoll.bootstrap"
"""Where the other side meets a prefill instance, if that has to be told."""
STAND_IN_LABEL = "atoll.stand-in"
"""With it a node says that other weights answer than were asked for; gateways tell whoever asks."""
_CLOUDS = ("aws", "gcp", "azure")


@dataclass(frozen=True, slots=True)
class ServiceWeights:
    """Weights of a service: their source, and the names requests ask for.

    The source is a path on the nodes, hf://ORG/NAME, s3:// or gs://. `engine` is asked for where it is not
    "auto". `stand_in`: they are those of another model, for the stage engine to try a plan with.
    `quantization` is the format that the engine turns them into as it loads them, None: as they are. `gguf`
    is their source for engines that load GGUF files alone, None: the same.
    """

    source: str
    names: tuple[str, ...]
    engine: str = AUTO
    stand_in: bool = False
    quantization: str | None = None
    gguf: str | None = None

    def for_engine(self, engine: Engine) -> ServiceWeights:
        """Return the weights as an engine loads them."""
        if engine.weights != "gguf" or self.gguf is None:
            return self
        return replace(self, source=self.gguf, quantization=None)


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """Settings that commands depend on besides the plan.

    `fabric`, `hub_token`, `executors` (the token of executors) and `secrets` name files here. `atoll` and
    `python` are the programs on the nodes. `drain_s` is how long a stopping node may finish what runs,
    `ready_s` how long an engine may take to start. `compile_cache` is the folder on the nodes that keeps
    what engines compile as they start; None: their own. `executor` says who starts an engine's workers on
    other machines: the command of each ("ranks"), or Ray, where the engine can ask it to. `device`,
    `dtype`, `kv_bytes`, `alone` and `split_on_cores` are for the stage engine; with the last it splits
    layers as planned on cores, too.
    """

    fabric: str | None = None
    hub_token: str | None = None
    executors: str | None = None
    secrets: tuple[tuple[str, str], ...] = ()
    atoll: tuple[str, ...] = ("atoll",)
    python: str = "python3"
    cache: str | None = None
    compile_cache: str | None = None
    drain_s: float = 600.0
    ready_s: float = 1800.0
    executor: Literal["ranks", "ray"] = "ranks"
    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    kv_bytes: int | None = None
    alone: bool = True
    split_on_cores: bool = False


@dataclass(frozen=True, slots=True)
class InstanceRecipe:
    """Recipe of an instance's commands: all that they depend on but where they run (`CommandSettings`).

    For targets whose machines build commands by themselves.
    """

    instance: Instance
    weights: ServiceWeights
    labels: Labels
    launch: EngineLaunch | None = None
    weight: float | None = None

    def commands(self, settings: CommandSettings) -> tuple[NodeCommand, ...]:
        """Return what every node of the instance runs there."""
        return node_commands(
            self.instance,
            self.weights,
            settings,
            launch=self.launch,
            labels=self.labels,
            weight=self.weight,
        )


def label_options(labels: Labels) -> tuple[str, ...]:
    """Return the options with which `atoll join` carries an instance's labels into the fabric."""
    given = labels.model_dump()
    return tuple(
        word for name in sorted(given) for word in ("--label", f"{_PREFIX}{name}={given[name]}")
    )


def read_labels(carried: Mapping[str, str]) -> Labels | None:
    """Return the labels that a session of the fabric carries; None if it belongs to no fleet."""
    own = {
        name.removeprefix(_PREFIX): value
        for name, value in carried.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) in Labels.model_fields
    }
    try:
        return Labels.parse(own)
    except InputError:
        return None


def choose_engine(instance: Instance, weights: ServiceWeights) -> Engine:
    """Return the engine that was asked for, else the first in the order of preference that can.

    One that was asked for and cannot carry the instance is refused.
    """
    asked = None if weights.engine == AUTO else find_launched(weights.engine)
    if asked is None and instance.engine is not None and not weights.stand_in:
        asked = find_launched(instance.engine)
    if instance.phase is not Phase.BOTH:
        apart = [engine for engine in list_launched() if engine.connector is not None]
        if asked not in (None, *apart) or weights.source.endswith(".gguf"):
            names = " or ".join(f"'{engine.name}'" for engine in apart)
            raise InputError(
                f"{instance.id} runs {instance.phase} alone, which only the engine {names} does here",
                field="phases",
                hint=f"plan with 'phases: together', or use the engine {names}",
            )
        if asked is None:
            # Both sides need the same, and only this one runs any of them.
            asked = next(engine for engine in apart if engine.staged)
    layout = engine_layout(instance)
    if asked is not None:
        asked.check_layout(layout)
        return asked
    for engine in list_launched():
        takes = engine.takes(weights.source, stand_in=weights.stand_in)
        if takes and engine.runs(layout) and _runs_on(engine, instance):
            return engine
    raise InputError(f"no engine runs {instance.id}", field="engine")


def _runs_on(engine: Engine, instance: Instance) -> bool:
    """Whether an engine runs on the GPUs of an instance, as far as the catalog knows them."""
    gpus = Catalog.default().gpus
    kinds = gpu_kinds(instance) & gpus.keys()
    # One that says of no hardware that it runs there leaves that to whoever starts it.
    return not engine.platforms or all(engine.refuses_hardware(gpus[k]) is None for k in kinds)


def node_commands(
    instance: Instance,
    weights: ServiceWeights,
    settings: CommandSettings,
    *,
    launch: EngineLaunch | None = None,
    labels: Labels | None = None,
    weight: float | None = None,
) -> tuple[NodeCommand, ...]:
    """Return what every node of an instance runs, the leading node first.

    `launch` are the limits that the plan reckons with (`Plan.engines`), `weight` the instance's share of the
    service's requests. Nodes on one machine that one engine can run are one command.
    """
    if instance.is_executor:
        raise InputError(
            f"{instance.id} is an executor, which runs components and no engine",
            field="classes",
            hint="its command comes from the parts of its service",
        )
    check_source(weights.source)
    if not weights.names:
        raise InputError("requests have no name to ask for", field="names")
    engine = choose_engine(instance, weights)
    engine.check_layout(engine_layout(instance), launch)
    weights = weights.for_engine(engine)
    if weights.quantization is not None:
        own = launch or EngineLaunch()
        launch = own.model_copy(update={"quantization": weights.quantization})
    order = _InstanceOrder(instance, weights, settings, launch, labels, weight)
    if engine.staged:
        return order.stage_commands()
    engine.check_source(weights.source)
    layout, host = engine_layout(instance), ServerHost(_PORT, settings.python)
    if layout.alone:
        # Its address and its ports are known where it starts (`instance_member`).
        host = replace(
            host, address=f"@host:{instance.nodes[0].id}", handover_port=order.handover_port
        )
    served = ServedModel(order.source, weights.names, launch)
    command = engine.command(layout, served, host)
    kept = KeptLaunch(engine, layout, replace(served, source=weights.source), gpu_kinds(instance))
    if order.machines > 1:
        # Workers that Ray starts pull no weights, and know no addresses to hand KV cache over at.
        plain = not layout.alone and not is_stored(weights.source)
        if settings.executor == "ray" and engine.ray_options and plain:
            return order.ray_commands(kept, command)
        return order.rank_commands(kept, command)
    words, environment = _apart_from(command)
    argv = order.join(order.prepare(words, kept), handover=order.handover_labels(engine))
    if layout.alone:
        node = instance.nodes[0]
        argv = order.meet(node, [node], argv, copies=layout.copies, ports_of=kept.key)
    return (order.command(instance.nodes, argv, environment),)


def executor_command(
    instance: Instance,
    parts: Mapping[str, ServedParts],
    settings: CommandSettings,
    *,
    labels: Labels | None = None,
    fleet: str | None = None,
) -> NodeCommand:
    """Return what an executor runs; InputError where nothing stands for the parts that it is planned for.

    `parts` are those of every service that it takes requests of. It meets its graph server in the fleet of
    its labels, or in `fleet`.
    """
    components = components_of(instance, parts)
    if not components:
        raise InputError(
            f"nothing runs {'+'.join(instance.parts)} alone ({instance.id})",
            field="paths",
            hint="plan paths on which it stands with other parts, or name components for it",
        )
    order = _InstanceOrder(instance, ServiceWeights("", ()), settings, None, labels, None)
    (node,) = instance.nodes
    name = instance.id if labels is None else labels.instance
    offer = offer_executor(name, components)
    words = [
        *(settings.python, "-m", "atoll.deploy.commands.executor_node", "--name", name),
        *("--components", json.dumps(components), "--device", settings.device),
        *("--listen", f"@host:{node.id}:@port:{node.id}", "--port", _PORT),
        *(() if settings.alone else ("--threads", "1")),
        *("--drain", f"{settings.drain_s:g}"),
    ]
    place = (fleet or instance.id) if labels is None else labels.fleet
    pool = ("--streams", "--pool", pool_of(place), "--offer", offer.to_json())
    command = order.command([node], order.meet(node, [node], words, pool), {})
    if settings.executors is None:
        return command
    known = {*command.secrets, (TOKEN_VARIABLE, settings.executors)}
    return replace(command, secrets=tuple(sorted(known)))


def _apart_from(command: ServerCommand) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command, with the environment that is filled in where it starts, and the rest."""
    filled = {name: value for name, value in command.environment.items() if "@" in value}
    fixed = {name: value for name, value in command.environment.items() if name not in filled}
    told = ["env", *(f"{name}={value}" for name, value in sorted(filled.items()))] if filled else []
    return [*told, *command.arguments], fixed


def plan_commands(
    plan: Plan,
    weights: Mapping[str, ServiceWeights],
    settings: CommandSettings,
    only: str | None = None,
) -> dict[str, tuple[NodeCommand, ...]]:
    """Return the commands of every instance of a plan whose service has weights, or of one, by instance."""
    return {
        instance.id: node_commands(
            instance,
            weights[instance.service],
            settings,
            launch=launch_of(plan, instance),
            weight=share_of(plan, instance),
        )
        for instance in plan.instances
        if instance.service in weights and only in (None, instance.id)
    }


def share_of(plan: Plan, instance: Instance) -> float | None:
    """Return which share of its service's requests a plan sends over an instance, None if it has no route."""
    shares = [
        route.share
        for route in plan.routes
        if route.service == instance.service and instance.id in route.instances
    ]
    return sum(shares) if shares else None


@dataclass(frozen=True, slots=True)
class _InstanceOrder:
    """An instance with everything its commands depend on."""

    instance: Instance
    weights: ServiceWeights
    settings: CommandSettings
    launch: EngineLaunch | None
    labels: Labels | None
    weight: float | None

    @property
    def machines(self) -> int:
        """How many machines the instance stands on."""
        return len({assign_devices(self.instance, node).machine for node in self.instance.nodes})

    @property
    def handover_port(self) -> str:
        """Where KV cache is asked for, filled in where it starts."""
        # Ranks of a pipeline over machines meet at the first port.
        port = "@port2" if self.machines > 1 else "@port"
        return f"{port}:{self.instance.nodes[0].id}"

    @property
    def source(self) -> str:
        """Source of the weights as the engine is told it."""
        return WEIGHTS if is_stored(self.weights.source) else self.weights.source

    # The engines

    def rank_commands(self, kept: KeptLaunch, command: ServerCommand) -> tuple[NodeCommand, ...]:
        """Return one rank of a pipeline per node: the first listens, the others work for it."""
        engine, nodes = kept.engine, [stage.nodes[0] for stage in self.instance.layout()]
        commands = []
        for rank, node in enumerate(nodes):
            ranked = engine.rank_command(command, rank, [each.id for each in nodes])
            words, environment = _apart_from(ranked)
            argv = self.prepare(words, kept)
            if not rank:
                # The other ranks would not take part in a second start of this one alone.
                argv = self.join(argv, handover=self.handover_labels(engine), restarts=False)
            lasting = kept.key if not rank and kept.layout.alone else None
            argv = self.meet(node, nodes, argv, ports_of=lasting)
            commands.append(self.command([node], argv, environment))
        return tuple(commands)

    def ray_commands(self, kept: KeptLaunch, command: ServerCommand) -> tuple[NodeCommand, ...]:
        """Return the command of a server that has Ray start its workers; the other nodes run nothing else."""
        nodes = [stage.nodes[0] for stage in self.instance.layout()]
        server = (self.settings.python, "-m", "atoll.deploy.ray.ray_server", "--")
        words = self.prepare([*server, *command.arguments, *kept.engine.ray_options], kept)
        leading = self.command(nodes[:1], self.join(words), command.environment)
        others = [replace(self.command([node], (), {}), secrets=()) for node in nodes[1:]]
        return (leading, *others)

    def handover_labels(self, engine: Engine) -> tuple[str, ...]:
        """Return what gateways have to know of an instance that runs one phase alone."""
        phase, connector = self.instance.phase, engine.connector
        if phase not in (Phase.PREFILL, Phase.DECODE) or connector is None:
            return ()
        launched = None if self.launch is None else self.launch.handover
        pushed = "-push" if launched is not None and launched.endswith("push") else ""
        said = ["--label", f"{HANDOVER_LABEL}={connector.name}{pushed}/{phase}"]
        if phase is Phase.PREFILL and not connector.recomputes:
            first = self.instance.nodes[0].id
            said += ["--label", f"{BOOTSTRAP_LABEL}=@host:{first} {self.handover_port}"]
        return tuple(said)

    def stage_commands(self) -> tuple[NodeCommand, ...]:
        """Return the commands of the stage engine's nodes; prefill instances help those that decode."""
        instance, weights, settings = self.instance, self.weights, self.settings
        several = next((node for node in instance.nodes if node.gpus > node.tp), None)
        if settings.device == "cuda" and several is not None:
            raise InputError(
                f"{instance.id} has {several.gpus // several.tp} copies of its layers on {several.id},"
                " and the stage engine runs one on a node",
                field="engine",
                hint="plan anew with the engine 'atoll', or with equal nodes for vLLM",
            )
        order = StageOrder(
            instance=instance,
            source=self.source,
            names=weights.names,
            launch=self.launch,
            device=settings.device,
            dtype=settings.dtype,
            kv_bytes=settings.kv_bytes,
            alone=settings.alone,
            stand_in=weights.stand_in,
            split=settings.device == "cuda" or settings.split_on_cores,
        )
        # Whoever has one phase only must be reached by others, also where it is one node.
        meets = len(instance.nodes) > 1 or instance.phase is not Phase.BOTH
        served = ServedModel(weights.source, weights.names, self.launch)
        kept = KeptLaunch(STAGE, engine_layout(instance), served, gpu_kinds(instance))
        commands = []
        for node in instance.nodes:
            leads = node is instance.nodes[0]
            helped = leads and instance.phase is Phase.DECODE
            words = [
                *(settings.python, "-m", "atoll.deploy.commands.stage_node", "--node", node.id),
                *("--order", order.to_json()),
                *(("--peers", PEERS) if meets else ()),
                *(("--port", _PORT) if leads else ()),
                *(("--helpers", HELPERS) if helped else ()),
            ]
            # On cores it compiles nothing.
            on_gpus = settings.device == "cuda"
            argv = self.prepare(words, kept) if on_gpus else self.with_weights(words)
            if leads and instance.phase is not Phase.PREFILL:
                stand_in = weights.source.partition("#")[0][:200] if weights.stand_in else ""
                argv = self.join(argv, stand_in)
            if meets:
                pool: tuple[str, ...] = ()
                if instance.phase is Phase.PREFILL:
                    offer = offer_of(instance, node)
                    pool = ("--pool", self._pool_name(), "--offer", offer.to_json())
                elif helped:
                    pool = ("--pool", self._pool_name())
                argv = self.meet(node, instance.nodes, argv, pool)
            commands.append(self.command([node], argv, {}))
        return tuple(commands)

    # What stands before an engine

    def prepare(self, words: Sequence[str], kept: KeptLaunch) -> list[str]:
        """Return a command that pulls stored weights and finds kept compilations first."""
        return self.with_weights(
            kept.wrap(words, self.settings.python, self.settings.compile_cache)
        )

    def with_weights(self, words: Sequence[str]) -> list[str]:
        """Return a command that pulls stored weights first."""
        if not is_stored(self.weights.source):
            return list(words)
        settings = self.settings
        cache = ("--cache", settings.cache) if settings.cache else ()
        pull = (settings.python, "-m", "atoll.deploy.commands.stored_weights", *cache)
        return [*pull, self.weights.source, "--", *words]

    def join(
        self,
        words: Sequence[str],
        stand_in: str = "",
        handover: Sequence[str] = (),
        *,
        restarts: bool = True,
    ) -> list[str]:
        """Return a command that joins the fabric with the instance's labels, where there is a fabric."""
        instance, settings, labels, weight = self.instance, self.settings, self.labels, self.weight
        if settings.fabric is None:
            return list(words)
        spot = any(node.market == "spot" for node in instance.nodes)
        cloud = instance.region.partition("/")[0]
        name = labels.instance if labels is not None else instance.id
        return [
            *(*settings.atoll, "join", "--name", name[:100], "--region", instance.region),
            *("--stability", "spot" if spot else "standard"),
            *(("--spot", cloud) if spot and cloud in _CLOUDS else ()),
            *(("--weight", f"{weight:.6g}") if weight is not None else ()),
            *(("--price", f"{instance.usd_per_hour:.6g}/h") if instance.usd_per_hour > 0 else ()),
            *("--drain", f"{settings.drain_s:g}s", "--ready", f"{settings.ready_s:g}s"),
            *(() if restarts else ("--no-restart",)),
            *(label_options(labels) if labels is not None else ()),
            *(("--label", f"{STAND_IN_LABEL}={stand_in}") if stand_in else ()),
            *handover,
            # Events in the log say what is announced, for whoever waits for that.
            *("--log", "-", "--", *words),
        ]

    def meet(
        self,
        node: Node,
        nodes: Sequence[Node],
        words: Sequence[str],
        pool: Sequence[str] = (),
        *,
        copies: int = 1,
        ports_of: str | None = None,
    ) -> list[str]:
        """Return a command that first finds the other nodes of the instance; each copy has a port.

        `ports_of` is the launch that hands KV cache over at the same ports whenever it starts: vLLM counts
        them as part of what it compiles for, and would compile again.
        """
        # A name that no other instance has or had, where the labels give one.
        labels, settings = self.labels, self.settings
        name = self.instance.id if labels is None else f"{labels.fleet}.{labels.instance}"
        return [
            *(settings.python, "-m", "atoll.deploy.commands.instance_member"),
            *("--meeting", name.replace("/", "."), "--node", node.id),
            *("--nodes", ",".join(each.id for each in nodes)),
            *(("--ports", str(copies)) if copies > 1 else ()),
            *(("--ports-of", ports_of) if ports_of is not None else ()),
            *pool,
            *("--drain", f"{settings.drain_s:g}", "--wait", f"{settings.ready_s:g}", "--", *words),
        ]

    def _pool_name(self) -> str:
        """Where prefill and decode instances of a service meet; it ends in the service's name."""
        service = self.instance.service.replace("/", "_").replace(".", "_")
        return (
            service if self.labels is None else f"{self.labels.fleet}.{service}".replace("/", "_")
        )

    def command(
        self, nodes: Sequence[Node], argv: Sequence[str], env: Mapping[str, str]
    ) -> NodeCommand:
        """Return a command for nodes on one machine, with the files of its secrets."""
        secrets = dict(self.settings.secrets)
        if self.settings.fabric is not None:
            secrets[FABRIC_VARIABLE] = self.settings.fabric
        if self.settings.hub_token is not None:
            secrets[HUB_VARIABLE] = self.settings.hub_token
        return NodeCommand(
            node=nodes[0].id,
            node_type=nodes[0].node_type,
            argv=tuple(argv),
            gpus=sum(node.gpus for node in nodes),
            env=tuple(sorted(env.items())),
            secrets=tuple(sorted(secrets.items())),
        )
