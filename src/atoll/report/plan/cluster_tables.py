"""A plan on a fixed cluster in a terminal: machines, layers, use, sites, bottleneck, what is known of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.catalog.catalog import Catalog
from atoll.core.units import format_share, format_throughput, pluralize
from atoll.engines.table import find_engine
from atoll.plan.cluster_profiles import cluster_of, is_measured, request_tokens
from atoll.plan.engine_layout import describe_engine, describe_limits
from atoll.plan.measured_service import describe_measured
from atoll.plan.plan import SINK, SOURCE, Instance, Node, Plan, format_gpus
from atoll.plan.problem import Problem
from atoll.plan.proof import binding_reasons, proof_of
from atoll.report.promises import draw_verdicts, judge_plan, list_plan_groups
from atoll.report.render import Grid
from atoll.report.terminal import table
from atoll.solve.comparison import Compared
from atoll.solve.place.bottleneck import Bottleneck, Use, bottleneck, node_use

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_LISTED = 48
"""Machines listed one by one; more of them are folded by site, type and layers."""


@dataclass(frozen=True)
class MachineRow:
    """One machine, or equal ones together: what it holds, carries and could carry."""

    service: str
    machine: str
    node_type: str
    site: str
    layers: str
    run_by: str
    tokens_per_s: float
    use: float


def describe_plan(plan: Plan, problem: Problem) -> str:
    """Say in a line or two what the plan carries and what is known of how good it is."""
    nodes = f"{plan.nodes} of {pluralize(len(cluster_of(problem).nodes), 'node')}"
    requests = sum(instance.throughput_per_s for instance in plan.instances)
    hops = max((instance.stages for instance in plan.instances), default=0)
    tokens = 0.0 if plan.objective is None else plan.objective
    if plan.goal == "fair":
        demanded = sum(s.rate_per_s * s.headroom * request_tokens(s) for s in problem.services)
        text = (
            f"Every service gets at least {format_share(tokens / demanded)} of its demand "
            f"({tokens:,.1f} tokens/s at that share) on {nodes}"
        )
    else:
        per_s = format_throughput(requests).removesuffix("/s")
        text = (
            f"{tokens:,.1f} tokens/s ({per_s} requests/s) on {nodes}, "
            f"at most {pluralize(hops, 'hop')}"
        )
    return f"{text}. {proof_of(plan).text}"


def describe_shortage(plan: Plan) -> str | None:
    """Say which share of demand a plan serves, unless it serves all."""
    if plan.status == "infeasible":
        return "INFEASIBLE: the cluster has no placement."
    if plan.status != "partial":
        return None
    short = {name: part for name, part in plan.served_fraction.items() if part < 1.0}
    shares = ", ".join(f"{format_share(part)} of {name}" for name, part in short.items())
    return f"PARTIAL: serves {shares}."


def list_machines(plan: Plan, problem: Problem, catalog: Catalog) -> list[MachineRow]:
    """Return the machines of a plan in the order requests pass them, equal ones folded if there are many."""
    folded = plan.nodes > _MAX_LISTED
    rows: list[MachineRow] = []
    for instance in plan.instances:
        use = node_use(instance, problem, catalog)
        groups: dict[tuple[object, ...], list[Node]] = {}
        for node in sorted(instance.nodes, key=lambda n: (n.start, n.end, n.host or "")):
            site = instance.region_of(node)
            machine = None if folded else (node.host, node.gpu_ids)
            key = (node.start, node.end, site, node.node_type, node.gpus, machine)
            groups.setdefault(key, []).append(node)
        run_by = describe_engine(instance, catalog)
        if run_by is None and is_measured(problem, catalog, instance):
            run_by = "as measured"
        elif run_by is None:
            run_by = _describe_limits(instance, problem, catalog).partition(" (")[0]
        rows += [
            _fold_machines(instance, nodes, [use[n.id] for n in nodes], run_by)
            for nodes in groups.values()
        ]
    return rows


def _describe_limits(instance: Instance, problem: Problem, catalog: Catalog) -> str:
    spec = catalog.model(problem.service(instance.service).model).llm
    return describe_limits(instance, spec, catalog)


def list_unrun(plan: Plan, problem: Problem, catalog: Catalog) -> list[str]:
    """Return a sentence for each instance that the engine it is placed for does not run."""
    engine = problem.settings.engine
    if not find_engine(engine).launches:
        return []
    told = {
        instance.id: _describe_limits(instance, problem, catalog)
        for instance in plan.instances
        if instance.engine is None and not is_measured(problem, catalog, instance)
    }
    lines = []
    for name, text in told.items():
        who, _, why = text.partition(" (")
        able = who.removeprefix("only ")
        hint = "" if able == who else f"; --engines {able.partition(' ')[0]} places with its own"
        lines.append(f"{name}: {who} runs it, and its times are those of {engine} ({why}{hint}.")
    return lines


def _fold_machines(
    instance: Instance, nodes: Sequence[Node], use: Sequence[Use], run_by: str
) -> MachineRow:
    first = nodes[0]
    carried, able = sum(u.tokens_per_s for u in use), sum(u.capacity for u in use)
    return MachineRow(
        service=instance.service,
        machine=_name_machine(first) if len(nodes) == 1 else f"{len(nodes)} machines",
        node_type=first.node_type if first.gpu_ids is None else f"{first.gpus}/{first.node_type}",
        site=instance.region_of(first),
        layers=f"[{first.start}, {first.end})",
        run_by=run_by,
        tokens_per_s=carried,
        use=carried / able if able > 0 else 0.0,
    )


def _name_machine(node: Node) -> str:
    """The machine, and which of its GPUs where it is cut."""
    name = node.host or node.id
    return name if node.gpu_ids is None else f"{name}, GPUs {format_gpus(node.gpu_ids)}"


def sum_site_flows(instance: Instance, problem: Problem) -> dict[tuple[str, str], float]:
    """Return the tokens/s that go from site to site, those inside a site left out."""
    tokens = request_tokens(problem.service(instance.service))
    site = {node.id: instance.region_of(node) for node in instance.nodes}
    flows: dict[tuple[str, str], float] = {}
    for flow in instance.flows:
        if flow.src == SOURCE or flow.dst == SINK or site[flow.src] == site[flow.dst]:
            continue
        pair = (site[flow.src], site[flow.dst])
        flows[pair] = flows.get(pair, 0.0) + flow.per_s * tokens
    return dict(sorted(flows.items()))


def find_bottlenecks(
    plan: Plan, problem: Problem, catalog: Catalog
) -> Iterator[tuple[Instance, Bottleneck | None]]:
    """Yield every instance with the machines and links that are full."""
    for instance in plan.instances:
        yield instance, bottleneck(instance, problem, catalog)


def describe_unused(plan: Plan, problem: Problem) -> str | None:
    """Say which machines hold nothing, by type."""
    used = {node.host for instance in plan.instances for node in instance.nodes}
    idle = Counter(n.node_type for n in cluster_of(problem).nodes if n.name not in used)
    if not idle:
        return None
    return "Unused: " + ", ".join(f"{n}x {kind}" for kind, n in sorted(idle.items())) + "."


def draw_cluster_plan(
    plan: Plan, problem: Problem, catalog: Catalog, compared: Sequence[Compared]
) -> RenderableType:
    """Return everything about a plan on a fixed cluster for a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [*draw_verdicts(judge_plan(plan))]
    groups = list_plan_groups(plan)
    if groups.rows:
        parts.append(groups.draw("Promises by group of requests"))
    shortage = describe_shortage(plan)
    if shortage is not None:
        parts.append(Text(shortage, style="bold red"))
    machines = tabulate_machines(plan, problem, catalog, service=len(plan.instances) > 1)
    parts += [
        machines.draw("Machines"),
        _draw_services(plan, problem),
    ]
    parts += [Text(line) for line in list_unrun(plan, problem, catalog)]
    parts += [
        Text(f"Times of {line}.") for line in describe_measured(problem, catalog, plan.instances)
    ]
    reasons = binding_reasons(plan)
    if reasons:
        parts.append(Text(f"What binds: {'; '.join(reasons)}."))
    parts += [Text(f"Simulated: {note}.") for note in plan.notes]
    for instance in plan.instances:
        name = f" of {instance.service}" if len(plan.instances) > 1 else ""
        between = sum_site_flows(instance, problem)
        if between:
            flows = ", ".join(f"{a} -> {b} {value:,.0f}" for (a, b), value in between.items())
            parts.append(Text(f"Tokens/s between sites{name}: {flows}."))
    idle = describe_unused(plan, problem)
    if idle is not None:
        parts.append(Text(idle))
    if compared:
        parts.append(_draw_comparison(plan, compared))
    parts.append(Text(f"{plan.problem_name}: {describe_plan(plan, problem)}", style="bold"))
    return Group(*parts)


