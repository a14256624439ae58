"""The rules of `atoll.sim.tasks` once more, in plain Python: every token by itself, lists, no shortcuts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from atoll.core.rng import stream
from atoll.sim.tasks.task_build import work_seconds
from atoll.sim.tasks.task_demand import Demand, amount, draw_wants
from atoll.sim.tasks.task_fleet import (
    BatchPart,
    DiffusionPart,
    PartEdge,
    StepTable,
    TaskFleet,
    TokenPart,
)
from tests.sim.tasks.records import Dealer, Executor, Job, Request, Unit, curve


class Reference:
    """One run; `requests` has what came of it."""

    def __init__(
        self, fleet: TaskFleet, demand: Demand, routing: str, query_s: float, seed: int
    ) -> None:
        self.fleet, self.routing, self.query_s = fleet, routing, query_s
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.kicked: list[Executor] = []
        self.control_s = 0.0
        self.random = stream(seed, "tasks").integers(1, 2147483398, size=2, dtype=np.int64)
        names = [box.name for box in fleet.boxes]
        self.out_s = [0.0] * len(names)
        self.in_s = [0.0] * len(names)
        self.free_s = dict.fromkeys(fleet.links, 0.0)
        self.executors: list[Executor] = []
        for spec in fleet.executors:
            executor = Executor(len(self.executors), names.index(spec.box), spec.group)
            for name, model in spec.parts.items():
                rates = (0.0, 0.0)
                if isinstance(model, TokenPart):
                    rates = work_seconds(model, *self.mean_tokens(spec.service, name))
                executor.units.append(Unit(executor, name, model, rates))
            self.executors.append(executor)
        self.requests = self.make_requests(demand, seed)
        self.path_dealers: dict[tuple[str, str], Dealer] = {}
        self.step_dealers: dict[tuple[int, int], Dealer] = {}
        vertex = 0
        for klass in fleet.classes:
            shares = [path.share for path in fleet.paths_of(klass)]
            self.path_dealers[klass.key] = Dealer(shares, vertex)
            vertex += 1
        for klass in fleet.classes:
            for path in fleet.paths_of(klass):
                for k, step in enumerate(path.steps):
                    weights = [w for _, w in step.executors]
                    self.step_dealers[id(path), k] = Dealer(weights, vertex)
                    vertex += 1

    def mean_tokens(self, service: str, part: str) -> tuple[float, float]:
        mine = [k for k in self.fleet.classes if k.service == service and part in k.needs]
        total = sum(k.rate_per_s for k in mine)
        if not mine:
            return 1.0, 1.0
        pairs = [
            [
                k.rate_per_s * max(1.0, each.mean(k.input_tokens, k.output_tokens))
                for each in (k.needs[part].prompt, k.needs[part].answer)
            ]
            for k in mine
        ]
        return sum(p for p, _ in pairs) / total, sum(q for _, q in pairs) / total

    def make_requests(self, demand: Demand, seed: int) -> list[Request]:
        made: dict[int, Request] = {}
        for at, spec in enumerate(self.fleet.classes):
            rows = np.flatnonzero(demand.klass == at)
            mine = demand.take(rows)
            used = {p for path in self.fleet.paths_of(spec) for p in path.parts}
            parts = [p for p in spec.needs if p in used]
            wants = {p: draw_wants(self.fleet, spec, p, spec.needs[p], mine, seed) for p in parts}
            sizes = {edge: amount(edge.bytes, mine) for edge in spec.edges}
            for i, r in enumerate(rows):
                size = {edge: float(sizes[edge][i]) for edge in spec.edges}
                request = Request(int(r), spec, float(demand.arrival_s[r]), {}, size)
                for p in parts:
                    w = wants[p]
                    request.jobs[p] = Job(
                        0,
                        p,
                        request,
                        int(w.items[i]),
                        spec.needs[p].steps,
                        int(w.prompt[i]),
                        int(w.answer[i]),
                    )
                for edge in spec.edges:
                    if edge.chunk_tokens and edge.src in parts and edge.dst in parts:
                        made_tokens = request.jobs[edge.src].answer
                        request.jobs[edge.dst].items = math.ceil(made_tokens / edge.chunk_tokens)
                made[int(r)] = request
        number = 0
        in_order = [made[at] for at in sorted(made)]
        for request in in_order:
            for job in request.jobs.values():
                job.number = number
                number += 1
        return in_order

    # Time.

    def push(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, self.count, what))
        self.count += 1

    def kick(self, executor: Executor) -> None:
        if executor not in self.kicked:
            self.kicked.append(executor)

    def run(self, until_s: float = math.inf) -> None:
        coming = list(self.requests)
        while True:
            arrival = coming[0].arrival_s if coming else math.inf
            event = self.events[0][0] if self.events else math.inf
            time = min(arrival, event)
            if time > self.now and self.kicked:
                kicked, self.kicked = self.kicked, []
                for executor in kicked:
                    if executor.at is None:
                        self.start_next(executor)
                continue
            if time > until_s or time == math.inf:
                return
            self.now = time
            if arrival <= event:
                self.arrive(coming.pop(0))
            else:
                heapq.heappop(self.events)[2]()

    # Requests.

    def active(self, request: Request, part: str) -> bool:
        assert request.path is not None
        return part in request.path.parts

    def arrive(self, request: Request) -> None:
        spec = request.spec
        dealer = self.path_dealers[spec.key]
        static = self.routing == "static"
        at = dealer.draw(self.random) if static else dealer.deal()
        request.path = self.fleet.paths_of(spec)[at]
        if self.routing != "dynamic":
            for k, step in enumerate(request.path.steps):
                dealer = self.step_dealers[id(request.path), k]
                at = dealer.draw(self.random) if static else dealer.deal()
                name = step.executors[at][0]
                number = [e.name for e in self.fleet.executors].index(name)
                for part in step.parts:
                    units = self.executors[number].units
                    self.assign(request.jobs[part], next(u for u in units if u.name == part))
        for edge in spec.edges:
            if self.active(request, edge.src) and self.active(request, edge.dst):
                request.jobs[edge.dst].feeders.append(edge)
                request.jobs[edge.dst].unstarted.append(edge)
        for part in request.path.parts:
            job = request.jobs[part]
            if not job.feeders:
                if self.routing == "dynamic":
                    self.choose(job)
                self.push(max(self.now, job.known_s), lambda job=job: self.begin(job))  # type: ignore[misc]

    def assign(self, job: Job, unit: Unit) -> None:
        job.unit = unit
        model = unit.model
        if isinstance(model, TokenPart):
            job.work_s = 0.0 if model.phase == "decode" else job.prompt * unit.rates[0]
            job.work_s += 0.0 if model.phase == "prefill" else job.answer * unit.rates[1]
        else:
            job.work_s = job.items * job.steps * (job.item_s + model.fixed_s / model.max_batch)
        unit.executor.work_s += job.work_s

    def choose(self, job: Job) -> None:
        able = [e.name for e in self.fleet.candidates(job.request.spec, job.part)]
        every = [
            (executor.work_s, executor.number)
            for spec, executor in zip(self.fleet.executors, self.executors, strict=True)
            if spec.name in able
        ]
        executor = self.executors[min(every)[1]]
        self.assign(job, next(u for u in executor.units if u.name == job.part))
        self.control_s = max(self.control_s, self.now) + self.query_s * len(able)
        job.known_s = self.control_s

    def send(self, job: Job, edge: PartEdge, share: float, what: Callable[[Job], None]) -> float:
        to = job.request.jobs[edge.dst]
        if to.unit is None:
            self.choose(to)
        assert job.unit is not None
        assert to.unit is not None
        now = max(self.now, to.known_s)
        size = share * job.request.size[edge]
        source, target = job.unit.executor, to.unit.executor
        a, b = self.fleet.boxes[source.box], self.fleet.boxes[target.box]
        alike = source.box == target.box and source.group == target.group
        if source is target or (alike and source.group is not None):
            there = now
        elif source.box == target.box:
            there = now + size / a.inner_bytes_per_s + a.inner_latency_s
        else:
            i, k = source.box, target.box
            self.out_s[i] = max(self.out_s[i], now) + size / a.nic_bytes_per_s
            self.in_s[k] = max(self.in_s[k], now) + size / b.nic_bytes_per_s
            there = max(self.out_s[i], self.in_s[k]) + max(a.latency_s, b.latency_s)
            link = self.fleet.links.get((a.name, b.name))
            if link is not None:
                free_s = max(self.free_s[a.name, b.name], now) + size / link.bytes_per_s
                self.free_s[a.name, b.name] = free_s
                there = max(there, free_s + link.latency_s)
        self.push(there, lambda: what(to))
        return there

    def out_edges(self, job: Job) -> list[PartEdge]:
        edges = [e for e in job.request.spec.edges if e.src == job.part]
        return [e for e in edges if self.active(job.request, e.dst)]

    def into_tokens(self, job: Job, edge: PartEdge) -> bool:
        return self.fleet.part_type(job.request.spec.service, edge.dst) is TokenPart

    def stream(self, job: Job) -> None:
        for edge in self.out_edges(job):
            if not edge.streamed:
                continue
            if self.into_tokens(job, edge):
                if edge not in job.streamed_to:
                    job.streamed_to.append(edge)
                    share = min(1.0, edge.chunk_tokens / job.answer)
                    self.send(job, edge, share, lambda to, e=edge: self.take_chunk(to, e))  # type: ignore[misc]
            else:
                share = 1.0 / job.request.jobs[edge.dst].items
                self.send(job, edge, share, lambda to, e=edge: self.take_chunk(to, e))  # type: ignore[misc]

    def take_chunk(self, job: Job, edge: PartEdge) -> None:
        tokens = isinstance(job.model, TokenPart)
        if not tokens:
            job.ready += 1
        if edge in job.unstarted:
            job.unstarted.remove(edge)
            if not job.unstarted:
                self.begin(job)
        elif not job.unstarted and not tokens:
            self.enqueue(job)

    def take_all(self, job: Job, edge: PartEdge) -> None:
        job.feeders.remove(edge)
        if edge in job.unstarted:
            job.unstarted.remove(edge)
            if not job.unstarted:
                self.begin(job)
        if job.worked and not job.finished and not job.feeders:
            self.finish(job)

    def begin(self, job: Job) -> None:
        if isinstance(job.model, TokenPart):
            if job.model.phase == "decode":
                job.made, job.cached = 1, job.prompt
                if job.answer <= 1:
                    self.complete(job)
                    return
            self.enqueue(job)
            return
        edges = job.request.spec.edges
        if not any(
            e.streamed and e.dst == job.part and self.active(job.request, e.src) for e in edges
        ):
            job.ready = job.items
        if job.items == 0:
            self.complete(job)
        elif job.ready > 0:
            self.enqueue(job)

    def enqueue(self, job: Job) -> None:
        assert job.unit is not None
        if job not in job.unit.queue:
            job.unit.queue.append(job)
        self.kick(job.unit.executor)

    def complete(self, job: Job) -> None:
        assert job.unit is not None
        job.worked = True
        job.unit.executor.work_s -= job.work_s
        if isinstance(job.model, TokenPart):
            self.stream(job)
        if not job.feeders:
            self.finish(job)

    def finish(self, job: Job) -> None:
        request = job.request
        job.finished = True
        if job.model.emits == "text":
            request.last_text_s = self.now
        elif job.model.emits == "audio":
            request.last_audio_s = self.now
        elif job.model.emits == "image":
            request.image_s = self.now
        assert request.path is not None
        if all(request.jobs[part].finished for part in request.path.parts):
            request.end_s = self.now
        gone = self.now
        for edge in self.out_edges(job):
            share = 1.0
            if edge.streamed:
                share = 0.0
                if self.into_tokens(job, edge):
                    share = 1.0 - min(1.0, edge.chunk_tokens / job.answer)
            there = self.send(job, edge, share, lambda to, e=edge: self.take_all(to, e))  # type: ignore[misc]
            gone = max(gone, there)
        if isinstance(job.model, TokenPart) and job.model.phase == "prefill":
            self.push(gone, lambda: self.give_up(job))

    def give_up(self, job: Job) -> None:
        """Free the KV cache that a prompt had until it was where it was wanted."""
        assert job.unit is not None
        job.unit.leaving.remove(job)
        self.kick(job.unit.executor)

    # Steps.

    def start_next(self, executor: Executor) -> None:
        n = len(executor.units)
        for i in range(n):
            k = (executor.last + 1 + i) % n
            took = self.start(executor.units[k])
            if took is not None:
                executor.last, executor.at = k, executor.units[k]
                executor.units[k].busy_s += took
                executor.units[k].spans.append((self.now, self.now + took))
                self.push(self.now + took, lambda: self.end(executor))
                return

    def start(self, unit: Unit) -> float | None:
        if isinstance(unit.model, BatchPart):
            return self.start_batch(unit, unit.model)
        if isinstance(unit.model, DiffusionPart):
            return self.start_denoising(unit, unit.model)
        return self.start_tokens(unit, unit.model)

    def end(self, executor: Executor) -> None:
        unit = executor.at
        assert unit is not None
        executor.at = None
        if isinstance(unit.model, BatchPart):
            batch, unit.batch = unit.batch, []
            for job, count in batch:
                self.count_items(job, count)
        elif isinstance(unit.model, DiffusionPart):
            self.end_denoising(unit)
        else:
            self.end_tokens(unit, unit.model)
        self.kick(executor)

    def count_items(self, job: Job, count: int) -> None:
        job.done += count
        if job.model.emits == "audio" and math.isnan(job.request.first_audio_s):
            job.request.first_audio_s = self.now
        if job.done == job.items:
            self.complete(job)

    def start_batch(self, unit: Unit, model: BatchPart) -> float | None:
        total, room = model.fixed_s, model.max_batch
        while room and unit.queue:
            job = unit.queue[0]
            count = min(room, job.ready)
            job.ready -= count
            room -= count
            total += count * job.item_s
            unit.batch.append((job, count))
            if not job.ready:
                unit.queue.pop(0)
        return total if unit.batch else None

    def start_denoising(self, unit: Unit, model: DiffusionPart) -> float | None:
        while unit.queue and len(unit.image_jobs) < model.max_batch:
            job = unit.queue[0]
            unit.image_jobs.append(job)
            unit.images.append([job.steps])
            job.ready -= 1
            if not job.ready:
                unit.queue.pop(0)
        if not unit.images:
            return None
        return model.fixed_s + math.fsum(job.item_s for job in unit.image_jobs)

    def end_denoising(self, unit: Unit) -> None:
        for left in unit.images:
            left[0] -= 1
        pairs = list(zip(unit.image_jobs, unit.images, strict=True))
        unit.image_jobs = [job for job, left in pairs if left[0] > 0]
        unit.images = [left for _, left in pairs if left[0] > 0]
        over = sorted((job for job, left in pairs if left[0] == 0), key=lambda job: job.number)
        for job in over:
            self.count_items(job, 1)

    def held(self, unit: Unit) -> float:
        return sum(job.held for job in [*unit.running, *unit.prompts, *unit.leaving])

    def start_tokens(self, unit: Unit, model: TokenPart) -> float | None:
        eager = model.admission == "prompts"
        if eager:
            while unit.running and self.held(unit) + len(unit.running) > model.kv_tokens:
                job = max(unit.running, key=lambda job: job.number)
                unit.running.remove(job)
                job.cached, job.held, job.gave_way = 0, 0.0, True
                job.request.retries += 1
                unit.queue.insert(0, job)
        budget = model.max_tokens - len(unit.running)
        for job in unit.prompts:
            if budget > 0:
                budget -= self.add_piece(unit, job, budget)
        while unit.queue and len(unit.running) + len(unit.prompts) < model.max_sequences:
            job = unit.queue[0]
            target = self.target(job)
            answer = 0 if model.phase == "prefill" else job.answer
            used = self.held(unit) + job.prompt + answer
            if eager:
                used = self.held(unit) + len(unit.running) + target + 1
            complete = job.cached == target
            if used > model.kv_tokens or (budget <= 0 and not complete):
                break
            unit.queue.pop(0)
            job.held = target if eager else job.prompt + answer
            if complete:
                unit.running.append(job)
                budget -= 1
            else:
                unit.prompts.append(job)
                budget -= self.add_piece(unit, job, budget)
        if not unit.running and not unit.pieces:
            return None
        unit.stepping = list(unit.running)
        if eager:
            for job in unit.running:
                job.held += 1
        return self.step_seconds(unit, model)

    def target(self, job: Job) -> int:
        """Tokens that the prompt pass has to put into the cache."""
        assert isinstance(job.model, TokenPart)
        if job.model.phase == "decode" and not job.gave_way:
            return job.prompt
        return job.prompt + job.made

    def add_piece(self, unit: Unit, job: Job, budget: int) -> int:
        piece = min(budget, self.target(job) - job.cached)
        unit.pieces.append((job, piece))
        return piece

    def step_seconds(self, unit: Unit, model: TokenPart) -> float:
        table = model.step
        assert isinstance(table, StepTable)
        layers = 0.0
        if unit.pieces:
            layers += curve(table.prefill, float(sum(n for _, n in unit.pieces)))
        if unit.running:
            layers += curve(table.decode, float(len(unit.running)))
        if unit.pieces and unit.running:
            layers -= table.shared_s
        return table.step_s + layers

    def end_tokens(self, unit: Unit, model: TokenPart) -> None:
        for job in sorted(unit.stepping, key=lambda job: job.number):
            job.made += 1
            job.cached += 1
            self.next_token(unit, job, [e for e in self.out_edges(job) if e.streamed])
        unit.stepping = []
        pieces, unit.pieces = unit.pieces, []
        for job, piece in pieces:
            whole = self.target(job)
            job.cached += piece
            if job.cached < whole:
                continue
            unit.prompts.remove(job)
            job.made += 1
            if model.emits == "text" and math.isnan(job.request.first_text_s):
                job.request.first_text_s = self.now
            if model.phase == "prefill":
                unit.leaving.append(job)
                self.complete(job)
            else:
                unit.running.append(job)
                self.next_token(unit, job, [e for e in self.out_edges(job) if e.streamed])

    def next_token(self, unit: Unit, job: Job, streamed: list[PartEdge]) -> None:
        if job.made >= job.answer:
            unit.running.remove(job)
            job.held = 0.0
            self.complete(job)
        elif streamed and job.made % streamed[0].chunk_tokens == 0:
            self.stream(job)
