"""What requests keep around a loss, by when they came: before it, in the minute after, and later."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.sim.sim_arrays import FAIL, Floats

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from atoll.sim.instance_history import FleetHistory

SOON_S = 60.0
"""How long after a loss requests count as those that came right after it."""
MAX_LOSSES = 24
"""Losses of a run beyond which nothing is said of single ones."""


@dataclass(frozen=True, slots=True)
class KeptThroughLoss:
    """The share of a service's requests that kept both promises around a loss at `time_s`, in seconds.

    Those that came since the loss before this one, in the minute after it, and from then until the next loss;
    None where none came. `instances` are those that lost a node, and with `ready` the plan had routes for it.
    """

    service: str
    time_s: float
    instances: tuple[str, ...]
    ready: bool
    before: float | None
    soon: float | None
    later: float | None


def kept_through_losses(
    history: FleetHistory, came: Sequence[tuple[str, Floats, NDArray[np.bool_]]]
) -> Iterator[KeptThroughLoss]:
    """Yield what each service keeps around each loss of a run, in order of time; nothing where many are.

    `came` has for each service when the requests that are judged came, in seconds, and which kept promises.
    """
    lost: dict[float, set[int]] = {}
    for event in history.events:
        if event.kind == FAIL and event.time_s is not None:
            lost.setdefault(event.time_s, set()).add(event.instance)
    times = sorted(lost)
    if len(times) > MAX_LOSSES:
        return
    prepared = {one.lost for one in history.after_loss}
    for before_s, time_s, next_s in zip([0.0, *times], times, [*times[1:], np.inf], strict=False):
        soon_s = min(time_s + SOON_S, next_s)
        names = tuple(sorted(history.standing[number].instance.id for number in lost[time_s]))
        for service, arrival_s, met in came:
            shares = [
                _share(met[(arrival_s >= begin) & (arrival_s < end)])
                for begin, end in itertools.pairwise((before_s, time_s, soon_s, next_s))
            ]
            yield KeptThroughLoss(service, time_s, names, lost[time_s] in prepared, *shares)


def _share(met: NDArray[np.bool_]) -> float | None:
    return float(met.mean()) if len(met) else None
