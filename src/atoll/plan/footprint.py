"""Objectives beside dollars: energy and carbon, and how much of them a plan needs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from atoll.core.frozen import Frozen
from atoll.plan.name_types import Name

_NotNegative = Annotated[float, Field(ge=0)]
Objective = Literal["cost", "energy", "carbon"]


class ObjectiveWeights(Frozen):
    """Objective in USD per hour: `usd` x rent + `usd_per_kwh` x kW + `usd_per_tonne` x t CO2 per hour.

    The default is rent alone. Energy alone is usd 0 and usd_per_kwh 1, carbon alone usd_per_tonne 1.
    """

    usd: _NotNegative = 1.0
    usd_per_kwh: _NotNegative = 0.0
    usd_per_tonne: _NotNegative = 0.0

    @property
    def rent_only(self) -> bool:
        """Whether nothing but dollars counts."""
        return self.usd_per_kwh == 0.0 and self.usd_per_tonne == 0.0


RENT_OBJECTIVES: dict[str, ObjectiveWeights] = {
    "cost": ObjectiveWeights(),
    "energy": ObjectiveWeights(usd=0.0, usd_per_kwh=1.0),
    "carbon": ObjectiveWeights(usd=0.0, usd_per_tonne=1.0),
}
"""Weights of the objectives that have a name, where nothing else counts."""


class PowerGrid(Frozen):
    """Carbon intensity of electricity: g CO2 per kWh by region, and elsewhere `default_g_per_kwh`.

    `pue` is what a site draws over what its machines draw (power usage effectiveness).
    """

    g_per_kwh: dict[Name, _NotNegative] = Field(default_factory=dict)
    default_g_per_kwh: _NotNegative | None = None
    pue: Annotated[float, Field(ge=1, le=5)] = 1.0

    def intensity(self, region: str) -> float | None:
        """Return g CO2 per kWh in a region, None where nobody said."""
        return self.g_per_kwh.get(region, self.default_g_per_kwh)


class PowerUse(Frozen):
    """Power of a plan at its planned load: watts with `pue`, joules per generated token, kg CO2 per hour.

    `kg_per_hour` is None where the grid of a region in use is not known. `weighted_usd_per_hour` is the
    objective that was asked for, and `weighted_bound` what no plan can go below, if that is known.
    `cheapest_usd_per_hour` is what the plan costs that is cheapest in dollars, and `cheapest_watts` what it
    draws.
    """

    watts: _NotNegative
    joules_per_token: dict[Name, _NotNegative] = Field(default_factory=dict)
    kg_per_hour: _NotNegative | None = None
    weighted_usd_per_hour: float | None = None
    weighted_bound: float | None = None
    cheapest_usd_per_hour: _NotNegative | None = None
    cheapest_watts: _NotNegative | None = None
