"""The problem as it is now: demand as forecast, offers as observed, less what is held back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from atoll.control.decision.backoff import HeldBack
from atoll.control.decision.control_view import ControlPolicy, Mixes, View
from atoll.plan.cluster import ANY, Cluster
from atoll.plan.plan import SINK, SOURCE, Instance, count_machines
from atoll.plan.problem import Offer, Problem, Service


def restate_demand(
    view: View,
    rates: Mapping[str, float],
    policy: ControlPolicy,
    mixes: Mixes = MappingProxyType({}),
) -> Problem:
    """Return the fleet's problem with the rates to plan for, lengths of the last hour, and the offers of now.

    A service whose traffic nobody has seen keeps what the fleet file says; one that has none keeps a small
    share of that, so that its first request finds somebody. So does a class that `mixes` give less.
    """
    lengths = {seen.service: seen.hour.lengths for seen in view.traffic}
    services = []
    for service in view.problem.services:
        update: dict[str, object] = {}
        if service.name in rates:
            least = policy.min_share * service.rate_per_s
            update["rate_per_s"] = max(least, rates[service.name])
        seen = lengths.get(service.name)
        if seen is not None:
            tail = service.lengths.input_tail
            update["lengths"] = (
                seen if tail <= 0.0 else seen.model_copy(update={"input_tail": tail})
            )
        restated = service.model_copy(update=update) if update else service
        services.append(restate_mix(restated, mixes.get(service.name), policy))
    # Not checked again: order and names are those of the problem and of the view.
    offers = tuple(sorted(view.offers or view.problem.offers, key=lambda offer: offer.key))
    return view.problem.model_copy(update={"services": tuple(services), "offers": offers})


def restate_mix(
    service: Service, mix: Mapping[str, float] | None, policy: ControlPolicy
) -> Service:
    """Return a service whose classes have other shares, of which none is left out; None: those it has."""
    if mix is None:
        return service
    least = {klass.name: policy.min_share * klass.share for klass in service.classes}
    shares = {name: max(share, mix.get(name, 0.0)) for name, share in least.items()}
    total = sum(shares.values())
    classes = tuple(
        klass.model_copy(update={"share": shares[klass.name] / total}) for klass in service.classes
    )
    return service.model_copy(update={"classes": classes})


def restate_supply(
    problem: Problem,
    held: HeldBack,
    running: Mapping[str, Instance],
    reserved: Iterable[Instance],
    policy: ControlPolicy,
) -> Problem:
    """Return the problem for a planner: what runs, what can be had beside it, and what starting costs.

    Of an offer that is held back only what runs there remains. Machines of `reserved` instances are not free.
    Coral's penalty is the rent that a start costs over the time in which a change must pay for itself, unless
    the fleet gives another.
    """
    kept = tuple(
        one if one.id == name else one.model_copy(update={"id": name})
        for name, one in sorted(running.items())
    )
    settings = problem.settings
    if settings.init_penalty <= 0.0:
        penalty = policy.start_rent_s / policy.payback_s
        settings = settings.model_copy(update={"init_penalty": penalty})
    reserved = tuple(reserved)
    if problem.cluster is not None:
        cluster, offers = _restate_cluster(problem, problem.cluster, held, kept, reserved)
        return problem.replace(running=kept, settings=settings, offers=offers, cluster=cluster)
    offers = _restate_offers(problem.offers, held, kept, reserved)
    # Not checked again: both are in order, and their parts were checked where they come from.
    update = {"running": kept, "settings": settings, "offers": offers}
    return problem.model_copy(update=update)


def _restate_offers(
    offers: Iterable[Offer],
    held: HeldBack,
    running: tuple[Instance, ...],
    reserved: tuple[Instance, ...],
) -> tuple[Offer, ...]:
    used, going = count_machines(running), count_machines(reserved)
    found = {offer.key: offer for offer in offers}
    for key in (
        used.keys() - found.keys()
    ):  # what runs stays possible though nobody offers more of it
        region, node_type, market = key
        usd = max(
            one.usd_per_hour / len(one.nodes)
            for one in running
            if any((one.region_of(n), n.node_type, n.market) == key for n in one.nodes)
        )
        found[key] = Offer(
            region=region, node_type=node_type, market=market, available=0, usd_per_hour=usd
        )
    stated = []
    for key in sorted(found):
        offer = found[key]
        free = 0 if key in held.keys else offer.available - going[key]
        stated.append(offer.model_copy(update={"available": max(free, used[key])}))
    return tuple(stated)


def _restate_cluster(
    problem: Problem,
    cluster: Cluster,
    held: HeldBack,
    running: tuple[Instance, ...],
    reserved: tuple[Instance, ...],
) -> tuple[Cluster, tuple[Offer, ...]]:
    """Return the cluster without hosts that are set aside, held back or not free, and its offers."""
    used = {node.host for one in running for node in one.nodes}
    going = {node.host for one in reserved for node in one.nodes} - used
    nodes = tuple(
        node
        for node in cluster.nodes
        if node.name in used
        or not (
            node.name in held.hosts
            or node.name in going
            or (node.region, node.node_type, "owned") in held.keys
        )
    )
    if not nodes:
        nodes = cluster.nodes  # a planner needs some; nothing that is held back is started anyway
    counts = Counter((node.region, node.node_type) for node in nodes)
    offers = tuple(
        offer.model_copy(update={"available": counts[offer.region, offer.node_type]})
        for offer in problem.offers
        if counts[offer.region, offer.node_type] and offer.market == "owned"
    )
    ends = {ANY, SOURCE, SINK} | {n.name for n in nodes} | {n.region for n in nodes}
    links = tuple(link for link in cluster.links if {link.src, link.dst} <= ends)
    if len(nodes) == len(cluster.nodes):
        return cluster, offers
    return Cluster.model_validate({**dict(cluster), "nodes": nodes, "links": links}), offers
