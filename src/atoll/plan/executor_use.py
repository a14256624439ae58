"""How a plan uses its executors: how busy each is with what, how long requests take, what goes between them.

Figures for people, worked out from a plan, its problem and the performance model. A plan that does not hold
for the problem still gives figures, as far as they are known: what is not is None.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from pydantic import Field

from atoll.catalog.catalog import Catalog
from atoll.catalog.models import ModelSpec
from atoll.core.errors import AtollError
from atoll.core.frozen import Frozen
from atoll.perf.components.class_loads import component_of, generators, makes_images
from atoll.perf.components.executor import ExecutorWork
from atoll.plan.executors import (
    first_text_parts,
    group_of,
    handover_s,
    node_work,
    request_bytes,
)
from atoll.plan.plan import Instance, Market, Node, Plan, RequestPath, RequestStep
from atoll.plan.problem import Problem, Service
from atoll.workload.classes import RequestClass

_MIN_SHARE = 1e-6
"""A part that takes less than this share of its executors is asked for nothing."""
MachineKey = tuple[str, str, str, str]
"""Region, node type, market, and which machine of those it is."""
_AtPlaces = dict[tuple[MachineKey, int], Instance]
"""Executors by machine and group of its GPUs."""


class ExecutorUse(Frozen):
    """An executor at work: `busy` is the share of its time that requests take, by part and in all.

    `requests_per_s` pass it, of its service and of `guests` that share it. `kv_tokens` is room for tokens of
    the llm, None where it runs none.
    """

    id: str
    service: str
    guests: tuple[str, ...] = ()
    parts: tuple[str, ...]
    region: str
    kind: str
    node_type: str
    market: Market
    kept: bool
    usd_per_hour: float
    requests_per_s: float
    busy: float | None
    busy_by_part: dict[str, float] = Field(default_factory=dict)
    kv_tokens: int | None = None


class PathUse(Frozen):
    """A path of a class: its share of the class, requests/s, its steps in words, and how long it takes.

    Seconds are those of a request alone on the slowest executors of every step, queues left out:
    `first_text_s` until the first text, `speech_made_s` for all speech after the text, `image_made_s` for an
    image. None where the class wants no such thing, or an executor cannot do it within the promise.
    """

    share: float
    requests_per_s: float
    text: str
    steps: tuple[RequestStep, ...]
    first_text_s: float | None = None
    speech_made_s: float | None = None
    image_made_s: float | None = None


class ClassUse(Frozen):
    """Requests of a class: how many a second, what they are promised, and the paths that they take.

    Promises in seconds, None where there is none: until the first text, per further token, for speech to be
    made (its length less what it is ahead), for an image.
    """

    service: str
    klass: str
    share: float
    requests_per_s: float
    ttft_s: float | None
    tpot_s: float | None
    speech_within_s: float | None
    image_within_s: float | None
    paths: tuple[PathUse, ...]

    @property
    def first_text_s(self) -> float | None:
        """Until the first text on the slowest path."""
        return _slowest(path.first_text_s for path in self.paths)

    @property
    def speech_made_s(self) -> float | None:
        """For all speech on the slowest path."""
        return _slowest(path.speech_made_s for path in self.paths)

    @property
    def image_made_s(self) -> float | None:
        """For an image on the slowest path."""
        return _slowest(path.image_made_s for path in self.paths)


class PairFlow(NamedTuple):
    """Traffic from one executor to another: requests/s, bytes/s, and whether from machine to machine."""

    service: str
    src: str
    dst: str
    requests_per_s: float
    bytes_per_s: float
    between_machines: bool


class PartHandover(Frozen):
    """Traffic from executors of one kind to those of another: `src` and `dst` are such as "vision on T4:1".

    `bytes_per_s` are all that is handed over, `network_bytes_per_s` those that go from machine to machine.
    """

    service: str
    src: str
    dst: str
    requests_per_s: float
    bytes_per_s: float
    network_bytes_per_s: float


class PartUse(Frozen):
    """How busy the executors of a part are: `seconds_per_s` of work on it, over `executors` that run it.

    `service` names all that share them.

    `busy` is the share of those executors' time that is taken in all, `own` the part's own share of it.
    """

    service: str
    part: str
    executors: int
    seconds_per_s: float
    busy: float
    own: float


class ExecutorPlanUse(Frozen):
    """Everything a plan does with its executors, by executor, class, and pair of executors."""

    executors: tuple[ExecutorUse, ...] = ()
    classes: tuple[ClassUse, ...] = ()
    handovers: tuple[PartHandover, ...] = ()

    def of_service(self, service: str) -> tuple[ExecutorUse, ...]:
        """Return the executors that take requests of one service."""
        return tuple(use for use in self.executors if service in (use.service, *use.guests))

    def classes_of(self, service: str) -> tuple[ClassUse, ...]:
        """Return the classes of one service."""
        return tuple(use for use in self.classes if use.service == service)

    def parts(self) -> tuple[PartUse, ...]:
        """Return how busy each part of each service keeps its executors, the busiest executors first.

        Parts that nothing is asked of come last.
        """
        found: dict[tuple[str, str], list[ExecutorUse]] = {}
        for use in self.executors:
            for part in use.parts:
                whose = " and ".join((use.service, *use.guests))
                found.setdefault((whose, part), []).append(use)
        parts = [
            PartUse(
                service=service,
                part=part,
                executors=len(uses),
                seconds_per_s=sum(use.busy_by_part.get(part, 0.0) for use in uses),
                busy=sum(use.busy or 0.0 for use in uses) / len(uses),
                own=sum(use.busy_by_part.get(part, 0.0) for use in uses) / len(uses),
            )
            for (service, part), uses in found.items()
        ]
        return tuple(
            sorted(
                parts,
                # Rounded, so that sums that differ in their last bits do not change the order.
                key=lambda p: (p.own < _MIN_SHARE, -round(p.busy, 9), -round(p.own, 9), p.service),
            )
        )


def executor_use(plan: Plan, problem: Problem, catalog: Catalog) -> ExecutorPlanUse:
    """Return what a plan does with its executors; nothing where it has none."""
    executors = {i.id: i for i in plan.executor_instances}
    works = _works(executors.values(), problem, catalog)
    known = [(path, *found) for path in plan.paths if (found := _class_of(path, problem))]
    busy: defaultdict[str, dict[str, float]] = defaultdict(dict)
    passing: defaultdict[str, float] = defaultdict(float)
    for path, service, klass in known:
        rate = _rate(plan, service, klass) * path.share
        for step in path.steps:
            for name, weight in step.instances.items():
                passing[name] += rate * weight
                for part in step.parts:
                    work = works.get((name, service.name))
                    seconds = None if work is None else work.seconds.get((klass.name, part))
                    if seconds is not None:
                        own = busy[name]
                        own[part] = own.get(part, 0.0) + rate * weight * seconds
    return ExecutorPlanUse(
        executors=tuple(
            _executor(one, works.get((one.id, one.service)), busy[one.id], passing[one.id])
            for one in executors.values()
        ),
        classes=tuple(
            _class(plan, service, klass, catalog, executors, works)
            for service in problem.services
            for klass in service.classes
        ),
        handovers=_handovers(pair_flows(plan, problem, catalog), executors),
    )


def machine_key(instance: Instance, node: Node) -> MachineKey:
    """Return what tells the machine of a node from others: its host, its slot, or whose alone it is."""
    if node.host is not None:
        which = node.host
    elif node.gpu_ids is None:
        which = f"{instance.id} {node.id}"
    else:
        which = f"machine {node.slot or 0}"
    return (instance.region_of(node), node.node_type, node.market, which)


def describe_executor(one: Instance) -> str:
    """Return what an executor runs, and on which kind of node: "vision on T4:1", "llm on L40S:2 spot"."""
    spot = " spot" if one.nodes[0].market == "spot" else ""
    return f"{'+'.join(one.parts)} on {one.nodes[0].kind}{spot}"


def describe_path(steps: Iterable[RequestStep], executors: Mapping[str, Instance]) -> str:
    """Return the steps of a path in words: "vision on 2x T4:1 -> llm on L40S:1"."""
    return " -> ".join(
        f"{'+'.join(step.parts)} on {_kinds(step.instances, executors)}" for step in steps
    )


def _kinds(weights: Mapping[str, float], executors: Mapping[str, Instance]) -> str:
    counts: Counter[str] = Counter()
    for name, weight in weights.items():
        if weight > 0.0:
            one = executors.get(name)
            spot = " spot" if one is not None and one.nodes[0].market == "spot" else ""
            counts[f"{one.nodes[0].kind}{spot}" if one is not None else name] += 1
    return " + ".join(f"{n}x {kind}" if n > 1 else kind for kind, n in sorted(counts.items()))


def _works(
    executors: Iterable[Instance], problem: Problem, catalog: Catalog
) -> dict[tuple[str, str], ExecutorWork]:
    """Return the work of each executor for each of its services, where it fits at all."""
    names = {service.name: service for service in problem.graph_services}
    found: dict[tuple[str, str], ExecutorWork] = {}
    for one in executors:
        # Executors have one node; anything else is for the validator.
        if len(one.nodes) != 1 or not names.keys() >= set(one.services):
            continue
        for name in one.services:
            try:
                work = node_work(problem, catalog, names[name], one)
            except AtollError:
                continue  # the validator says what is wrong with it
            if work is not None:
                found[one.id, name] = work
    return found


def _class_of(path: RequestPath, problem: Problem) -> tuple[Service, RequestClass] | None:
    for service in problem.services:
        for klass in service.classes:
            if (service.name, klass.name) == (path.service, path.klass):
                return service, klass
    return None


def _rate(plan: Plan, service: Service, klass: RequestClass) -> float:
    return service.class_rate_per_s(klass) * plan.served_fraction.get(service.name, 1.0)


def _executor(
    one: Instance, work: ExecutorWork | None, busy: Mapping[str, float], passing: float
) -> ExecutorUse:
    node = one.nodes[0]
    by_part = {part: busy.get(part, 0.0) for part in one.parts}
    return ExecutorUse(
        id=one.id,
        service=one.service,
        guests=one.services[1:],
        parts=one.parts,
        region=one.region,
        kind=node.kind,
        node_type=node.node_type,
        market=node.market,
        kept=one.kept,
        usd_per_hour=one.usd_per_hour,
        requests_per_s=passing,
        busy=None if work is None else sum(by_part.values()),
        busy_by_part={} if work is None else by_part,
        kv_tokens=work.kv_tokens if work is not None and work.kv_tokens > 0 else None,
    )


def _class(
    plan: Plan,
    service: Service,
    klass: RequestClass,
    catalog: Catalog,
    executors: Mapping[str, Instance],
    works: Mapping[tuple[str, str], ExecutorWork],
) -> ClassUse:
    rate = _rate(plan, service, klass)
    speech = None
    if klass.ahead_s is not None and klass.speech_s is not None:
        speech = klass.speech_s - klass.ahead_s
    own = [p for p in plan.paths if (p.service, p.klass) == (service.name, klass.name)]
    return ClassUse(
        service=service.name,
        klass=klass.name,
        share=klass.share,
        requests_per_s=rate,
        ttft_s=klass.ttft_s,
        tpot_s=klass.tpot_s,
        speech_within_s=speech,
        image_within_s=klass.image_s,
        paths=tuple(
            _Timed(path, service, klass, catalog, executors, works).use(rate)
            for path in sorted(own, key=lambda p: -p.share)
        ),
    )


class _Timed:
    """A path and how long requests take on it, alone on the slowest executors of every step."""

    def __init__(
        self,
        path: RequestPath,
        service: Service,
        klass: RequestClass,
        catalog: Catalog,
        executors: Mapping[str, Instance],
        works: Mapping[tuple[str, str], ExecutorWork],
    ) -> None:
        self.path, self.klass, self.catalog, self.executors = path, klass, catalog, executors
        self.model: ModelSpec = catalog.model(service.model)
        self.size = request_bytes(catalog, service, klass)
        self.way = [part for step in path.steps for part in step.parts]
        self.holders: dict[str, list[Instance]] = {}
        self.took: dict[str, float | None] = {}
        for step in path.steps:
            standing = [executors[n] for n, w in step.instances.items() if w > 0 and n in executors]
            at = [works.get((one.id, service.name)) for one in standing]
            for part in step.parts:
                times = [w.latency_s.get((klass.name, part)) if w else None for w in at]
                self.holders[part] = standing
                # One time that is not known leaves it open: the others might not be the slowest.
                self.took[part] = None if None in times else _slowest(times)

    def use(self, rate: float) -> PathUse:
        """Return the path with its figures at so many requests/s of its class."""
        return PathUse(
            share=self.path.share,
            requests_per_s=rate * self.path.share,
            text=describe_path(self.path.steps, self.executors),
            steps=self.path.steps,
            first_text_s=self._first_text_s(),
            speech_made_s=self._speech_s(),
            image_made_s=self._image_s(),
        )

    def _first_text_s(self) -> float | None:
        encoders, llm = first_text_parts(self.model, self.way)
        if llm is None or self.klass.image_output is not None:
            return None
        prompt = self.took.get(llm)
        before = [self.took.get(encoder) for encoder in encoders]
        if prompt is None or None in before:
            return None
        # Encoders run side by side: the slowest of them counts.
        moved = [
            (took or 0.0) + self._moving_s(encoder, llm)
            for encoder, took in zip(encoders, before, strict=True)
        ]
        return max(moved, default=0.0) + prompt

    def _speech_s(self) -> float | None:
        if self.klass.speech_s is None:
            return None
        makers = {name for name, spec in generators(self.model) if not makes_images(spec)}
        return self._sum_s([part for part in self.way if component_of(part) in makers])

    def _image_s(self) -> float | None:
        return None if self.klass.image_output is None else self._sum_s(self.way)

    def _sum_s(self, parts: list[str]) -> float | None:
        times = [self.took.get(part) for part in parts]
        if not times or None in times:
            return None
        moving = sum(self._moving_s(a, b) for a, b in self.size if a in parts and b in parts)
        return sum(took or 0.0 for took in times) + moving

    def _moving_s(self, first: str, second: str) -> float:
        """The longest that handing over takes, from kind of slice to kind of slice."""
        size = self.size.get((first, second), 0.0)
        # Parts of one step run on one and the same executor, whichever that is.
        if any(first in step.parts and second in step.parts for step in self.path.steps):
            return 0.0
        return max(
            (
                handover_s(self.catalog, a, b, size)
                for here in self._slices(self.holders[first])
                for there in self._slices(self.holders[second])
                for a, b in _unlike_pairs(here, there)
            ),
            default=0.0,
        )

    def _slices(self, executors: Iterable[Instance]) -> Iterable[_AtPlaces]:
        """Executors on slices that are alike, one for each machine and group of its GPUs."""
        found: dict[tuple[object, ...], _AtPlaces] = {}
        for one in executors:
            node = one.nodes[0]
            key = (one.region, node.node_type, node.gpu_ids is None, node.gpus)
            found.setdefault(key, {})[machine_key(one, node), group_of(self.catalog, one)] = one
        return found.values()


def _unlike_pairs(here: _AtPlaces, there: _AtPlaces) -> Iterator[tuple[Instance, Instance]]:
    """Yield two executors of two machines, and two of two groups of one: others take as long as these."""
    for on_one_machine in (False, True):
        found = (
            (a, b)
            for (machine, group), a in here.items()
            for (other, to), b in there.items()
            if (machine == other) == on_one_machine and (machine, group) != (other, to)
        )
        yield from islice(found, 1)


def pair_flows(plan: Plan, problem: Problem, catalog: Catalog) -> list[PairFlow]:
    """Return what goes between single executors, both of which are in the plan, in order of their names."""
    executors = {i.id: i for i in plan.executor_instances}
    machines = {name: machine_key(one, one.nodes[0]) for name, one in executors.items()}
    requests: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    sizes: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for path in plan.paths:
        found = _class_of(path, problem)
        if found is None:
            continue
        service, klass = found
        rate = _rate(plan, service, klass) * path.share
        step_of = {part: number for number, step in enumerate(path.steps) for part in step.parts}
        between: defaultdict[tuple[int, int], float] = defaultdict(float)
        for (first, second), size in request_bytes(catalog, service, klass).items():
            if first in step_of and second in step_of and step_of[first] != step_of[second]:
                # Two edges of one request between the same steps are one request.
                between[step_of[first], step_of[second]] += size
        for (at, to), size in between.items():
            for a, x in path.steps[at].instances.items():
                for b, y in path.steps[to].instances.items():
                    # An executor hands nothing to itself.
                    if a != b and a in executors and b in executors and x * y > 0.0:
                        requests[service.name, a, b] += rate * x * y
                        sizes[service.name, a, b] += rate * x * y * size
    return [
        PairFlow(*key, requests[key], size, machines[key[1]] != machines[key[2]])
        for key, size in sorted(sizes.items())
    ]


def _handovers(
    flows: Iterable[PairFlow], executors: Mapping[str, Instance]
) -> tuple[PartHandover, ...]:
    """Sum traffic between single executors by their kinds."""
    names = {name: describe_executor(one) for name, one in executors.items()}
    sums: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for flow in flows:
        total = sums[flow.service, names[flow.src], names[flow.dst]]
        total[0] += flow.requests_per_s
        total[1] += flow.bytes_per_s
        total[2] += flow.bytes_per_s if flow.between_machines else 0.0
    return tuple(
        PartHandover(
            service=service,
            src=src,
            dst=dst,
            requests_per_s=rate,
            bytes_per_s=size,
            network_bytes_per_s=network,
        )
        for (service, src, dst), (rate, size, network) in sorted(sums.items())
    )


def _slowest(times: Iterable[float | None]) -> float | None:
    return max((took for took in times if took is not None), default=None)