def tabulate_machines(plan: Plan, problem: Problem, catalog: Catalog, *, service: bool) -> Grid:
    """Return a row for each machine, or equal ones together; with its service if asked for."""
    columns = ("machine", "type", "site", "engine", "layers", "tokens/s", "in use")
    rows = [
        (
            *([row.service] if service else []),
            row.machine,
            row.node_type,
            row.site,
            row.run_by,
            row.layers,
            f"{row.tokens_per_s:,.0f}",
            format_share(row.use),
        )
        for row in list_machines(plan, problem, catalog)
    ]
    return Grid(("service", *columns) if service else columns, rows, columns[4:])


def _draw_services(plan: Plan, problem: Problem) -> RenderableType:
    lines = []
    for service in problem.services:
        carried = sum(i.throughput_per_s for i in plan.instances if i.service == service.name)
        demanded = service.rate_per_s * service.headroom
        lines.append(
            (
                service.name,
                format_throughput(demanded) if demanded > 0 else None,
                format_throughput(carried),
                f"{carried * request_tokens(service):,.0f}",
                format_share(min(1.0, carried / demanded)) if demanded > 0 else None,
            )
        )
    columns = ("service", "requests asked", "carried", "tokens/s", "served")
    return table(columns, lines, title="Demand and capacity", right=columns[1:])


def _draw_comparison(plan: Plan, compared: Sequence[Compared]) -> RenderableType:
    tokens_per_s = plan.objective or 0.0
    hops = max((instance.stages for instance in plan.instances), default=0)
    lines: list[tuple[object, ...]] = [
        (plan.solver, f"{tokens_per_s:,.1f}", "x1.00", plan.nodes, hops)
    ]
    for other in compared:
        if other.tokens_per_s is None:
            lines.append((other.solver, None, None, None, None))
            continue
        ratio = f"x{other.tokens_per_s / tokens_per_s:.2f}" if tokens_per_s > 0 else None
        lines.append((other.solver, f"{other.tokens_per_s:,.1f}", ratio, other.nodes, other.hops))
    columns = ("solver", "tokens/s", "ratio", "nodes", "hops")
    return table(columns, lines, title="Next to simple rules", right=columns[1:])
