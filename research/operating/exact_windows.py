"""Windows of a run again, event by event: is what the fluid says of them true?

Windows are ten minutes in which nothing became ready or was lost, from the most loaded to the least. Their
fleet is simulated with as many requests in each minute as came, and set beside what the run wrote down. The
first minute is left out: the simulator begins with an empty fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.control.operation.control_loop import TrafficReport
from atoll.control.virtual.fluid import KeptCurve
from atoll.control.virtual.fluid_calibration import SIMULATED_S, WARM_S, open_queue, simulate_rates
from atoll.control.virtual.virtual_demand import MINUTE_S
from atoll.control.virtual.virtual_run import FleetOperator, OperationResult, VirtualSetting
from atoll.control.virtual.world import VirtualWorld
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Service

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog

MINUTES = 10


@dataclass(frozen=True, slots=True)
class ExactWindow:
    """A service in a window: its load, and the shares of requests that kept their promises by both models."""

    minute: int
    service: str
    load: float
    fluid: float
    exact: float


class WatchedOperator:
    """An operator, with what served at each of its turns."""

    def __init__(self, operator: FleetOperator) -> None:
        self.operator, self.name = operator, operator.name
        self.serving: dict[int, tuple[Instance, ...]] = {}

    def turn(self, world: VirtualWorld, seen: TrafficReport) -> None:
        """Have the operator do its turn, and see what serves then."""
        self.operator.turn(world, seen)
        minute, rest_s = divmod(world.elapsed_s, MINUTE_S)
        if rest_s == 0.0:
            self.serving[int(minute)] = tuple(world.ready())


def check_windows(
    setting: VirtualSetting,
    result: OperationResult,
    watched: WatchedOperator,
    catalog: Catalog,
    number: int = 5,
) -> list[ExactWindow]:
    """Return so many windows of a run by both models, evenly from the most loaded to the least."""
    series, problem = result.series, setting.problem
    loads: list[tuple[float, int]] = []
    for minute in sorted(watched.serving):
        inside = slice(minute, minute + MINUTES)
        capacity = series.capacity_per_s[:, inside]
        if capacity.shape[1] < MINUTES or np.ptp(capacity, axis=1).max() > 1e-9:
            continue
        rate = series.arrived[:, inside].mean(axis=1) / MINUTE_S
        loads.append((float((rate / np.maximum(capacity[:, 0], 1e-9)).max()), minute))
    loads.sort(reverse=True)
    step = max(1, (len(loads) - 1) // max(1, number - 1))
    found: list[ExactWindow] = []
    for _, minute in loads[::step][:number]:
        inside = slice(minute, minute + MINUTES)
        plan = Plan(
            problem_hash="",
            problem_name=problem.name,
            instances=watched.serving[minute],
            usd_per_hour=0.0,
            status="feasible",
            solver="what serves",
        )
        rates = {
            name: tuple((series.arrived[at, inside] / MINUTE_S).tolist())
            for at, name in enumerate(result.services)
        }
        exact = simulate_rates(
            problem, catalog, plan, rates, seconds=MINUTES * MINUTE_S, warm_s=MINUTE_S, seed=minute
        )
        for at, name in enumerate(result.services):
            kept = series.kept[at, inside][1:].sum()
            arrived = series.arrived[at, inside][1:].sum()
            load = series.arrived[at, inside].mean() / MINUTE_S / series.capacity_per_s[at, minute]
            found.append(
                ExactWindow(minute, name, float(load), float(kept / arrived), exact.get(name, 1.0))
            )
    return found


def flow_rates(
    service: Service,
    curve: KeptCurve,
    capacity_per_s: float,
    rates: Sequence[float],
    *,
    seconds: float = SIMULATED_S,
    warm_s: float = WARM_S,
) -> float:
    """Return the share that the fluid model has kept where `simulate_rates` simulates."""
    queue = open_queue(service, curve)
    part_s = seconds / len(rates)
    kept = arrived = 0.0
    for at, rate in enumerate(rates):
        begin_s = at * part_s
        for first, last in ((begin_s, min(begin_s + part_s, warm_s)), (begin_s, begin_s + part_s)):
            first = first if last <= warm_s else max(first, warm_s)
            if last <= first:
                continue
            served = queue.serve(rate * (last - first), last - first, capacity_per_s)
            if first >= warm_s:
                kept += served.kept
                arrived += rate * (last - first)
    return kept / arrived if arrived > 0.0 else 1.0
