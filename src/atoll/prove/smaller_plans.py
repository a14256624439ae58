"""Plans that differ from one in a single instance: without it, with a cheaper one instead, or with one more.

Of smaller plans, what the others carry is raised so that all demand is met: as far as the performance model
lets it, and beyond that where a simulation of each alone finds that it carries more. Whether promises are
kept is for a simulation of the whole to tell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.units import format_share
from atoll.plan.plan import MAX_SIMULATED
from atoll.plan.validate.check import validate
from atoll.prove.load_curves import units_per_request
from atoll.prove.prospects import kind_prices, stand
from atoll.solve.assembly import NewInstance, assemble, build_instance, keep
from atoll.solve.derating import find_templates, node_set
from atoll.solve.packing import pack

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Market, OfferKey, Plan, SimulatedCapacity
    from atoll.plan.problem import Problem
    from atoll.solve.templates.library import Libraries

    CarryMore = Callable[[Instance, float], SimulatedCapacity | None]

_SWAPS = 2
"""Cheaper templates that are tried instead of an instance: those that cost most."""
_ROUNDING = 1e-9


def smaller_plans(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    max_usd: float,
    carry: CarryMore,
) -> list[Plan]:
    """Return valid plans with one instance less or a cheaper one that cost at most so much, dearest first.

    `carry` says whether an instance carries more than the performance model gives it.
    """
    found: list[Plan] = []
    for rest in _with_one_changed(plan, problem, catalog, libraries):
        raised = _raise(problem, catalog, rest, carry)
        made = None if raised is None else join_instances(problem, catalog, raised, plan.solver)
        if made is not None and (made.objective or 0.0) <= max_usd:
            found.append(made)
    return sorted(found, key=lambda made: (-(made.objective or 0.0), made.content_hash()))


def join_instances(
    problem: Problem, catalog: Catalog, instances: Iterable[Instance], solver: str
) -> Plan | None:
    """Return the plan of some instances; None where it serves too little, or no such plan is allowed."""
    many = list(instances)
    if not on_offer(problem, many):
        return None
    made = assemble(problem, pack(problem, many), catalog=catalog, status="feasible", solver=solver)
    # What they keep is not known yet.
    wrong = [one for one in validate(made, problem, catalog) if one.rule != "promise"]
    return made if made.status == "feasible" and not wrong else None


def describe_simulated(plan: Plan) -> list[str]:
    """Return by instance in words that it carries more than the capacity model says, and why that is so."""
    return [
        f"{one.id} carries {one.throughput_per_s / known.model_per_s:.0%} of the capacity model, as "
        f"simulated: alone with {known.per_s / known.model_per_s:.0%} at least {format_share(known.kept)} of "
        f"{known.requests:,} requests keep their promise, on {len(known.seeds)} seeds"
        for one in plan.instances
        if (known := one.simulated) is not None
    ]


def larger_plans(
    plan: Plan, problem: Problem, catalog: Catalog, libraries: Libraries, services: Iterable[str]
) -> list[Plan]:
    """Return valid plans with one instance more of some services, like one that it has, cheapest first.

    On any market: what is lost with spot nodes may be had elsewhere.
    """
    found: list[Plan] = []
    seen: set[object] = set()
    wanted = {*services}
    for one in sorted(plan.instances, key=lambda instance: instance.id):
        alike = (one.role, one.region, node_set(one))
        if one.service not in wanted or one.is_executor or alike in seen:
            continue
        seen.add(alike)
        name = f"{one.service}-{one.phase}-{len(plan.instances)}"
        if any(name == other.id for other in plan.instances):
            name = f"{name}-more"
        for other in _on_every_market(one, problem, catalog, libraries):
            many = [*plan.instances, other.model_copy(update={"id": name})]
            if not on_offer(problem, many):
                continue
            raised = [keep(problem, catalog, i).model_copy(update={"kept": i.kept}) for i in many]
            made = assemble(
                problem,
                pack(problem, raised),
                catalog=catalog,
                status="feasible",
                solver=plan.solver,
            )
            if made.status == "feasible" and not validate(made, problem, catalog):
                found.append(made)
    return sorted(found, key=lambda made: (made.objective or 0.0, made.content_hash()))


def _on_every_market(
    one: Instance, problem: Problem, catalog: Catalog, libraries: Libraries
) -> Iterator[Instance]:
    """Yield an instance on the same nodes, all of them of one market."""
    library, nodes = libraries.roles[one.role], node_set(one)
    for row in find_templates(library.counts, libraries.kinds, [nodes])[nodes][:1]:
        for market in sorted({offer.market for offer in problem.offers}):
            rented: dict[tuple[str, str, Market], int] = {}
            for kind, number in nodes:
                sold = [
                    offer
                    for offer in problem.offers
                    if (offer.region, offer.market) == (one.region, market) and kind in offer.kinds
                ]
                if sold:
                    cheapest = min(
                        sold, key=lambda offer: (offer.usd_per_hour / offer.gpus, offer.key)
                    )
                    rented[kind, cheapest.node_type, market] = number
            if len(rented) == len(nodes):
                new = NewInstance(one.role, one.region, library.layout(int(row)), rented)
                yield build_instance(problem, catalog, new, id="more")


def on_offer(problem: Problem, instances: Iterable[Instance]) -> bool:
    """Whether there are machines for all."""
    gpus: Counter[OfferKey] = Counter()
    for instance in instances:
        for node in instance.nodes:
            gpus[instance.region_of(node), node.node_type, node.market] += node.gpus
    sold = {offer.key: offer.available * offer.gpus for offer in problem.offers}
    return all(number <= sold.get(key, 0) for key, number in gpus.items())


def _with_one_changed(
    plan: Plan, problem: Problem, catalog: Catalog, libraries: Libraries
) -> Iterator[list[Instance]]:
    prices = kind_prices(problem, libraries.kinds)
    seen: set[object] = set()
    for one in sorted(plan.instances, key=lambda instance: instance.id):
        alike = (one.role, one.region, one.engine, node_set(one), round(one.usd_per_hour, 9))
        # Of equal instances one is as good as another, and what costs nothing saves nothing.
        if alike in seen or one.usd_per_hour <= 0.0 or one.is_executor:
            continue
        seen.add(alike)
        rest = [other for other in plan.instances if other.id != one.id]
        yield rest
        library = libraries.roles[one.role]
        usd = library.counts @ prices
        # The dearest of the cheaper ones that may leave all demand served.
        lacks = _demand(problem, one) - MAX_SIMULATED * sum(
            keep(problem, catalog, other).throughput_per_s
            for other in rest
            if other.role == one.role
        )
        rows = np.flatnonzero(
            (usd < one.usd_per_hour * (1.0 - _ROUNDING))
            & (library.throughput * MAX_SIMULATED >= max(lacks, 0.0))
        )
        for row in rows[np.argsort(-usd[rows], kind="stable")][:_SWAPS]:
            other = stand(problem, catalog, one.role, library.layout(int(row)))
            if other is not None:
                yield [*rest, other.model_copy(update={"id": one.id})]


def _demand(problem: Problem, instance: Instance) -> float:
    service = problem.service(instance.service)
    return service.demand_per_s * units_per_request(service, instance.phase)


def _raise(
    problem: Problem, catalog: Catalog, rest: Iterable[Instance], carry: CarryMore
) -> list[Instance] | None:
    """Let the instances of each role carry its demand, in proportion; None where that is too much for all."""
    roles: dict[str, list[Instance]] = {}
    for one in rest:
        roles.setdefault(one.role, []).append(one)
    raised: list[Instance] = []
    for some in roles.values():
        carried = sum(one.throughput_per_s for one in some)
        factor = max(1.0, (1.0 + _ROUNDING) * _demand(problem, some[0]) / carried)
        most = {one.id: keep(problem, catalog, one) for one in some}
        if any(one.throughput_per_s * factor > most[one.id].throughput_per_s for one in some):
            full = [most[one.id].model_copy(update={"kept": one.kept}) for one in some]
            more = _overload(problem, full, carry)
            if more is None:
                return None
            raised += more
            continue
        raised += [_scale(one, factor) for one in some]
    return raised or None


def _overload(problem: Problem, full: list[Instance], carry: CarryMore) -> list[Instance] | None:
    """Let instances carry demand beyond the performance model, all alike; None where one does not."""
    total = sum(one.throughput_per_s for one in full)
    over = (1.0 + _ROUNDING) * _demand(problem, full[0]) / total if total > 0.0 else math.inf
    if over <= 1.0:
        return full
    found: list[Instance] = []
    for one in full:
        known = carry(one, over * one.throughput_per_s) if over <= MAX_SIMULATED else None
        if known is None:
            return None
        found.append(_scale(one, over).model_copy(update={"simulated": known}))
    return found


def _scale(one: Instance, factor: float) -> Instance:
    flows = tuple(f.model_copy(update={"per_s": f.per_s * factor}) for f in one.flows)
    update = {"flows": flows, "throughput_per_s": one.throughput_per_s * factor}
    return one.model_copy(update=update)
