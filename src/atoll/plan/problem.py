"""The problem: which models, which promises, how much demand, and which nodes can be had.

A problem is complete: with the catalog that ships with Atoll and its own `overlays` it says
everything a planner needs, so that the same JSON gives the same plan anywhere. Services, offers and
running instances are kept in a canonical order: the order they were given in changes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from atoll.catalog.dtypes import GGUF_OUTER
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.frozen import Frozen
from atoll.core.ids import Phase, RoleId, format_node_type, parse_node_type, parse_role
from atoll.engines.limits import EngineLaunch, EngineLimits
from atoll.engines.table import EngineChoice, find_engine
from atoll.perf.components.measured import MeasuredRate
from atoll.plan.choice import NO_LEVEL, Choice, ModelMix, fit_mixes, levels_of
from atoll.plan.cluster import Cluster
from atoll.plan.footprint import ObjectiveWeights, PowerGrid
from atoll.plan.name_types import ModelName, Name, NodeTypeName, refuse
from atoll.plan.plan import Instance, Market, NotNegative, OfferKey, Share
from atoll.plan.robustness import RiskModel
from atoll.plan.survival import MAX_LOST, Survival
from atoll.workload.classes import RequestClass
from atoll.workload.lengths import PREFIX_BLOCK, LengthMix, SharedPrefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from atoll.catalog.catalog import Catalog
    from atoll.catalog.checkpoints import Checkpoint

COMPONENT = "llm"
"""The component that services of plain language models place."""

ATTAINMENT = 0.95
"""The share of requests that keep their promises, unless a service says otherwise."""
Positive = Annotated[float, Field(gt=0)]
Shortage = Literal["fail", "fraction", "priority"]
Phases = Literal["auto", "apart", "together"]
Sizing = Literal["half", "share"]
Family = Literal["rent", "place", "graph"]
"""How a problem is planned: nodes rented, layers placed on a fixed cluster, or components on executors."""

_PHASES_OF: dict[str, tuple[Phase, ...]] = {
    "auto": (Phase.PREFILL, Phase.DECODE, Phase.BOTH),
    "apart": (Phase.PREFILL, Phase.DECODE),
    "together": (Phase.BOTH,),
}


class Lengths(Frozen):
    """Moments of prompt and answer lengths in tokens; see `workload.lengths.LengthMix`."""

    input_mean: float
    output_mean: float
    input_mean_square: float
    output_mean_square: float
    input_tail: float = 0.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        try:
            self.mix()
        except InputError as error:
            raise refuse(InputError(f"{error.field}: {error.message}", hint=error.hint)) from error
        return self

    @classmethod
    def of(cls, mix: LengthMix) -> Lengths:
        """Return the moments of a length mix."""
        return cls(
            input_mean=mix.input_mean,
            output_mean=mix.output_mean,
            input_mean_square=mix.input_mean_square,
            output_mean_square=mix.output_mean_square,
            input_tail=mix.input_tail,
        )

    def mix(self) -> LengthMix:
        """Return the length mix with these moments."""
        return LengthMix(
            self.input_mean,
            self.output_mean,
            self.input_mean_square,
            self.output_mean_square,
            self.input_tail,
        )


class Prefix(Frozen):
    """A beginning that a `share` of a service's prompts have in common, in tokens; see `SharedPrefix`."""

    share: float = Field(gt=0.0, le=1.0)
    tokens: int = Field(ge=PREFIX_BLOCK)

    def shared(self) -> SharedPrefix:
        """Return it as length mixes have it."""
        return SharedPrefix(self.share, self.tokens)


class Reserve(Frozen):
    """What an operated service has to spare for bursts: a share of what is asked, a forecast's quantile."""

    share: Share | None = None
    quantile: float | None = Field(default=None, gt=0, lt=1)


