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
from atoll.plan.validate.validate_executors import check_paths
from atoll.solve.graph.boxes import LaidMachine
from atoll.solve.graph.graph_types import ClassDemand, GraphProgram
from atoll.solve.packing import pack

_TRICKLE = 1e-9


def strains_links(plan: Plan, problem: Problem, catalog: Catalog) -> bool:
    """Return whether links carry less than paths send over them, or not as soon as they would have to."""
    rules = {violation.rule for violation in check_paths(plan, problem, catalog)}
    return not rules.isdisjoint(("link-capacity", "handover"))


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
        taken: list[tuple[int, str]] = []
        for executor, _, number in box.executors:
            waiting = left.get((executor, box.offer[0]), [])
            mine = [name for name in waiting if _offer(known[name]) == box.offer][:number]
            for name in mine:
                waiting.remove(name)
            taken += enumerate(mine)
            seats.setdefault((box.offer[0], index, executor), []).extend(mine)
        # By falling size at multiples of it: no hole is left. The first of all types stand side by side, then
        # the second: those that hand over to each other may then stand in one group of GPUs.
        for _, name in sorted(taken, key=lambda one: (-known[one[1]].gpus, *one)):
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

    Every executor runs a part for as many as its box's flows say. Parts of a chain are handed over inside a
    machine as far as the box says so; else the slowest of the one go with the fastest of the other. From
    part to part of the others a request stays on its executor if that has room, or on its machine, and
    always in its region. `seats` has the executors by box (offer and slot, as its index in `boxes`) and type.
    """
    spreads: dict[tuple[str, str, int, str], dict[str, Spread]] = {}
    inside: dict[tuple[str, str, int, str], dict[tuple[str, str], dict[tuple[str, str], float]]]
    inside = {}
    place: dict[str, int] = {}
    types: dict[str, int] = {}
    for number, box in enumerate(boxes):
        region = box.offer[0]
        for (service, klass, route, part, executor), rate in box.flows:
            names = seats[region, number, executor]
            # Requests stay in a region.
            at = spreads.setdefault((service, klass, route, region), {}).setdefault(part, {})
            for name in names:
                place[name], types[name] = number, executor
                at[name] = at.get(name, 0.0) + rate / len(names)
        for (service, klass, route, (part, one), (after, two)), rate in box.inside:
            pairs = _deal(rate, seats[region, number, one], seats[region, number, two])
            of = inside.setdefault((service, klass, route, region), {})
            of.setdefault((part, after), {}).update(pairs)
    demands = {demand.key: demand for demand in program.classes}
    found = []
    for key, by_part in sorted(spreads.items()):
        service, klass, route, _ = key
        demand = demands[service, klass]
        order = demand.routes[route]
        total = min(sum(by_part.get(part, {}).values()) for part in order)
        if total <= 0.0:  # rounding of what another region serves
            continue
        rooms = {
            part: {name: rate * total / sum(room.values()) for name, rate in room.items()}
            for part, room in ((part, by_part[part]) for part in order)
        }
        late = {
            (part, name): program.executors[types[name]].latency_s.get((service, klass, part), 0.0)
            for part, room in rooms.items()
            for name in room
        }
        routes = _chained(demand, order, rooms, inside.get(key, {}), late, total)
        done = set(routes[0][0]) if routes else set()
        paths = routes or [({}, total)]
        for part in order:
            if part not in done:
                paths = _extend(paths, part, rooms[part], place, total)
        found += [
            (service, klass, rate, tuple((part, names[part]) for part in order))
            for names, rate in paths
        ]
    return found


_Names = dict[str, str]
"""Executors by part."""


def _deal(rate: float, ones: Sequence[str], twos: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return pairs of executors of one machine: with themselves where both are alike, else all with all."""
    if list(ones) == list(twos):
        return {(name, name): rate / len(ones) for name in ones}
    each = rate / (len(ones) * len(twos))
    return {(one, two): each for one in ones for two in twos}


def _chained(
    demand: ClassDemand,
    order: Sequence[str],
    rooms: Mapping[str, Spread],
    inside: Mapping[tuple[str, str], Mapping[tuple[str, str], float]],
    late: Mapping[tuple[str, str], float],
    total: float,
) -> list[tuple[_Names, float]]:
    """Return the parts of a route's chains put together, which all share a part; nothing without chains."""
    chains = [c for c in demand.chains if c.first in order and c.second in order]
    if not chains:
        return []
    root = chains[0].second
    paths: list[tuple[_Names, float]] = [({root: name}, r) for name, r in rooms[root].items()]
    for chain in chains:
        known = next((part for part in (chain.second, chain.first) if part in paths[0][0]), None)
        other = chain.first if known == chain.second else chain.second
        if known is None or other in paths[0][0]:
            continue
        pairs = inside.get((chain.first, chain.second), {})
        if known == chain.first:
            near = {(a, b): rate for (a, b), rate in pairs.items()}
        else:
            near = {(b, a): rate for (a, b), rate in pairs.items()}
        paths = _couple(paths, known, other, rooms, near, late, total)
    return paths


def _couple(
    paths: Sequence[tuple[_Names, float]],
    known: str,
    other: str,
    rooms: Mapping[str, Spread],
    near: Mapping[tuple[str, str], float],
    late: Mapping[tuple[str, str], float],
    total: float,
) -> list[tuple[_Names, float]]:
    """Add a part to paths: first by the pairs given, then the slowest with the fastest."""
    min_rate = _TRICKLE * total
    have = [rate for _, rate in paths]
    room = dict(rooms[other])
    joined: list[tuple[_Names, float]] = []

    def join(i: int, name: str, most: float) -> float:
        some = min(have[i], room[name], most)
        if some <= min_rate:
            return 0.0
        have[i] -= some
        room[name] -= some
        joined.append(({**paths[i][0], other: name}, some))
        return some

    for (here, there), rate in sorted(near.items()):
        left = rate
        for i, (names, _) in enumerate(paths):
            if names[known] == here and there in room:
                left -= join(i, there, left)
    slow = sorted(range(len(paths)), key=lambda i: -late[known, paths[i][0][known]])
    fast = sorted(room, key=lambda name: (late[other, name], name))
    for i in slow:
        for name in fast:
            join(i, name, have[i])
    return joined


def _extend(
    routes: Sequence[tuple[_Names, float]],
    part: str,
    spread: Spread,
    place: Mapping[str, int],
    total: float,
) -> list[tuple[_Names, float]]:
    """Add a part to routes: on the executor they came from, then on a machine they were on, then anywhere."""
    min_rate = _TRICKLE * total
    room = dict(spread)
    longer: list[tuple[_Names, float]] = []
    waiting = list(routes)
    for near in ("executor", "machine", "anywhere"):
        rest = []
        for names, rate in waiting:
            left = rate
            been = {place[name] for name in names.values()}
            for name in sorted(room):
                same = name in names.values() if near == "executor" else place[name] in been
                if near != "anywhere" and not same:
                    continue
                some = min(left, room[name])
                if some > min_rate:
                    longer.append(({**names, part: name}, some))
                    room[name] -= some
                    left -= some
            if left > min_rate:
                rest.append((names, left))
        waiting = rest
    if waiting:
        # Rounding: what is left goes where there is most room.
        roomiest = max(sorted(room), key=lambda name: room[name])
        longer += [({**names, part: roomiest}, rate) for names, rate in waiting]
    return longer
