"""Better stages for a pipeline by exchanging nodes, the cut of layers being free.

Where it is known which slices each stage has, the best cut is, too: at a flow F stage s holds at most J_s(F)
layers, the most with which its slices carry F together, and F is reached if these add up to L. So the search
is over slices alone. It holds F a little above the best so far and makes sum_s J_s(F) larger: of all ways to
move a slice to another stage, or to exchange two, the best is taken, not back again for a while (tabu), until
the sum is L.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.sites.pipeline_bound import Cut
from atoll.solve.place.sites.stage_rates import Place, StageTable

_ABOVE = 1.0 + 5e-4
"""Times the best flow so far that is asked for."""
_FIRST = 0.85
"""Share of the flow if machines could be divided that is asked for first."""
_LOWER = 0.9
"""Factor on that where it is not reached."""
_TABU = 8
"""Steps for which a stage does not take back what it gave."""
_NEAR = 0.9
"""What the next layer counts where slices all but carry it."""


@dataclass(frozen=True)
class Filled:
    """Slices by stage and way of a place, by a table, and the flow that all stages carry, tokens/s."""

    flow: float
    cut: Cut
    number: Ints
    table: StageTable


def exchange(place: Place, machines: Ints, start: Filled, steps: int) -> Filled | None:
    """Return the best filling met from one whose flow is a limit, None where there is none.

    It ends after so many steps without a better one.
    """
    return _Exchange(place, machines, start).run(start.flow, steps)


class _Exchange:
    """The search; stage S holds what no stage has, way W stands for nothing."""

    def __init__(self, place: Place, machines: Ints, start: Filled) -> None:
        self._table = start.table
        rate = np.array([start.table.at(s) for s in range(start.table.stages)])
        stages, ways, width = rate.shape
        self.layers, self._stages, self._ways = width - 1, stages, ways
        self._rate = np.zeros((stages, ways + 1, width))
        self._rate[:, :ways] = rate / place.pieces[:, None]
        self._number = np.zeros((stages + 1, ways + 1), np.int64)
        self._number[:stages, :ways] = start.number
        # Machines that are left are whole, so only ways to use them whole have more than is given.
        given = np.zeros(len(machines))
        np.add.at(given, place.entry, start.number.sum(axis=0) / place.pieces)
        left = machines - np.ceil(given - 1e-9)
        for entry in np.unique(place.entry).tolist():
            way = _best_way(rate, place.entry == entry)
            self._number[stages, way] = int(left[entry]) * int(place.pieces[way])
        # There is always nothing to give.
        self._number[:, ways] = 1
        # By stage, what it gives and what it takes: the layers it then holds, and what they are worth.
        self._held = np.zeros((stages, ways + 1, ways + 1))
        self._worth = np.zeros_like(self._held)

    def run(self, limit: float, steps: int) -> Filled | None:
        """Return the best filling met, after so many steps without a better one."""
        best: Filled | None = None
        target = limit * _FIRST
        self._look(target, range(self._stages))
        forbidden = np.zeros(self._number.shape, np.int64)
        left, now = steps, 0
        while left > 0:
            now, left = now + 1, left - 1
            step = self._best_step(forbidden >= now)
            if step is None:
                break
            a, b, give, take = step
            for stage, out, into in ((a, give, take), (b, take, give)):
                if out < self._ways:
                    self._number[stage, out] -= 1
                    forbidden[stage, out] = now + _TABU
                if into < self._ways:
                    self._number[stage, into] += 1
            self._look(target, (stage for stage in (a, b) if stage < self._stages))
            if self._layers_held() >= self.layers:
                better = self._filled()
                if better is not None and (best is None or better.flow > best.flow):
                    best, left = better, steps
                    target = best.flow * _ABOVE
                    self._look(target, range(self._stages))
            elif best is None and left == 0 and target > limit * _FIRST * _LOWER**6:
                target, left = target * _LOWER, steps
                self._look(target, range(self._stages))
        return best

    def _look(self, flow: float, stages: Iterable[int]) -> None:
        """Write what stages hold at a flow, as they are and with a slice less, more or exchanged."""
        for s in stages:
            rate = self._rate[s]
            carried = self._number[s].astype(np.float64) @ rate
            changed = carried[None, None, :] - rate[:, None, :] + rate[None, :, :]
            changed[..., 0] = np.inf
            self._held[s], part = _layers_of(changed, flow)
            self._worth[s] = self._held[s] + part

    def _layers_held(self) -> int:
        none = self._ways
        return int(self._held[:, none, none].sum())

    def _best_step(self, forbidden: NDArray[np.bool_]) -> tuple[int, int, int, int] | None:
        """Return the stages a, b, what a gives b and takes for it; None where nothing can be moved."""
        stages, none = self._stages, self._ways
        gain = np.zeros((stages + 1, none + 1, none + 1))
        gain[:stages] = self._worth - self._worth[:, none, none][:, None, None]
        gain[self._number <= 0] = -np.inf
        # What was given a short while ago is not taken back.
        gain = np.where(forbidden[:, None, :], -np.inf, gain)
        total = gain[:, None, :, :] + gain.transpose(0, 2, 1)[None, :, :, :]
        every, equal = np.arange(stages + 1), np.arange(none + 1)
        total[every, every] = -np.inf
        total[:, :, equal, equal] = -np.inf
        at = int(np.argmax(total))
        a, b, give, take = (int(x) for x in np.unravel_index(at, total.shape))
        return (a, b, give, take) if np.isfinite(total[a, b, give, take]) else None

    def _carried(self) -> Floats:
        """Return what every stage carries with each number of layers; with none, anything."""
        number = self._number[: self._stages].astype(np.float64)
        carried: Floats = np.einsum("sw,swj->sj", number, self._rate)
        carried[:, 0] = np.inf
        return carried

    def _filled(self) -> Filled | None:
        """Return the filling with the best cut for what stages have; None where no cut has a flow."""
        carried = self._carried()
        levels = np.unique(carried[np.isfinite(carried) & (carried > 0.0)])
        low, high = 0, len(levels)
        # The flow is what some stage carries with some number of layers.
        while low < high:
            middle = (low + high) // 2
            if _layers_of(carried, float(levels[middle]))[0].sum() >= self.layers:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return None
        cut = _layers_of(carried, float(levels[low - 1]))[0].astype(np.int64)
        # Layers too many are taken from the longest stages; fewer layers hardly ever carry less.
        while int(cut.sum()) > self.layers:
            cut[int(np.argmax(cut))] -= 1
        flow = float(carried[np.arange(len(cut)), cut].min())
        if cut.min() < 1 or flow <= 0.0:
            return None
        number = self._number[: self._stages, : self._ways].copy()
        return Filled(flow, tuple(int(j) for j in cut), number, self._table)


def _layers_of(carried: Floats, flow: float) -> tuple[Floats, Floats]:
    """Return the most layers with which stages carry a flow, and how near they are to one more."""
    width = carried.shape[-1]
    # The last number of layers that does; with none they carry anything.
    held = width - 1 - (carried >= flow)[..., ::-1].argmax(axis=-1)
    following = np.minimum(held + 1, width - 1)
    near = np.take_along_axis(carried, following[..., None], axis=-1)[..., 0] / flow
    part = np.where(held < width - 1, np.clip(near, 0.0, 1.0), 0.0)
    return held.astype(np.float64), _NEAR * part


def _best_way(rate: Floats, ways: NDArray[np.bool_]) -> int:
    """Return of some ways the one that carries the most layers a second."""
    work = (rate * np.arange(rate.shape[2])).max(axis=(0, 2))
    return int(np.argmax(np.where(ways, work, -1.0)))