class Service(Frozen):
    """A model to be served, what is promised, and how much is asked of it.

    `ttft_s` and `tpot_s` are promised seconds to the first token and per further token; `rate_per_s`
    is requests per second. `attainment` is the share of requests that must keep both promises, when they
    arrive at random: gaps between them have a standard deviation of `burstiness` times their mean (1 is
    Poisson). Capacity is planned for `headroom` times the demand, and while the fleet is operated for a
    `reserve` beyond what is asked then. `phases` says whether
    prefill and decode run apart, together, or some of each, whichever is cheapest ("auto"). `only` and
    `avoid` hold kinds of nodes ("L40S:2") or GPU types ("L40S", any size); an empty `only` allows all.
    `engine_limits` are what its engines are started with; the number format of the KV cache is part of the
    model's name ("llama-3-70b@kv=fp8").

    A service with `classes` is of an any-to-any model, or of one that takes images: requests differ in what
    they bring and want, and promises are per class; `ttft_s` and `tpot_s` are the loosest of them, and
    `lengths` those of the llm over all classes. Its parts run on executors. `paths`, if any, are the only
    ways that requests may go, each a row of executors ("vision", "vision+llm"); `rates` were measured.
    Its components share executors with those of other services: of the same model unless `share` is false,
    and of any model under one name in `share_as` (`component_sharing`). `cores` are CPU cores that a
    component needs wherever it stands.

    Promises hold for every class, each with its own `attainment` or the service's. Classes of text alone
    under one promise are `text_classes`: the service is a plain one, and they are told apart where promises
    are judged. So are services that share instances (`service_sharing`), each of which is held to its own
    promise; `ttft_s` and `tpot_s` are the tightest then. With `length_deciles` promises hold for each tenth
    of its requests by length of prompt, too.
    """

    name: Name
    model: ModelName
    ttft_s: Positive
    tpot_s: Positive
    rate_per_s: NotNegative
    lengths: Lengths
    phases: Phases = "auto"
    headroom: float = Field(default=1.0, ge=1)
    attainment: float = Field(default=ATTAINMENT, gt=0, lt=1)
    burstiness: float = Field(default=1.0, ge=0.1, le=20)
    priority: Positive = 1.0
    only: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    engine_limits: EngineLimits = EngineLimits()
    classes: tuple[RequestClass, ...] = ()
    paths: tuple[tuple[str, ...], ...] = ()
    rates: tuple[MeasuredRate, ...] = ()
    cores: tuple[tuple[Name, NotNegative], ...] = ()
    share: bool = True
    share_as: tuple[tuple[Name, Name], ...] = ()
    text_classes: tuple[RequestClass, ...] = ()
    length_deciles: bool = False
    prefix: Prefix | None = None
    reserve: Reserve | None = None

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what came later and is not set, so that older problems keep their hash."""
        fields: dict[str, object] = write(self)
        later: dict[str, object] = {"attainment": ATTAINMENT, "burstiness": 1.0, "share": True}
        blank = [*("classes", "paths", "rates", "cores", "share_as", "text_classes"), "prefix"]
        blank += ["length_deciles", "reserve"]
        later |= {name: fields[name] for name in blank if not fields[name]}
        if self.engine_limits.given:
            fields["engine_limits"] = self.engine_limits.model_dump(exclude_none=True)
        else:
            fields.pop("engine_limits", None)
        return {name: value for name, value in fields.items() if later.get(name) != value}

    @field_validator("only", "avoid")
    @classmethod
    def _in_order(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            for name in names:
                parse_node_type(name)
        except InputError as error:
            raise refuse(error) from error
        return tuple(sorted(set(names)))

    @field_validator("classes", "text_classes")
    @classmethod
    def _classes_in_order(cls, classes: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
        _all_different("class", (klass.name for klass in classes))
        total = sum(klass.share for klass in classes)
        if classes and abs(total - 1.0) > 1e-6:
            message = f"the shares of the classes add up to {total:g}"
            raise refuse(InputError(message, hint="make them add up to 1 (100%)"))
        return tuple(sorted(classes, key=lambda klass: klass.name))

    @field_validator("paths")
    @classmethod
    def _paths_in_order(cls, paths: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(sorted(set(paths)))

    @field_validator("rates")
    @classmethod
    def _rates_in_order(cls, rates: tuple[MeasuredRate, ...]) -> tuple[MeasuredRate, ...]:
        _all_different("measured rate", (f"{r.part} on {r.on} per {r.unit}" for r in rates))
        return tuple(sorted(rates, key=lambda rate: (rate.part, rate.on, rate.unit)))

    @property
    def is_graph(self) -> bool:
        """Whether it is served by executors of parts of a model, not by copies of a plain llm."""
        return bool(self.classes)

    @property
    def target(self) -> float:
        """The share of all requests that must keep their promises: what its classes come to together."""
        promised = [k for k in (*self.classes, *self.text_classes) if k.is_promised]
        total = sum(klass.share for klass in promised)
        if all(klass.attainment is None for klass in promised):
            return self.attainment
        return sum(k.share * self.class_target(k.name) for k in promised) / total

    def class_target(self, name: str) -> float:
        """Return the share of a class's requests that must keep their promises."""
        for klass in (*self.classes, *self.text_classes):
            if klass.name == name and klass.attainment is not None:
                return klass.attainment
        return self.attainment

    def with_attainment(self, share: float) -> Service:
        """Return the service with this share promised to all of its requests, whatever their class."""

        def alike(classes: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
            return tuple(klass.model_copy(update={"attainment": None}) for klass in classes)

        return self.model_copy(
            update={
                "attainment": share,
                "classes": alike(self.classes),
                "text_classes": alike(self.text_classes),
            }
        )

    def scale_promises(self, *, ttft: float = 1.0, tpot: float = 1.0) -> Service:
        """Return the service with so many times the promised seconds, of its classes too."""

        def scale(promised: Service | RequestClass) -> dict[str, object]:
            times = {"ttft_s": (promised.ttft_s, ttft), "tpot_s": (promised.tpot_s, tpot)}
            return {name: s * factor for name, (s, factor) in times.items() if s is not None}

        return self.model_copy(
            update={
                **scale(self),
                "classes": tuple(k.model_copy(update=scale(k)) for k in self.classes),
                "text_classes": tuple(k.model_copy(update=scale(k)) for k in self.text_classes),
            }
        )

    def class_rate_per_s(self, klass: RequestClass) -> float:
        """Requests per second of a class that capacity is planned for, headroom included."""
        return self.demand_per_s * klass.share

    def klass(self, name: str) -> RequestClass:
        """Return the class of this name."""
        for klass in self.classes:
            if klass.name == name:
                return klass
        raise UnknownNameError(f"class of {self.name}", name, (k.name for k in self.classes))

    @property
    def roles(self) -> tuple[RoleId, ...]:
        """Roles of a plain llm that may be placed: prefill and decode apart, both as one, or all three."""
        return () if self.classes else _roles_of(self.name, self.phases)

    def takes_role(self, role: RoleId) -> bool:
        """Return whether instances of a role may serve it: executors, or phases of a plain llm."""
        return role.phase is Phase.SERVE if self.classes else role in self.roles

    @property
    def demand_per_s(self) -> float:
        """Requests per second that capacity is planned for, headroom included."""
        return self.rate_per_s * self.headroom

    def demand(self, role: RoleId | str) -> float:
        """Return what a role must carry where it serves all of the service, headroom included.

        Prompt tokens/s for prefill, generated tokens/s for decode, requests/s for both together.
        """
        role_id = parse_role(role) if isinstance(role, str) else role
        if role_id not in self.roles:
            raise UnknownNameError(f"role of {self.name}", str(role), map(str, self.roles))
        per_request = {
            Phase.PREFILL: self.lengths.input_mean,
            Phase.DECODE: self.lengths.output_mean,
        }.get(role_id.phase, 1.0)
        return self.rate_per_s * per_request * self.headroom

    def slo_s(self, phase: Phase) -> float:
        """Return the promise of a phase that runs alone, in seconds."""
        return self.ttft_s if phase is Phase.PREFILL else self.tpot_s

    def allows(self, kind: str) -> bool:
        """Return whether the service may stand on this kind of node.

        A node has one share of a GPU: several would take turns, and gain nothing over one. Executors of
        any-to-any models share whole GPUs by plans of their own.
        """
        node = parse_node_type(kind)
        if node.shares > 1 and (node.gpu_count > 1 or self.is_graph):
            return False
        names = {kind, node.gpu, node.whole_gpu}
        return not names & set(self.avoid) and (not self.only or bool(names & set(self.only)))


@lru_cache(maxsize=4096)
def _roles_of(name: str, phases: Phases) -> tuple[RoleId, ...]:
    return tuple(RoleId(name, COMPONENT, phase) for phase in _PHASES_OF[phases])


@cache
def slices_of(gpu_count: int) -> tuple[int, ...]:
    """Return the sizes a machine may be cut into, ascending: powers of two that divide it, and all of it.

    Each size divides the next, so slices fit into machines whenever their GPUs add up to no more.
    """
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if gpu_count % size == 0]
    return tuple(sorted({*sizes, gpu_count}))


