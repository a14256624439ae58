"""What binds a plan on a fixed cluster: full machines, full links, full memory, and the promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from atoll.catalog.catalog import Catalog
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.explain.changes import Change, faster_links, with_more
from atoll.solve.explain.explanation import Constraint, ExtraNodes
from atoll.solve.place.bottleneck import bottleneck

_MEMORY = "KV cache"
"""How the placing solvers begin a reason that is about memory."""

Bound = tuple[Constraint, Change]
"""A constraint, and the change that loosens it."""


def cluster_constraints(plan: Plan, problem: Problem, catalog: Catalog) -> Iterator[Bound]:
    """Yield what a plan on a fixed cluster uses up, with the change that loosens each; most of it first."""
    cluster = cluster_of(problem)
    machines: Counter[tuple[str, str]] = Counter()
    rules: Counter[int] = Counter()
    for instance in plan.instances:
        cut = bottleneck(instance, problem, catalog)
        if cut is None:
            continue
        machines.update((cluster.node(n.host).region, n.node_type) for n in cut.nodes if n.host)
        links = (cluster.link(src, dst) for src, dst in cut.links)
        rules.update(cluster.links.index(link) for link in links if link is not None)
    for (region, kind), count in sorted(machines.items(), key=lambda item: (-item[1], item[0])):
        noun = "machine" if count == 1 else "machines"
        yield _one_more(problem, region, kind, f"{count} full {noun} {kind} in {region}", "machine")
    for index, count in sorted(rules.items(), key=lambda item: (-item[1], item[0])):
        link = cluster.links[index]
        noun = "link" if count == 1 else "links"
        where = f"{count} full {noun} ({link.src} - {link.dst})"
        constraint = Constraint(kind="link", where=where, loosened="links ten times as fast")
        yield constraint, Change("links", where, faster_links(problem, [index]))
    for reason in plan.reasons:
        if reason.startswith(_MEMORY):
            yield from _memory(reason, problem)


def promise_constraint(problem: Problem) -> Bound:
    """Return the promises of all services as one constraint."""
    names = ", ".join(service.name for service in problem.services)
    constraint = Constraint(kind="promise", where=f"promises of {names}", loosened="best effort")
    return constraint, Change("best-effort", constraint.where, problem, best_effort=True)


def _memory(reason: str, problem: Problem) -> Iterator[Bound]:
    """Yield the machine whose memory is full: the reason names it."""
    for node in cluster_of(problem).nodes:
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
