"""The cheapest fleet that survives losses, by trying all of them: shares no code with the solvers.

A machine is what it carries of every phase of every service, all of it lost together: of what can stand on
one, only fillings that nothing else beats in every phase count. A fleet is so many machines of each filling.
In a region as much is served as both phases carry, and what runs together; nothing crosses regions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PREFILL, DECODE, BOTH = range(3)
_MISSED = 1e-6
"""Share of the demand that rounding may cost."""


@dataclass(frozen=True)
class MachineOffer:
    """So many machines at a price; `fillings[f]` is the share of demand that each may carry, by service and
    phase."""

    region: int
    usd: float
    available: int
    fillings: tuple[Floats, ...]


@dataclass(frozen=True)
class Lost:
    """Any so many machines, or any so many regions, at once; a share `keep` is still served."""

    machines: int = 0
    regions: int = 0
    keep: float = 1.0
    services: frozenset[int] | None = None


@dataclass(frozen=True)
class Mix:
    """One demand that all services may answer, each as often as `most` and wrong as often as `errors` says:
    no more often than `max_error` in all. What each answers is settled before the loss."""

    errors: tuple[float, ...]
    max_error: float

    def is_met(self, most: Floats) -> bool:
        """Return whether services that answer so much at most can answer everything, well enough."""
        left, wrong = 1.0, 0.0
        for error, share in sorted(zip(self.errors, most.tolist(), strict=True)):
            taken = min(left, share)
            left, wrong = left - taken, wrong + taken * error
        return left <= _MISSED and wrong <= self.max_error + _MISSED


@dataclass
class Fleet:
    """Machines by (offer, filling)."""

    usd: float
    machines: list[tuple[int, int]] = field(default_factory=list)


def fill(
    gpus: int, pieces: Sequence[tuple[int, int, int, float]], shape: tuple[int, int]
) -> tuple[Floats, ...]:
    """Return the best fillings of a machine with pieces (GPUs, service, phase, share of the demand)."""
    found: list[Floats] = []

    def grow(left: int, first: int, carried: Floats) -> None:
        more = False
        for at in range(first, len(pieces)):
            size, service, phase, share = pieces[at]
            if size <= left and share > 0.0:
                more = True
                larger = carried.copy()
                larger[service, phase] += share
                grow(left - size, at, larger)
        if not more and carried.any():
            found.append(carried)

    # Larger slices first: what is left is then a whole number of the smaller ones.
    pieces = sorted(pieces, reverse=True)
    grow(gpus, 0, np.zeros(shape))
    unique = list({one.tobytes(): one for one in found}.values())

    def beats(a: Floats, b: Floats) -> bool:
        return bool((a >= b - 1e-15).all() and (a > b + 1e-12).any())

    return tuple(one for one in unique if not any(beats(other, one) for other in unique))


def shares_left(
    offers: Sequence[MachineOffer], fleet: Sequence[tuple[int, int]], regions: int
) -> Floats:
    """Return the share of each service's demand that machines serve."""
    shape = next(filling for one in offers for filling in one.fillings).shape
    carried = np.zeros((regions, *shape))
    for offer, filling in fleet:
        carried[offers[offer].region] += offers[offer].fillings[filling]
    paired = np.minimum(carried[:, :, PREFILL], carried[:, :, DECODE]).sum(axis=0)
    return np.asarray(paired + carried[:, :, BOTH].sum(axis=0))


def scenarios(
    offers: Sequence[MachineOffer], fleet: Sequence[tuple[int, int]], lost: Lost, regions: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield what is left of a fleet after each loss."""
    if lost.machines:
        number = min(lost.machines, len(fleet))
        for gone in {tuple(sorted(some)) for some in itertools.combinations(fleet, number)}:
            left = list(fleet)
            for one in gone:
                left.remove(one)
            yield left
    if lost.regions:
        for some in itertools.combinations(range(regions), min(lost.regions, regions)):
            yield [one for one in fleet if offers[one[0]].region not in some]


def survives(
    offers: Sequence[MachineOffer],
    fleet: Sequence[tuple[int, int]],
    lost: Lost,
    regions: int,
    mix: Mix | None = None,
) -> bool:
    """Return whether a fleet serves all, and enough after each loss."""
    if mix is not None:
        most = shares_left(offers, fleet, regions)
        for left in scenarios(offers, fleet, lost, regions):
            most = np.minimum(most, shares_left(offers, left, regions) / lost.keep)
        return mix.is_met(most)
    if (shares_left(offers, fleet, regions) < 1.0 - _MISSED).any():
        return False
    for left in scenarios(offers, fleet, lost, regions):
        shares = shares_left(offers, left, regions)
        services = range(len(shares)) if lost.services is None else lost.services
        if any(shares[m] < lost.keep - _MISSED for m in services):
            return False
    return True


def cheapest(
    offers: Sequence[MachineOffer],
    lost: Lost,
    regions: int,
    *,
    under: float = float("inf"),
    most_machines: int = 8,
    most_fleets: int = 400_000,
    mix: Mix | None = None,
) -> tuple[Fleet | None, bool]:
    """Return the cheapest fleet below a price that survives, and whether all fleets below it were tried."""
    every = [
        (offer, filling) for offer, one in enumerate(offers) for filling in range(len(one.fillings))
    ]
    best: Fleet | None = None
    tried, whole = 0, True

    def grow(fleet: list[tuple[int, int]], usd: float, first: int) -> None:
        nonlocal best, tried, whole
        for at in range(first, len(every)):
            offer = offers[every[at][0]]
            cost = usd + offer.usd
            limit = under if best is None else min(under, best.usd)
            if cost >= limit - 1e-12:
                continue
            if sum(1 for one in fleet if one[0] == every[at][0]) >= offer.available:
                continue
            tried += 1
            if tried > most_fleets or len(fleet) >= most_machines:
                whole = False
                return
            larger = [*fleet, every[at]]
            if survives(offers, larger, lost, regions, mix):
                best = Fleet(cost, larger)
                continue  # one machine more is never cheaper
            grow(larger, cost, at)

    grow([], 0.0, 0)
    return best, whole