class Offer(Frozen):
    """Nodes that can be had: so many of one type, in one region, on one market, at one price.

    `available` counts those in use now. `instance` is what the seller calls the machine. Unless it is
    `whole`, a machine with several GPUs may be cut into slices for several instances; it is paid whole. GPUs
    that are offered in shares are as many GPUs of a type of their own ("H200/2:2" is one H200 in two).
    `cores` are CPU cores of one machine, None where nobody needs to know; slices have their share of them.
    """

    region: Name
    node_type: NodeTypeName
    market: Market = "on-demand"
    available: int = Field(ge=0)
    usd_per_hour: NotNegative
    instance: str | None = None
    whole: bool = False
    cores: Positive | None = None

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out cores that are not known, so that older problems keep their hash."""
        fields: dict[str, object] = write(self)
        return {name: value for name, value in fields.items() if name != "cores" or value}

    @model_validator(mode="after")
    def _shares_are_whole_gpus(self) -> Self:
        node = parse_node_type(self.node_type)
        if node.gpu_count % node.shares:
            message = f"{self.node_type} is {node.gpu_count} shares of GPUs in {node.shares} each"
            raise refuse(InputError(message, hint="offer all shares of a GPU"))
        if node.shares > 1 and self.whole:
            message = f"{node.whole} is offered in shares and never cut"
            raise refuse(InputError(message, hint="leave out 'shares' or 'whole'"))
        return self

    @property
    def key(self) -> OfferKey:
        """Identity of the offer: region, node type, market."""
        return (self.region, self.node_type, self.market)

    @property
    def gpus(self) -> int:
        """GPUs of one machine."""
        return parse_node_type(self.node_type).gpu_count

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs that an instance may have of one machine, ascending; the last is all of it."""
        return (self.gpus,) if self.whole else slices_of(self.gpus)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of nodes that one machine gives, by `sizes`."""
        return _kinds_of(self.node_type, self.whole)


@cache
def _kinds_of(node_type: str, whole: bool) -> tuple[str, ...]:
    gpu, gpus = parse_node_type(node_type)
    sizes = (gpus,) if whole else slices_of(gpus)
    return tuple(format_node_type(gpu, size) for size in sizes)


class Limits(Frozen):
    """Limits of a plan; None is no limit.

    `budget_usd_per_hour` bounds what the nodes cost while they run. `spot_share` is the largest share
    of any service's requests that may be served on spot (`validate_spot`). `spread` is in how many regions
    every role must stand. Promises hold with what `survive` names lost (a number is of machines), and with
    every spot node lost `spot_loss_per_h` times an hour, `spot_notice_s` seconds after that is announced.
    """

    budget_usd_per_hour: NotNegative | None = None
    spot_share: Share | None = None
    max_nodes: int | None = Field(default=None, ge=0)
    spread: int = Field(default=1, ge=1)
    survive: Annotated[int, Field(strict=True, ge=0, le=MAX_LOST)] | Survival = 0
    spot_loss_per_h: float = Field(default=0.0, ge=0, le=60)
    spot_notice_s: float = Field(default=0.0, ge=0, le=3600)

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what came later and is not set, so that older problems keep their hash."""
        fields: dict[str, object] = write(self)
        later = {"survive": 0, "spot_loss_per_h": 0.0, "spot_notice_s": 0.0}
        return {name: value for name, value in fields.items() if later.get(name) != value}

    @property
    def survival(self) -> Survival:
        """What may be lost with promises kept."""
        named = self.survive
        return named if isinstance(named, Survival) else Survival(machines=named)


