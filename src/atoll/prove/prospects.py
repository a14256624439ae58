"""Templates that a cheaper plan would use next: what to simulate before it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.core.ids import parse_node_type
from atoll.solve.assembly import NewInstance, build_instance
from atoll.solve.derating import Derating, NodeSet, find_templates

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Market
    from atoll.plan.problem import Problem
    from atoll.solve.assembly import LayoutLike
    from atoll.solve.templates.library import Libraries

Key = tuple[str, NodeSet]


def find_prospects(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    derating: Derating,
    roles: list[str],
    max_prospects: int,
    slack: float,
) -> dict[Key, Instance]:
    """Return, of each role, up to `max_prospects` templates that nobody has simulated, cheapest first.

    They cost at most 1 + `slack` times what the cheapest that is known does, for what they carry.
    """
    prices = kind_prices(problem, libraries.kinds)
    found: dict[Key, Instance] = {}
    for role in roles:
        library = libraries.roles[role]
        rates = derating.throughput(role, library)
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = np.where(rates > 0.0, (library.counts @ prices) / rates, np.inf)
        known = np.zeros(len(rates), np.bool_)
        kinds = library.tables.node_types
        sets = [nodes for of_role, nodes in derating.shares if of_role == role]
        for rows in find_templates(library.counts, kinds, sets).values():
            known[rows] = True
        limit = np.min(cost[known], initial=np.inf) * (1.0 + slack)
        order = np.argsort(cost, kind="stable")
        taken = 0
        # Enough to find the prospects among those that cannot be had anywhere, and not the whole library.
        for index in order[: 4 * max_prospects + int(known.sum())]:
            if taken >= max_prospects or not cost[index] <= limit:
                break
            if known[index]:
                continue
            instance = stand(problem, catalog, role, library.layout(int(index)))
            if instance is not None:
                nodes = tuple(
                    (kinds[c], int(library.counts[index, c]))
                    for c in np.flatnonzero(library.counts[index])
                )
                found[role, tuple(sorted(nodes))] = instance
                taken += 1
    return found


def find_rivals(
    problem: Problem, catalog: Catalog, libraries: Libraries, keys: Iterable[Key]
) -> dict[Key, Instance]:
    """Return templates as other engines than the library's run them; the engine is last in their keys."""
    found: dict[Key, Instance] = {}
    for role, nodes in sorted(keys):
        library = libraries.roles[role]
        for row in find_templates(library.counts, libraries.kinds, [nodes])[nodes]:
            for layout in library.rivals(int(row)):
                one = stand(problem, catalog, role, layout)
                if one is not None:
                    found[role, (*nodes, (layout.engine or "", 0))] = one
    return found


def kind_prices(problem: Problem, kinds: tuple[str, ...]) -> NDArray[np.float64]:
    """Return the least that a node of each kind costs per hour; a slice, its share of a machine."""
    # A price so high that a kind that nobody offers is never a prospect.
    prices = np.full(len(kinds), 1e9)
    for offer in problem.offers:
        if offer.available <= 0:
            continue
        for kind in offer.kinds:
            share = parse_node_type(kind).gpu_count / offer.gpus
            at = kinds.index(kind)
            # A little above 0, so that nodes that cost nothing still have an order by what they carry.
            prices[at] = min(prices[at], offer.usd_per_hour * share + 1e-9)
    return prices


def stand(problem: Problem, catalog: Catalog, role: str, layout: LayoutLike) -> Instance | None:
    """Return the instance of a layout where all of its nodes can be had; None where that is nowhere."""
    kinds = Counter(kind for stage in layout.stages for kind in stage.nodes)
    for region in problem.regions:
        rented: dict[tuple[str, str, Market], int] = {}
        for kind, number in kinds.items():
            offers = [
                o
                for o in problem.offers
                if o.region == region
                and kind in o.kinds
                and o.available * (o.gpus // parse_node_type(kind).gpu_count) >= number
            ]
            if not offers:
                break
            offer = min(offers, key=lambda o: (o.usd_per_hour / o.gpus, o.key))
            rented[kind, offer.node_type, offer.market] = number
        else:
            return build_instance(
                problem, catalog, NewInstance(role, region, layout, rented), id="prospect"
            )
    return None
