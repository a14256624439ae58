"""Which machine each executor stands on, and paths that stay on a machine where interfaces are too slow.

Slices of an offer fit into as many machines as their GPUs add up to, in any order of equal sizes
(`solve.packing`). Where interfaces do not bind, requests are dealt evenly to executors that are alike. Where
they would, executors stand as the programme with topology says (`patterns`), and a request goes on to an
executor of the same machine as long as there is one with room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from atoll.catalog.catalog import Catalog
from atoll.plan.executors import machine_of
from atoll.plan.plan import Instance, PathStep, Plan, RequestPath
from atoll.plan.problem import Problem
from atoll.plan.validate.executors import machine_traffic
from atoll.plan.validate.violation import exceeds
from atoll.solve.cells.boxes import Box
from atoll.solve.packing import pack

_TRICKLE = 1e-9


def overloads_interfaces(plan: Plan, problem: Problem, catalog: Catalog) -> bool:
    """Return whether paths send more between machines than their interfaces carry."""
    executors = {i.id: i for i in plan.instances if i.is_executor}
    return any(
        exceeds(max(sent, received), catalog.links.nic_bytes_per_s(region, node_type))
        for region, node_type, sent, received in machine_traffic(
            plan, problem, catalog, executors
        ).values()
    )


def place_in(
    problem: Problem,
    instances: Sequence[Instance],
    boxes: Sequence[Box],
    by_type: Mapping[tuple[int, str], Sequence[str]],
) -> tuple[Instance, ...]:
    """Return instances with a slot and GPUs for every slice; new executors stand in the boxes given.

    Where something runs already, or slices of several machines make one instance, they are packed as usual.
    """
    known = {instance.id: instance for instance in instances}
    movable = all(not i.kept for i in instances) and all(len(i.nodes) == 1 for i in instances)
    if not boxes or not movable:
        return pack(problem, instances)
    left = {key: list(names) for key, names in by_type.items()}
    for box in boxes:
        start = 0
        taken = []
        for executor, _, number in box.executors:
            waiting = left.get((executor, box.offer[0]), [])
            mine = [name for name in waiting if _offer(known[name]) == box.offer][:number]
            for name in mine:
                waiting.remove(name)
            taken += mine
        # By falling size at multiples of it: no hole is left.
        for name in sorted(taken, key=lambda one: (-known[one].gpus, one)):
            instance = known[name]
            (node,) = instance.nodes
            if node.gpu_ids is not None:
                gpus = tuple(range(start, start + node.gpus))
                start += node.gpus
                seated = node.model_copy(update={"slot": box.slot, "gpu_ids": gpus})
                known[name] = instance.model_copy(update={"nodes": (seated,)})
    return tuple(known[instance.id] for instance in instances)


def _offer(instance: Instance) -> tuple[str, str, str]:
    return (instance.region, instance.nodes[0].node_type, instance.nodes[0].market)


def keep_local(
    paths: Sequence[RequestPath], instances: Sequence[Instance]
) -> tuple[RequestPath, ...]:
    """Return paths of single executors that go on in the same machine as far as weights allow.

    Every executor gets as much as before.
    """
    machines = {i.id: machine_of(i) for i in instances if i.is_executor}
    found: defaultdict[tuple[str, str, tuple[tuple[tuple[str, ...], str], ...]], float]
    found = defaultdict(float)
    for path in paths:
        ways: list[tuple[tuple[str, ...], float]] = [((), 1.0)]
        for step in path.steps:
            ways = _extend(ways, dict(step.instances), machines)
        for names, share in ways:
            steps = tuple((step.parts, n) for step, n in zip(path.steps, names, strict=True))
            found[path.service, path.klass, steps] += path.share * share
    return tuple(
        RequestPath(
            service=service,
            klass=klass,
            share=min(1.0, share),
            steps=tuple(PathStep(parts=parts, instances={n: 1.0}) for parts, n in steps),
        )
        for (service, klass, steps), share in sorted(found.items())
    )


def _extend(
    ways: Sequence[tuple[tuple[str, ...], float]],
    room: dict[str, float],
    machines: Mapping[str, tuple[object, ...]],
) -> list[tuple[tuple[str, ...], float]]:
    """Add a step to ways: first on machines where a way has been, then wherever there is room."""
    longer: list[tuple[tuple[str, ...], float]] = []
    waiting = list(ways)
    for near in (True, False):
        rest = []
        for names, share in waiting:
            here = {machines[name] for name in names}
            for name in sorted(room):
                if near and machines[name] not in here:
                    continue
                some = min(share, room[name])
                if some > _TRICKLE:
                    longer.append(((*names, name), some))
                    room[name] -= some
                    share -= some
            if share > _TRICKLE:
                rest.append((names, share))
        waiting = rest
    if waiting:
        # Rounding: what is left goes where there is most room.
        most = max(sorted(room), key=lambda name: room[name])
        longer += [((*names, most), share) for names, share in waiting]
    return longer
