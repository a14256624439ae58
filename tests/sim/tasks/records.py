"""What the plain simulator of tasks keeps of jobs, requests, units and executors."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from atoll.routing.decisions import by_weight, draw, round_robin
from atoll.sim.sim_arrays import Longs
from atoll.sim.tasks.task_fleet import ClassSpec, PartEdge, PartModel, PathSpec, Points, TokenPart


@dataclass(eq=False)
class Job:
    number: int
    part: str
    request: Request
    items: int
    steps: int
    prompt: int
    answer: int
    unit: Unit | None = None
    feeders: list[PartEdge] = field(default_factory=list)
    unstarted: list[PartEdge] = field(default_factory=list)
    ready: int = 0
    done: int = 0
    made: int = 0
    cached: int = 0
    known_s: float = 0.0
    work_s: float = 0.0
    held: float = 0.0
    gave_way: bool = False
    worked: bool = False
    finished: bool = False
    streamed_to: list[PartEdge] = field(default_factory=list)

    @property
    def model(self) -> PartModel:
        assert self.unit is not None
        return self.unit.model

    @property
    def item_s(self) -> float:
        assert not isinstance(self.model, TokenPart)
        return self.model.item_s[self.request.spec.name]


@dataclass(eq=False)
class Request:
    number: int
    spec: ClassSpec
    arrival_s: float
    jobs: dict[str, Job]
    size: dict[PartEdge, float]
    path: PathSpec | None = None
    end_s: float = math.nan
    first_text_s: float = math.nan
    last_text_s: float = math.nan
    first_audio_s: float = math.nan
    last_audio_s: float = math.nan
    image_s: float = math.nan
    retries: int = 0


@dataclass(eq=False)
class Unit:
    executor: Executor
    name: str
    model: PartModel
    rates: tuple[float, float]
    queue: list[Job] = field(default_factory=list)
    batch: list[tuple[Job, int]] = field(default_factory=list)
    images: list[list[int]] = field(default_factory=list)
    image_jobs: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    prompts: list[Job] = field(default_factory=list)
    pieces: list[tuple[Job, int]] = field(default_factory=list)
    stepping: list[Job] = field(default_factory=list)
    leaving: list[Job] = field(default_factory=list)
    busy_s: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)


@dataclass(eq=False)
class Executor:
    number: int
    box: int
    group: int | None = None
    units: list[Unit] = field(default_factory=list)
    last: int = -1
    at: Unit | None = None
    work_s: float = 0.0


class Dealer:
    """Chooses among weighted options, as the routing of the run says."""

    def __init__(self, weights: list[float], shift: int) -> None:
        n = len(weights)
        self.first = np.array([0, n])
        self.target = np.arange(n)
        self.weight = np.array(weights)
        self.order = np.array([(i - shift) % n for i in range(n)])
        self.credit = np.zeros(n)
        self.closed = np.zeros(n, bool)

    def deal(self) -> int:
        return round_robin(
            self.first, self.target, self.weight, self.order, self.credit, 0, self.closed
        )

    def draw(self, random: Longs) -> int:
        return by_weight(self.first, self.target, self.weight, 0, self.closed, draw(random))


def curve(points: Points, value: float) -> float:
    xs = [x for x, _ in points]
    if value <= xs[0] or len(xs) == 1:
        return points[0][1]
    high = min(max(bisect_left(xs, value), 1), len(xs) - 1)
    (x0, y0), (x1, y1) = points[high - 1], points[high]
    return y0 + (value - x0) * (y1 - y0) / (x1 - x0)
