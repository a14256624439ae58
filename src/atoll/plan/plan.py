"""The plan: which nodes to rent, which layers each holds, how requests flow, what it costs.

Every node of an instance holds layers [start, end). Flow, in units per second of the role (prompt
tokens for prefill, generated tokens for decode, requests where both phases run together), runs from
"source" over nodes to "sink". A stage layout (nodes of a stage share a range, every stage feeds all
nodes of the next) and a placement with overlapping ranges are the same structure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from atoll.catalog.checkpoints import Checkpoint
from atoll.core.errors import InputError
from atoll.core.frozen import Frozen, without_blanks
from atoll.core.ids import Phase, RoleId, format_node_type, parse_node_type, parse_role
from atoll.core.units import pluralize
from atoll.engines.limits import EngineLaunch
from atoll.plan.choice import ModelMix
from atoll.plan.footprint import PowerUse
from atoll.plan.kept_groups import KeptGroup, min_share
from atoll.plan.name_types import Name, NodeTypeName, RoleName, refuse
from atoll.plan.robustness import Robustness

SOURCE = "source"
SINK = "sink"

Market = Literal["on-demand", "spot", "owned"]
"""How a node is paid for: rented at a fixed price, rented until someone pays more, or one's own."""
Status = Literal["optimal", "feasible", "partial", "infeasible"]
"""At its bound, with all promises kept; valid; valid but serves only a share of the demand; no plan."""
Goal = Literal["cost", "max-flow", "sustained", "fair", "latency"]
"""Objective of a plan: low cost, or tokens/s on a fixed cluster. The tokens/s of the largest flow; of the
largest that the KV caches can hold in flight; or of the service that gets the least of its demand. With
"latency" requests are answered soonest, and the objective is the tokens/s that are carried."""

OfferKey = tuple[str, str, Market]
"""Identity of an offer of machines: region, node type, market."""
PROVEN_GAP = 1e-3
"""The largest gap of a plan that is called optimal."""
_ROUNDING = 1e-9

NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NodeId = Annotated[str, Field(pattern=r"^n\d+$")]
GpuIndex = Annotated[int, Field(ge=0, le=1023)]
TemplateKey = tuple[str, tuple[tuple[str, int], ...]]
RentalKey = tuple[str, str, tuple[tuple[str, int, Market, int], ...]]
PlacementKey = tuple[str, str, tuple[tuple[str, int, Market, int, int, int, str], ...], str]


class Node(Frozen):
    """Part of a machine in an instance: it holds layers [start, end), split over groups of `tp` GPUs.

    Where that is less than the machine, `gpu_ids` are its GPUs; they form one copy of the layers for every
    `tp` of them. `slot` says which of the machines of an offer it is on, counted from 0, where machines are
    cut. `host` is the machine's name where it is one of a fixed cluster, and `region` where it stands if
    that is not the region of its instance. `kv_bytes` is its KV cache, told to engines where its GPU is a
    share of one: what is free there when they start says nothing.
    """

    id: NodeId
    node_type: NodeTypeName
    market: Market
    start: int = Field(ge=0)
    end: int = Field(ge=1)
    tp: int = Field(ge=1)
    host: Name | None = None
    region: Name | None = None
    slot: int | None = Field(default=None, ge=0)
    gpu_ids: tuple[GpuIndex, ...] | None = Field(default=None, min_length=1)
    kv_bytes: int | None = Field(default=None, ge=1)

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what is not known, so that problems without hosts keep their hash."""
        fields: dict[str, object] = write(self)
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def layers(self) -> int:
        """How many layers the node holds."""
        return self.end - self.start

    @property
    def gpus(self) -> int:
        """How many GPUs the node has: all of the machine's, or those of its slice."""
        return self.machine_gpus if self.gpu_ids is None else len(self.gpu_ids)

    @property
    def machine_gpus(self) -> int:
        """How many GPUs the whole machine has."""
        return parse_node_type(self.node_type).gpu_count

    @property
    def kind(self) -> str:
        """Its part of the machine as a node type of its own: two GPUs of an "L40S:8" are "L40S:2"."""
        return format_node_type(parse_node_type(self.node_type).gpu, self.gpus)

    @property
    def gpu_shares(self) -> int:
        """Of how many equal shares of a GPU it has one; 1 where its GPUs are whole."""
        return parse_node_type(self.node_type).shares

    @property
    def share(self) -> float:
        """Which share of the machine it has."""
        return self.gpus / self.machine_gpus

    def describe(self) -> str:
        """Return what it has of which machine: "2/8 of L40S:8, machine 3, GPUs 4-5"; or just the machine."""
        if self.gpu_ids is None:
            return self.node_type if self.host is None else f"{self.node_type}, {self.host}"
        machine = self.host if self.host is not None else f"machine {self.slot}"
        named = "GPU" if self.gpus == 1 else "GPUs"
        return f"{_slice_name(self)}, {machine}, {named} {self.format_slice()}"

    def format_slice(self) -> str:
        """Write the GPUs of its slice, or which share it has of one: "4-5", "0, share 1"."""
        shares = self.gpu_shares
        if shares == 1 or self.gpu_ids is None:
            return format_gpus(self.gpu_ids or ())
        return "; ".join(f"{gpu // shares}, share {gpu % shares}" for gpu in self.gpu_ids)


