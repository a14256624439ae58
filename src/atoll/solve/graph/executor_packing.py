"""Which machine each executor stands on, and paths that stay on a machine where interfaces are too slow.

Slices of an offer fit into as many machines as their GPUs add up to, in any order of equal sizes
(`solve.packing`). Where interfaces do not bind, requests are dealt evenly to executors that are alike. Where
they would, executors stand as the program with topology says (`patterns`), and a request goes on to an
executor of the same machine as long as there is one with room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.validate_executors import machine_traffic
from atoll.plan.validate.violation import exceeds
from atoll.solve.graph.boxes import LaidMachine
from atoll.solve.graph.graph_types import GraphProgram
from atoll.solve.packing import pack

_TRICKLE = 1e-9


def overloads_interfaces(plan: Plan, problem: Problem, catalog: Catalog) -> bool:
    """Return whether paths send more between machines than their interfaces carry."""
    executors = {i.id: i for i in plan.executor_instances}
    return any(
        exceeds(max(sent, received), catalog.links.nic_bytes_per_s(region, node_type))
        for region, node_type, sent, received in machine_traffic(
            plan, problem, catalog, executors
        ).values()
    )


Seats = dict[tuple[str, int, int], list[str]]
"""Executors by region, box (its number) and type."""


def place_in(
    problem: Problem,
    instances: Sequence[Instance],
    boxes: Sequence[LaidMachine],
    by_type: Mapping[tuple[int, str], Sequence[str]],
) -> tuple[tuple[Instance, ...], Seats]:
    """Return instances with a slot and GPUs for every slice, and who sits in which box.

    New executors stand in the boxes given. Where something runs already, or slices of several machines make
    one instance, all are packed as usual and nobody has a seat.
    """
    known = {instance.id: instance for instance in instances}
    movable = all(not i.kept for i in instances) and all(len(i.nodes) == 1 for i in instances)
    if not boxes or not movable:
        return pack(problem, instances), {}
    seats: Seats = {}
    left = {key: list(names) for key, names in by_type.items()}
    for index, box in enumerate(boxes):
        start = 0
        taken = []
        for executor, _, number in box.executors:
            waiting = left.get((executor, box.offer[0]), [])
            mine = [name for name in waiting if _offer(known[name]) == box.offer][:number]
            for name in mine:
                waiting.remove(name)
            taken += mine
            seats.setdefault((box.offer[0], index, executor), []).extend(mine)
        # By falling size at multiples of it: no hole is left.
        for name in sorted(taken, key=lambda one: (-known[one].gpus, one)):
            instance = known[name]
            (node,) = instance.nodes
            if node.gpu_ids is not None:
                gpus = tuple(range(start, start + node.gpus))
                start += node.gpus
                seated = node.model_copy(update={"slot": box.slot, "gpu_ids": gpus})
                known[name] = instance.model_copy(update={"nodes": (seated,)})
    return tuple(known[instance.id] for instance in instances), seats


def _offer(instance: Instance) -> tuple[str, str, str]:
    return (instance.region, instance.nodes[0].node_type, instance.nodes[0].market)


Spread = dict[str, float]
"""Requests/s by executor."""


def local_paths(
    boxes: Sequence[LaidMachine],
    seats: Mapping[tuple[str, int, int], Sequence[str]],
    program: GraphProgram,
) -> list[tuple[str, str, float, tuple[tuple[str, str], ...]]]:
    """Return routes of single requests over executors of boxes: service, class, requests/s, (part, executor).

    Every executor runs a part for as many as its box's flows say. From part to part a request stays on its
    executor if that has room, or on its machine, and always in its region. `seats` has the executors by box
    (offer and slot, as its index in `boxes`) and type.
    """
    spreads: dict[tuple[str, str, int, str], dict[str, Spread]] = {}
    place: dict[str, int] = {}
    for number, box in enumerate(boxes):
        for (service, klass, route, part, executor), rate in box.flows:
            names = seats[box.offer[0], number, executor]
            # Requests stay in a region.
            at = spreads.setdefault((service, klass, route, box.offer[0]), {}).setdefault(part, {})
            for name in names:
                place[name] = number
                at[name] = at.get(name, 0.0) + rate / len(names)
    demands = {demand.key: demand for demand in program.classes}
    found = []
    for (service, klass, route, _), by_part in sorted(spreads.items()):
        order = demands[service, klass].routes[route]
        total = min(sum(by_part.get(part, {}).values()) for part in order)
        if total <= 0.0:  # rounding of what another region serves
            continue
        routes: list[tuple[tuple[str, ...], float]] = [((), total)]
        for part in order:
            room = by_part[part]
            scale = total / sum(room.values())
            routes = _extend(
                routes, {name: rate * scale for name, rate in room.items()}, place, total
            )
        found += [
            (service, klass, rate, tuple(zip(order, names, strict=True))) for names, rate in routes
        ]
    return found


def _extend(
    routes: Sequence[tuple[tuple[str, ...], float]],
    room: Spread,
    place: Mapping[str, int],
    total: float,
) -> list[tuple[tuple[str, ...], float]]:
    """Add a part to routes: on the executor they came from, then on a machine they were on, then anywhere."""
    min_rate = _TRICKLE * total
    longer: list[tuple[tuple[str, ...], float]] = []
    waiting = list(routes)
    for near in ("executor", "machine", "anywhere"):
        rest = []
        for names, rate in waiting:
            left = rate
            been = {place[name] for name in names}
            for name in sorted(room):
                same = name in names if near == "executor" else place[name] in been
                if near != "anywhere" and not same:
                    continue
                some = min(left, room[name])
                if some > min_rate:
                    longer.append(((*names, name), some))
                    room[name] -= some
                    left -= some
            if left > min_rate:
                rest.append((names, left))
        waiting = rest
    if waiting:
        # Rounding: what is left goes where there is most room.
        roomiest = max(sorted(room), key=lambda name: room[name])
        longer += [((*names, roomiest), rate) for names, rate in waiting]
    return longer
