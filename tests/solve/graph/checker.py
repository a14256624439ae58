"""Whether an answer keeps every row of its program, written from the formulation alone."""

from __future__ import annotations

from collections import Counter, defaultdict

from atoll.plan.plan import OfferKey
from atoll.solve.graph.graph_types import GraphAnswer, GraphProgram

_SAME = 1e-9


def broken_rows(program: GraphProgram, answer: GraphAnswer) -> list[str]:
    """Return what is wrong with an answer; nothing where it is right."""
    if answer.status == "infeasible":
        return []
    return [
        *_demand(program, answer),
        *_work(program, answer),
        *_machines(program, answer),
        *_chains(program, answer),
    ]


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * max(1.0, abs(a), abs(b))


def _demand(program: GraphProgram, answer: GraphAnswer) -> list[str]:
    wrong = []
    for klass in program.classes:
        came = sum(rate for key, rate in answer.routes.items() if key[:2] == klass.key)
        if not _close(came, answer.served[klass.key] * klass.rate_per_s):
            wrong.append(f"{klass.key}: {came} requests/s are not its share")
        parts: dict[tuple[str, str], float] = defaultdict(float)
        for (service, name, route, region), rate in answer.routes.items():
            if (service, name) == klass.key:
                for part in set(klass.routes[route]):
                    parts[part, region] += rate
        for flow in answer.flows:
            if (flow.service, flow.klass) == klass.key:
                parts[flow.part, flow.region] -= flow.rate_per_s
        wrong += [f"{klass.key} {at}: {left}" for at, left in parts.items() if not _close(left, 0)]
    return wrong


def _work(program: GraphProgram, answer: GraphAnswer) -> list[str]:
    busy: dict[tuple[int, str], float] = defaultdict(float)
    for flow in answer.flows:
        executor = program.executors[flow.executor]
        assert flow.service in executor.services
        seconds = executor.seconds[flow.service, flow.klass, flow.part]
        busy[flow.executor, flow.region] += seconds * flow.rate_per_s
    have = {(p.executor, p.region): p.count for p in answer.placed}
    return [
        f"executor {at} works {time} s/s of {have.get(at, 0)}"
        for at, time in busy.items()
        if time > have.get(at, 0) + _SAME
    ]


def _machines(program: GraphProgram, answer: GraphAnswer) -> list[str]:
    wrong = []
    offers = {machine.key: machine for machine in program.machines}
    gpus: Counter[OfferKey] = Counter()
    standing = Counter[int]()
    for item in program.standing:
        standing[item.executor] += item.count
    for placed in answer.placed:
        uses = program.executors[placed.executor].uses
        taken: Counter[str] = Counter()
        for key, kind, count in placed.slices:
            gpu, size = kind.rsplit(":", 1)
            assert offers[key].gpu == gpu
            assert int(size) in offers[key].sizes
            assert key[0] == placed.region
            taken[kind] += count
            gpus[key] += int(size) * count
        if taken != Counter({kind: n * placed.count for kind, n in uses if n}):
            wrong.append(f"executor {placed.executor} holds {dict(taken)}")
        if placed.kept > min(placed.count, standing[placed.executor]):
            wrong.append(f"executor {placed.executor}: {placed.kept} kept")
    for key, used in gpus.items():
        number = answer.machines.get(key, 0)
        if used > number * offers[key].gpus or number > offers[key].available:
            wrong.append(f"{key}: {used} GPUs of {number} machines")
    return wrong + _money(program, answer) + _limits(program, answer, gpus)


def _money(program: GraphProgram, answer: GraphAnswer) -> list[str]:
    offers = {machine.key: machine for machine in program.machines}
    rent = sum(offers[key].usd_per_hour * n for key, n in answer.machines.items())
    wrong = []
    if not _close(rent, answer.usd_per_hour):
        wrong.append(f"rent {rent} is not {answer.usd_per_hour}")
    if program.goal == "cost" and not _close(rent + answer.init_usd, answer.objective):
        wrong.append("the objective is not rent and starts")
    # Which slices are new is only told where all or none of a type are.
    if all(placed.kept in (0, placed.count) for placed in answer.placed):
        start = sum(
            offers[key].usd_per_hour * count * int(kind.rsplit(":", 1)[1]) / offers[key].gpus
            for placed in answer.placed
            if not placed.kept
            for key, kind, count in placed.slices
        )
        if not _close(program.init_penalty * start, answer.init_usd):
            wrong.append(f"starting costs {program.init_penalty * start}, not {answer.init_usd}")
    return wrong


def _limits(program: GraphProgram, answer: GraphAnswer, gpus: Counter[OfferKey]) -> list[str]:
    wrong = []
    budget, most = program.budget_usd_per_hour, program.max_machines
    if budget is not None and answer.usd_per_hour > budget + _SAME:
        wrong.append(f"rent {answer.usd_per_hour} beyond {budget}")
    if most is not None and sum(answer.machines.values()) > most:
        wrong.append("too many machines")
    if program.spot_share is not None:
        spot = sum(n for key, n in gpus.items() if key[2] == "spot")
        if spot > program.spot_share * sum(gpus.values()) + _SAME:
            wrong.append(f"{spot} of {sum(gpus.values())} GPUs are spot")
    return wrong


def _chains(program: GraphProgram, answer: GraphAnswer) -> list[str]:
    """Check that slow executors of a first part find fast ones of the second, route by route."""
    wrong = []
    for klass in program.classes:
        for (service, name, route, region), rate in answer.routes.items():
            if (service, name) != klass.key:
                continue
            parts = klass.routes[route]
            for chain in klass.chains:
                if chain.first not in parts or chain.second not in parts:
                    continue
                late: dict[str, list[tuple[float, float]]] = {chain.first: [], chain.second: []}
                for (s, t, w, part, e, r), flow in answer.split.items():
                    if (s, t, w, r) == (service, name, route, region) and part in late:
                        latency = program.executors[e].latency_s.get((service, name, part), 0.0)
                        late[part].append((latency, flow))
                for part, each in late.items():
                    if not _close(sum(flow for _, flow in each), rate):
                        wrong.append(f"{klass.key} {route} {part}: split does not add up")
                for v, _ in late[chain.first]:
                    slow = sum(flow for latency, flow in late[chain.first] if latency >= v)
                    fast = sum(
                        flow
                        for latency, flow in late[chain.second]
                        if latency <= chain.budget_s - v + _SAME
                    )
                    if slow > fast + _SAME * max(1.0, fast):
                        wrong.append(f"{klass.key} {chain}: {slow} slow, {fast} fast")
    return wrong