def format_gpus(gpu_ids: Iterable[int]) -> str:
    """Write GPUs as ranges: "0-3, 6"."""
    ranges: list[list[int]] = []
    for gpu in sorted(gpu_ids):
        if ranges and gpu == ranges[-1][-1] + 1:
            ranges[-1].append(gpu)
        else:
            ranges.append([gpu])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in ranges)


class Flow(Frozen):
    """Units per second from `src` ("source" or a node's id) to `dst` (a node's id or "sink")."""

    src: str
    dst: str
    per_s: NotNegative


class StageView(NamedTuple):
    """The nodes of an instance that hold the same layers."""

    start: int
    end: int
    nodes: tuple[Node, ...]


MAX_SIMULATED = 1.25
"""The most that an instance may be simulated with, over what the capacity model gives it."""


class SimulatedCapacity(Frozen):
    """What an instance carries alone in simulation where that is more than the capacity model says.

    `model_per_s` is what the model gives it and `per_s` what it was simulated with, both in units of its
    role: with `requests` on each of the `seeds`, of which at least the share `kept` kept their promise.
    """

    model_per_s: float = Field(gt=0.0)
    per_s: float = Field(gt=0.0)
    kept: Share
    requests: int = Field(ge=1)
    seeds: tuple[int, ...] = Field(min_length=1)


class PartWork(NamedTuple):
    """Seconds of an executor that a request of a class takes for one of its parts."""

    klass: str
    part: str
    seconds: float


class Guest(Frozen):
    """A service whose requests an executor of another one takes, too, and how many a second pass it.

    `share` is the part that they are of its work, `work` what they are planned to take of it, as `Instance`
    has it for its own service.
    """

    service: Name
    per_s: NotNegative
    share: Share = 0.0
    work: tuple[PartWork, ...] = ()


