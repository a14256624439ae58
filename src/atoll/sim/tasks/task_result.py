"""Results of a simulation of tasks: per class, per executor and part, and per request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.plan.kept_groups import KeptGroup, count_kept, judge_group
from atoll.plan.problem import Service
from atoll.plan.request_groups import list_groups
from atoll.sim.sim_arrays import Floats, Longs, Records
from atoll.sim.sim_result import Spread
from atoll.sim.tasks import task_arrays as a
from atoll.sim.tasks.task_build import BuiltTasks, class_parts
from atoll.sim.tasks.task_fleet import ClassSpec, Promises

_BEHIND = 0.02
"""A class falls behind of which this share of what comes is added to what is under way."""
_MORE = 0.5
"""And this share of what is under way at first."""
_SURE = 3.0
"""And so many times the root of that, by which chance alone moves it."""


@dataclass(frozen=True, slots=True)
class ClassResult:
    """Requests of one class that came after the warm-up; times in seconds.

    `ttft_s` until the first text, `tpot_s` per token after it, `first_audio_s` until the first sound,
    `ahead_s` by how much speech is complete before a listener who starts with its first piece has heard all
    (less is worse: 99 % of requests are ahead by `p99` or more),
    `image_s` until the images. `kept` are the shares of judged requests that kept each promise there is,
    `kept_all` all of them (None: there is none), and `counts` how many did and were judged, by part of the
    run. One that is not finished is judged by what is broken already. Of a class that `falls_behind` more
    and more are under way, as executors carry less than comes: then nothing is kept, also where they wait
    for their first sound, of which nothing is promised. `requests_per_s` are those that finished in the
    steady window. `part_s` is, by part, how long requests are there: from when what it needs
    has come until it is done, waiting included.
    """

    service: str
    name: str
    arrived: int
    finished: int
    in_flight: int
    e2e_s: Spread
    ttft_s: Spread
    tpot_s: Spread
    first_audio_s: Spread
    ahead_s: Spread
    image_s: Spread
    kept: Mapping[str, float]
    kept_all: float | None
    counts: tuple[tuple[int, int], ...]
    falls_behind: bool
    requests_per_s: float
    part_s: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class PartResult:
    """One part on an executor over the whole run.

    `utilisation` is the share of the run in which it works, and `busy` that of the time in which requests
    come: after the last one came it has less and less to do. `batch_mean` are items, images or sequences in a
    step, `queue_mean` requests that wait, `kv_mean` and `kv_peak` shares of the KV cache (what is booked
    counts).
    """

    part: str
    utilisation: float
    busy: float
    steps: int
    batch_mean: float
    queue_mean: float
    kv_mean: float
    kv_peak: float
    prompt_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class ExecutorResult:
    """One executor: the share of the run and of the time in which requests come (`busy`) that it works."""

    name: str
    box: str
    service: str
    utilisation: float
    busy: float
    parts: tuple[PartResult, ...]


@dataclass(frozen=True)
class TaskColumns:
    """Per request, in order of arrival: class by number, path by number in the fleet's order of classes,
    seconds since arrival (NaN: it has none, or not yet), and whether it is judged.
    """

    klass: Longs
    path: Longs
    arrival_s: Floats
    e2e_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    first_audio_s: Floats
    ahead_s: Floats
    image_s: Floats
    retries: Longs


@dataclass(frozen=True)
class TaskResult:
    """Everything a run found. The same arguments give the same result, `cpu_s` apart.

    `requests_per_s` counts what finished in the steady window (the time in which requests come without the
    warm-up share at both ends; the whole run where all come at once); `by_makespan_per_s` is requests over
    the time from first arrival to last finish, as where many are submitted and the last is waited for.
    `nic_busy` is, by box, the share of the time in which requests come that it sends and receives.
    `gave_way` counts sequences whose KV cache was taken and computed again, `cut` requests that no KV cache
    has room for and that were made shorter.
    """

    classes: tuple[ClassResult, ...]
    executors: tuple[ExecutorResult, ...]
    columns: TaskColumns
    arrived: int
    finished: int
    in_flight: int
    clock_s: float
    requests_per_s: float
    by_makespan_per_s: float
    nic_busy: Mapping[str, tuple[float, float]]
    queries: int
    gave_way: int
    cut: int
    cpu_s: float

    def klass(self, name: str, service: str | None = None) -> ClassResult:
        """Return the result of a class."""
        return next(c for c in self.classes if c.name == name and service in (None, c.service))

    def judge_classes(self, service: Service) -> tuple[KeptGroup, ...]:
        """Return what each class of a service keeps of what it is promised."""
        own = {klass.name: klass for klass in self.classes if klass.service == service.name}
        return tuple(
            judge_group(group, own[group.name].counts, own[group.name].kept)
            for group in list_groups(service)
            if group.name in own
        )

    def executor(self, name: str) -> ExecutorResult:
        """Return the result of an executor."""
        return next(e for e in self.executors if e.name == name)

    @classmethod
    def of(
        cls, built: BuiltTasks, *, warmup: float, cpu_s: float, part_times: bool = True
    ) -> TaskResult:
        """Read the result off a run."""
        sim, fleet = built.sim, built.fleet
        run = sim.run[0]
        clock = float(run["clock_s"])
        came = sim.request[: int(run["next"])]
        columns = _columns(came, built.speech_s[: len(came)])
        from_s = warmup * float(columns.arrival_s[-1])
        judged = columns.arrival_s >= from_s
        end_s = np.asarray(came["end_s"])
        asked = min(clock, float(run["asked_s"]))
        low, high = warmup * asked, (1.0 - warmup) * asked
        steady = (end_s > low) & (end_s <= high)
        window = max(high - low, 1e-12)
        finished = int(run["finished"])
        last = float(end_s.max()) if finished == len(came) else clock
        makespan = last - float(columns.arrival_s[0])
        return cls(
            classes=tuple(
                _class(
                    spec,
                    columns,
                    judged & (columns.klass == at),
                    clock,
                    float((steady & (columns.klass == at)).sum()) / window,
                    _times_at_parts(built, at, judged) if part_times else {},
                    falls_behind=_falls_behind(columns, columns.klass == at, from_s),
                )
                for at, spec in enumerate(fleet.classes)
            ),
            executors=_executors(built, clock, asked),
            columns=columns,
            arrived=len(came),
            finished=finished,
            in_flight=len(came) - finished,
            clock_s=clock,
            requests_per_s=float(steady.sum()) / window,
            by_makespan_per_s=finished / makespan if makespan > 0.0 else 0.0,
            nic_busy={
                spec.name: (float(box["out_asked_s"]) / asked, float(box["in_asked_s"]) / asked)
                for spec, box in zip(fleet.boxes, sim.box, strict=True)
            },
            queries=int(run["queries"]),
            gave_way=int(run["gave_way"]),
            cut=built.clipped,
            cpu_s=cpu_s,
        )


def _columns(came: Records, speech_s: Floats) -> TaskColumns:
    arrival = np.asarray(came["arrival_s"])
    tokens = np.asarray(came["tokens"])
    gaps = came["last_text_s"] - came["first_text_s"]
    tpot = np.where(tokens > 1, gaps / np.maximum(tokens - 1, 1), np.nan)
    return TaskColumns(
        klass=np.array(came["klass"]),
        path=np.array(came["path"]),
        arrival_s=arrival.copy(),
        e2e_s=came["end_s"] - arrival,
        ttft_s=came["first_text_s"] - arrival,
        # Text that is not complete has no pace yet.
        tpot_s=np.where(np.isfinite(came["end_s"]), tpot, np.nan),
        first_audio_s=came["first_audio_s"] - arrival,
        ahead_s=came["first_audio_s"] + speech_s - came["last_audio_s"],
        image_s=came["image_s"] - arrival,
        retries=np.array(came["retries"]),
    )


def _class(
    spec: ClassSpec,
    columns: TaskColumns,
    mine: NDArray[np.bool_],
    clock: float,
    per_s: float,
    part_s: Mapping[str, Spread],
    *,
    falls_behind: bool,
) -> ClassResult:
    e2e = columns.e2e_s[mine]
    done = np.isfinite(e2e)
    kept, kept_all, counts = _kept(spec.promises, columns, mine, clock)
    if falls_behind and kept_all is not None:
        kept |= dict.fromkeys(kept.keys() & {"ahead", "image"}, 0.0)
        kept_all, counts = 0.0, tuple((0, judged) for _, judged in counts)
    spreads = {
        name: Spread.of(getattr(columns, name)[mine])
        for name in ("e2e_s", "ttft_s", "tpot_s", "first_audio_s", "image_s")
    }
    behind = Spread.of(-columns.ahead_s[mine])
    return ClassResult(
        service=spec.service,
        name=spec.name,
        arrived=int(mine.sum()),
        finished=int(done.sum()),
        in_flight=int((~done).sum()),
        ahead_s=Spread(*(None if value is None else -value for value in behind)),
        kept=kept,
        kept_all=kept_all,
        counts=counts,
        falls_behind=falls_behind,
        requests_per_s=per_s,
        part_s=part_s,
        **spreads,
    )


def _falls_behind(columns: TaskColumns, own: NDArray[np.bool_], from_s: float) -> bool:
    """Whether more and more requests of a class are under way: in the last third of the time as in the first.

    The time is that in which they come, after the warm-up.
    """
    arrival = columns.arrival_s[own]
    # What never ended was under way all the time.
    end = np.nan_to_num(arrival + columns.e2e_s[own], nan=np.inf)
    until_s = float(arrival.max(initial=from_s))
    third_s = (until_s - from_s) / 3.0
    if third_s <= 0.0:
        return False  # all of them came at once

    def under_way(since_s: float) -> float:
        inside = np.minimum(end, since_s + third_s) - np.maximum(arrival, since_s)
        return float(np.maximum(inside, 0.0).sum()) / third_s

    first, last = under_way(from_s), under_way(until_s - third_s)
    came = int((arrival >= from_s).sum()) * 2.0 / 3.0
    chance = _SURE * math.sqrt(max(first, 1.0))
    # In a short run queues that keep up fill at first.
    return last - first > max(_BEHIND * came, _MORE * first, chance)


def _times_at_parts(built: BuiltTasks, at: int, judged: NDArray[np.bool_]) -> dict[str, Spread]:
    sim, spec = built.sim, built.fleet.classes[at]
    came = sim.request[: len(judged)]
    first = came["job"][judged & (came["klass"] == at)]
    found: dict[str, Spread] = {}
    for k, part in enumerate(class_parts(built.fleet, spec)):
        jobs = sim.job[first + k]
        done = jobs[jobs["finished"]]
        if len(done):
            found[part] = Spread.of(done["finish_s"] - done["begin_s"])
    return found


def _kept(
    promises: Promises, columns: TaskColumns, mine: NDArray[np.bool_], clock: float
) -> tuple[dict[str, float], float | None, tuple[tuple[int, int], ...]]:
    """The share of requests that kept each promise, that kept all of them, and how many did."""
    done = np.isfinite(columns.e2e_s[mine])
    age = clock - columns.arrival_s[mine]
    held: dict[str, NDArray[np.bool_]] = {}
    known: dict[str, NDArray[np.bool_]] = {}
    limits = {
        "ttft": (promises.ttft_s, columns.ttft_s),
        "tpot": (promises.tpot_s, columns.tpot_s),
        "ahead": (promises.ahead_s, columns.ahead_s),
        "image": (promises.image_s, columns.image_s),
    }
    for name, (limit, column) in limits.items():
        if limit is None:
            continue
        values = column[mine]
        there = np.isfinite(values)
        met = values >= limit if name == "ahead" else values <= limit
        # What a finished request does not have (a pace, with one token) it cannot break.
        held[name] = np.where(there, met, done)
        late = (age > limit) if name in ("ttft", "image") else np.zeros_like(there)
        known[name] = there | done | late
    kept = {name: float(held[name][known[name]].mean()) for name in held if known[name].any()}
    if not held:
        return kept, None, ()
    broken = np.any([known[name] & ~held[name] for name in held], axis=0)
    judged = broken | np.all([known[name] for name in held], axis=0)
    whole = ~broken[judged]
    return kept, float(whole.mean()) if len(whole) else None, count_kept(whole)


def _executors(built: BuiltTasks, clock: float, asked: float) -> tuple[ExecutorResult, ...]:
    found: list[ExecutorResult] = []
    for spec, row in zip(built.fleet.executors, built.sim.executor, strict=True):
        units = range(int(row["first"]), int(row["first"] + row["count"]))
        # A step that is cut off by the end of the run was not all in it.
        over_s = max(0.0, float(row["step_end_s"]) - clock) if row["busy"] else 0.0
        parts = tuple(
            _part(
                built.unit_names[u],
                built.sim.unit[u],
                clock,
                asked,
                over_s if u == int(row["at"]) else 0.0,
            )
            for u in units
        )
        worked, busy = sum(part.utilisation for part in parts), sum(part.busy for part in parts)
        found.append(ExecutorResult(spec.name, spec.box, spec.service, worked, busy, parts))
    return tuple(found)


def _part(name: str, unit: Records, clock: float, asked: float, over_s: float) -> PartResult:
    room = max(float(unit["room"]), 1.0)
    held = float(unit["used"]) * clock - float(unit["used_moment"])
    queued = float(unit["waiting"]) * clock - float(unit["queue_moment"])
    span = max(clock, 1e-12)
    return PartResult(
        part=name,
        utilisation=(float(unit["busy_s"]) - over_s) / span,
        busy=float(unit["busy_asked_s"]) / max(asked, 1e-12),
        steps=int(unit["step_count"]),
        batch_mean=float(unit["batch_sum"]) / max(int(unit["step_count"]), 1),
        queue_mean=max(0.0, queued / span),
        kv_mean=held / span / room if unit["type"] == a.TOKENS else 0.0,
        kv_peak=float(unit["peak"]) / room if unit["type"] == a.TOKENS else 0.0,
        prompt_tokens=int(unit["prompt_tokens"]),
        decode_tokens=int(unit["decode_tokens"]),
    )
