"""How loaded the executors of an any-to-any service are, by class, over the paths that requests take.

An executor is full at a second of work a second (`Instance.work`). A class goes over the paths of the plan in
force, as graph servers send it: where no executor of a step serves, over its other paths, and without any
over all executors that run what it needs, alike. The load of a step is the mean of its executors' by weight,
that of a path its highest step's, that of a class the mean of its paths' by share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.control.decision.executor_capacity import ClassNeed
from atoll.plan.plan import Instance, RequestPath

Floats = NDArray[np.float64]
_Step = tuple[tuple[str, ...], dict[str, float]]
"""Parts, and the weights of executors."""
_ENDS = (".prefill", ".decode")


class ExecutorLoads:
    """Loads of classes by their rates, with these executors and paths."""

    def __init__(
        self,
        needs: Sequence[ClassNeed],
        serving: Sequence[Instance],
        paths: Iterable[RequestPath],
    ) -> None:
        self._number = {one.id: at for at, one in enumerate(serving)}
        self._seconds = [
            {(klass, part): seconds for klass, part, seconds in one.work} for one in serving
        ]
        own: dict[str, list[RequestPath]] = {need.klass: [] for need in needs}
        for path in paths:
            if path.klass in own:
                own[path.klass].append(path)
        takes = np.zeros((len(serving), len(needs)))
        steps: list[Floats] = []
        begins: list[int] = []
        shares: list[tuple[int, float]] = []
        self._reached = np.zeros(len(needs), np.bool_)
        for k, need in enumerate(needs):
            ways = self._list_ways(need, own[need.klass])
            total = sum(share for share, _ in ways)
            for share, way in ways:
                begins.append(len(steps))
                shares.append((k, share / total))
                self._reached[k] = True
                for parts, weights in way:
                    row = np.zeros(len(serving))
                    for name, weight in weights.items():
                        at = self._number[name]
                        row[at] = weight
                        seconds = sum(self._seconds[at][need.klass, part] for part in parts)
                        takes[at, k] += share / total * weight * seconds
                    steps.append(row)
        self._takes = takes
        self._steps = np.array(steps).reshape(len(steps), len(serving))
        self._begins = np.array(begins, np.int64)
        self._shares = np.zeros((len(needs), len(shares)))
        for at, (k, share) in enumerate(shares):
            self._shares[k, at] = share

    def of(self, rates: Sequence[float] | Floats) -> Floats:
        """Return the load of every class at these requests/s of all; infinite where nobody serves it."""
        loads = np.full(len(self._reached), math.inf)
        if len(self._begins):
            busy = self._takes @ np.asarray(rates, np.float64)
            paths = np.maximum.reduceat(self._steps @ busy, self._begins)
            loads[self._reached] = (self._shares @ paths)[self._reached]
        return loads

    def carried(self, rates: Sequence[float] | Floats) -> float:
        """Return the requests/s of all classes together that fill the most loaded one, at these shares."""
        asked = np.asarray(rates, np.float64)
        highest = float(self.of(asked)[asked > 0.0].max(initial=0.0))
        return 0.0 if highest <= 0.0 or math.isinf(highest) else float(asked.sum()) / highest

    def _list_ways(
        self, need: ClassNeed, paths: Sequence[RequestPath]
    ) -> list[tuple[float, list[_Step]]]:
        """Return the ways of a class that lead somewhere, with their shares."""
        found = []
        for path in paths:
            way = [
                (step.parts, self._living(need.klass, step.parts, step.instances))
                for step in path.steps
            ]
            if path.share > 0.0 and all(weights for _, weights in way):
                found.append((path.share, way))
        if found:
            return found
        anywhere = self._go_anywhere(need)
        return [] if anywhere is None else [(1.0, anywhere)]

    def _living(
        self, klass: str, parts: Sequence[str], weights: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the weights of executors that serve and do these parts, made to add up to 1."""
        here = {
            name: weight
            for name, weight in weights.items()
            if weight > 0.0
            and (at := self._number.get(name)) is not None
            and all((klass, part) in self._seconds[at] for part in parts)
        }
        total = sum(here.values())
        return {name: weight / total for name, weight in here.items()}

    def _go_anywhere(self, need: ClassNeed) -> list[_Step] | None:
        """Return a step for each component over all that run it, None where one is run by nobody."""
        every = dict.fromkeys(self._number, 1.0)
        way: list[_Step] = []
        for component in need.components:
            whole = self._living(need.klass, (component,), every)
            if whole:
                way.append(((component,), whole))
                continue
            for end in _ENDS:
                phase = self._living(need.klass, (component + end,), every)
                if not phase:
                    return None
                way.append(((component + end,), phase))
        return way
