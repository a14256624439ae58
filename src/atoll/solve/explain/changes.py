"""Single changes to a problem, each of which only allows more: what explanations ask about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError
from atoll.core.ids import parse_node_type
from atoll.plan.cluster import Cluster, ClusterLink, ClusterNode
from atoll.plan.files.offers_file import can_be_cut
from atoll.plan.problem import Offer, Problem, Service
from atoll.plan.survival import Survival
from atoll.solve.explain.plan_explanation import Constraint, ExtraNodes, RepairKind

_CLASS_PROMISES: Mapping[str, tuple[str, str]] = {
    "ttft": ("ttft_s", "TTFT"),
    "tpot": ("tpot_s", "TPOT"),
    "ahead": ("ahead_s", "speech ahead"),
    "image": ("image_s", "time to the image"),
}
"""Promises of classes: the field, and what it is called."""
_LOOSER = 2.0
"""By what promises of classes are loosened."""
_GPUS = 3
"""GPU types that are offered beside those there are."""
FASTER = 10.0
"""How many times the bandwidth, and the share of the latency, that a faster link has."""


@dataclass(frozen=True)
class Change:
    """A changed problem, and the change in words: as a kind of repair and as a question.

    With `best_effort` promises are not asked for, which is no matter of the problem.
    """

    kind: RepairKind
    where: str
    problem: Problem
    before: float | None = None
    after: float | None = None
    rentals: tuple[ExtraNodes, ...] = ()
    best_effort: bool = False

    @property
    def question(self) -> str:
        """The change in a few words, for progress."""
        return ", ".join(rental.text for rental in self.rentals) or self.where


def soft(problem: Problem) -> Problem:
    """Return the problem that serves what it can: how much that is tells more than that it is not all."""
    if problem.settings.on_shortage != "fail":
        return problem
    return problem.replace(settings=problem.settings.model_copy(update={"on_shortage": "fraction"}))


def loosen(problem: Problem, constraint: Constraint) -> Problem:
    """Return the problem without a limit, or with one more node."""
    if constraint.rental is not None:
        return with_more(problem, (constraint.rental,))
    free: dict[str, tuple[str, int | None]] = {
        "budget": ("budget_usd_per_hour", None),
        "max-nodes": ("max_nodes", None),
        "spot-share": ("spot_share", None),
        "spread": ("spread", 1),
    }
    name, value = free[constraint.kind]
    return with_limits(problem, **{name: value})


def with_limits(problem: Problem, **changes: float | Survival | None) -> Problem:
    """Return the problem with other limits."""
    return problem.replace(limits=problem.limits.model_copy(update=changes))


def with_more(problem: Problem, rentals: Iterable[ExtraNodes]) -> Problem:
    """Return the problem with more nodes on offer, or with more machines in its cluster."""
    more = {(r.region, r.node_type, r.market): r.count for r in rentals}
    offers = tuple(
        offer.model_copy(update={"available": offer.available + more.get(offer.key, 0)})
        for offer in problem.offers
    )
    if problem.cluster is None:
        return problem.replace(offers=offers)
    taken = {node.name for node in problem.cluster.nodes}
    nodes = list(problem.cluster.nodes)
    # Sorted, so that the same machines always get the same names.
    for (region, kind, _), count in sorted(more.items()):
        names = _free_names(f"extra-{region}-{kind.replace(':', 'x')}", taken)
        nodes += [
            ClusterNode(name=next(names), node_type=kind, region=region) for _ in range(count)
        ]
    return problem.replace(offers=offers, cluster=_rebuild(problem.cluster, nodes=tuple(nodes)))


def _rebuild(cluster: Cluster, **fields: object) -> Cluster:
    """Return the cluster with other fields, checked; a copy would keep what it has worked out of the old."""
    given = {name: getattr(cluster, name) for name in Cluster.model_fields}
    return Cluster.model_validate(given | fields)


def _free_names(stem: str, taken: set[str]) -> Iterator[str]:
    number = 0
    while True:
        name = f"{stem}-{number}"
        if name not in taken:
            yield name
        number += 1


def _with_offers(problem: Problem, change: Callable[[Offer], Offer]) -> Problem:
    return problem.replace(offers=tuple(map(change, problem.offers)))


def _with_service(problem: Problem, name: str, **fields: object) -> Problem:
    return problem.replace(
        services=tuple(
            s.model_copy(update=fields) if s.name == name else s for s in problem.services
        )
    )


def cuts(problem: Problem) -> list[Change]:
    """Return the problem with the whole machines of each offer allowed to be cut."""
    whole = [o for o in problem.offers if o.whole and o.gpus > 1 and o.available > 0]

    def cut(key: tuple[str, str, str]) -> Problem:
        return _with_offers(
            problem, lambda o: o.model_copy(update={"whole": False}) if o.key == key else o
        )

    return [
        Change("cut", f"cut {_named(offer)} into slices (without `whole`)", cut(offer.key))
        for offer in whole
    ]


def _named(offer: Offer) -> str:
    return ExtraNodes(
        region=offer.region, node_type=offer.node_type, market=offer.market, count=1
    ).where


def free_phases(problem: Problem) -> list[Change]:
    """Return the problem with each service free to run its phases apart, together, or some of each."""
    found = []
    for service in _demanded(problem):
        if service.phases == "auto":
            continue
        other = "together" if service.phases == "apart" else "apart"
        where = f"phases of {service.name} also {other} (`phases: auto`)"
        found.append(Change("phases", where, _with_service(problem, service.name, phases="auto")))
    return found


def unpinned(problem: Problem) -> list[Change]:
    """Return the problem with each service free to stand on any node."""
    return [
        Change(
            "pinning",
            f"{service.name} on any node (without `only` and `avoid`)",
            _with_service(problem, service.name, only=(), avoid=()),
        )
        for service in _demanded(problem)
        if service.only or service.avoid
    ]


def with_spot(problem: Problem, catalog: Catalog) -> list[Change]:
    """Return the problem with spot nodes beside those on demand, as many, at the catalog's median prices."""
    known = {offer.key for offer in problem.offers}
    # Spot is suggested only where the fleet knows none: else its own prices are what counts.
    if problem.cluster is not None or any(offer.market == "spot" for offer in problem.offers):
        return []
    extra = []
    for offer in problem.offers:
        if offer.market != "on-demand" or (offer.region, offer.node_type, "spot") in known:
            continue
        price = catalog.prices.cheapest(
            offer.region, offer.node_type, spot=True, include_imputed=True
        )
        usd = None if price is None else price.cost(spot=True)
        if usd is not None and usd < offer.usd_per_hour:
            extra.append(offer.model_copy(update={"market": "spot", "usd_per_hour": usd}))
    if not extra:
        return []
    offers = (*problem.offers, *extra)
    return [Change("spot", "spot nodes at the catalog's prices", problem.replace(offers=offers))]


