"""Changes of a what-if: demand, promises, prices, numbers of machines, the budget.

A change is made where the fleet is written: in its file, so that what is planned is what can be exported, or
in its problem where there is no such file. Both give the same problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.frozen import Frozen
from atoll.core.ids import parse_node_type
from atoll.core.units import format_duration, format_price, format_share
from atoll.plan.cluster import ANY, Cluster
from atoll.plan.plan import SINK, SOURCE
from atoll.plan.problem import Offer, Problem, Service
from atoll.planner.source import WrittenFleet, read_data

MAX_NAMES = 1000
Factor = Annotated[float, Field(strict=True, ge=0, le=1000)]
Factors = Annotated[dict[str, Factor], Field(max_length=MAX_NAMES)]


class PromiseChange(Frozen):
    """Other promises of a service; None leaves one as it is. `target` is the share that keeps both."""

    ttft_s: Annotated[float, Field(strict=True, gt=0, le=600)] | None = None
    tpot_s: Annotated[float, Field(strict=True, gt=0, le=60)] | None = None
    target: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None


class DialChange(Frozen):
    """One change: factors by service or GPU type, promises, and the budget per hour."""

    demand: Factors = Field(default_factory=dict)
    promises: dict[str, PromiseChange] = Field(default_factory=dict, max_length=MAX_NAMES)
    prices: Factors = Field(default_factory=dict)
    available: Factors = Field(default_factory=dict)
    budget_usd_per_hour: Annotated[float, Field(strict=True, ge=0, le=1e9)] | None = None

    @property
    def is_none(self) -> bool:
        """Whether everything stays as it is."""
        return self == DialChange()

    def describe(self) -> str:
        """Return the change in a few words, for people."""
        said = [f"demand of {name} x{factor:g}" for name, factor in self.demand.items()]
        for name, promise in self.promises.items():
            said += [
                f"{what} of {name} {format_duration(seconds)}"
                for what, seconds in (("ttft", promise.ttft_s), ("tpot", promise.tpot_s))
                if seconds is not None
            ]
            if promise.target is not None:
                said.append(f"{format_share(promise.target)} of {name} keep promises")
        said += [f"price of {gpu} x{factor:g}" for gpu, factor in self.prices.items()]
        said += [f"{gpu} machines x{factor:g}" for gpu, factor in self.available.items()]
        if self.budget_usd_per_hour is not None:
            said.append(f"budget {format_price(self.budget_usd_per_hour)}")
        return ", ".join(said) or "nothing"


def apply_change(source: WrittenFleet, change: DialChange) -> WrittenFleet:
    """Return the fleet as it would be."""
    check_names(source, change)
    if change.is_none:
        return source
    if source.data is None:
        return WrittenFleet(change_problem(source.problem, change))
    return read_data(change_file(source, change), source.problem.name)


def service_names(source: WrittenFleet) -> tuple[str, ...]:
    """Return the names that demand and promises are turned by, in the order of the file."""
    if source.data is not None:
        return tuple(source.data["services"])
    return source.problem.asked_names


def gpu_types(problem: Problem) -> tuple[str, ...]:
    """Return the GPU types that there are machines of, sorted."""
    return tuple(sorted({parse_node_type(kind).gpu for kind in problem.node_types}))


def check_names(source: WrittenFleet, change: DialChange) -> None:
    """Refuse names that the fleet does not have."""
    services, gpus = service_names(source), gpu_types(source.problem)
    for field, names, kind, known in (
        ("demand", change.demand, "service", services),
        ("promises", change.promises, "service", services),
        ("prices", change.prices, "GPU type", gpus),
        ("available", change.available, "GPU type", gpus),
    ):
        for name in names:
            if name not in known:
                raise UnknownNameError(kind, name, known, field=f"{field}.{name[:60]}")
    if change.budget_usd_per_hour is not None and source.problem.cluster is not None:
        raise InputError(
            "a fixed cluster is paid for whatever is asked of it",
            field="budget_usd_per_hour",
            hint="leave the budget out",
        )


# In the problem


def change_problem(problem: Problem, change: DialChange) -> Problem:
    """Return the problem as it would be; names are those of services, or of choices for all their ways."""
    ways = problem.variants
    services = {service.name: service for service in problem.services}
    for name in dict.fromkeys((*change.demand, *change.promises)):
        for way in ways.get(name, (name,)):
            if sum(way in others for others in ways.values()) > 1:
                raise InputError(
                    f"{way} answers for several services",
                    field=f"demand.{name}",
                    hint="ask with the fleet file instead of its problem",
                )
            service = _promise(services[way], change.promises.get(name))
            rate = service.rate_per_s * change.demand.get(name, 1.0)
            services[way] = service.model_copy(update={"rate_per_s": rate})
    update: dict[str, object] = {"services": tuple(services.values())}
    if problem.cluster is None:
        update["offers"] = tuple(_offer(offer, change) for offer in problem.offers)
    else:
        cluster = _cut(problem.cluster, change.available)
        update["cluster"] = cluster
        update["offers"] = tuple(_owned(problem.offers, cluster, change))
    if change.budget_usd_per_hour is not None:
        limits = problem.limits.model_copy(
            update={"budget_usd_per_hour": change.budget_usd_per_hour}
        )
        update["limits"] = limits
    return problem.replace(**update)


def _promise(service: Service, promise: PromiseChange | None) -> Service:
    if promise is None:
        return service
    given = {
        name: value
        for name, value in (("ttft_s", promise.ttft_s), ("tpot_s", promise.tpot_s))
        if value is not None
    }
    update: dict[str, object] = dict(given)
    # Classes that promise something of their own follow; the others have the service's promise anyway.
    if service.classes:
        update["classes"] = tuple(
            klass.model_copy(
                update={name: v for name, v in given.items() if getattr(klass, name) is not None}
            )
            for klass in service.classes
        )
    changed = service.model_copy(update=update)
    return changed if promise.target is None else changed.with_attainment(promise.target)


def _offer(offer: Offer, change: DialChange) -> Offer:
    gpu = parse_node_type(offer.node_type).gpu
    return offer.model_copy(
        update={
            "usd_per_hour": offer.usd_per_hour * change.prices.get(gpu, 1.0),
            "available": scale_count(offer.available, change.available.get(gpu, 1.0)),
        }
    )


def scale_count(count: int, factor: float) -> int:
    """Return so many times a number of machines, halves rounded up; a million at most."""
    return min(1_000_000, int(count * factor + 0.5))


def _cut(cluster: Cluster, available: Mapping[str, float]) -> Cluster:
    """The cluster with its first machines of each kind and site; more than there are cannot be asked for."""
    kept: dict[tuple[str, str], int] = {}
    for node in cluster.nodes:
        key = (node.region, node.node_type)
        kept[key] = kept.get(key, 0) + 1
    for key, count in list(kept.items()):
        gpu = parse_node_type(key[1]).gpu
        factor = available.get(gpu, 1.0)
        if factor > 1.0:
            raise InputError(
                "a fixed cluster has the machines that it has",
                field=f"available.{gpu}",
                hint="take a factor of 1 at most, or add machines to its file",
            )
        kept[key] = scale_count(count, factor)
    nodes = []
    for node in cluster.nodes:
        key = (node.region, node.node_type)
        if kept[key] > 0:
            kept[key] -= 1
            nodes.append(node)
    if not nodes:
        raise InputError("no machine is left", field="available", hint="leave some")
    # A link to a machine that is gone would lead nowhere.
    ends = {ANY, SOURCE, SINK, *(n.name for n in nodes), *(n.region for n in nodes)}
    links = tuple(link for link in cluster.links if {link.src, link.dst} <= ends)
    if not links:
        raise InputError("no link is left", field="available", hint="leave more machines")
    kinds = {node.node_type for node in nodes}
    profiles = {
        name: {kind: profile for kind, profile in by_kind.items() if kind in kinds}
        for name, by_kind in cluster.profiles.items()
    }
    return cluster.model_copy(update={"nodes": tuple(nodes), "links": links, "profiles": profiles})


def _owned(offers: Iterable[Offer], cluster: Cluster, change: DialChange) -> Iterable[Offer]:
    """Offers of what is left of a cluster, where they say more than that it is there."""
    left: dict[tuple[str, str], int] = {}
    for node in cluster.nodes:
        key = (node.region, node.node_type)
        left[key] = left.get(key, 0) + 1
    for offer in offers:
        count = left.get((offer.region, offer.node_type), 0)
        if count:
            gpu = parse_node_type(offer.node_type).gpu
            usd = offer.usd_per_hour * change.prices.get(gpu, 1.0)
            yield offer.model_copy(update={"available": count, "usd_per_hour": usd})


# In the file


def change_file(source: WrittenFleet, change: DialChange) -> dict[str, Any]:
    """Return the data of the fleet file as it would be."""
    assert source.data is not None
    data = dict(source.data)
    file = source.file
    services = dict(data["services"])
    for name in dict.fromkeys((*change.demand, *change.promises)):
        entry = dict(services[name])
        if name in change.demand:
            entry["rate"] = file.services[name].rate * change.demand[name]
        promise = change.promises.get(name)
        if promise is not None:
            _write_promise(entry, promise)
        services[name] = entry
    data["services"] = services
    if change.prices or change.available:
        if source.problem.cluster is None:
            data["pool"] = _write_pool(data["pool"], source.problem, change)
        else:
            data["cluster"] = _write_cluster(data["cluster"], source.problem, change)
    if change.budget_usd_per_hour is not None:
        data["limits"] = {**(data.get("limits") or {}), "budget": change.budget_usd_per_hour}
    return data


def _write_promise(entry: dict[str, Any], promise: PromiseChange) -> None:
    for name, value in (("ttft", promise.ttft_s), ("tpot", promise.tpot_s)):
        if value is None:
            continue
        entry[name] = value
        if isinstance(entry.get("classes"), dict):
            entry["classes"] = {
                klass: {**sizes, name: value} if name in sizes else sizes
                for klass, sizes in entry["classes"].items()
            }
    if promise.target is not None:
        entry["attainment"] = promise.target
        if isinstance(entry.get("classes"), dict):
            entry["classes"] = {
                klass: {name: value for name, value in sizes.items() if name != "attainment"}
                for klass, sizes in entry["classes"].items()
            }


def _write_pool(pool: Mapping[str, Any], problem: Problem, change: DialChange) -> dict[str, Any]:
    """The pool with every offer that changes written out: that counts before what `cloud` says of it."""
    changed = {*change.prices, *change.available}
    written = [
        _offer(offer, change)
        for offer in problem.offers
        if parse_node_type(offer.node_type).gpu in changed
    ]
    catalog = problem.catalog()
    # What is written out anew replaces what the file has of that GPU.
    kept = [
        offer for offer in pool.get("offers") or () if _offered_gpu(catalog, offer) not in changed
    ]
    return {**pool, "offers": [*kept, *map(_write_offer, written)]}


def _offered_gpu(catalog: Catalog, offer: Mapping[str, Any]) -> str:
    """The GPU type of an offer in a file: of its shares where it has any."""
    node = parse_node_type(catalog.node(str(offer["node_type"])).id)
    shares = int(offer.get("shares", 1))
    return (node if shares == 1 else node.in_shares(shares)).gpu


def _write_offer(offer: Offer) -> dict[str, Any]:
    fields, node = offer.model_dump(exclude_none=True), parse_node_type(offer.node_type)
    shares = {"shares": node.shares} if node.shares > 1 else {}
    return {**fields, "node_type": str(node.whole), **shares}


def _write_cluster(
    cluster: Mapping[str, Any], problem: Problem, change: DialChange
) -> dict[str, Any]:
    """The cluster with its machines written out by name."""
    changed = change_problem(problem, DialChange(prices=change.prices, available=change.available))
    assert changed.cluster is not None
    offers = {(offer.region, offer.node_type): offer for offer in changed.offers}
    nodes: dict[str, dict[str, Any]] = {}
    for node in changed.cluster.nodes:
        offer = offers[node.region, node.node_type]
        group = nodes.setdefault(node.region, {}).setdefault(
            node.node_type,
            {"names": [], "usd_per_hour": offer.usd_per_hour, "whole": offer.whole},
        )
        group["names"].append(node.name)
    ends = {ANY, SOURCE, SINK, *nodes, *(node.name for node in changed.cluster.nodes)}
    links = [link for link in cluster["links"] if set(link["between"]) <= ends]
    return {**cluster, "nodes": nodes, "links": links}
