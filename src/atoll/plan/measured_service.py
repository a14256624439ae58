"""Which nodes of a plan are predicted by a server that was measured, and which server that is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atoll.perf.measured_engine import with_measured
from atoll.plan.cluster_profiles import is_measured

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.catalog.measured_servers import MeasuredServer
    from atoll.plan.plan import Instance
    from atoll.plan.problem import Problem


def find_servers(
    problem: Problem, catalog: Catalog, instances: Iterable[Instance]
) -> dict[tuple[str, str], MeasuredServer | None]:
    """Return by service and kind of node the server that predictions rest on, None for none.

    Empty where no server was measured.
    """
    found: dict[tuple[str, str], MeasuredServer | None] = {}
    if not any(gpu.servers for gpu in catalog.gpus.values()):
        return found
    for instance in instances:
        service = problem.service(instance.service)
        # Profiles of nodes of a cluster are curves, and nothing is predicted.
        has_curves = problem.cluster is not None and is_measured(problem, catalog, instance)
        if service.is_graph or has_curves:
            continue
        spec = catalog.model(service.model).llm
        engine = problem.run_by(instance.engine).engine_of(service)
        for node in instance.nodes:
            gpu = catalog.node(node.kind).gpu
            profile = with_measured(engine.on(gpu), spec, gpu, node.tp)
            found[service.name, node.kind] = profile.measured
    return found


def describe_measured(
    problem: Problem, catalog: Catalog, instances: Iterable[Instance]
) -> tuple[str, ...]:
    """Return a line for each service and kind of node whose times were measured on a server."""
    servers = find_servers(problem, catalog, instances)
    return tuple(
        f"{service} on {kind}: measured with the {server}"
        for (service, kind), server in sorted(servers.items())
        if server is not None
    )


def service_servers(
    problem: Problem, catalog: Catalog, instances: Iterable[Instance]
) -> tuple[MeasuredServer | None, ...]:
    """Return for every service the server that all its nodes rest on, the least sure one of several."""
    servers = find_servers(problem, catalog, instances)
    found: list[MeasuredServer | None] = []
    for service in problem.services:
        own = [server for (name, _), server in servers.items() if name == service.name]
        known = [server for server in own if server is not None]
        whole = own and len(known) == len(own)
        found.append(max(known, key=lambda one: one.first_token_error) if whole else None)
    return tuple(found)
