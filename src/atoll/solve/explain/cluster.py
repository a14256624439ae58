"""What binds a plan on a fixed cluster: full machines, full links, full memory, and the promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.explain.changes import Change, faster_links, with_more
from atoll.solve.explain.explanation import Constraint, ExtraNodes
from atoll.solve.place.bottleneck import Bottleneck, bottleneck

_MEMORY = "KV cache"
"""How the placing solvers begin a reason that is about memory."""

Bound = tuple[Constraint, Change]
"""A constraint, and the change that loosens it."""


def cluster_constraints(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Bound]:
    """Yield what a plan on a fixed cluster uses up, with the change that loosens each."""
    seen: set[str] = set()
    for instance in plan.instances:
        cut = bottleneck(instance, problem, catalog)
        for constraint, change in () if cut is None else _full(cut, problem):
            if constraint.where not in seen:
                seen.add(constraint.where)
                yield constraint, change
    for reason in plan.reasons:
        if reason.startswith(_MEMORY):
            yield from _memory(reason, problem)


def promise_constraint(problem: Problem) -> Bound:
    """Return the promises of all services as one constraint."""
    names = ", ".join(service.name for service in problem.services)
    constraint = Constraint(kind="promise", where=f"promises of {names}", loosened="best effort")
    return constraint, Change("best-effort", constraint.where, problem, best_effort=True)


def _full(cut: Bottleneck, problem: Problem) -> Iterator[Bound]:
    """Yield the full machines, by region and type, and the rules of full links."""
    cluster = problem.cluster
    if cluster is None:
        return
    machines = Counter(
        (cluster.node(node.host).region, node.node_type) for node in cut.nodes if node.host
    )
    for (region, kind), count in sorted(machines.items()):
        noun = "machine" if count == 1 else "machines"
        yield _one_more(problem, region, kind, f"{count} full {noun} {kind} in {region}", "machine")
    rules: dict[int, int] = Counter()
    for src, dst in cut.links:
        link = cluster.link(src, dst)
        if link is not None:
            rules[cluster.links.index(link)] += 1
    for index, count in sorted(rules.items()):
        link = cluster.links[index]
        noun = "link" if count == 1 else "links"
        where = f"{count} full {noun} ({link.src} - {link.dst})"
        constraint = Constraint(kind="link", where=where, loosened="links ten times as fast")
        yield constraint, Change("links", where, faster_links(problem, [index]))


def _memory(reason: str, problem: Problem) -> Iterator[Bound]:
    """Yield the machine whose memory is full: the reason names it."""
    cluster = problem.cluster
    for node in () if cluster is None else cluster.nodes:
        if f"{_MEMORY} of {node.name} " in reason:
            yield _one_more(problem, node.region, node.node_type, reason, "memory")


def _one_more(problem: Problem, region: str, kind: str, where: str, what: str) -> Bound:
    more = ExtraNodes(region=region, node_type=kind, market="owned", count=1)
    constraint = Constraint(
        kind="memory" if what == "memory" else "machine",
        where=where,
        loosened=f"one more {kind} in {region}",
        rental=more,
    )
    return constraint, Change("nodes", kind, with_more(problem, (more,)), rentals=(more,))
