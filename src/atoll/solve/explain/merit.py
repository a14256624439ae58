"""How good a plan is, and which problems leave at least as much room as others.

A plan for a problem holds for every problem that only allows more: what is added may be left alone. So the
best plan known for a problem is the best of those made for it or for any tighter one, and answers along a
chain of ever looser problems never get worse, whatever a search found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.plan.cluster import Cluster
from atoll.plan.plan import Plan
from atoll.plan.problem import Limits, Offer, Problem, Service
from atoll.solve.explain.plan_explanation import served_share
from atoll.workload.classes import RequestClass

_DIGITS = 6
"""Shares, USD and tokens/s that differ less are equal: rounded, so that the order is one."""


@dataclass(frozen=True, order=True)
class Merit:
    """Order of plans: demand served, then cost or throughput, then how few machines are used."""

    served: float
    mean: float
    value: float
    spared: int = 0

    @property
    def meets_demand(self) -> bool:
        """Whether all demand is served."""
        return self.served >= 1.0


def merit(plan: Plan, problem: Problem) -> Merit:
    """Return what a plan for a problem is worth; without a plan, less than anything."""
    if plan.status == "infeasible":
        return Merit(-1.0, -1.0, 0.0)
    value = plan.objective if plan.objective is not None else plan.usd_per_hour
    signed = round(-value if plan.goal == "cost" else value, _DIGITS)
    if plan.status != "partial":
        return Merit(1.0, 1.0, signed, -plan.nodes)
    # A partial plan never counts as a full one, however little is missing.
    min_served = min(round(served_share(plan, problem), _DIGITS), 1.0 - 10.0**-_DIGITS)
    mean = round(served_share(plan, problem, mean=True), _DIGITS)
    return Merit(min_served, mean, signed, -plan.nodes)


def relaxes(looser: Problem, tighter: Problem) -> bool:
    """Return whether every plan for `tighter` can be kept where `looser` is asked.

    True only where that is plain from the two: prices, demands and settings are the same, and what differs is
    more nodes, machines that may be cut, faster links, looser promises, limits or ways to run a service.
    """
    same = ("settings", "running", "overlays")
    return (
        all(getattr(looser, name) == getattr(tighter, name) for name in same)
        and len(looser.services) == len(tighter.services)
        and all(map(_allows_service, looser.services, tighter.services))
        and _allows_offers(looser.offers, tighter.offers)
        and _allows_limits(looser.limits, tighter.limits)
        and _allows_cluster(looser.cluster, tighter.cluster)
    )


def _allows_service(looser: Service, tighter: Service) -> bool:
    changed: dict[str, object] = {
        "ttft_s": 0.0,
        "tpot_s": 0.0,
        "phases": "auto",
        "only": (),
        "avoid": (),
    }
    changed |= {"classes": (), "text_classes": (), "paths": ()}
    if _with(looser, changed) != _with(tighter, changed):
        return False
    if not _allows_classes(looser.classes, tighter.classes):
        return False
    if not _allows_classes(looser.text_classes, tighter.text_classes):
        return False
    if looser.paths and looser.paths != tighter.paths:
        return False
    pins_fewer = set(looser.avoid) <= set(tighter.avoid) and (
        not looser.only or (bool(tighter.only) and set(tighter.only) <= set(looser.only))
    )
    return (
        looser.ttft_s >= tighter.ttft_s
        and looser.tpot_s >= tighter.tpot_s
        and looser.phases in ("auto", tighter.phases)
        and pins_fewer
    )


def _allows_classes(looser: tuple[RequestClass, ...], tighter: tuple[RequestClass, ...]) -> bool:
    """Whether classes are the same but for promises, and none of those is tighter."""
    promises = {"ttft_s": None, "tpot_s": None, "ahead_s": None, "image_s": None}
    return len(looser) == len(tighter) and all(
        a.model_copy(update=promises) == b.model_copy(update=promises)
        and all(_is_no_less(getattr(a, p), getattr(b, p)) for p in promises if p != "ahead_s")
        and (a.ahead_s is None or (b.ahead_s is not None and a.ahead_s <= b.ahead_s))
        for a, b in zip(looser, tighter, strict=True)
    )


def _with(service: Service, fields: Mapping[str, object]) -> Service:
    return service.model_copy(update=dict(fields))


def _allows_offers(looser: tuple[Offer, ...], tighter: tuple[Offer, ...]) -> bool:
    by_key = {offer.key: offer for offer in looser}
    for offer in tighter:
        other = by_key.get(offer.key)
        if offer.available == 0 and other is None:
            continue
        if other is None or other.usd_per_hour != offer.usd_per_hour:
            return False
        if other.available < offer.available or (other.whole and not offer.whole):
            return False
    return True


def _allows_limits(looser: Limits, tighter: Limits) -> bool:
    less, more = looser.survival, tighter.survival
    spared = less.model_copy(update={"spared": more.spared}) == more
    survives = not less.lost or (spared and {*less.spared} >= {*more.spared})
    return (
        survives
        and looser.spread <= tighter.spread
        and all(
            _is_no_less(getattr(looser, name), getattr(tighter, name))
            for name in ("budget_usd_per_hour", "spot_share", "max_nodes")
        )
    )


def _is_no_less(looser: float | None, tighter: float | None) -> bool:
    return looser is None or (tighter is not None and looser >= tighter)


def _allows_cluster(looser: Cluster | None, tighter: Cluster | None) -> bool:
    if looser is None or tighter is None:
        return looser is tighter
    same = ("profiles", "kv_fill", "token_bytes")
    if any(getattr(looser, name) != getattr(tighter, name) for name in same):
        return False
    if len(looser.links) != len(tighter.links):
        return False
    faster = all(
        (a.src, a.dst, a.one_way) == (b.src, b.dst, b.one_way)
        and a.bytes_per_s >= b.bytes_per_s
        and a.latency_s <= b.latency_s
        for a, b in zip(looser.links, tighter.links, strict=True)
    )
    return faster and set(tighter.nodes) <= set(looser.nodes)
