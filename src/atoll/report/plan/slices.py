"""Which instance has which GPUs of the machines that are cut."""

from __future__ import annotations

from atoll.plan.plan import Instance, Node, Plan, format_gpus
from atoll.report.render import Grid

_COLUMNS = ("region", "machine", "market", "GPUs", "instance")
HOLDS = ("layers", "runs")
"""What the last column is called: layers of plain models, or also parts of others."""


def list_slices(plan: Plan) -> Grid:
    """Return a row for each slice, machine by machine, and one for what is idle of a machine."""
    machines: dict[tuple[str, str, str, str | int], list[tuple[Node, Instance]]] = {}
    for instance in plan.instances:
        for node in instance.nodes:
            if node.gpu_ids is not None:
                machine = node.host if node.host is not None else node.slot or 0
                key = (instance.region_of(node), node.node_type, node.market, machine)
                machines.setdefault(key, []).append((node, instance))
    rows: list[tuple[object, ...]] = []
    for (region, node_type, market, machine), slices in sorted(
        machines.items(), key=lambda entry: (*entry[0][:3], _rank(entry[0][3]))
    ):
        named = machine if isinstance(machine, str) else f"{node_type}, machine {machine}"
        here = (region, named, market)
        taken: set[int] = set()
        for node, instance in sorted(slices, key=lambda entry: entry[0].gpu_ids or ()):
            taken |= set(node.gpu_ids or ())
            held = f"[{node.start}, {node.end})"
            if instance.is_executor:
                held = "+".join(instance.parts)
            rows.append((*here, format_gpus(node.gpu_ids or ()), instance.id, held))
        idle = sorted(set(range(slices[0][0].machine_gpus)) - taken)
        if idle:
            rows.append((*here, format_gpus(idle), "idle", None))
    runs = any(instance.is_executor for instance in plan.instances)
    return Grid((*_COLUMNS, HOLDS[runs]), rows)


def _rank(machine: str | int) -> tuple[int, str]:
    return (machine, "") if isinstance(machine, int) else (0, machine)