def loosen_promise(problem: Problem, service: Service, kind: RepairKind, factor: float) -> Change:
    """Return the problem with one promise of a service loosened to `factor` times what it is."""
    before = service.ttft_s if kind == "ttft" else service.tpot_s
    after = before * factor
    services = tuple(
        s.scale_promises(**{kind: factor}) if s.name == service.name else s
        for s in problem.services
    )
    looser = problem.replace(services=services)
    return Change(kind, f"{kind.upper()} of {service.name}", looser, before=before, after=after)


def loosen_classes(
    problem: Problem, service: Service, kind: RepairKind, factor: float
) -> Change | None:
    """Return the problem with one kind of promise of all classes of a service loosened; None without any.

    Seconds become `factor` times what they are, and speech may be that much less ahead of a listener.
    """
    name, word = _CLASS_PROMISES[kind]
    given = [value for k in service.classes if (value := getattr(k, name)) is not None]
    # More seconds are looser, but for speech it is less time ahead: that promise is divided.
    times = 1.0 / factor if kind == "ahead" else factor
    if not any(given):
        return None
    classes = tuple(
        klass
        if (value := getattr(klass, name)) is None
        else klass.model_copy(update={name: value * times})
        for klass in service.classes
    )
    fields: dict[str, object] = {"classes": classes}
    if kind in ("ttft", "tpot"):
        # The service's own are the loosest of its classes.
        fields[name] = getattr(service, name) * times
    looser = _with_service(problem, service.name, **fields)
    before = max(given)
    where = f"{word} of {service.name}, all classes,"
    return Change(kind, where, looser, before=before, after=before * times)


def free_paths(problem: Problem) -> list[Change]:
    """Return the problem with each service free to take any path over executors."""
    return [
        Change(
            "paths",
            f"any path for {service.name} (without `paths`)",
            _with_service(problem, service.name, paths=()),
        )
        for service in _demanded(problem)
        if service.paths
    ]


def faster_links(problem: Problem, rules: Iterable[int]) -> Problem:
    """Return the problem with some rules of its cluster's links ten times as fast."""
    cluster = problem.cluster
    if cluster is None:
        return problem
    chosen = set(rules)

    def fast(link: ClusterLink) -> ClusterLink:
        return link.model_copy(
            update={
                "bytes_per_s": link.bytes_per_s * FASTER,
                "latency_s": link.latency_s / FASTER,
            }
        )

    links = tuple(
        fast(link) if index in chosen else link for index, link in enumerate(cluster.links)
    )
    return problem.replace(cluster=_rebuild(cluster, links=links))


def _demanded(problem: Problem) -> list[Service]:
    return [service for service in problem.services if service.rate_per_s > 0]


def looser_classes(problem: Problem) -> Iterator[Change]:
    """Yield promises of any-to-any services loosened to twice what they are, one kind of them at a time."""
    for service in problem.graph_services:
        if service.rate_per_s > 0:
            for kind in ("ttft", "tpot", "ahead", "image"):
                change = loosen_classes(problem, service, kind, _LOOSER)
                if change is not None:
                    yield change


def more_gpu_types(problem: Problem, catalog: Catalog) -> Iterator[Change]:
    """Yield the problem with one more GPU type on offer, at the catalog's prices, the cheapest types first.

    As many machines as the problem has of any of its own types.
    """
    rented = [offer for offer in problem.offers if offer.market != "owned"]
    if not rented:
        return
    own = {parse_node_type(offer.node_type).gpu for offer in problem.offers}
    max_available = max(offer.available for offer in rented)
    found: dict[str, list[Offer]] = {}
    for region in sorted({offer.region for offer in rented}):
        for kind, price in catalog.prices.cheapest_by_node(region).items():
            usd, gpu = price.cost(), parse_node_type(kind).gpu
            if gpu in own or usd is None or not _is_known(catalog, kind):
                continue
            offer = Offer(
                region=region,
                node_type=kind,
                available=max_available,
                usd_per_hour=usd,
                instance=price.instance,
                whole=not can_be_cut(catalog, kind),
            )
            found.setdefault(gpu, []).append(offer)
    cheapest = {gpu: min(o.usd_per_hour / o.gpus for o in some) for gpu, some in found.items()}
    for gpu in sorted(found, key=lambda gpu: (cheapest[gpu], gpu))[:_GPUS]:
        offers = (*problem.offers, *found[gpu])
        yield Change("gpus", f"{gpu} on offer, too", problem.replace(offers=offers))


def _is_known(catalog: Catalog, kind: str) -> bool:
    try:
        catalog.node(kind)
    except AtollError:
        return False
    return True
