"""Objectives beside dollars: energy and carbon, and how much of them a plan needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import Field

from atoll.core.frozen import Frozen
from atoll.core.units import parse_carbon_price, parse_energy_price
from atoll.plan.name_types import Name

_NotNegative = Annotated[float, Field(ge=0)]
Drawn = Literal["energy", "carbon"]
"""What machines draw and a price can be put on."""
Objective = Literal["cost", Drawn]


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
        return all(self.price(drawn) == 0.0 for drawn in DRAWN.values())

    def price(self, drawn: DrawnObjective) -> float:
        """Return what a unit of something drawn counts, in USD."""
        return float(getattr(self, drawn.weight))


def _write_watts(watts: float) -> str:
    return f"{watts:.0f} W" if watts < 1e3 else f"{watts / 1e3:.2f} kW"


def _write_carbon(kg_per_hour: float) -> str:
    return f"{kg_per_hour:.3g} kg CO2/h"


class ParsePrice(Protocol):
    """Reads a price as people write it; `field` is what an error names."""

    def __call__(self, value: str | float, *, field: str | None = None) -> float:
        """Return USD for a unit; InputError says what is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class DrawnObjective:
    """Something that counts beside rent: its price, and how its figure is written.

    `weight` is its price in `ObjectiveWeights`, in USD for a unit; `parse_price` reads one as people write it
    ("$0.2/kWh"), and `price_form` writes one. `figure` is
    how much of it a plan draws in an hour, in `PowerUse`: `figure_per_unit` of it make a unit, and `write`
    writes it in a sentence. In a column called `column` it stands divided by `column_scale`, in the form
    `column_form`.
    """

    weight: str
    parse_price: ParsePrice
    price_form: str
    figure: str
    write: Callable[[float], str]
    column: str
    column_form: str = "{:.3g}"
    column_scale: float = 1.0
    figure_per_unit: float = 1e3

    def alone(self, price: float, *, usd: float = 0.0) -> ObjectiveWeights:
        """Return the weights where nothing counts but it, and rent as much as `usd` says."""
        return ObjectiveWeights.model_validate({"usd": usd, self.weight: price})


DRAWN: Mapping[Drawn, DrawnObjective] = {
    "energy": DrawnObjective(
        *("usd_per_kwh", parse_energy_price, "${:.3g}/kWh", "watts", _write_watts),
        *("kW", "{:.3f}", 1e3),
    ),
    "carbon": DrawnObjective(
        "usd_per_tonne", parse_carbon_price, "${:,.0f}/t", "kg_per_hour", _write_carbon, "kg CO2/h"
    ),
}
RENT_OBJECTIVES: dict[str, ObjectiveWeights] = {
    "cost": ObjectiveWeights(),
    **{name: drawn.alone(1.0) for name, drawn in DRAWN.items()},
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
