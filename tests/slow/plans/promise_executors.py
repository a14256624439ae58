"""Plans of executors beside a given one, written down one by one: see `promise_rivals`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError
from atoll.core.ids import Phase, RoleId
from atoll.plan.executors import routes_of, work_of
from atoll.plan.plan import Plan, RequestPath, RequestStep
from atoll.plan.problem import Problem, Service
from tests.slow.plans.promise_rivals import (
    MOST_INSTANCES,
    Piece,
    Rival,
    Slice,
    Yard,
    divisors,
    piece_of,
    stands_on,
)


def list_executor_rivals(
    problem: Problem, catalog: Catalog, plan: Plan, under_usd: float
) -> Iterator[Rival]:
    """Yield plans of executors below a price: all of at most three, and the given one with one changed."""
    yard = Yard(problem, catalog)
    (service,) = problem.graph_services
    groups = list(_groupings(catalog, service))
    singles = {
        parts: _executors(problem, catalog, service, parts)
        for parts in {p for g in groups for p in g}
    }
    for grouping in groups:
        for counts in itertools.product(range(1, MOST_INSTANCES + 1), repeat=len(grouping)):
            if sum(counts) > MOST_INSTANCES:
                continue
            own = [
                itertools.combinations_with_replacement(singles[parts], count)
                for parts, count in zip(grouping, counts, strict=True)
            ]
            for some in itertools.product(*own):
                chosen = tuple(piece for pieces in some for piece in pieces)
                if yard.price(chosen) < under_usd:
                    paths = _paths(catalog, service, chosen)
                    make = partial(_make, yard, plan, chosen, paths)
                    yield Rival(
                        make, problem, "of three", yard.price(chosen), 1.0, stands_on(chosen)
                    )
    yield from _changed_executors(yard, catalog, service, plan, under_usd)


def _needed(catalog: Catalog, service: Service) -> dict[str, tuple[str, ...]]:
    """By class the parts that its requests need, an llm whole, in the order they run."""
    return {
        klass.name: min(routes_of(catalog, service, klass), key=len) for klass in service.classes
    }


def _groupings(catalog: Catalog, service: Service) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to divide the parts that are needed into at most three executors."""
    needed = _needed(catalog, service)
    parts = list(dict.fromkeys(part for route in needed.values() for part in route))
    for where in itertools.product(range(MOST_INSTANCES), repeat=len(parts)):
        if all(n <= max((-1, *where[:at])) + 1 for at, n in enumerate(where)):
            groups: dict[int, list[str]] = defaultdict(list)
            for part, group in zip(parts, where, strict=True):
                groups[group].append(part)
            yield tuple(tuple(group) for group in groups.values())


def _executors(
    problem: Problem, catalog: Catalog, service: Service, parts: tuple[str, ...]
) -> list[Piece]:
    found = []
    role = RoleId(service.name, "+".join(sorted(parts)), Phase.SERVE)
    for offer in problem.offers:
        for size in offer.sizes:
            for tp in divisors(size):
                one = Slice(offer.key, size, tp, 0, 1)
                try:
                    work = work_of(
                        problem, catalog, service, parts, one.kind, machine=offer.node_type, tp=tp
                    )
                except AtollError:
                    continue
                if work is not None:
                    found.append(Piece(role, None, (one,), service.demand_per_s, parts))
    return found


def _paths(catalog: Catalog, service: Service, chosen: Sequence[Piece]) -> tuple[RequestPath, ...]:
    """One path a class: its parts in order, each group of them over its executors alike."""
    paths = []
    for klass, route in _needed(catalog, service).items():
        steps: list[RequestStep] = []
        for part in route:
            own = [n for n, piece in enumerate(chosen) if part in piece.parts]
            names = {f"i{n}": 1.0 / len(own) for n in own}
            if steps and list(steps[-1].instances) == list(names):
                steps[-1] = RequestStep(parts=(*steps[-1].parts, part), instances=names)
            else:
                steps.append(RequestStep(parts=(part,), instances=names))
        paths.append(RequestPath(service=service.name, klass=klass, share=1.0, steps=tuple(steps)))
    return tuple(paths)


def _changed_executors(
    yard: Yard, catalog: Catalog, service: Service, plan: Plan, under_usd: float
) -> Iterator[Rival]:
    problem = yard.problem
    for old in plan.executor_instances:
        rest = _without(plan, old.id)
        if rest is not None and rest.usd_per_hour < under_usd:
            yield Rival(
                partial(_same, rest), problem, "one left out", rest.usd_per_hour, 1.0, old.id
            )
        for piece in _executors(problem, catalog, service, old.parts):
            others = [i for i in plan.instances if i.id != old.id]
            chosen = [*(piece_of(i) for i in others), piece]
            if yard.price(chosen) >= under_usd:
                continue
            names = [*(i.id for i in others), old.id]
            make = partial(_make, yard, plan, chosen, plan.paths, names)
            yield Rival(make, problem, "one changed", yard.price(chosen), 1.0, stands_on(chosen))


def _make(
    yard: Yard,
    plan: Plan,
    chosen: Sequence[Piece],
    paths: tuple[RequestPath, ...],
    names: Sequence[str] | None = None,
) -> Plan:
    made = yard.assemble(yard.problem, chosen, {})
    if names is not None:
        by_number = sorted(made.instances, key=lambda i: int(i.id[1:]))
        renamed = [
            one.model_copy(update={"id": name}) for one, name in zip(by_number, names, strict=True)
        ]
        made = made.model_copy(update={"instances": tuple(sorted(renamed, key=lambda i: i.id))})
    return made.model_copy(update={"paths": paths, "engines": plan.engines})


def _same(plan: Plan) -> Plan:
    return plan


def _without(plan: Plan, name: str) -> Plan | None:
    """The plan without an executor, its requests dealt to those beside it; None where there are none."""
    paths = []
    for path in plan.paths:
        steps = []
        for step in path.steps:
            left = {key: weight for key, weight in step.instances.items() if key != name}
            total = sum(left.values())
            if total <= 0.0:
                break
            weights = {key: weight / total for key, weight in left.items()}
            steps.append(step.model_copy(update={"instances": weights}))
        else:
            paths.append(path.model_copy(update={"steps": tuple(steps)}))
    shares: dict[tuple[str, str], float] = defaultdict(float)
    for path in paths:
        shares[path.service, path.klass] += path.share
    if any(shares[path.service, path.klass] <= 0.0 for path in plan.paths):
        return None
    instances = tuple(i for i in plan.instances if i.id != name)
    usd = plan.usd_per_hour - sum(i.usd_per_hour for i in plan.instances if i.id == name)
    return plan.model_copy(
        update={
            "instances": instances,
            "paths": tuple(
                path.model_copy(update={"share": path.share / shares[path.service, path.klass]})
                for path in paths
            ),
            "usd_per_hour": usd,
            "objective": usd,
        }
    )
