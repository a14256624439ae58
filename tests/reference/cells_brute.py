"""The best answer to small any-to-any programs by trying all numbers of executors.

A second formulation that shares nothing with the solver: whole numbers are listed, slices are laid into
machines one by one, and requests go over explicit paths (an executor type for every part, chains checked path
by path) in a linear program of `scipy`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from atoll.solve.graph.graph_types import ClassDemand, GraphProgram

_SAME = 1e-7
Counts = tuple[int, ...]


@dataclass(frozen=True)
class Best:
    """The largest share or multiple, and the least cost at it (goal "cost") in USD/h."""

    share: float
    cost: float


def count_candidates(program: GraphProgram) -> int:
    """Return how many vectors of counts `solve` lists at most."""
    number = 1
    for e, region in _units(program):
        number *= _most(program, e, region) + 1
    for standing in program.standing:
        number *= standing.count + 1
    return number


def solve(program: GraphProgram) -> Best:
    """Return the best of all; share 0 where nothing can be served."""
    units = _units(program)
    costs = _list_costs(program, units)
    goal = program.goal
    paths = _list_paths(program, units)
    cap = 1.0 if goal == "cost" else math.inf
    if goal == "cost":
        failed: list[np.ndarray] = []
        for total, usd in sorted(costs.items(), key=lambda item: (item[1], item[0])):
            vector = np.array(total)
            if any((vector <= other).all() for other in failed):
                continue
            if _share(program, paths, total, cap) >= 1.0 - _SAME:
                return Best(1.0, usd)
            failed = [other for other in failed if not (other <= vector).all()] + [vector]
        if program.shortage == "fail":
            return Best(0.0, math.inf)
    shares = {total: _share(program, paths, total, cap) for total in _maximal(costs)}
    share = max(shares.values(), default=0.0)
    if share <= _SAME or goal == "most":
        return Best(share, math.inf)
    failed = []
    for total, usd in sorted(costs.items(), key=lambda item: (item[1], item[0])):
        vector = np.array(total)
        if any((vector <= other).all() for other in failed):
            continue
        if _share(program, paths, total, cap) >= share * (1.0 - _SAME):
            return Best(share, usd)
        failed.append(vector)
    raise AssertionError("the largest share is reached by nothing")


def _units(program: GraphProgram) -> list[tuple[int, str]]:
    """Return (type, region) that some request can visit: what idles does not dilute the share of spot."""
    regions = sorted({machine.key[0] for machine in program.machines})
    units = [
        (e, region)
        for e in range(len(program.executors))
        for region in regions
        if _most(program, e, region) > 0
    ]
    able = [
        {key for e, where in units if where == region for key in program.executors[e].seconds}
        for region in regions
    ]
    visited = {
        (klass.service, klass.name, part, region)
        for klass in program.classes
        if klass.rate_per_s > 0.0
        for region, runs in zip(regions, able, strict=True)
        for route in klass.routes
        if all((klass.service, klass.name, part) in runs for part in route)
        for part in route
    }
    return [
        (e, region)
        for e, region in units
        if any((*key, region) in visited for key in program.executors[e].seconds)
    ]


def _most(program: GraphProgram, e: int, region: str) -> int:
    most = math.inf
    for kind, count in program.executors[e].uses:
        room = sum(
            machine.available * (machine.gpus // int(kind.rsplit(":", 1)[1]))
            for machine in _offering(program, kind, region)
        )
        most = min(most, room // count)
    return int(most)


def _offering(program: GraphProgram, kind: str, region: str) -> list:  # type: ignore[type-arg]
    gpu, size = kind.rsplit(":", 1)
    return [
        machine
        for machine in program.machines
        if machine.key[0] == region and machine.gpu == gpu and int(size) in machine.sizes
    ]


# -------------------------------------------------------------------- machines


def _list_costs(program: GraphProgram, units: list[tuple[int, str]]) -> dict[Counts, float]:
    """Return the least cost by number of executors of each unit, where limits allow it at all."""
    costs: dict[Counts, float] = {}
    place = {unit: i for i, unit in enumerate(units)}
    for kept in itertools.product(*(range(s.count + 1) for s in program.standing)):
        base = [0] * len(units)
        held = [0] * len(program.machines)
        for number, standing in zip(kept, program.standing, strict=True):
            unit = (standing.executor, standing.offers[0][0])
            if unit not in place:
                continue
            base[place[unit]] += number
            kinds = [k for k, n in program.executors[standing.executor].uses for _ in range(n)]
            for key, kind in zip(standing.offers, kinds, strict=True):
                o = [machine.key for machine in program.machines].index(key)
                held[o] += number * int(kind.rsplit(":", 1)[1])
        for fresh in _count_up(program, units):
            usd = _cheapest(program, units, fresh, tuple(held))
            if usd < math.inf:
                total = tuple(a + b for a, b in zip(base, fresh, strict=True))
                costs[total] = min(usd, costs.get(total, math.inf))
    return costs


def _count_up(program: GraphProgram, units: list[tuple[int, str]]) -> Iterator[Counts]:
    """List new executors whose GPUs are there, type by type and region by region."""
    room: dict[tuple[str, str], int] = {}
    for machine in program.machines:
        at = (machine.key[0], machine.gpu)
        room[at] = room.get(at, 0) + machine.available * machine.gpus

    def extend(counts: tuple[int, ...], left: dict[tuple[str, str], int]) -> Iterator[Counts]:
        if len(counts) == len(units):
            yield counts
            return
        e, region = units[len(counts)]
        number, left = 0, dict(left)
        while True:
            yield from extend((*counts, number), left)
            for kind, count in program.executors[e].uses:
                gpu, size = kind.rsplit(":", 1)
                left[region, gpu] -= int(size) * count
                if left[region, gpu] < 0:
                    return
            number += 1

    yield from extend((), room)


def _cheapest(
    program: GraphProgram, units: list[tuple[int, str]], fresh: Counts, held: Counts
) -> float:
    """Return the least rent and cost of starting over all ways to take the slices of offers."""
    slices: dict[tuple[str, str], int] = {}
    for (e, region), number in zip(units, fresh, strict=True):
        for kind, count in program.executors[e].uses:
            if number * count:
                slices[kind, region] = slices.get((kind, region), 0) + number * count
    options = [
        [
            tuple(zip((m.key for m in offering), counts, strict=True))
            for counts in itertools.product(range(number + 1), repeat=len(offering))
            if sum(counts) == number
        ]
        for (kind, region), number in slices.items()
        for offering in [_offering(program, kind, region)]
    ]
    sizes = [int(kind.rsplit(":", 1)[1]) for kind, _ in slices]
    best = math.inf
    for choice in itertools.product(*options):
        best = min(best, _price(program, choice, sizes, held))
    return best


def _price(program: GraphProgram, choice: tuple, sizes: list[int], held: Counts) -> float:  # type: ignore[type-arg]
    rent = start = 0.0
    machines = spot = used = 0
    for o, machine in enumerate(program.machines):
        mine = [
            size
            for size, taken in zip(sizes, choice, strict=True)
            for key, count in taken
            if key == machine.key
            for _ in range(count)
        ]
        gpus = sum(mine) + held[o]
        number = _pack(sorted(mine, reverse=True), held[o], machine.gpus)
        if number > machine.available:
            return math.inf
        rent += number * machine.usd_per_hour
        start += sum(mine) / machine.gpus * machine.usd_per_hour
        machines += number
        used += gpus
        spot += gpus if machine.key[2] == "spot" else 0
    limits = (
        (program.budget_usd_per_hour, rent),
        (program.max_machines, machines),
        (None if program.spot_share is None else program.spot_share * used, spot),
    )
    if any(limit is not None and value > limit + 1e-9 for limit, value in limits):
        return math.inf
    return rent + program.init_penalty * start


def _pack(sizes: list[int], held: int, gpus: int) -> int:
    """Return machines for slices laid down one after the other; with some held, what their sum needs."""
    if held:
        return -(-(sum(sizes) + held) // gpus)
    free: list[int] = []
    for size in sizes:
        at = next((i for i, room in enumerate(free) if room >= size), None)
        if at is None:
            free.append(gpus)
            at = len(free) - 1
        free[at] -= size
    return len(free)


# -------------------------------------------------------------------- flows

_Path = tuple[int, dict[int, float]]
"""Which class, and the seconds of every unit that a request takes."""


def _list_paths(program: GraphProgram, units: list[tuple[int, str]]) -> list[_Path]:
    paths = []
    regions = sorted({region for _, region in units})
    for t, klass in enumerate(program.classes):
        for route in klass.routes:
            for region in regions:
                paths += list(_paths_of(program, units, t, klass, tuple(route), region))
    return paths


def _paths_of(
    program: GraphProgram,
    units: list[tuple[int, str]],
    t: int,
    klass: ClassDemand,
    route: tuple[str, ...],
    region: str,
) -> Iterator[_Path]:
    able = [
        [
            j
            for j, (e, where) in enumerate(units)
            if where == region and (*klass.key, part) in program.executors[e].seconds
        ]
        for part in route
    ]
    for chosen in itertools.product(*able):
        at = dict(zip(route, chosen, strict=True))
        late = {
            part: program.executors[units[j][0]].latency_s.get((*klass.key, part), 0.0)
            for part, j in at.items()
        }
        if any(
            late[c.first] + late[c.second] > c.budget_s + 1e-9
            for c in klass.chains
            if c.first in at and c.second in at
        ):
            continue
        takes: dict[int, float] = {}
        for part, j in at.items():
            seconds = program.executors[units[j][0]].seconds[*klass.key, part]
            takes[j] = takes.get(j, 0.0) + seconds
        yield t, takes


def _share(program: GraphProgram, paths: list[_Path], total: Counts, cap: float) -> float:
    """Return the largest common (or priority-weighed) share of demand that so many executors serve."""
    asked = [t for t, klass in enumerate(program.classes) if klass.rate_per_s > 0.0]
    mine = [path for path in paths if all(total[j] for j in path[1]) and path[0] in asked]
    weighed = program.goal == "cost" and program.shortage == "priority"
    number = len(asked) if weighed else 1
    weights = [program.classes[t].priority for t in asked] if weighed else [1.0]
    cost = np.zeros(number + len(mine))
    cost[:number] = -np.array(weights) / sum(weights)
    upper = np.zeros((len(total), len(cost)))
    equal = np.zeros((len(asked), len(cost)))
    for k, (t, takes) in enumerate(mine):
        for j, seconds in takes.items():
            upper[j, number + k] = seconds
        equal[asked.index(t), number + k] = 1.0
    for i, t in enumerate(asked):
        equal[i, i if weighed else 0] = -program.classes[t].rate_per_s
    bounds = [(0.0, None if math.isinf(cap) else cap)] * number + [(0.0, None)] * len(mine)
    result = linprog(
        cost,
        A_ub=upper,
        b_ub=np.array(total, float),
        A_eq=equal,
        b_eq=np.zeros(len(asked)),
        bounds=bounds,
        method="highs",
    )
    return -float(result.fun) if result.status == 0 else 0.0


def _maximal(costs: dict[Counts, float]) -> list[Counts]:
    """Return the counts that no other one exceeds."""
    return [
        total
        for total in costs
        if not any((*total[:i], total[i] + 1, *total[i + 1 :]) in costs for i in range(len(total)))
    ]


# -------------------------------------------------------------------- machines with NICs


def solve_boxes(program: GraphProgram) -> Best:
    """Return the best with NICs, by trying all machines with all executors in them.

    Requests go over paths of executors in machines; what they carry from one machine to another takes the
    NICs of both. Types on one slice only, without starts and shares of spot.
    """
    offers = [_offer_choices(program, o) for o in range(len(program.machines))]
    tried: list[tuple[float, tuple[tuple[int, dict[int, int]], ...]]] = []
    for choice in itertools.product(*offers):
        boxes = tuple((o, box) for o, each in enumerate(choice) for box in each)
        rent = sum(program.machines[o].usd_per_hour for o, _ in boxes)
        budget, most = program.budget_usd_per_hour, program.max_machines
        if (budget is None or rent <= budget + 1e-9) and (most is None or len(boxes) <= most):
            tried.append((rent, boxes))
    tried.sort(key=lambda item: item[0])
    cap = 1.0 if program.goal == "cost" else math.inf
    shares = [_box_share(program, boxes, cap) for _, boxes in tried]
    best = max(shares)
    cost = next(usd for (usd, _), s in zip(tried, shares, strict=True) if s >= best * (1 - _SAME))
    return Best(best, cost)


def _offer_choices(program: GraphProgram, o: int) -> list[tuple[dict[int, int], ...]]:
    """List sets of machines of an offer, each full of executors."""
    machine = program.machines[o]
    fitting = [
        (e, int(executor.uses[0][0].rsplit(":", 1)[1]))
        for e, executor in enumerate(program.executors)
        if executor.uses[0][0].rsplit(":", 1)[0] == machine.gpu
        and int(executor.uses[0][0].rsplit(":", 1)[1]) in machine.sizes
    ]
    full = []
    for counts in itertools.product(*(range(machine.gpus // size + 1) for _, size in fitting)):
        left = machine.gpus - sum(n * s for n, (_, s) in zip(counts, fitting, strict=True))
        if left >= 0 and all(left < size for _, size in fitting):
            full.append({e: n for n, (e, _) in zip(counts, fitting, strict=True) if n})
    return [
        boxes
        for number in range(machine.available + 1)
        for boxes in itertools.combinations_with_replacement(full, number)
    ]


def _box_share(
    program: GraphProgram, boxes: tuple[tuple[int, dict[int, int]], ...], cap: float
) -> float:
    places = [(b, e) for b, (_, inside) in enumerate(boxes) for e in inside]
    rows: dict[tuple[str, int, int], int] = {(("work"), b, e): i for i, (b, e) in enumerate(places)}
    limit = [float(boxes[b][1][e]) for b, e in places]
    for b, (o, _) in enumerate(boxes):
        nic = program.machines[o].nic_bytes_per_s
        if nic < math.inf:
            for side in ("out", "in"):
                rows[side, b, 0] = len(limit)
                limit.append(1.0)
    columns: list[tuple[int, dict[int, float]]] = []
    for t, klass in enumerate(program.classes):
        for route in klass.routes:
            able = [
                [(b, e) for b, e in places if (*klass.key, part) in program.executors[e].seconds]
                for part in route
            ]
            for chosen in itertools.product(*able):
                takes = _box_path(
                    program, boxes, klass, dict(zip(route, chosen, strict=True)), rows
                )
                if takes is not None:
                    columns.append((t, takes))
    cost = np.zeros(1 + len(columns))
    cost[0] = -1.0
    upper = np.zeros((len(limit), len(cost)))
    equal = np.zeros((len(program.classes), len(cost)))
    for k, (t, takes) in enumerate(columns):
        for row, value in takes.items():
            upper[row, 1 + k] = value
        equal[t, 1 + k] = 1.0
    for t, klass in enumerate(program.classes):
        equal[t, 0] = -klass.rate_per_s
    result = linprog(
        cost,
        A_ub=upper if limit else None,
        b_ub=np.array(limit) if limit else None,
        A_eq=equal,
        b_eq=np.zeros(len(equal)),
        bounds=[(0.0, None if math.isinf(cap) else cap)] + [(0.0, None)] * len(columns),
        method="highs",
    )
    return -float(result.fun) if result.status == 0 else 0.0


def _box_path(
    program: GraphProgram,
    boxes: tuple[tuple[int, dict[int, int]], ...],
    klass: ClassDemand,
    at: dict[str, tuple[int, int]],
    rows: dict[tuple[str, int, int], int],
) -> dict[int, float] | None:
    """Return what a path takes of executors and NICs, None where it breaks a chain or leaves its region."""
    if len({program.machines[boxes[b][0]].key[0] for b, _ in at.values()}) > 1:
        return None
    for chain in klass.chains:
        if chain.first in at and chain.second in at:
            late = sum(
                program.executors[at[part][1]].latency_s.get((*klass.key, part), 0.0)
                for part in (chain.first, chain.second)
            )
            if late > chain.budget_s + 1e-9:
                return None
    takes: dict[int, float] = {}
    for part, (b, e) in at.items():
        row = rows["work", b, e]
        takes[row] = takes.get(row, 0.0) + program.executors[e].seconds[*klass.key, part]
    for (part, after), size in klass.bytes_between.items():
        if part in at and after in at and at[part][0] != at[after][0]:
            for side, (b, _) in (("out", at[part]), ("in", at[after])):
                if (side, b, 0) in rows:
                    nic = program.machines[boxes[b][0]].nic_bytes_per_s
                    row = rows[side, b, 0]
                    takes[row] = takes.get(row, 0.0) + size / nic
    return takes
