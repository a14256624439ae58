"""Choose one entry per service so that GPUs suffice and costs are least: the same question, two ways.

    min sum_s cost_s[k_s]    sum_s use_s[k_s, n] <= stock[n] for every GPU type n

`CpMaster` asks CP-SAT in a process of its own, since ortools cannot be loaded beside highspy; `merge_fronts`
needs nothing but numpy: fronts of (GPUs, cost) are merged service by service.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Self

import numpy as np

from atoll.core.errors import InternalError, MissingDependencyError
from atoll.solve.array_types import Floats, Ints

Master = Callable[[Sequence[Floats], Sequence[Ints], Ints], "list[int] | None"]
"""Costs and GPUs used by service and entry, and the stock; returns an entry per service, None if none fit."""

_GRAINS = 10**6
"""Steps into which the range of costs is cut: CP-SAT counts in whole numbers."""
_DETERMINISTIC_TIME = 60.0
"""Work of one CP-SAT solve, in its own units; what is asked here takes a small part of one."""


def efficient(cost: Floats, use: Ints) -> Ints:
    """Return the entries than which no other costs and uses less: ascending by cost, the first of equals."""
    finite = np.flatnonzero(np.isfinite(cost))
    # Sorted by cost, then GPUs, then number: a later entry can only be kept if it uses less of something.
    order = finite[np.lexsort((finite, use[finite].sum(axis=1), cost[finite]))]
    # Of entries that use the same, the first: few are left of many.
    code = np.ravel_multi_index(tuple(use[order].T), tuple(use[order].max(axis=0, initial=0) + 1))
    order = order[np.sort(np.unique(code, return_index=True)[1])]
    kept = np.empty((len(order), use.shape[1]), np.int64)
    rows: list[int] = []
    for k in order.tolist():
        # Everything kept is at least as cheap, so one that uses no more of any type makes this entry useless.
        if not rows or not (kept[: len(rows)] <= use[k]).all(axis=1).any():
            kept[len(rows)] = use[k]
            rows.append(k)
    return np.array(rows, np.int64)


def merge_fronts(costs: Sequence[Floats], uses: Sequence[Ints], stock: Ints) -> list[int] | None:
    """Return the cheapest entry of every service that fit together, exactly."""
    total, used = np.zeros(1), np.zeros((1, len(stock)), np.int64)
    chosen = np.zeros((1, 0), np.int64)
    for cost, use in zip(costs, uses, strict=True):
        rows = efficient(cost, use)
        both = (used[:, None, :] + use[rows][None, :, :]).reshape(-1, len(stock))
        sums = (total[:, None] + cost[rows][None, :]).ravel()
        # Sums that exceed the stock go now: what comes later only adds to them.
        fits = np.flatnonzero((both <= stock).all(axis=1))
        if not len(fits):
            return None
        front = fits[efficient(sums[fits], both[fits])]
        # The index of a sum is (row before) * (own rows) + own row.
        before, own = np.divmod(front, len(rows))
        chosen = np.concatenate((chosen[before], rows[own][:, None]), axis=1)
        total, used = sums[front], both[front]
    return [int(k) for k in chosen[int(np.argmin(total))]]


class CpMaster:
    """CP-SAT with one thread, a fixed seed and a limit on counted work, in a process that is kept."""

    def __init__(self, seed: int = 0, *, work: float = 1.0) -> None:
        if find_spec("ortools") is None:
            raise MissingDependencyError("ortools", "cp", needed_for="the solver cp")
        self.seed, self.work = seed, work
        self.solves = 0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # our own module, by the interpreter that runs us
            [sys.executable, "-m", "atoll.solve.place.cp.cp_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # The worker ends when its stdin does; no signal is needed.
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()

    def __call__(
        self, costs: Sequence[Floats], uses: Sequence[Ints], stock: Ints
    ) -> list[int] | None:
        """Return the cheapest entry of every service that fit together, None if none do."""
        rows = [efficient(cost, use) for cost, use in zip(costs, uses, strict=True)]
        if any(not len(own) for own in rows):
            return None
        kept = [cost[own] for cost, own in zip(costs, rows, strict=True)]
        # Costs above the least of their service; only differences matter.
        above = [cost - cost.min() for cost in kept]
        # Where all costs are equal the range is 0, and any unit will do.
        unit = max(float(cost.max()) for cost in above) / _GRAINS or 1.0
        answer = self._ask(
            {
                "costs": [[round(float(c) / unit) for c in cost] for cost in above],
                "uses": [use[own].tolist() for use, own in zip(uses, rows, strict=True)],
                "stock": stock.tolist(),
                "seed": self.seed,
                "deterministic_time": _DETERMINISTIC_TIME * self.work,
            }
        )
        self.solves += 1
        chosen = answer["chosen"]
        if chosen is None:
            return None
        return [int(own[k]) for own, k in zip(rows, chosen, strict=True)]

    def _ask(self, question: dict[str, object]) -> dict[str, list[int] | None]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise InternalError("the CP-SAT process is asked before it was started")
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise InternalError(f"the CP-SAT process ended with code {process.wait()}")
        answer: dict[str, list[int] | None] = json.loads(line)
        return answer
