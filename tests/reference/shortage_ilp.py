"""The largest share of all demand that can be served at once, by one integer program.

Shares no code with the solvers. For machines that are cut into slices, instances on single slices, and
choices between ways, with levels y and the common share f:

    n[p]    instances of piece p                       whole numbers
    a[w]    share of way w whose phases run apart

    sum over pieces of an offer of GPUs times n       <= GPUs of all its machines
    a of a way                                        <= what its pieces for prefill carry; for decode, too
    y of a way                                        <= a + what its pieces for both carry
                                                         (all in shares of its demand)
    y of a service that no choice names                = f
    sum of y over the ways of a choice                 = f
    sum of error times y over them                    <= max_error f
    sum of y over the ways of a model                 >= its least share times f
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ShortPiece(NamedTuple):
    """An instance on one slice: the way it serves, its offer, its GPUs, its phase, and what it carries.

    That is a share of the demand of its way.
    """

    way: int
    offer: int
    gpus: int
    phase: str
    share: float


class ShortChoice(NamedTuple):
    """Ways of a choice, how often each errs, the most that they may on average, and least shares of some."""

    ways: tuple[int, ...]
    errors: tuple[float, ...]
    max_error: float | None = None
    floors: tuple[tuple[tuple[int, ...], float], ...] = ()


def most_served(
    pieces: Sequence[ShortPiece],
    gpus: Sequence[int],
    choices: Sequence[ShortChoice],
    ways: int,
) -> float:
    """Return the largest share, at most 1, of the demand of all that can be served; `gpus` are by offer."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    number = len(pieces)
    width = number + 2 * ways + 1
    rows: list[np.ndarray] = []
    low: list[float] = []
    high: list[float] = []

    def add(terms: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(width)
        for at, value in terms.items():
            row[at] += value
        rows.append(row)
        low.append(least)
        high.append(most)

    for k, whole in enumerate(gpus):
        add({p: one.gpus for p, one in enumerate(pieces) if one.offer == k}, 0.0, whole)
    for way in range(ways):
        apart = number + ways + way
        for phase in ("prefill", "decode", "both"):
            carried = {
                p: one.share for p, one in enumerate(pieces) if (one.way, one.phase) == (way, phase)
            }
            rest = {apart: 1.0, number + way: -1.0} if phase == "both" else {apart: -1.0}
            add({**carried, **rest}, 0.0, np.inf)
    named = {way for choice in choices for way in choice.ways}
    for way in set(range(ways)) - named:
        add({number + way: 1.0, width - 1: -1.0}, 0.0, 0.0)
    for choice in choices:
        add({**{number + w: 1.0 for w in choice.ways}, width - 1: -1.0}, 0.0, 0.0)
        if choice.max_error is not None:
            own = zip(choice.ways, choice.errors, strict=True)
            add({**{number + w: e for w, e in own}, width - 1: -choice.max_error}, -np.inf, 0.0)
        for some, floor in choice.floors:
            add({**{number + w: 1.0 for w in some}, width - 1: -floor}, 0.0, np.inf)
    most = [gpus[one.offer] // one.gpus for one in pieces]
    found = milp(
        np.concatenate([np.zeros(width - 1), [-1.0]]),
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        integrality=np.concatenate([np.ones(number), np.zeros(2 * ways + 1)]),
        bounds=Bounds(np.zeros(width), np.concatenate([most, np.ones(2 * ways + 1)])),
        options={"mip_rel_gap": 1e-6},
    )
    return 0.0 if found.x is None else float(found.x[-1])
