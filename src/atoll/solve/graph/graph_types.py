"""Input and output of the planner of any-to-any models, as numbers: no model or GPU is looked up.

An *executor* runs a set of parts (components, or phases of an llm) on the GPUs of a slice of a machine, or of
several slices where layers of a plain model are spread. One second of it is one second of work. A request of
class t takes `seconds[t, part]` of an executor for each part that it runs there: seconds add up, rates do
not, whichever of the services that share the executor the classes are of. A class may go one of several
`routes`, each a set of parts, of which every part is run by one executor.

With n[e, r] executors of type e in region r, x[t, w, r] requests/s of class t that go route w there and
z[t, part, e, r] of them for which e runs a part:

    sum_{w, r} x[t, w, r]        =  f_t rate_t                             all demand, or a share f of it
    sum_e z[t, part, e, r]       =  sum_{w with part} x[t, w, r]           every part of a route is run
    sum z[t, part, e, r] seconds <= n[e, r]                                no executor works overtime
    sum_e uses[e, kind] n[e, r]  =  sum_{offers o in r} u[kind, o]         slices of machines
    sum_kind gpus(kind) u[kind, o] <= gpus(o) b[o],  b[o] <= available(o)  sizes divide each other: they pack
    cost = sum_o price(o) b[o]  (+ what starting costs)

Latency: `latency_s[t, part]` is how long a request of class t is at an executor for a part. A `Chain` bounds
the sum over two parts, the second after the first. Executors that are slow at the first need fast ones at
the second: for every latency v of the first, what goes over executors of at least v is no more than what
goes over those of at most budget - v. Allowed partners are nested, so that is enough (Gale's theorem), and
matching slow with fast ones gives the routes of single requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from atoll.plan.plan import OfferKey

ClassKey = tuple[str, str]
"""Service and class."""
PartKey = tuple[str, str, str]
"""Service, class and part."""
Place = tuple[str, str, str]
"""Region, node type of the machine, kind of the slice."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines on offer: `key` is region, node type, market; `sizes` GPUs of slices they may be cut into.

    Executors that take no more than `group_gpus` together hand over at once inside a machine, others at
    `inner_bytes_per_s` after `inner_s` seconds.
    """

    key: OfferKey
    gpu: str
    gpus: int
    available: int
    usd_per_hour: float
    sizes: tuple[int, ...]
    nic_bytes_per_s: float = float("inf")
    group_gpus: float = float("inf")
    inner_bytes_per_s: float = float("inf")
    inner_s: float = 0.0

    @property
    def region(self) -> str:
        """Where they are."""
        return self.key[0]

    @property
    def spot(self) -> bool:
        """Whether they may be taken away."""
        return self.key[2] == "spot"


@dataclass(frozen=True, slots=True)
class ExecutorType:
    """Executors that are alike: parts of a service on slices of machines, such as {"A100-80:2": 1}.

    They run what they have `seconds` for, of `guests` beside their own service. `label` tells types apart
    that have the same parts and slices (other layers or tensor parallelism).
    """

    service: str
    parts: tuple[str, ...]
    uses: tuple[tuple[str, int], ...]
    seconds: Mapping[PartKey, float] = field(hash=False)
    latency_s: Mapping[PartKey, float] = field(hash=False)
    label: str = ""
    guests: tuple[str, ...] = ()

    @property
    def services(self) -> tuple[str, ...]:
        """The services whose requests they take, their own first."""
        return (self.service, *self.guests)


@dataclass(frozen=True, slots=True)
class Chain:
    """The latencies of two parts of a class may add up to `budget_s`, hand-over left out.

    Executors of one machine hand over in less time: then `inside_s`, None where that makes no difference.
    """

    first: str
    second: str
    budget_s: float
    inside_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClassDemand:
    """Requests of a class: how many a second, which routes they may go, and what bounds their latency.

    `bytes_between` has, by (part, next part), the bytes of one request that go from one to the other.
    `places` has, by part, the (region, node type, kind of slice) that may run it where machines are told
    apart; a part that is not named runs on all.
    """

    service: str
    name: str
    rate_per_s: float
    routes: tuple[tuple[str, ...], ...]
    chains: tuple[Chain, ...] = ()
    bytes_between: Mapping[tuple[str, str], float] = field(default_factory=dict, hash=False)
    priority: float = 1.0
    places: Mapping[str, frozenset[Place]] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> ClassKey:
        """Service and class."""
        return (self.service, self.name)


@dataclass(frozen=True, slots=True)
class StandingExecutors:
    """Executors that run now: `count` of a type, on the machines of the offers named, slice by slice."""

    executor: int
    offers: tuple[OfferKey, ...]
    count: int


@dataclass(frozen=True, slots=True)
class GraphProgram:
    """The whole question. Goal "cost" is the cheapest for the demand, "most" the largest multiple of it.

    `budget_usd_per_hour`, `spot_share` (of GPUs in slices in use) and `max_machines` bound the answer, None
    is no bound. Where not all demand can be met with goal "cost", `shortage` says whether every class gets
    the same largest share ("fraction"), shares are weighed by priority ("priority"), or there is no plan
    ("fail"). A new executor costs `init_penalty` times its share of the machine's price more than one that
    stands. Where shares are weighed and classes of one service are served `alike`, they have one share, and
    its priority counts once. `likely` are types that answers to such questions had: the search begins with
    them, and where it may stay `unproven` it ends with them. The types of the `known` answer to an easier
    question come before all else: all was served for `known_usd`, and no answer costs less than `at_least`
    (USD/h).
    """

    machines: tuple[Machines, ...]
    executors: tuple[ExecutorType, ...]
    classes: tuple[ClassDemand, ...]
    standing: tuple[StandingExecutors, ...] = ()
    goal: Literal["cost", "most"] = "cost"
    budget_usd_per_hour: float | None = None
    spot_share: float | None = None
    max_machines: int | None = None
    init_penalty: float = 0.0
    shortage: Literal["fail", "fraction", "priority"] = "fraction"
    alike: bool = False
    likely: tuple[int, ...] = ()
    unproven: bool = False
    known: tuple[int, ...] = ()
    known_usd: float = 0.0
    at_least: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacedExecutors:
    """Executors of one type in one region: slices taken from offers, and how many of them ran before."""

    executor: int
    region: str
    count: int
    kept: int
    slices: tuple[tuple[OfferKey, str, int], ...]


@dataclass(frozen=True, slots=True)
class PartFlow:
    """Requests/s of a class for which an executor type in a region runs a part."""

    service: str
    klass: str
    part: str
    executor: int
    region: str
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class GraphAnswer:
    """Solution: executors, machines by offer, flows, routes, the share of each class that is served.

    `objective` is USD/h with what starting costs ("cost"), or the multiple of demand ("most"), `bound` what
    is proven of the best. `routes` has requests/s by (service, class, route, region).

    Where not all demand is met, `share` is the common share (weighed by priority: the mean), `share_bound`
    what is proven of the largest, and cost and bound are those of the cheapest at that share. `split` has,
    for classes with chains, the flows of each route: (service, class, route, part, executor, region).
    """

    status: Literal["optimal", "feasible", "partial", "infeasible"]
    placed: tuple[PlacedExecutors, ...]
    machines: Mapping[OfferKey, int]
    flows: tuple[PartFlow, ...]
    routes: Mapping[tuple[str, str, int, str], float]
    served: Mapping[ClassKey, float]
    usd_per_hour: float
    init_usd: float
    objective: float
    bound: float
    nodes: int = 0
    iterations: int = 0
    cut_short: bool = False
    reasons: tuple[str, ...] = ()
    share: float = 1.0
    share_bound: float = 1.0
    split: Mapping[tuple[str, str, int, str, int, str], float] = field(default_factory=dict)
