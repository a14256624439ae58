"""Why a node type is in a plan or not: who uses it, what it would have to cost, why it carries nothing."""

from __future__ import annotations

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase, RoleId
from atoll.perf.layers import default_tp
from atoll.plan.capacities import longest_context, memory_model
from atoll.plan.cluster_profiles import service_profiles
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.explain.plan_explanation import NodeUse, RoleFit
from atoll.solve.templates.generate import TemplateLibrary
from atoll.solve.templates.library import Libraries


def node_use(
    node_type: str, plan: Plan, problem: Problem, catalog: Catalog, libraries: Libraries | None
) -> NodeUse:
    """Return who uses a node type, or whether it could carry anything; without asking for prices.

    Of rented nodes the `libraries` say what they carry; where they are not given, nothing is said of it.
    """
    offers = [offer for offer in problem.offers if offer.node_type == node_type]
    counts = plan.count_nodes().items()
    used = sum(count for (_, kind, _), count in counts if kind == node_type)
    standing = [i for i in plan.instances if any(n.node_type == node_type for n in i.nodes)]
    users = dict.fromkeys(
        f"{i.service} {i.role_id.component if i.is_executor else i.phase}" for i in standing
    )
    rented = problem.cluster is None
    if rented:
        fits = () if libraries is None else _fits(node_type, problem, catalog, libraries)
    else:
        fits = tuple(_fit_on_cluster(node_type, problem, catalog, s) for s in problem.services)
    price = min((o.usd_per_hour for o in offers if o.available), default=None)
    use = NodeUse(
        node_type=node_type,
        verdict="used",
        used=used,
        available=sum(offer.available for offer in offers),
        instances=tuple(instance.id for instance in standing),
        used_by=tuple(users),
        roles=fits,
        usd_per_hour=price if rented else None,
    )
    if used:
        return use
    if not use.available:
        return use.model_copy(update={"verdict": "not-offered"})
    if fits and not any(fit.carries for fit in fits):
        return use.model_copy(update={"verdict": "carries-nothing"})
    return use.model_copy(update={"verdict": "too-dear" if rented else "idle", "asked": False})


def _fit_on_cluster(kind: str, problem: Problem, catalog: Catalog, service: Service) -> RoleFit:
    role = str(service.roles[-1])
    if not service.allows(kind):
        return RoleFit(role=role, carries=False, reason=f"{service.name} may not stand on it")
    if kind not in service_profiles(problem, catalog, service):
        reason = f"not one layer of {service.name} fits beside a request"
        return RoleFit(role=role, carries=False, reason=reason)
    return RoleFit(role=role, carries=True, reason=f"carries {service.name}")


def _fits(
    node_type: str, problem: Problem, catalog: Catalog, libraries: Libraries
) -> tuple[RoleFit, ...]:
    """Return for each role whether the machine, whole or cut, can be part of an instance of it."""
    kinds = sorted(
        {kind for o in problem.offers if o.node_type == node_type for kind in o.kinds},
        key=lambda kind: (kind != node_type, kind),
    )
    fits = []
    for role in problem.roles:
        tried = [role_fit(problem, catalog, libraries, role, kind) for kind in kinds]
        fits.append(next((fit for fit in tried if fit.carries), tried[0]))
    return tuple(fits)


def role_fit(
    problem: Problem, catalog: Catalog, libraries: Libraries, role: RoleId, kind: str
) -> RoleFit:
    """Return whether a kind of node can be part of an instance of a role, and if not, why."""
    library = libraries.roles[str(role)]
    service = problem.service_of(role)
    column = libraries.kinds.index(kind)
    tables = library.tables
    name = f"{service.name} {role.phase}"
    if not service.allows(kind):
        reason = f"{service.name} may not stand on it"
    elif library.counts[:, column].any():
        return RoleFit(role=str(role), carries=True, reason=f"carries {name}")
    elif tables.memory_bytes[column] > tables.memory_limit:
        ratio = problem.settings.memory_ratio
        reason = f"has more than {ratio:g} times the memory of {service.name} (memory_ratio)"
    elif not tables.rates[:, :, column].any():
        reason = f"{_why_nothing(problem, catalog, service, role.phase, kind)} ({name})"
    elif _carried_alone(library, column) <= 0.0:
        max_nodes = problem.settings.max_nodes_per_instance
        reason = f"up to {max_nodes} of them do not hold {service.name} within the promise ({name})"
    else:
        reason = f"adds nothing to nodes that carry {name} without it"
    return RoleFit(role=str(role), carries=False, reason=reason)


def _why_nothing(
    problem: Problem, catalog: Catalog, service: Service, phase: Phase, kind: str
) -> str:
    """Say why not a single layer is carried: it does not fit, or takes too long."""
    node = catalog.node(kind)
    phases = (Phase.PREFILL, Phase.DECODE) if phase is Phase.BOTH else (phase,)
    tp = default_tp(catalog.model(service.model).llm, node)
    for each in phases:
        memory = memory_model(problem, catalog, service, each, node, tp)
        if memory.max_layers(longest_context(catalog, service)) == 0:
            return "not one layer fits beside a request"
    return "breaks the promise with a single layer"


def _carried_alone(library: TemplateLibrary, column: int) -> float:
    """The most that an instance of this kind of node alone carries."""
    tables, best = library.tables, 0.0
    for number in range(1, library.max_nodes + 1):
        if number * tables.memory_bytes[column] > tables.memory_limit:
            break
        counts = np.zeros(len(tables.node_types), np.int8)
        counts[column] = number
        best = max(best, library.layout_of(counts).throughput)
    return best