Router = Literal["atoll", "plain"]
"""What chooses pipelines in a runtime: Atoll's router, which looks ahead, or plain interleaved weighted round
robin over the plan's flows."""


class Settings(Frozen):
    """How to search; unlike limits, a plan that goes beyond them is still a valid one.

    Templates have at most `max_nodes_per_instance` nodes, `memory_ratio` times the model's memory in
    total, and `max_stages` stages (None: as many as nodes). `init_penalty` is the time to start an
    instance over the time until the next re-plan: a new instance costs 1 + init_penalty times its
    price. `on_shortage` says what happens when demand cannot be met: fail, serve the same largest
    fraction of every service's demand, or weigh services by priority. Capacity is what keeps promises for
    half of all requests, or about for the share of them that each service asks for (`sized_for`).

    A plan of rented or owned nodes may cost the share `simplicity` more than the cheapest to have fewer
    machines, hops, slices, shapes and phases apart (`solve.rent.simple_allocation`). Every machine more that
    costs nothing, and on a fixed cluster whose demand can be met every machine, hop and slice more, must
    shorten requests by more than that share of their time (`solve.place.simple_placement`). 0: the cheapest
    plan, and all machines of a cluster.

    Instances are run by one of `engines`, each by the first that carries as much as any, and have a layout
    that it runs. Without any, layouts are free and take the times of `engine`: nobody may run them.
    `startup_s` is the time from ordering an instance to its first request, None: as `plan.startup` has it.
    `router` is what the runtime of a fixed cluster has, None: Atoll's with its own engine, else not known.
    """

    max_nodes_per_instance: int = Field(default=6, ge=1, le=8)
    memory_ratio: Positive = 12.0
    max_stages: int | None = Field(default=None, ge=1)
    init_penalty: NotNegative = 0.0
    engine: str = "vllm"
    engines: tuple[str, ...] = ()
    seed: int = Field(default=0, ge=0)
    on_shortage: Shortage = "fraction"
    sized_for: Sizing = "half"
    simplicity: float = Field(default=0.02, ge=0.0, le=1.0)
    startup_s: NotNegative | None = None
    router: Router | None = None

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what came later and is not set, so that older problems keep their hash."""
        fields: dict[str, object] = write(self)
        later = {
            "sized_for": self.sized_for != "half",
            "engines": bool(self.engines),
            "simplicity": self.simplicity != 0.02,
            "startup_s": self.startup_s is not None,
            "router": self.router is not None,
        }
        return {name: value for name, value in fields.items() if later.get(name, True)}

    @property
    def routers(self) -> tuple[Router, ...]:
        """The routers that a placement has to be good with: one, or all where it is not known."""
        if self.router is not None:
            return (self.router,)
        return ("atoll",) if find_engine(self.engine).staged else ("atoll", "plain")

    @property
    def stages(self) -> int:
        """The most stages a template may have."""
        limit = self.max_nodes_per_instance
        return limit if self.max_stages is None else min(limit, self.max_stages)


class Problem(Frozen):
    """Everything a planner is given.

    `overlays` are catalog overlays as plain data, applied in order to the catalog that ships with
    Atoll. `running` are the instances of an earlier plan that run now. With a `cluster` the nodes are
    those and no others: one offer for each of its regions and node types, owned, at the price of the offer
    given for it or for nothing. With `choices` some services are ways to answer them, at levels that a plan
    sets (`choice`); `settled` is the problem that is left then. `weights` are what counts, `grid` what
    electricity costs the climate, `risk` how far things may turn out otherwise (for plans that ask).
    """

    schema_version: Literal[1] = 1
    name: Name
    services: tuple[Service, ...] = Field(min_length=1)
    offers: tuple[Offer, ...] = ()
    limits: Limits = Limits()
    settings: Settings = Settings()
    running: tuple[Instance, ...] = ()
    overlays: tuple[dict[str, JsonValue], ...] = ()
    cluster: Cluster | None = None
    choices: tuple[Choice, ...] = ()
    weights: ObjectiveWeights = ObjectiveWeights()
    grid: PowerGrid = PowerGrid()
    risk: RiskModel | None = None

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what came later and is not there, so that other problems keep their hash."""
        fields: dict[str, object] = write(self)
        blank: dict[str, object] = {
            "cluster": self.cluster is None,
            "choices": not self.choices,
            "weights": self.weights == ObjectiveWeights(),
            "grid": self.grid == PowerGrid(),
            "risk": self.risk is None,
        }
        return {name: value for name, value in fields.items() if not blank.get(name)}

    @model_validator(mode="after")
    def _choices_name_services(self) -> Self:
        names = {service.name for service in self.services}
        _all_different("choice", (choice.name for choice in self.choices))
        ordered = tuple(sorted(self.choices, key=lambda choice: choice.name))
        object.__setattr__(self, "choices", ordered)
        for choice in self.choices:
            unknown = [v.service for v in choice.variants if v.service not in names]
            if unknown:
                message = f"{choice.name} names the service {unknown[0]}, which is not there"
                raise refuse(InputError(message, hint="add it under services"))
            if choice.name in names:
                message = f"a choice and a service are both called {choice.name}"
                raise refuse(InputError(message, hint="give one of them another name"))
        return self

    @model_validator(mode="after")
    def _nodes_are_the_clusters(self) -> Self:
        if self.cluster is not None:
            # Not a copy: a validator must return the object it was given.
            object.__setattr__(self, "offers", _cluster_offers(self.cluster, self.offers))
        return self

    @field_validator("services")
    @classmethod
    def _services_in_order(cls, services: tuple[Service, ...]) -> tuple[Service, ...]:
        _all_different("service", (service.name for service in services))
        # In one order, so that equal problems have equal hashes.
        return tuple(sorted(services, key=lambda service: service.name))

    @field_validator("offers")
    @classmethod
    def _offers_in_order(cls, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
        _all_different("offer", (" ".join(offer.key) for offer in offers))
        return tuple(sorted(offers, key=lambda offer: offer.key))

    @field_validator("running")
    @classmethod
    def _running_in_order(cls, running: tuple[Instance, ...]) -> tuple[Instance, ...]:
        _all_different("running instance", (instance.id for instance in running))
        return tuple(sorted(running, key=lambda instance: instance.id))

    @property
    def family(self) -> Family:
        """How it is planned: on a fixed cluster ("place"), any-to-any models ("graph"), or rented ("rent").

        Everybody who treats these problems differently asks this property, and nothing else.
        """
        if self.cluster is not None:
            return "place"
        return "graph" if any(service.is_graph for service in self.services) else "rent"

    def scale_demand(self, factor: float) -> Problem:
        """Return the problem with the demand of every service multiplied by `factor`."""
        if factor == 1.0:
            return self
        services = (
            one.model_copy(update={"rate_per_s": one.rate_per_s * factor}) for one in self.services
        )
        return self.replace(services=tuple(services))

    @property
    def hosts(self) -> frozenset[str]:
        """Names of the machines of a fixed cluster; none where nodes are rented."""
        return frozenset(node.name for node in self.cluster.nodes) if self.cluster else frozenset()

    @property
    def regions(self) -> tuple[str, ...]:
        """Every region with an offer, sorted."""
        return tuple(sorted({offer.region for offer in self.offers}))

    @property
    def node_types(self) -> tuple[str, ...]:
        """Every node type on offer, sorted."""
        return tuple(sorted({offer.node_type for offer in self.offers}))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind of node on offer, whole machines and slices of them, sorted."""
        # Offers of many regions are of few types.
        types = {(offer.node_type, offer.whole) for offer in self.offers}
        return tuple(sorted({kind for one in types for kind in _kinds_of(*one)}))

    @property
    def roles(self) -> tuple[RoleId, ...]:
        """Every role of every service, in order."""
        return tuple(role for service in self.services for role in service.roles)

    @property
    def graph_services(self) -> tuple[Service, ...]:
        """Services of any-to-any models, whose components run on executors."""
        return tuple(service for service in self.services if service.is_graph)

    @property
    def plain_services(self) -> tuple[Service, ...]:
        """Services of plain llms, which instances serve whole."""
        return tuple(service for service in self.services if not service.is_graph)

    @property
    def is_settled(self) -> bool:
        """Whether no choice between models is left: every service is of one model."""
        return not self.choices

    @property
    def variants(self) -> dict[str, tuple[str, ...]]:
        """The services that may answer each choice, by its name."""
        return {c.name: tuple(v.service for v in c.variants) for c in self.choices}

    @property
    def asked_names(self) -> tuple[str, ...]:
        """Names that clients ask for: services that answer no choice, then choices."""
        optional = {name for names in self.variants.values() for name in names}
        plain = (service.name for service in self.services if service.name not in optional)
        return (*plain, *self.variants)

    def fit_mixes(self, mixes: Sequence[ModelMix]) -> tuple[ModelMix, ...] | None:
        """Return mixes as the choices here have them; None where they are for others or break rules."""
        return fit_mixes(self.choices, mixes)

    def mixes_at(
        self, levels: Mapping[str, float], usd_per_point: Mapping[str, float] = MappingProxyType({})
    ) -> tuple[ModelMix, ...]:
        """Return the mix of every choice at these levels of services; USD/h of a point of error by choice."""
        return tuple(ModelMix.of(c, levels, usd_per_point.get(c.name)) for c in self.choices)

    def settled(self, mixes: Iterable[ModelMix]) -> Problem:
        """Return the problem of plain services that mixes of models leave; without choices, this one."""
        if not self.choices:
            return self
        levels = levels_of(mixes)
        optional = {name for names in self.variants.values() for name in names}
        services = []
        for service in self.services:
            if service.name not in optional:
                services.append(service)
            elif levels.get(service.name, 0.0) > NO_LEVEL:
                rate = service.rate_per_s * levels[service.name]
                services.append(service.model_copy(update={"rate_per_s": rate}))
        return self.replace(services=tuple(services), choices=())

    def service(self, name: str) -> Service:
        """Return the service of this name."""
        for service in self.services:
            if service.name == name:
                return service
        raise UnknownNameError("service", name, (service.name for service in self.services))

    def service_of(self, role: RoleId | str) -> Service:
        """Return the service a role belongs to."""
        role_id = parse_role(role) if isinstance(role, str) else role
        return self.service(role_id.model)

    def engine_of(self, service: Service) -> EngineChoice:
        """Return the engine of a service with its limits."""
        limits = service.engine_limits
        guess, draft = limits.speculative, None
        if guess is not None and guess.method == "draft_model" and guess.model is not None:
            draft = self.catalog().model(guess.model).llm
        return EngineChoice(self.settings.engine, limits, draft)

    def run_by(self, engine: str | None) -> Problem:
        """Return the problem as it is for instances of one engine; None: as it is where layouts are free."""
        if engine is None or (engine == self.settings.engine and not self.settings.engines):
            return self
        return _run_by(self, engine)

    def launches(self) -> dict[str, EngineLaunch]:
        """Return by service what its engines are started with: limits, promise, and the longest request."""
        from atoll.plan.context_length import max_model_len

        catalog, found = self.catalog(), {}
        for service in self.services:
            model, own = catalog.model(service.model), dict(service.engine_limits)
            guess = service.engine_limits.speculative
            if guess is not None and guess.method == "draft_model":
                # Engines know its weights, not its name in the catalog.
                draft = catalog.model(str(guess.model))
                source = draft.checkpoint.source if draft.checkpoint else draft.name
                own["speculative"] = guess.model_copy(update={"model": source})
            if not service.is_graph:
                own |= {
                    "max_model_len": max_model_len(
                        service.lengths.mix(), model.llm.max_context, own["max_model_len"]
                    ),
                    "tool_parser": model.tool_parser,
                    "reasoning_parser": model.reasoning_parser,
                }
            found[service.name] = EngineLaunch(
                **own,
                kv_cache_dtype=kv_dtype_of(service.model),
                promised_ttft_s=service.ttft_s,
            )
        return found

    def checkpoints(self) -> dict[str, Checkpoint]:
        """Return by service the weights that its model is served from, as far as any are published."""
        catalog = self.catalog()
        found = {each.name: catalog.model(each.model).checkpoint for each in self.services}
        return {name: known for name, known in found.items() if known is not None}

    def list_unpublished(self, instances: Iterable[Instance]) -> tuple[str, ...]:
        """Return a line for each service whose model has no known weights as its instances load them."""
        catalog, lines = self.catalog(), []
        run_by = {(one.service, one.engine) for one in instances if one.engine is not None}
        for service in self.services:
            model, name = catalog.model(service.model), service.name
            loaders = [find_engine(engine) for of, engine in sorted(run_by) if of == name]
            if model.precision is not None and model.checkpoint is None:
                own = f"name those of {name} with --model {name}=SOURCE"
                lines.append(f"no weights of {model.name} are known: {own}")
            elif model.gguf is None and any(engine.weights == "gguf" for engine in loaders):
                own = f"name those of {name} with --model {name}=FILE.gguf"
                others = sorted(model.checkpoints.keys() & GGUF_OUTER.keys())
                asked = "".join(f", or ask for {model.name}@{each}" for each in others)
                lines.append(f"no GGUF weights of {model.name} are known: {own}{asked}")
        return tuple(lines)

    def started_as(self, engines: Mapping[str, EngineLaunch]) -> Problem:
        """Return the problem with the tokens per step that a plan starts engines with, where none are set.

        A plan may choose them, within what the fleet leaves open.
        """
        services = []
        for service in self.services:
            own, launch = service.engine_limits, engines.get(service.name)
            tokens = None if launch is None else launch.max_num_batched_tokens
            if own.max_num_batched_tokens is None and tokens is not None:
                # A step has no more sequences than tokens.
                fits = own.max_num_seqs and min(own.max_num_seqs, tokens)
                update = {"max_num_batched_tokens": tokens, "max_num_seqs": fits}
                service = service.model_copy(
                    update={"engine_limits": own.model_copy(update=update)}
                )
            services.append(service)
        if tuple(services) == self.services:
            return self
        return self.model_copy(update={"services": tuple(services)})

    def with_engine_limits(
        self, limits: EngineLimits, kv_cache_dtype: str | None = None
    ) -> Problem:
        """Return the problem with what is set here for the engines of all services."""
        return self.replace(
            services=[
                {
                    **dict(service),
                    "engine_limits": {**service.engine_limits.given, **limits.given},
                    "model": with_kv_dtype(service.model, kv_cache_dtype),
                }
                for service in self.services
            ]
        )

    def demand(self, role: RoleId | str) -> float:
        """Return what a role must carry; see `Service.demand`."""
        return self.service_of(role).demand(role)

    def kinds_for(self, service: str) -> tuple[str, ...]:
        """Return the kinds of nodes on offer that a service may stand on."""
        allows = self.service(service).allows
        return tuple(kind for kind in self.kinds if allows(kind))

    def offer(self, region: str, node_type: str, market: Market) -> Offer | None:
        """Return the offer of these nodes, None if there is none."""
        for offer in self.offers:
            if offer.node_type == node_type and offer.region == region and offer.market == market:
                return offer
        return None

    def replace(self, **fields: object) -> Problem:
        """Return the problem with other values in these fields, checked and in canonical order."""
        return Problem.model_validate({**dict(self), **fields})

    def catalog(self) -> Catalog:
        """Return the facts this problem is about: the shipped catalog with its overlays."""
        return _catalog_with(json.dumps(self.overlays))


@lru_cache(maxsize=16)
def _catalog_with(overlays: str) -> Catalog:
    """Return the same object for the same overlays: what is known of a catalog is found by its identity."""
    from atoll.catalog.catalog import Catalog
    from atoll.catalog.overlay import apply_overlay

    catalog = Catalog.default()
    for overlay in json.loads(overlays):
        catalog = apply_overlay(catalog, overlay)
    return catalog


_RUN_BY: dict[tuple[int, str], tuple[Problem, Problem]] = {}
_MAX_RUN_BY = 256


def _run_by(problem: Problem, engine: str) -> Problem:
    """Return the same object for the same problem: what is known of it is found by its identity."""
    key = (id(problem), engine)
    known = _RUN_BY.get(key)
    if known is None:
        settings = problem.settings.model_copy(update={"engine": engine, "engines": ()})
        if len(_RUN_BY) >= _MAX_RUN_BY:
            _RUN_BY.clear()
        # The problem is kept beside the answer, so its id cannot have passed to another.
        known = _RUN_BY[key] = (problem, problem.model_copy(update={"settings": settings}))
    return known[1]


KV_CACHE_DTYPES = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "bfloat16": "bf16",
    "float16": "fp16",
}
"""Names of number formats in engines that the catalog knows by another name."""


def kv_dtype_of(model: str) -> str | None:
    """Return the number format of the KV cache that a model's name asks for, None for the model's own."""
    parts = (part.strip() for part in model.partition("@")[2].split(","))
    return next((part.removeprefix("kv=") for part in parts if part.startswith("kv=")), None)


def with_kv_dtype(model: str, dtype: str | None) -> str:
    """Return the name of a model with its KV cache in another number format; None and "auto" leave it."""
    if dtype in (None, "auto"):
        return model
    base, _, variant = model.partition("@")
    parts = [part.strip() for part in variant.split(",") if part.strip()]
    rest = [part for part in parts if not part.startswith("kv=")]
    return f"{base}@{','.join([*rest, f'kv={KV_CACHE_DTYPES.get(str(dtype), dtype)}'])}"


def _cluster_offers(cluster: Cluster, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    counts = Counter((node.region, node.node_type) for node in cluster.nodes)
    prices = {(offer.region, offer.node_type): offer for offer in offers}
    for key, offer in prices.items():
        if offer.market != "owned" or offer.available != counts[key]:
            message = f"{offer.available} {' '.join(offer.key)}, the cluster owns {counts[key]}"
            raise refuse(
                InputError(f"an offer of {message}", hint="give nodes in the cluster only")
            )
    return tuple(
        prices.get(key)
        or Offer(region=key[0], node_type=key[1], market="owned", available=n, usd_per_hour=0.0)
        for key, n in sorted(counts.items())
    )


def _all_different(what: str, names: Iterable[str]) -> None:
    earlier: set[str] = set()
    for name in names:
        if name in earlier:
            raise PydanticCustomError(
                "quantity",
                "{message}",
                {"message": f"the {what} {name!r} is given twice", "hint": "give each one once"},
            )
        earlier.add(name)
