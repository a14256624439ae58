"""Allocations that survive losses, held against all fleets there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.solve.rent.allocation import allocate
from atoll.solve.rent.allocation_types import (
    BOTH,
    DECODE,
    PREFILL,
    Allocation,
    AllocationLimits,
    LossLimits,
    RoleTemplates,
    ServiceDemand,
    Supply,
)
from atoll.solve.rent.choosing.level_choice import choose_levels
from atoll.solve.rent.choosing.level_rows import ChoiceRow, LevelRows
from atoll.solve.rent.spot_ways import SpotWays
from tests.reference.loss_enumeration import Lost, MachineOffer, Mix, cheapest, fill, survives
from tests.seeds import examples

PHASES = {"together": (BOTH,), "apart": (PREFILL, DECODE), "auto": (PREFILL, DECODE, BOTH)}
MACHINES = ((1, (1,)), (2, (1, 2)), (4, (4,)), (4, (1, 2, 4)))
"""GPUs of a machine and the slices it may be cut into."""


class World:
    """Offers, services of single nodes, and the same for the enumeration."""

    def __init__(
        self,
        machines: list[tuple[int, int, float, int]],
        phases: list[str],
        rates: list[dict[tuple[int, int], float]],
        regions: int,
    ) -> None:
        kinds = sorted({(shape, gpus) for shape, *_ in machines for gpus in MACHINES[shape][1]})
        self.supply = Supply(
            regions=tuple(f"r{g}" for g in range(regions)),
            kinds=tuple(f"M{shape}:{gpus}" for shape, gpus in kinds),
            region=np.array([g for _, g, _, _ in machines]),
            gpus=np.array([MACHINES[shape][0] for shape, *_ in machines]),
            sizes=tuple(
                tuple((gpus, kinds.index((shape, gpus))) for gpus in MACHINES[shape][1])
                for shape, *_ in machines
            ),
            spot=np.zeros(len(machines), np.bool_),
            usd=np.array([usd for _, _, usd, _ in machines]),
            available=np.array([n for *_, n in machines]),
            link=np.full((regions, regions), np.inf),
        )
        self.regions = regions
        self.services = [
            ServiceDemand(
                f"s{m}",
                tuple(
                    RoleTemplates(
                        phase,
                        np.eye(len(kinds), dtype=np.int8),
                        np.array([rates[m].get((phase, c), 0.0) for c in range(len(kinds))]),
                        1.0,
                    )
                    for phase in PHASES[own]
                ),
                np.ones(len(kinds), np.bool_),
            )
            for m, own in enumerate(phases)
        ]
        shape_of = (len(phases), 3)
        self.offers = [
            MachineOffer(
                g,
                usd,
                number,
                fill(
                    MACHINES[shape][0],
                    [
                        (gpus, m, phase, min(1.0, rates[m].get((phase, kinds.index((shape, gpus))), 0.0)))
                        for gpus in MACHINES[shape][1]
                        for m, own in enumerate(phases)
                        for phase in PHASES[own]
                    ],
                    shape_of,
                ),
            )
            for shape, g, usd, number in machines
        ]  # fmt: skip

    def allocate(self, losses: LossLimits | None) -> Allocation:
        return allocate(self.services, self.supply, AllocationLimits(losses=losses))

    def machines_of(self, found: Allocation, machines: bool) -> list[MachineOffer]:
        """The machines of an allocation, each as an offer of one with what stands on it."""
        held: dict[object, np.ndarray] = {}
        shape = (len(self.services), 3)
        number = 0
        left = dict(found.slices)
        for one in found.instances:
            role = next(r for r in self.services[one.service].roles if r.phase == one.phase)
            assert one.template is not None
            rate = min(1.0, float(role.throughput[one.template]))
            for place in one.places:
                left[place.offer, place.gpus] -= 1
                at = held.setdefault((place.offer, place.slot), np.zeros(shape))
                at[one.service, one.phase] += rate
            gpus = int(self.supply.kinds[one.template].partition(":")[2])
            for _ in range(one.number - len(one.places)):
                # On a machine of its own: of any offer of the region that has some left.
                k = next(
                    (
                        k
                        for (k, size), n in sorted(left.items())
                        if n > 0
                        and size == gpus
                        and size == self.supply.gpus[k]
                        and self.supply.region[k] == one.region
                        and (size, one.template) in self.supply.sizes[k]
                    ),
                    None,
                )
                if k is None:
                    # A slice of any machine: it matters only where machines are lost.
                    if machines:
                        return []
                    k = next(
                        k
                        for (k, size), n in sorted(left.items())
                        if n > 0
                        and size == gpus
                        and self.supply.region[k] == one.region
                        and (size, one.template) in self.supply.sizes[k]
                    )
                left[k, gpus] -= 1
                number += 1
                at = held.setdefault((k, -number), np.zeros(shape))
                at[one.service, one.phase] += rate
        return [
            MachineOffer(int(self.supply.region[key[0]]), 0.0, 1, (what,))
            for key, what in held.items()
            if isinstance(key, tuple)
        ]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    regions = draw(st.integers(1, 2))
    machines = [
        (
            draw(st.integers(0, len(MACHINES) - 1)),
            draw(st.integers(0, regions - 1)),
            draw(st.sampled_from([1.0, 1.7, 2.0, 3.1, 4.5])),
            draw(st.integers(1, 4)),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    # One offer of a shape in a region.
    machines = list({(shape, g): (shape, g, usd, n) for shape, g, usd, n in machines}.values())
    phases = draw(st.lists(st.sampled_from(sorted(PHASES)), min_size=1, max_size=2))
    kinds = len({(shape, gpus) for shape, *_ in machines for gpus in MACHINES[shape][1]})
    rate = st.sampled_from([0.0, 0.2, 0.35, 0.5, 0.6, 0.8, 1.0, 1.5])
    rates = [
        {(phase, c): draw(rate) for phase in PHASES[own] for c in range(kinds)} for own in phases
    ]
    return World(machines, phases, rates, regions)


@examples(25)
@given(
    world=worlds(),
    lost=st.sampled_from(
        [
            Lost(machines=1),
            Lost(machines=1, keep=0.6),
            Lost(machines=2),
            Lost(regions=1),
            Lost(machines=1, services=frozenset({0})),
        ]
    ),
)
def test_nothing_that_survives_costs_less(world: World, lost: Lost) -> None:
    places = tuple((g,) for g in range(world.regions)) if lost.regions else ()
    names = frozenset() if lost.services is None else frozenset(f"s{m}" for m in lost.services)
    asked = LossLimits(lost.machines, places, lost.keep, names)
    best, whole = cheapest(world.offers, lost, world.regions, most_machines=7, most_fleets=3000)
    if not whole:
        return
    found = world.allocate(asked)

    machines = [] if found.status == "infeasible" else world.machines_of(found, lost.machines > 0)
    held = [(n, 0) for n in range(len(machines))]
    stands = bool(machines) and survives(machines, held, lost, world.regions)
    if best is None:
        assert not stands
        return
    # Several at once, or of several services, may need what is safe: it is asked for where this is not.
    if not stands:
        found = world.allocate(LossLimits(lost.machines, places, lost.keep, names, safe=True))
        machines = world.machines_of(found, lost.machines > 0)
        held = [(n, 0) for n in range(len(machines))]
        assert survives(machines, held, lost, world.regions)
    assert found.bound <= best.usd + 1e-6
    if lost.machines < 2:
        assert found.objective == pytest.approx(best.usd)
    else:
        assert found.objective >= best.usd - 1e-6


@examples(20)
@given(
    world=worlds(),
    lost=st.sampled_from([Lost(machines=1), Lost(machines=1, keep=0.6), Lost(regions=1)]),
    errors=st.sampled_from([(0.0, 0.2), (0.1, 0.0)]),
    max_error=st.sampled_from([0.05, 0.12, 0.3]),
)
def test_models_are_chosen_for_what_survives(
    world: World, lost: Lost, errors: tuple[float, float], max_error: float
) -> None:
    ways = len(world.services)
    mix = Mix(errors[:ways], max_error)
    rows = LevelRows((ChoiceRow("chat", tuple(range(ways)), mix.errors, max_error),))
    if not rows.possible:
        return
    places = tuple((g,) for g in range(world.regions)) if lost.regions else ()
    asked = LossLimits(lost.machines, places, lost.keep)
    best, whole = cheapest(
        world.offers, lost, world.regions, most_machines=7, most_fleets=3000, mix=mix
    )
    if not whole:
        return
    found = choose_levels(world.services, world.supply, AllocationLimits(losses=asked), rows)
    if best is None:
        assert found.allocation is None
        return
    assert found.allocation is not None
    assert found.objective == pytest.approx(best.usd)
    assert found.bound <= best.usd + 1e-6
    assert rows.hold(found.levels, 1e-6)


def test_the_share_on_spot_is_chosen_for_what_survives() -> None:
    """Machines off spot carry half, cheap ones on spot 60 %: of these at most 40 % may be used."""
    world = World(
        [(0, 0, 3.0, 4), (1, 0, 1.0, 4)], ["together"], [{(BOTH, 0): 0.5, (BOTH, 2): 0.6}], 1
    )
    spot = np.array([False, True])
    supply = Supply(**{**vars(world.supply), "spot": spot})
    ways = SpotWays.of(world.services, supply, 0.4, ())
    assert ways is not None
    limits = AllocationLimits(losses=LossLimits(machines=1))
    found = choose_levels(ways.services, ways.supply, limits, ways.rows)

    assert found.allocation is not None
    # Two off spot carry all, and one of them with one on spot does: $6 and $1.
    assert found.objective == pytest.approx(7.0)
    assert found.bound == pytest.approx(7.0)
