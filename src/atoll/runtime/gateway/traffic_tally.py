"""A tally of what is asked and kept, for a controller: by model, over the last minute, five minutes, hour.

Sums are kept for every ten seconds of the last hour, in a ring; what happens now moves a few numbers of the
newest one. Of the last day it is kept, ten minutes at a time, how many requests kept their promise. Only
models that are served or that a controller told of are counted, so names that clients make up cost nothing.
Time is a parameter, in seconds of any clock that does not step back.

Who keeps a promise (`keeps_promise`): times count from the arrival, whatever was waited for. Requests that
were refused for want of room or that failed have not kept it. What was the client's own fault is not judged.
Groups of requests with a share of their own are told apart by the length of a prompt, as the backend counts
it: one that ended without that counts for its model, and for no group.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from operator import add
from typing import NamedTuple, Protocol

from atoll.runtime.pool.pool import BackendPool
from atoll.runtime.pool.routes import LengthGroup, ModelPromise, RoutesTold
from atoll.telemetry.traffic_page import (
    MAX_SERVING,
    GroupSums,
    InstanceEnd,
    InstancePace,
    ModelTraffic,
    TrafficPage,
    WindowSums,
)

_STEP_S = 10.0
_STEPS = 360
_WINDOWS = {"minute": 6, "five_minutes": 30, "hour": _STEPS}
"""Whole steps of each; the one that is not over comes on top."""
_GROUP_STEPS = _WINDOWS["five_minutes"] + 1
"""Steps that are kept of groups of requests: those that a controller judges by."""
_SUMS = 12
_DAY_STEPS = 144
_STEPS_A_DAY_STEP = 60
"""A day is kept in steps of ten minutes."""
_MAX_MODELS = 256
"""Models that are counted without having been told of; each takes 37 kB at most once it is asked for."""
_MAX_TOKENS = 10_000_000
"""More is no length of a request, whatever a backend says."""


class EndedRequest(NamedTuple):
    """How a request ended: `first_s` and `seconds` from its arrival to the first token and to the end.

    `tokens` are those of the answer that the client has, `prompt_tokens` of what was asked, where a backend
    said so.
    """

    status: int
    outcome: str
    stream: bool
    seconds: float
    first_s: float | None
    tokens: int = 0
    prompt_tokens: int | None = None


def keeps_promise(
    promise: ModelPromise, ended: EndedRequest, group: LengthGroup | None = None
) -> bool | None:
    """Whether a request kept a promise, its group's where it has one; None where it says nothing about that.

    Of an answer that is no stream only the end is seen: it has the time of its first token and of all the
    others. A client that left before the first token was promised is not judged.
    """
    outcome, first_s = ended.outcome, ended.first_s
    ttft_s, tpot_s = promise.ttft_s, promise.tpot_s
    if group is not None:
        ttft_s, tpot_s = group.ttft_s or ttft_s, group.tpot_s or tpot_s
    # One that left was waiting for one token more.
    further = ended.tokens if outcome == "cancelled" else max(0, ended.tokens - 1)
    if outcome == "cancelled":
        if first_s is None:
            return False if ended.seconds > ttft_s else None
    elif outcome != "ok":
        # 429 is want of room: that is not the client's fault.
        client = 400 <= ended.status < 500 and ended.status != 429
        return None if client else False
    if not ended.stream or first_s is None:
        return ended.seconds <= ttft_s + tpot_s * further
    in_time = further == 0 or ended.seconds - first_s <= tpot_s * further
    return in_time and first_s <= ttft_s


class SumRing:
    """Sums of the last `steps` steps of time, a row of `sums` numbers for each; the oldest is overwritten.

    Rows are added to in order of time. Until there is something to keep, no memory is taken.
    """

    __slots__ = ("_last", "_rows", "_steps", "_sums")

    def __init__(self, steps: int, sums: int) -> None:
        self._steps, self._sums = steps, sums
        self._rows = array("d")
        self._last = 0
        """The newest step that was added to."""

    def add(self, step: int, sums: Sequence[float]) -> None:
        """Add to the row of a step, which is the newest or a later one."""
        if not self._rows:
            # A model that nobody asks for takes no memory.
            if not any(sums):
                return
            self._rows = array("d", bytes(8 * self._sums * self._steps))
            self._last = step
        width = self._sums
        # Steps in which nothing happened still hold what was a whole turn of the ring ago.
        for empty in range(max(self._last + 1, step - self._steps + 1), step + 1):
            at = empty % self._steps * width
            self._rows[at : at + width] = array("d", bytes(8 * width))
        self._last = step
        at = step % self._steps * width
        for k, value in enumerate(sums):
            self._rows[at + k] += value

    def total(self, begin: int, end: int) -> list[float]:
        """Return the sums of the steps from `begin` up to but not with `end`."""
        width = self._sums
        begin, end = max(begin, self._last - self._steps + 1), min(end, self._last + 1)
        if not self._rows or begin >= end:
            return [0.0] * width
        first, last = begin % self._steps * width, (end - 1) % self._steps * width + width
        rows = self._rows
        # Columns of one stretch, or of two where it goes over the edge: slices are summed without a loop.
        parts = [rows[first:last]] if first < last else [rows[first:], rows[:last]]
        return [math.fsum(sum(part[k::width]) for part in parts) for k in range(width)]


class ModelTally:
    """Counters of one model."""

    __slots__ = (
        "_arrivals",
        "_day",
        "_first",
        "_firsts",
        "_groups",
        "_groups_now",
        "_input",
        "_input_square",
        "_judged",
        "_kept",
        "_kinds",
        "_kinds_now",
        "_measured",
        "_output",
        "_output_square",
        "_promise",
        "_rest",
        "_rest_tokens",
        "_ring",
        "_step",
        "_step_ends_s",
        "_totals",
    )

    def __init__(self, now_s: float) -> None:
        self._promise: ModelPromise | None = None
        self._groups = SumRing(_GROUP_STEPS, 0)
        self._groups_now: list[int] = []
        """Of the newest step, judged and kept of every group in turn."""
        self._ring = SumRing(_STEPS, _SUMS)
        self._kinds: dict[str, SumRing] = {}
        """Of arrivals that are not text for text, by what they bring and want."""
        # The whole steps of a day, and the one that is not over.
        self._day = SumRing(_DAY_STEPS + 1, 2)
        self._begin(int(now_s // _STEP_S))

    @property
    def promise(self) -> ModelPromise | None:
        """What requests are judged by."""
        return self._promise

    @promise.setter
    def promise(self, promise: ModelPromise | None) -> None:
        before, now = (() if one is None else one.groups for one in (self._promise, promise))
        self._promise = promise
        if before != now:
            # What was counted was of other groups.
            self._groups = SumRing(_GROUP_STEPS, 2 * len(now))
            self._groups_now = [0] * (2 * len(now))

    def _begin(self, step: int) -> None:
        self._groups_now = [0] * len(self._groups_now)
        self._step, self._step_ends_s = step, (step + 1) * _STEP_S
        self._arrivals = self._measured = self._judged = self._kept = 0
        self._input = self._input_square = self._output = self._output_square = 0
        self._firsts = self._rest_tokens = 0
        self._first = self._rest = 0.0
        self._kinds_now: dict[str, int] = {}
        self._totals: dict[int, list[float]] = {}
        """Sums of whole steps, by how many: they stay until the next step."""

    def _sums(self) -> tuple[float, ...]:
        """The newest step, in the order of `WindowSums`."""
        return (
            self._arrivals,
            self._measured,
            self._input,
            self._input_square,
            self._output,
            self._output_square,
            self._judged,
            self._kept,
            self._firsts,
            self._first,
            self._rest_tokens,
            self._rest,
        )

    def _roll(self, now_s: float) -> None:
        """Put the newest step into the rings and begin another."""
        self._ring.add(self._step, self._sums())
        self._groups.add(self._step, self._groups_now)
        for kind, count in self._kinds_now.items():
            self._kinds.setdefault(kind, SumRing(_STEPS, 1)).add(self._step, (count,))
        if self._judged:
            self._day.add(self._step // _STEPS_A_DAY_STEP, (self._judged, self._kept))
        self._begin(int(now_s // _STEP_S))

    def arrive(self, now_s: float, kind: str = "") -> None:
        """Count a request that came; `kind` is what it brings and wants ("": text for text)."""
        if now_s >= self._step_ends_s:
            self._roll(now_s)
        self._arrivals += 1
        if kind:
            self._kinds_now[kind] = self._kinds_now.get(kind, 0) + 1

    def refuse(self, now_s: float, kind: str = "") -> None:
        """Count a request that came and was refused."""
        self.arrive(now_s, kind)
        if self.promise is not None:
            self._judged += 1

    def measure(
        self,
        now_s: float,
        read: int,
        written: int,
        first_s: float | None = None,
        rest_s: float = 0.0,
    ) -> None:
        """Take in the lengths in tokens of a request that was answered whole.

        Of a stream, `first_s` are the seconds from its arrival to the first token, `rest_s` those from there
        to the end.
        """
        if now_s >= self._step_ends_s:
            self._roll(now_s)
        # Backends may claim anything: one such request would spoil the sums.
        if not (0 <= read <= _MAX_TOKENS and 0 <= written <= _MAX_TOKENS):
            read, written = (min(max(tokens, 0), _MAX_TOKENS) for tokens in (read, written))
        self._measured += 1
        self._input += read
        self._input_square += read * read
        self._output += written
        self._output_square += written * written
        if first_s is not None:
            self._firsts += 1
            self._first += first_s
            if written > 1:
                self._rest_tokens += written - 1
                self._rest += rest_s

    def judge(self, now_s: float, ended: EndedRequest) -> None:
        """Count whether a request kept the promise, if there is one."""
        if now_s >= self._step_ends_s:
            self._roll(now_s)
        promise = self._promise
        if promise is None:
            return
        at = promise.group_of(ended.prompt_tokens)
        kept = keeps_promise(promise, ended, None if at is None else promise.groups[at])
        if kept is None:
            return
        self._judged += 1
        self._kept += kept
        if at is not None:
            self._groups_now[2 * at] += 1
            self._groups_now[2 * at + 1] += kept

    def take(self, now_s: float, begin: int) -> list[float]:
        """Return the sums of the whole steps from `begin` on, in the order of `_sums`."""
        if now_s >= self._step_ends_s:
            self._roll(now_s)
        return self._ring.total(begin, self._step)

    def read(self, now_s: float, since_s: float) -> ModelTraffic:
        """Return all windows; nothing was counted before `since_s`."""
        if now_s >= self._step_ends_s:
            self._roll(now_s)
        return ModelTraffic(
            **{name: self._window(steps, now_s, since_s) for name, steps in _WINDOWS.items()},
            groups=self._read_groups(),
        )

    def _read_groups(self) -> dict[str, GroupSums]:
        groups = () if self._promise is None else self._promise.groups
        if not groups:
            return {}
        before = self._groups.total(self._step - _WINDOWS["five_minutes"], self._step)
        total = [int(a + b) for a, b in zip(before, self._groups_now, strict=True)]
        return {
            group.name: GroupSums(judged=total[2 * at], kept=total[2 * at + 1])
            for at, group in enumerate(groups)
        }

    def day(self, now_s: float) -> tuple[int, int]:
        """Return how many requests were judged and how many kept the promise, over the last 24 hours.

        That is 144 whole steps of ten minutes and the one that is not over.
        """
        if now_s >= self._step_ends_s:
            self._roll(now_s)
        newest = self._step // _STEPS_A_DAY_STEP
        judged, kept = self._day.total(newest - _DAY_STEPS, newest + 1)
        return int(judged) + self._judged, int(kept) + self._kept

    def _window(self, steps: int, now_s: float, since_s: float) -> WindowSums:
        # Whole steps are summed once until the next one; only the newest is added each time.
        begin = self._step - steps
        before = self._totals.get(steps)
        if before is None:
            before = self._totals[steps] = self._ring.total(begin, self._step)
        total = [*map(add, before, self._sums())]
        # In the first seconds a rate would be chance: until a step is over it counts as a whole one.
        seconds = max(_STEP_S, now_s - max(begin * _STEP_S, since_s))
        return WindowSums(
            seconds=seconds,
            arrivals=int(total[0]),
            measured=int(total[1]),
            input_sum=total[2],
            input_square_sum=total[3],
            output_sum=total[4],
            output_square_sum=total[5],
            judged=int(total[6]),
            kept=int(total[7]),
            firsts=int(total[8]),
            first_sum_s=total[9],
            rest_tokens=int(total[10]),
            rest_sum_s=total[11],
            kinds=self._window_kinds(begin),
        )

    def _window_kinds(self, begin: int) -> dict[str, int]:
        """Return how many of each kind came since a step began."""
        found = {
            kind: int(ring.total(begin, self._step)[0]) + self._kinds_now.get(kind, 0)
            for kind, ring in self._kinds.items()
        }
        found = self._kinds_now | found
        return {kind: count for kind, count in sorted(found.items()) if count}


class InstanceTally:
    """Requests of one instance over five minutes, and the pace of their tokens."""

    __slots__ = ("_now", "_ring", "_step", "_step_ends_s")

    def __init__(self, now_s: float) -> None:
        self._ring = SumRing(_GROUP_STEPS, 3)
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._step = int(now_s // _STEP_S)
        self._step_ends_s = (self._step + 1) * _STEP_S
        self._now = [0.0, 0.0, 0.0]

    def _roll(self, now_s: float) -> None:
        self._ring.add(self._step, self._now)
        self._begin(now_s)

    def add(self, now_s: float, tokens: int = 0, seconds: float = 0.0) -> None:
        """Count a request, and of a stream the tokens after its first one and the seconds they took."""
        if now_s >= self._step_ends_s:
            self._roll(now_s)
        self._now[0] += 1
        self._now[1] += min(max(tokens, 0), _MAX_TOKENS)
        self._now[2] += seconds

    def read(self, now_s: float, since_s: float) -> InstancePace | None:
        """Return its pace; None where it answered nothing."""
        if now_s >= self._step_ends_s:
            self._roll(now_s)
        begin = self._step - _WINDOWS["five_minutes"]
        total = [*map(add, self._ring.total(begin, self._step), self._now)]
        if not total[0]:
            return None
        return InstancePace(
            seconds=max(_STEP_S, now_s - max(begin * _STEP_S, since_s)),
            requests=int(total[0]),
            tokens=int(total[1]),
            sum_s=total[2],
        )


class ModelLook(NamedTuple):
    """The traffic of a model, how many were judged and kept the promise within a day, and the promise."""

    traffic: ModelTraffic
    judged_day: int
    kept_day: int
    promise: ModelPromise | None


class OtherNames(Protocol):
    """Whoever knows which models other names stand for."""

    def find_alias(self, name: str) -> str | None:
        """Return the model behind another name, None if it is none."""
        ...


class TrafficTally:
    """The tallies of a gateway, by model."""

    def __init__(
        self,
        pool: BackendPool,
        names: OtherNames,
        now_s: float,
        stated: Mapping[str, ModelPromise] | None = None,
    ) -> None:
        self._pool, self._names = pool, names
        self._stated = stated or {}
        self._since_s = now_s
        self._taken = int(now_s // _STEP_S)
        self._tallies: dict[str, ModelTally] = {}
        self._instances: dict[str, InstanceTally] = {}

    def pace(self, instance: str, now_s: float, tokens: int = 0, seconds: float = 0.0) -> None:
        """Count a request that one instance answered whole; see `InstanceTally.add`."""
        tally = self._instances.get(instance)
        if tally is None:
            tally = self._instances[instance] = InstanceTally(now_s)
        tally.add(now_s, tokens, seconds)

    def find(self, name: str, now_s: float) -> ModelTally | None:
        """Return what counts requests for a name; None for one that nobody serves or told of."""
        tally = self._tallies.get(name)
        return tally if tally is not None else self._begin(name, now_s)

    def take(self, now_s: float) -> dict[str, tuple[float, ...]]:
        """Return what was counted by model in the whole steps since this was asked last.

        Requests, tokens of prompts and answers, streams and their seconds to the first token, further tokens
        and their seconds, how many were judged and how many kept the promise.
        """
        begin, self._taken = self._taken, int(now_s // _STEP_S)
        found = {}
        for name, tally in self._tallies.items():
            sums = tally.take(now_s, begin)
            found[name] = (sums[0], sums[2], sums[4], *sums[8:12], *sums[6:8])
        return found

    def look(self, name: str, now_s: float) -> ModelLook | None:
        """Return what is known of a model for those who watch; None where nothing was asked or told."""
        tally = self._tallies.get(name)
        # One that settings promise something for is shown before it is asked.
        if tally is None and name in self._stated:
            tally = self._begin(name, now_s)
        if tally is None:
            return None
        return ModelLook(tally.read(now_s, self._since_s), *tally.day(now_s), tally.promise)

    def state(self, stated: Mapping[str, ModelPromise]) -> None:
        """Judge by these promises of the settings where a controller gives none."""
        self._stated = stated
        for name, tally in self._tallies.items():
            tally.promise = self._promise_of(name)

    def _promise_of(self, name: str) -> ModelPromise | None:
        routes = self._pool.routes
        told = None if routes is None else routes.models.get(name)
        if told is not None and told.promise is not None:
            return told.promise
        return self._stated.get(name)

    def _begin(self, name: str, now_s: float) -> ModelTally | None:
        # Names of aliases are counted as the model behind them.
        if name not in self._pool.rings:
            model = self._names.find_alias(name)
            if model is None or model not in self._pool.rings:
                return None
            tally = self._tallies.get(model)
            if tally is not None:
                return tally
            name = model
        if len(self._tallies) >= _MAX_MODELS:
            # Models that are gone make room first; what is still too many is not counted.
            self._forget()
            if len(self._tallies) >= _MAX_MODELS:
                return None
        tally = self._tallies[name] = ModelTally(now_s)
        tally.promise = self._promise_of(name)
        return tally

    def _forget(self) -> None:
        """Drop the tallies of models that are not served any more and that no controller told of."""
        told = () if self._pool.routes is None else self._pool.routes.models
        for name in [n for n in self._tallies if n not in self._pool.rings and n not in told]:
            del self._tallies[name]

    def promise(self, routes: RoutesTold, now_s: float) -> None:
        """Judge by the promises that a controller gives; what it told of is counted from now on."""
        self._forget()
        for name in routes.models:
            if name not in self._tallies:
                self._tallies[name] = ModelTally(now_s)
        for name, tally in self._tallies.items():
            told = routes.models.get(name)
            promised = None if told is None else told.promise
            tally.promise = promised or self._stated.get(name)

    def page(self, now_s: float) -> TrafficPage:
        """Return what is said to a controller."""
        routes = self._pool.routes
        return TrafficPage(
            routes=None if routes is None else routes.content_hash(),
            models={
                name: tally.read(now_s, self._since_s)
                for name, tally in sorted(self._tallies.items())
            },
            ends=tuple(self._ends()),
            serving=tuple(self._serving()),
            paces=self._paces(now_s),
        )

    def _paces(self, now_s: float) -> dict[str, InstancePace]:
        """The instances that answered lately; those that are gone are forgotten."""
        here = {member.instance for member in self._pool.members.values()}
        self._instances = {name: one for name, one in self._instances.items() if name in here}
        found = {
            name: one.read(now_s, self._since_s) for name, one in sorted(self._instances.items())
        }
        return {name: pace for name, pace in found.items() if pace is not None}

    def _serving(self) -> list[str]:
        members = self._pool.members.values()
        names = {member.instance for member in members if member.instance and member.serves}
        return sorted(names)[:MAX_SERVING]

    def _ends(self) -> list[InstanceEnd]:
        """The instances that know when they end: the nearest end of each."""
        ends: dict[str, float] = {}
        for member in self._pool.members.values():
            if member.ends_s is not None and member.instance:
                ends[member.instance] = min(member.ends_s, ends.get(member.instance, member.ends_s))
        return [InstanceEnd(instance=name, ends_s=ends[name]) for name in sorted(ends)]
