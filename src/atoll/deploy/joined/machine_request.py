"""Requests to a machine that joined, and its answers.

A request names an instance and the recipe of its commands, never a command: the machine builds them by its
own engine files. It travels as a signed order (`atoll.runtime.join.signed_orders`) over hubs, which could
read it: nothing in it is secret. The machine's own token is what its instances join with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from atoll.core.errors import AtollError, InputError
from atoll.core.frozen import Frozen
from atoll.core.ids import format_node_type, parse_node_type
from atoll.deploy.commands.node_commands import InstanceRecipe, ServiceWeights
from atoll.deploy.commands.stored_weights import check_source, is_stored
from atoll.deploy.labels import Labels
from atoll.deploy.local.gpu_slots import HeldSlots, PoolMachine
from atoll.deploy.target import FailureKind, InstanceState
from atoll.engines.limits import EngineLaunch
from atoll.engines.table import AUTO, find_launched
from atoll.fabric.registry.records import Gpu
from atoll.plan.plan import Instance
from atoll.runtime.join.assignment import is_known_source

PURPOSE = "atoll-host-v1"
MAX_LOG_LINES = 1000
MAX_LOG_CHARACTERS = 100_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}")
_FORMAT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_TAG = re.compile(r":[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Handle = Annotated[str, Field(max_length=1024)]
_Seconds = Annotated[float, Field(ge=0, le=7 * 86400)]


class PartOrder(Frozen):
    """The part of an instance that is to stand on one machine: `nodes` of it, of the recipe in these fields.

    `machines` are all on which the instance stands. `weights` are `ServiceWeights`, `weight` is the
    instance's share of its service's requests.
    """

    instance: Instance
    labels: Labels
    weights: ServiceWeights
    launch: EngineLaunch | None = None
    weight: float | None = None
    nodes: Annotated[tuple[str, ...], Field(min_length=1)]
    machines: tuple[str, ...]
    ready_s: _Seconds = 1800.0
    drain_s: _Seconds = 600.0

    def recipe(self) -> InstanceRecipe:
        """Return what the commands of all nodes are made of."""
        return InstanceRecipe(self.instance, self.weights, self.labels, self.launch, self.weight)


class MachineRequest(Frozen):
    """A question or an order; `look` asks for what stands of a fleet and which GPUs are held.

    `measure` begins to: what it finds the machine tells the fabric (`atoll.fabric.registry.measured`).
    """

    verb: Literal["look", "start", "drain", "stop", "logs", "measure"]
    fleet: Annotated[str, Field(max_length=256)] = ""
    handle: _Handle = ""
    term: int = 0
    lines: Annotated[int, Field(ge=1, le=MAX_LOG_LINES)] = 100
    part: PartOrder | None = None


class StandingPart(Frozen):
    """A part of an instance as its machine sees it; see `InstanceStatus`."""

    handle: str
    order: PartOrder
    state: InstanceState
    since_s: float
    reason: str = ""
    kind: FailureKind | None = None


class MachineAnswer(Frozen):
    """Answer of a machine: what stands there, what is held, the newest term, or why it refuses."""

    parts: tuple[StandingPart, ...] = ()
    held: tuple[HeldSlots, ...] = ()
    term: int = 0
    text: str = ""
    refusal: str | None = None
    kind: FailureKind | None = None
    hint: str | None = None


class JoinedMachine(Frozen):
    """A machine that joined: its session, its name in the fabric, and its GPUs as machines of a pool."""

    sid: str
    name: str
    pool: tuple[PoolMachine, ...]


def pool_machines(
    name: str, gpus: Iterable[Gpu], region: str, usd_per_hour: float = 0.0
) -> tuple[PoolMachine, ...]:
    """Return a machine's GPUs as machines of a pool, one for each kind; other names left out."""
    kinds: dict[str, int] = {}
    for gpu in gpus:
        try:
            parse_node_type(format_node_type(gpu.type, gpu.count))
        except InputError:
            continue
        kinds[gpu.type] = kinds.get(gpu.type, 0) + gpu.count
    total = sum(kinds.values())
    return tuple(
        PoolMachine(
            name=name if len(kinds) == 1 else f"{name}.{kind}",
            node_type=format_node_type(kind, count),
            region=region,
            usd_per_hour=usd_per_hour * count / total,
        )
        for kind, count in sorted(kinds.items())
    )


def check_part(part: PartOrder, models: str | None) -> None:
    """Raise InputError unless an order is of a known kind; `models` is the folder that the machine allows."""
    weights, launch = part.weights, part.launch
    guesses = None if launch is None or launch.speculative is None else launch.speculative.model
    for source in (weights.source, weights.gguf, guesses):
        if source is not None:
            _check_source(source, models)
    for name in weights.names:
        if not _NAME.fullmatch(name):
            raise InputError(f"a model cannot be served as {name[:80]!r}", field="names")
    if weights.quantization is not None and not _FORMAT.fullmatch(weights.quantization):
        raise InputError(f"{weights.quantization[:80]!r} is no format", field="quantization")
    if weights.engine != AUTO:
        find_launched(weights.engine, field="engine")
    unknown = set(part.nodes) - {node.id for node in part.instance.nodes}
    if unknown:
        raise InputError(f"{part.instance.id} has no node {min(unknown)}", field="nodes")


def _check_source(source: str, models: str | None) -> None:
    if is_stored(source):
        check_source(source)
        return
    plain = source
    if not source.startswith(("/", "pypi://")):
        # A GGUF file of a repository is named by its tag.
        head, colon, tag = source.removeprefix("hf://").partition(":")
        plain = head if not colon or _TAG.fullmatch(colon + tag) else source
    if not is_known_source(plain, models):
        raise InputError(
            f"weights cannot be called {source[:80]!r} here",
            field="weights",
            hint="hf://ORG/NAME, s3://..., or a path below the folder given to 'atoll join --models'",
        )


def refusal_of(error: AtollError) -> MachineAnswer:
    """Return the answer of a machine that refuses."""
    kind = getattr(error, "kind", "settings")
    return MachineAnswer(refusal=error.message[:1000], kind=kind, hint=error.hint)
