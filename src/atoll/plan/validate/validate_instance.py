"""The rules of `validate` that concern one instance at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError, UsageError
from atoll.engines.table import ENGINES
from atoll.perf.memory_model import position_of
from atoll.plan.capacities import hop_bytes_per_unit, longest_context, memory_model, node_capacity
from atoll.plan.handover import hop_link
from atoll.plan.plan import (
    MAX_SIMULATED,
    SINK,
    SOURCE,
    Flow,
    Instance,
    Node,
    SimulatedCapacity,
)
from atoll.plan.problem import Problem
from atoll.plan.validate.validate_cluster import check_hosts, check_on_cluster
from atoll.plan.validate.validate_engine import check_engine
from atoll.plan.validate.violation import TOLERANCE, Violation, exceeds, violation


def check_structure(instance: Instance) -> list[Violation]:
    """Return what is wrong with an instance on its own: graph, layers, hops, flow, throughput."""
    broken = list(_graph(instance))
    if broken:
        return broken  # the rest would trip over the same flows
    violations = list(_layers(instance, max(node.end for node in instance.nodes)))
    violations += _hops(instance)
    violations += _flow(instance)
    return violations


def check_names(instance: Instance, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    """Yield every name of an instance that its problem or catalog does not know."""
    here = instance.id
    try:
        service = problem.service(instance.service)
        catalog.model(service.model)
    except UnknownNameError as error:
        yield violation("name", here, error.message)
        return
    if not service.takes_role(instance.role_id):
        yield violation("name", here, f"{instance.role} is no role of {service.name}")
    for region in sorted({instance.region, *map(instance.region_of, instance.nodes)}):
        if region not in problem.regions:
            yield violation("name", here, f"nothing is on offer in {region}")
    yield from check_hosts(instance, problem)
    if instance.guests and not instance.is_executor:
        yield violation("sharing", here, "only executors are shared")
    engine = ENGINES.get(instance.engine or "")
    if instance.engine is not None and (engine is None or engine.defaults is None):
        yield violation("engine", here, f"{instance.engine} is no engine of plans")
    for node in instance.nodes:
        try:
            catalog.node(node.node_type)
            catalog.node(node.kind)
        except UnknownNameError as error:
            yield violation("name", f"{here} {node.id}", error.message)


def check_node_limits(instance: Instance, problem: Problem, catalog: Catalog) -> list[Violation]:
    """Return where an instance asks more of its nodes and links than they can do."""
    if instance.executor_parts:
        return []  # it has no layers; `check_paths` looks at executors
    service = problem.service(instance.service)
    layers = catalog.model(service.model).llm.layers
    violations = [
        violation("layers", f"{instance.id} {node.id}", f"holds {_range(node)} of {layers} layers")
        for node in instance.nodes
        if not 0 <= node.start < node.end <= layers
    ]
    if violations:
        return violations
    if max(node.end for node in instance.nodes) != layers:
        message = f"no node holds the last of {layers} layers"
        violations.append(violation("layers", instance.id, message))
    violations += check_engine(instance, problem, catalog)
    if instance.simulated is not None:
        violations += _simulated(instance, instance.simulated, problem, catalog)
    carried = _inflow(instance)
    for node in instance.nodes:
        if not service.allows(node.kind):
            message = f"{service.name} may not stand on {node.kind}"
            violations.append(violation("pinning", f"{instance.id} {node.id}", message))
    if problem.cluster is not None:
        return violations + list(check_on_cluster(instance, carried, problem, catalog))
    for node in instance.nodes:
        violations += _node(instance, node, carried[node.id], problem, catalog)
    violations += _links(instance, problem, catalog)
    return violations


def _range(node: Node) -> str:
    return f"[{node.start}, {node.end})"


def _inflow(instance: Instance) -> dict[str, float]:
    """Units per second that enter each node."""
    carried = {node.id: 0.0 for node in instance.nodes}
    for flow in instance.flows:
        if flow.dst in carried:
            carried[flow.dst] += flow.per_s
    return carried


def _graph(instance: Instance) -> Iterator[Violation]:
    here = instance.id
    ids = Counter(node.id for node in instance.nodes)
    for node, count in ids.items():
        if count > 1:
            yield violation("graph", here, f"{count} nodes are called {node}")
    for flow in instance.flows:
        if flow.src != SOURCE and flow.src not in ids:
            yield violation("graph", here, f"a flow starts at {flow.src!r}, which is no node")
        if flow.dst != SINK and flow.dst not in ids:
            yield violation("graph", here, f"a flow ends at {flow.dst!r}, which is no node")
        if (flow.src, flow.dst) == (SOURCE, SINK):
            yield violation("graph", here, "a flow passes every node by")
    for (src, dst), count in Counter((flow.src, flow.dst) for flow in instance.flows).items():
        if count > 1:
            yield violation("graph", here, f"{count} flows from {src} to {dst}")


def _layers(instance: Instance, layers: int) -> Iterator[Violation]:
    """Every hop continues where the one before it ended, from layer 0 to the last."""
    nodes = {node.id: node for node in instance.nodes}
    for flow in instance.flows:
        where = f"{instance.id} {flow.src}->{flow.dst}"
        if flow.src == SOURCE:
            if nodes[flow.dst].start != 0:
                missed = nodes[flow.dst].start
                yield violation("layers", where, f"layers [0, {missed}) are skipped", missed)
            continue
        ran = nodes[flow.src].end
        if flow.dst == SINK:
            if ran != layers:
                message = f"layers [{ran}, {layers}) are skipped"
                yield violation("layers", where, message, layers - ran)
            continue
        after = nodes[flow.dst]
        if after.start > ran:
            message = f"layers [{ran}, {after.start}) are skipped"
            yield violation("layers", where, message, after.start - ran)
        elif after.end <= ran:
            yield violation(
                "layers", where, f"nothing of {_range(after)} is left to run after {ran}"
            )
        elif after.start < ran and not instance.partial:
            message = f"layers [{after.start}, {ran}) are held twice"
            yield violation("layers", where, message, ran - after.start)


def _hops(instance: Instance) -> Iterator[Violation]:
    longest = longest_way(instance.flows)
    if longest is None:
        yield violation("graph", instance.id, "flows run in a circle")
    elif longest > instance.stages:
        message = f"a way over {longest} nodes with time for {instance.stages}"
        yield violation("hops", instance.id, message, longest - instance.stages)


def longest_way(flows: tuple[Flow, ...]) -> int | None:
    """Return the most nodes on a way from source to sink, None if flows run in a circle."""
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for flow in flows:
        before.setdefault(flow.dst, []).append(flow.src)
        after.setdefault(flow.src, []).append(flow.dst)
    waiting = {place: len(sources) for place, sources in before.items()}
    ready = [place for place in after if place not in waiting]
    hops: dict[str, int] = dict.fromkeys(ready, 0)
    done = 0
    while ready:
        place = ready.pop()
        done += 1
        for following in after.get(place, ()):
            hops[following] = max(hops.get(following, 0), hops[place] + 1)
            waiting[following] -= 1
            if waiting[following] == 0:
                ready.append(following)
    if done < len(before.keys() | after.keys()):
        return None
    # The sink is one step past the last node.
    return max(0, hops.get(SINK, 1) - 1)


def _flow(instance: Instance) -> Iterator[Violation]:
    enters: defaultdict[str, float] = defaultdict(float)
    leaves: defaultdict[str, float] = defaultdict(float)
    for flow in instance.flows:
        enters[flow.dst] += flow.per_s
        leaves[flow.src] += flow.per_s
    # Rounding is relative to the whole: a trickle beside a river may look unbalanced alone.
    slack = TOLERANCE * max(instance.throughput_per_s, *enters.values(), TOLERANCE)
    for node in instance.nodes:
        lost = enters[node.id] - leaves[node.id]
        if abs(lost) > slack:
            message = f"{enters[node.id]:g}/s enter and {leaves[node.id]:g}/s leave"
            yield violation("flow", f"{instance.id} {node.id}", message, abs(lost))
    stated = instance.throughput_per_s
    for what, real in (("leave the source", leaves[SOURCE]), ("reach the sink", enters[SINK])):
        if abs(real - stated) > slack:
            message = f"{real:g}/s {what}, {stated:g}/s are stated"
            yield violation("throughput", instance.id, message, abs(real - stated))


def _node(
    instance: Instance, node: Node, carried: float, problem: Problem, catalog: Catalog
) -> Iterator[Violation]:
    where = f"{instance.id} {node.id}"
    service, problem = problem.service(instance.service), problem.run_by(instance.engine)
    phase = instance.phase
    kind = catalog.node(node.kind)
    try:
        memory = memory_model(problem, catalog, service, phase, kind, node.tp)
    except UsageError as error:
        yield violation("memory", where, error.message)
        return
    context = longest_context(catalog, service)
    if not memory.fits(node.start, node.end, context):
        need = memory.kv_bytes_per_sequence(node.start, node.end, context)
        short = need - memory.free_bytes(node.start, node.end)
        message = f"layers {_range(node)} on {kind.id} lack {short / 1e9:.3g} GB per GPU"
        yield violation("memory", where, message, max(0.0, short))
        return
    limit = _model_limit(instance, node, problem, catalog)
    if instance.simulated is not None:
        # Whether it was simulated with so much, and kept enough, `_simulated` has looked at.
        limit *= min(MAX_SIMULATED, instance.simulated.per_s / instance.simulated.model_per_s)
    if exceeds(carried, limit):
        message = f"{carried:g}/s on {kind.id} with {node.layers} layers, which carries {limit:g}/s"
        yield violation("node-capacity", where, message, carried - limit)


def _model_limit(instance: Instance, node: Node, problem: Problem, catalog: Catalog) -> float:
    """Return what a node carries by the capacity model, in units of the role per second."""
    service = problem.service(instance.service)
    return node_capacity(
        problem.run_by(instance.engine),
        catalog,
        service,
        instance.role_id,
        node.kind,
        node.layers,
        instance.stages,
        position_of(catalog.model(service.model).llm, node.start, node.end),
        tp=node.tp,
        region=instance.region,
        machine=node.node_type,
    )


def _simulated(
    instance: Instance, stated: SimulatedCapacity, problem: Problem, catalog: Catalog
) -> Iterator[Violation]:
    """Check that more than the capacity model gives an instance is what a simulation of it would say."""
    found: list[tuple[str, float]] = []
    if problem.cluster is not None:
        found.append(("is simulated, yet on a cluster flows are what they are", 0.0))
    model = min(
        sum(_model_limit(instance, node, problem, catalog) for node in stage.nodes)
        for stage in instance.layout()
    )
    # Links may leave less than nodes carry, never more.
    if exceeds(stated.model_per_s, model):
        said = f"the capacity model gives it {model:g}/s, {stated.model_per_s:g}/s are stated"
        found.append((said, stated.model_per_s - model))
    if exceeds(stated.per_s, MAX_SIMULATED * stated.model_per_s):
        over = stated.per_s / stated.model_per_s
        said = f"simulated with {over:.0%} of the capacity model, {MAX_SIMULATED:.0%} is the most"
        found.append((said, over - MAX_SIMULATED))
    if exceeds(instance.throughput_per_s, stated.per_s):
        said = f"carries {instance.throughput_per_s:g}/s, was simulated with {stated.per_s:g}/s"
        found.append((said, instance.throughput_per_s - stated.per_s))
    target = problem.service(instance.service).target
    if stated.kept < target:
        said = f"{stated.kept:.1%} kept their promise alone, {target:.1%} is asked for"
        found.append((said, target - stated.kept))
    if len(set(stated.seeds)) < len(stated.seeds):
        found.append(("names a seed twice", 0.0))
    for message, amount in found:
        field = "instances.simulated"
        yield violation("node-capacity", instance.id, message, amount, field=field)


def _links(instance: Instance, problem: Problem, catalog: Catalog) -> Iterator[Violation]:
    per_unit = hop_bytes_per_unit(catalog, problem.service(instance.service), instance.phase)
    nodes: Mapping[str, Node] = {node.id: node for node in instance.nodes}
    here = instance.region
    for flow in instance.flows:
        if flow.src not in nodes or flow.dst not in nodes:
            continue
        ends = (nodes[flow.src], nodes[flow.dst])
        link = catalog.links.between(here, here, *(node.node_type for node in ends))
        # A slice has its share of its own machine's network interface.
        own = (hop_link(catalog, node.node_type, here, node.gpus) for node in ends)
        limit = min(link.bandwidth_bytes_per_s, *(o.bandwidth_bytes_per_s for o in own))
        used = flow.per_s * per_unit
        if exceeds(used, limit):
            message = f"{used / 1e9:.3g} GB/s of activations over a link of {limit / 1e9:.3g} GB/s"
            where = f"{instance.id} {flow.src}->{flow.dst}"
            yield violation("link-capacity", where, message, used - limit)