class Instance(Frozen):
    """One copy of a role standing in a region.

    `stages` is the number of hops the latency promise was split into: each has budget SLO / stages
    for its step and hand-over. `partial` says that a node may run only those of its layers that the
    request still needs (overlapping ranges); without it ranges must meet end to start. `kept` says
    that it ran before and costs no initialisation. An executor has one node, whose layers are not told apart
    ([0, 1)), and its throughput is requests/s that paths lead over it. `engine` is the program that runs it;
    None where layouts are free of what engines can run. `slots` is how many requests it runs at a time where
    its engine cuts the KV cache into so many equal parts. `simulated` is why it may carry more than the
    capacity model says. `work` is what an executor is planned with: by class and part the seconds of it that
    a request takes, with the room that simulation found to be needed, so that it is full at 1 s a second.
    `guests` are the services beside its own that share an executor; its throughput is that of all of them.
    """

    id: Name
    service: Name
    role: RoleName
    region: Name
    stages: int = Field(ge=1)
    nodes: tuple[Node, ...] = Field(min_length=1)
    flows: tuple[Flow, ...]
    throughput_per_s: NotNegative
    usd_per_hour: NotNegative
    kept: bool = False
    partial: bool = False
    engine: Name | None = None
    slots: int | None = Field(default=None, ge=1)
    simulated: SimulatedCapacity | None = None
    work: tuple[PartWork, ...] = ()
    guests: tuple[Guest, ...] = ()

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out an engine that is not known, so that plans and problems without keep their hash."""
        fields: dict[str, object] = write(self)
        for name in ("engine", "slots", "simulated", "work"):
            if not fields.get(name):
                fields.pop(name, None)
        if not self.guests:
            fields.pop("guests", None)
        return fields

    @property
    def services(self) -> tuple[str, ...]:
        """The services whose requests it takes: its own first, then those that share it."""
        return (self.service, *(guest.service for guest in self.guests))

    @property
    def whose(self) -> str:
        """The services whose requests it takes, in words: "docs", or "docs and talk"."""
        return " and ".join(self.services)

    def carries(self, service: str) -> float:
        """Return what is led over it for one of its services: requests/s of an executor."""
        known = {guest.service: guest.per_s for guest in self.guests}
        if service != self.service:
            return known.get(service, 0.0)
        return max(0.0, self.throughput_per_s - sum(known.values()))

    def part_of(self, service: str) -> float:
        """Return which part of its work is a service's; evenly while it has none."""
        if not self.guests or service not in self.services:
            return float(service == self.service)
        shares = {guest.service: guest.share for guest in self.guests}
        if self.throughput_per_s <= 0.0:
            return 1.0 / len(self.services)
        return shares.get(service, max(0.0, 1.0 - sum(shares.values())))

    def work_of(self, service: str) -> tuple[PartWork, ...]:
        """Return what requests of one of its services take of an executor."""
        others = {guest.service: guest.work for guest in self.guests}
        return self.work if service == self.service else others.get(service, ())

    @property
    def role_id(self) -> RoleId:
        """The role, parsed into model, component and phase."""
        return parse_role(self.role)

    @property
    def phase(self) -> Phase:
        """The phase of the role."""
        return self.role_id.phase

    @property
    def node_counts(self) -> tuple[tuple[str, int], ...]:
        """The kinds of nodes and how many of each, sorted by kind."""
        return tuple(sorted(Counter(node.kind for node in self.nodes).items()))

    @property
    def template_key(self) -> TemplateKey:
        """The role and its multiset of kinds: equal for instances of one template."""
        return (self.role, self.node_counts)

    @property
    def rental_key(self) -> RentalKey:
        """The role, the region, and how many nodes of each (type, GPUs, market): what is paid for."""
        counts = Counter((node.node_type, node.gpus, node.market) for node in self.nodes)
        rented = tuple((*key, n) for key, n in sorted(counts.items()))
        return (self.role, self.region, rented)

    @property
    def placement_key(self) -> PlacementKey:
        """The rental key with the layers of every node: a running instance is kept iff it is equal."""
        held = (
            (n.node_type, n.gpus, n.market, n.start, n.end, n.tp, n.host or "") for n in self.nodes
        )
        return (self.role, self.region, tuple(sorted(held)), self.engine or "")

    def region_of(self, node: Node) -> str:
        """Return where a node of the instance stands."""
        return node.region or self.region

    @property
    def is_executor(self) -> bool:
        """Whether it runs parts of an any-to-any model, not layers of a plain one."""
        return self.phase is Phase.SERVE

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of its model that an executor runs."""
        return self.role_id.parts

    @property
    def executor_parts(self) -> tuple[str, ...]:
        """Parts of its model that it runs as an executor; none for instances of plain llms."""
        return self.parts if self.is_executor else ()

    @property
    def gpus(self) -> int:
        """GPUs of all nodes together."""
        return sum(node.gpus for node in self.nodes)

    def holds(self, node: Node) -> str:
        """Return what one of its nodes runs: the parts of an executor, else layers as "[0, 32)"."""
        return "+".join(self.parts) if self.is_executor else f"[{node.start}, {node.end})"

    def layout(self) -> tuple[StageView, ...]:
        """Return the nodes grouped by the layers they hold, in layer order."""
        groups: dict[tuple[int, int], list[Node]] = {}
        for node in self.nodes:
            groups.setdefault((node.start, node.end), []).append(node)
        return tuple(StageView(*held, tuple(groups[held])) for held in sorted(groups))

    def describe(self) -> str:
        """Return the layout in a line: "[0, 32) 2x L40S:2 | [32, 64) H100:1", or "vision+llm on T4:1"."""
        if self.is_executor:
            spot = " spot" if self.nodes[0].market == "spot" else ""
            return f"{self.role_id.component} on {_slice_name(self.nodes[0])}{spot}"
        stages: list[str] = []
        for stage in self.layout():
            counts = Counter((_slice_name(node), node.market) for node in stage.nodes)
            named = (
                f"{f'{n}x ' if n > 1 else ''}{kind}{' spot' if market == 'spot' else ''}"
                for (kind, market), n in sorted(counts.items())
            )
            stages.append(f"[{stage.start}, {stage.end}) {' + '.join(named)}")
        return " | ".join(stages)


def _slice_name(node: Node) -> str:
    """Return the node type, and how much of it where that is not all: "2/8 of H100:8"."""
    whole = node.gpu_ids is None
    return node.node_type if whole else f"{node.gpus}/{node.machine_gpus} of {node.node_type}"


class Route(Frozen):
    """A way that a share of a service's requests takes.

    `instances` are one that runs both phases, or one for prefill and then one for decode, by id.
    """

    service: Name
    instances: tuple[Name, ...] = Field(min_length=1, max_length=2)
    share: Share


class LossRoutes(Frozen):
    """Routes of `services` once some instances are lost, ready before it happens; `lost` says what goes.

    Services that it leaves as they are keep their routes.
    """

    lost: str = Field(min_length=1, max_length=1000)
    instances: tuple[Name, ...] = Field(min_length=1)
    services: tuple[Name, ...] = Field(min_length=1)
    routes: tuple[Route, ...] = ()

    def over(self, routes: Iterable[Route]) -> tuple[Route, ...]:
        """Return the routes that hold after the loss, in place of those of a plan."""
        others = [route for route in routes if route.service not in self.services]
        return tuple(
            sorted((*others, *self.routes), key=lambda route: (route.service, route.instances))
        )


class RequestStep(Frozen):
    """Parts of a model that one executor runs for a request; which of several is dealt by weight.

    `instances` are executors by id with their weights, which add up to 1.
    """

    parts: tuple[str, ...] = Field(min_length=1)
    instances: dict[Name, Share] = Field(min_length=1)

    @field_validator("instances")
    @classmethod
    def _in_order(cls, instances: dict[str, float]) -> dict[str, float]:
        return dict(sorted(instances.items()))


class RequestPath(Frozen):
    """A way over executors that a share of the requests of a class takes, step by step.

    A request is given its path, and an executor for each step, when it arrives.
    """

    service: Name
    klass: str = Field(min_length=1, max_length=120)
    share: Share
    steps: tuple[RequestStep, ...] = Field(min_length=1)


class KeptPromise(Frozen):
    """Promises that requests of a service kept in a simulation of the plan.

    `target` is the share of requests that shall keep both, `kept` the share that did, on other arrivals than
    the plan was sized with, and `low` to `high` its 95 % confidence interval. `kept_ttft` and `kept_tpot`
    kept the one and the other, and `kept_after_loss` both with the node lost that hurts most, where a plan
    must survive that. `chance` is how likely enough requests keep them, the performance model being wrong by
    as much as its constants may be. `cause` says what stands in the way where the target is missed.
    `groups` are what its classes keep, each with a target of its own, and deciles by length where asked for;
    none where all requests are alike, and in plans of earlier versions. `groups_after_loss` are what each of
    them keeps with what is lost that hurts it most.
    """

    service: Name
    target: Share
    kept: Share
    low: Share
    high: Share
    kept_ttft: Share
    kept_tpot: Share
    kept_after_loss: Share | None = None
    chance: Share | None = None
    cause: str | None = None
    groups: tuple[KeptGroup, ...] = ()
    groups_after_loss: tuple[KeptGroup, ...] = ()

    # Plans without keep their hash.
    _without_blanks = without_blanks("groups", "groups_after_loss")

    @property
    def is_kept(self) -> bool:
        """Whether enough requests keep their promises, also with a node lost where that is asked for.

        Of every group, too, as far as enough came of it to tell.
        """
        after = self.min_after_loss
        kept_share = self.kept if after is None else min(self.kept, after)
        return kept_share >= self.target and not self.short_groups

    @property
    def min_after_loss(self) -> float | None:
        """What is kept with what is lost that hurts most, or what the group does that falls shortest then.

        As of a service that promises it.
        """
        if self.kept_after_loss is None:
            return None
        return min_share(self.kept_after_loss, self.target, self.groups_after_loss)

    @property
    def margin(self) -> float:
        """By how much the target is exceeded, by all requests and by the group that falls shortest."""
        return min_share(self.kept, self.target, self.groups) - self.target

    def lower(self, target: float) -> KeptPromise:
        """Return the same with less promised, of groups in proportion."""
        part = (1.0 - target) / (1.0 - self.target)

        def lower_all(groups: tuple[KeptGroup, ...]) -> tuple[KeptGroup, ...]:
            return tuple(
                group.model_copy(update={"target": 1.0 - (1.0 - group.target) * part})
                for group in groups
            )

        after = lower_all(self.groups_after_loss)
        update = {"target": target, "groups": lower_all(self.groups), "groups_after_loss": after}
        return self.model_copy(update=update)

    @property
    def short_groups(self) -> tuple[KeptGroup, ...]:
        """The groups of which too few requests keep their promises, the worst first."""
        short = [group for group in self.groups if group.is_kept is False]
        return tuple(sorted(short, key=lambda group: (group.kept or 0.0) - group.target))

    @property
    def is_surely_kept(self) -> bool:
        """Whether they do, the whole confidence interval of the mean included.

        Of several plans that are tried one will look better than it is.
        """
        sure = all(group.low >= group.target for group in self.groups if group.is_kept)
        return self.is_kept and sure and self.low >= self.target


class Plan(Frozen):
    """A whole answer: instances, routes, what they cost, and how good the answer is proven to be.

    `usd_per_hour` is what the machines cost while they run, cut ones whole, and `init_usd` the
    initialisation penalty of the newly started instances, per hour; `objective` is their sum and
    `bound` the proven lower bound on it (for a `partial` plan, at the share of demand served). `gap` =
    (objective - bound) / objective. With a `goal` other than cost, objective and bound are tokens/s, prompt
    and generated ones alike, more is better: bound >= objective and `gap` = (bound - objective) / bound, the
    share that may be missing. They are None where a solver proves nothing. `served_fraction` is by service
    the share of its demand that is served from prompt to last token, 1 where demand is met. `cut_short` says
    that the deadline came before the search had ended: with more time there may be a better plan. `reasons`
    say what binds, `notes` what a simulation found. `promises` are what requests keep in simulation, by
    service, empty where only capacity was planned; then `bound` holds for capacities found by simulation, and
    `capacity_bound` whatever a simulation finds. `engines` are, by service, the limits that the plan reckons
    with and that engines are started with, where any are set, and `models` the names of the models that are
    served, empty where nobody wrote them down; `checkpoints` are the weights that it was reckoned with, as
    far as any are published. Requests of any-to-any models go by `paths` instead of routes.
    `after_loss` are the routes that hold once something is lost that the plan must survive.
    `mixes` are what it makes of choices between models: it is a plan for the problem that they settle, and
    `problem_hash` is of that one. `power` is what it draws, and `robustness` how it fares when things
    turn out otherwise, where that was asked.
    """

    schema_version: Literal[1] = 1
    problem_hash: str
    problem_name: str
    instances: tuple[Instance, ...] = ()
    routes: tuple[Route, ...] = ()
    after_loss: tuple[LossRoutes, ...] = ()
    paths: tuple[RequestPath, ...] = ()
    served_fraction: dict[str, Share] = Field(default_factory=dict)
    usd_per_hour: NotNegative
    init_usd: NotNegative = 0.0
    goal: Goal = "cost"
    objective: float | None = None
    bound: float | None = None
    gap: NotNegative | None = None
    status: Status
    solver: str
    cut_short: bool = False
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    promises: tuple[KeptPromise, ...] = ()
    capacity_bound: float | None = None
    engines: dict[str, EngineLaunch] = Field(default_factory=dict)
    models: dict[str, str] = Field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = Field(default_factory=dict)
    mixes: tuple[ModelMix, ...] = ()
    power: PowerUse | None = None
    robustness: Robustness | None = None

    @model_serializer(mode="wrap")
    def _without_promises(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out promises that were not looked at, and what only any-to-any models have."""
        fields: dict[str, object] = write(self)
        if not self.paths:
            fields.pop("paths", None)
        if not self.after_loss:
            fields.pop("after_loss", None)
        if not self.promises:
            fields.pop("promises", None)
        if self.capacity_bound is None:
            fields.pop("capacity_bound", None)
        if not self.models:
            fields.pop("models", None)
        fields.pop("checkpoints", None)
        if self.checkpoints:
            fields["checkpoints"] = {
                name: each.given for name, each in sorted(self.checkpoints.items())
            }
        if not self.mixes:
            fields.pop("mixes", None)
        if self.power is None:
            fields.pop("power", None)
        if self.robustness is None:
            fields.pop("robustness", None)
        fields.pop("engines", None)
        if self.engines:
            fields["engines"] = {name: own.given for name, own in sorted(self.engines.items())}
        return fields

    @field_validator("mixes")
    @classmethod
    def _mixed_once(cls, mixes: tuple[ModelMix, ...]) -> tuple[ModelMix, ...]:
        names = [mix.name for mix in mixes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise refuse(InputError(f"{twice} is mixed twice", hint="keep one of them"))
        return mixes

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, fields: object) -> object:
        """Read plans written when routes were per phase and plans held the time they took."""
        if not isinstance(fields, dict):
            return fields
        known = {k: v for k, v in fields.items() if k not in ("seconds", "cpu_seconds")}
        routes = known.get("routes")
        if isinstance(routes, list | tuple) and any(
            isinstance(route, dict) and "weights" in route for route in routes
        ):
            known["routes"] = _pair_routes(routes, _regions_of(known.get("instances")))
        if len(known) < len(fields):
            known["served_fraction"] = _fraction_by_service(known.get("served_fraction", {}))
        return known

    @field_validator("instances")
    @classmethod
    def _instances_in_order(cls, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        return tuple(sorted(instances, key=lambda instance: instance.id))

    @field_validator("routes")
    @classmethod
    def _routes_in_order(cls, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        return tuple(sorted(routes, key=lambda route: (route.service, route.instances)))

    @field_validator("paths")
    @classmethod
    def _paths_in_order(cls, paths: tuple[RequestPath, ...]) -> tuple[RequestPath, ...]:
        return tuple(
            sorted(
                paths,
                key=lambda p: (
                    p.service,
                    p.klass,
                    [(step.parts, list(step.instances)) for step in p.steps],
                ),
            )
        )

    @field_validator("served_fraction")
    @classmethod
    def _shares_in_order(cls, shares: dict[str, float]) -> dict[str, float]:
        return dict(sorted(shares.items()))

    @property
    def executor_instances(self) -> tuple[Instance, ...]:
        """Instances that run components of any-to-any models."""
        return tuple(instance for instance in self.instances if instance.is_executor)

    @property
    def plain_instances(self) -> tuple[Instance, ...]:
        """Instances that run layers of plain llms."""
        return tuple(instance for instance in self.instances if not instance.is_executor)

    @property
    def nodes(self) -> int:
        """Machines in use; one that is cut counts once."""
        return self.count_nodes().total()

    @property
    def idle_usd(self) -> float:
        """Cost per hour of GPUs of cut machines that no instance has."""
        used = sum(instance.usd_per_hour for instance in self.instances)
        idle = self.usd_per_hour - used
        return idle if idle > 1e-9 * self.usd_per_hour else 0.0  # below is rounding of the sums

    @property
    def idle_gpus(self) -> int:
        """GPUs of cut machines that no instance has."""
        machines = self.count_nodes().items()
        return sum(n * parse_node_type(kind).gpu_count for (_, kind, _), n in machines) - self.gpus

    @property
    def gpus(self) -> int:
        """GPUs in use, shares of a GPU one by one."""
        return sum(instance.gpus for instance in self.instances)

    def describe_gpus(self) -> str:
        """Return how many GPUs are in use: "4 GPUs", "1 GPU and 2 shares of GPUs"."""
        nodes = [node for instance in self.instances for node in instance.nodes]
        shares = sum(node.gpus for node in nodes if node.gpu_shares > 1)
        whole = self.gpus - shares
        words = [pluralize(whole, "GPU")] if whole or not shares else []
        words += [pluralize(shares, "share") + " of GPUs"] if shares else []
        return " and ".join(words)

    def of_role(self, role: str | RoleId) -> tuple[Instance, ...]:
        """Return the instances of one role."""
        text = str(role)
        return tuple(instance for instance in self.instances if instance.role == text)

    def weights(self, service: str, phase: Phase) -> dict[str, float]:
        """Return the share of a service's requests that each instance of a phase gets, by id."""
        ways, at = {Phase.PREFILL: (2, 0), Phase.DECODE: (2, 1), Phase.BOTH: (1, 0)}[phase]
        shares: dict[str, float] = {}
        for route in self.routes:
            if route.service == service and len(route.instances) == ways:
                name = route.instances[at]
                shares[name] = shares.get(name, 0.0) + route.share
        return shares

    @property
    def served_services(self) -> tuple[str, ...]:
        """The services whose requests its instances take, each once, in the order of instances."""
        return tuple(dict.fromkeys(name for one in self.instances for name in one.services))

    def count_nodes(self) -> Counter[OfferKey]:
        """Return how many machines are used per (region, node type, market); cut ones count once."""
        return count_machines(self.instances)


def count_machines(instances: Iterable[Instance]) -> Counter[OfferKey]:
    """Return how many machines instances use per (region, node type, market); cut ones count once."""
    machines: set[tuple[OfferKey, str | int]] = set()
    whole: Counter[OfferKey] = Counter()
    for instance in instances:
        for node in instance.nodes:
            key = (instance.region_of(node), node.node_type, node.market)
            machine = node.slot if node.host is None else node.host
            if machine is None or node.gpu_ids is None:
                whole[key] += 1
            else:
                machines.add((key, machine))
    return whole + Counter(key for key, _ in machines)


def _regions_of(instances: object) -> dict[str, str]:
    """Return where the instances of a plan that is being read stand."""
    listed = instances if isinstance(instances, list | tuple) else ()
    known = [i.model_dump() if isinstance(i, Instance) else i for i in listed]
    return {str(i.get("id")): str(i.get("region")) for i in known if isinstance(i, dict)}


def _pair_routes(older: Iterable[object], regions: Mapping[str, str]) -> list[dict[str, object]]:
    """Return ways from weights by phase: each prefill instance with the decode instances of its region.

    Only what a region has too much of for that is paired with what others have too much of.
    """
    weights: dict[tuple[str, str], dict[str, float]] = {}
    for route in older:
        if isinstance(route, dict) and isinstance(route.get("weights"), dict):
            given = route["weights"]
            if not all(isinstance(x, int | float) and x >= 0 for x in given.values()):
                raise ValueError("weights of routes are numbers of 0 and more")
            weights[str(route.get("service")), str(route.get("phase"))] = given
    routes: list[dict[str, object]] = []
    for (service, phase), first in weights.items():
        second = weights.get((service, Phase.DECODE.value))
        if phase == Phase.BOTH.value:
            routes += [{"service": service, "instances": [a], "share": x} for a, x in first.items()]
        elif phase == Phase.PREFILL.value and second is not None:
            routes += [
                {"service": service, "instances": list(pair), "share": min(1.0, share)}
                for pair, share in _pair_weights(first, second, regions).items()
            ]
    return routes


def _pair_weights(
    first: Mapping[str, float], second: Mapping[str, float], regions: Mapping[str, str]
) -> dict[tuple[str, str], float]:
    """Return the share of each pair: inside regions as far as both sides have some, then across."""
    left, right = dict(first), dict(second)
    shares: dict[tuple[str, str], float] = {}
    here = sorted({regions.get(name, "") for name in (*first, *second)})
    for some in [*([region] for region in here), here]:
        a = {name: x for name, x in left.items() if x > 0.0 and regions.get(name, "") in some}
        b = {name: y for name, y in right.items() if y > 0.0 and regions.get(name, "") in some}
        out, into = sum(a.values()), sum(b.values())
        paired = min(out, into)
        if paired <= _ROUNDING:
            continue
        for p, x in a.items():
            for d, y in b.items():
                shares[p, d] = shares.get((p, d), 0.0) + paired * (x / out) * (y / into)
        left |= {name: x * (1.0 - paired / out) for name, x in a.items()}
        right |= {name: y * (1.0 - paired / into) for name, y in b.items()}
    return shares


def _fraction_by_service(older: object) -> object:
    """Return by service the least share that any of its roles serves."""
    if not isinstance(older, dict):
        return older
    min_shares: dict[str, float] = {}
    for role, share in older.items():
        name = parse_role(str(role)).model if str(role).count("/") >= 2 else str(role)
        min_shares[name] = min(min_shares.get(name, 1.0), share)
    return min_shares
