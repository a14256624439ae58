"""Schema of choices between models, of objectives beside dollars, and of the grid in a fleet file."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Discriminator, Field, StrictStr, Tag

from atoll.core.frozen import Frozen
from atoll.core.quantities import GramsPerKwh, UsdPerKwh, UsdPerTonne
from atoll.plan.files.schema_fields import Share, text_or_mapping
from atoll.plan.footprint import Objective

Intensity = Annotated[GramsPerKwh, Field(le=1e5)]
EnergyPrice = Annotated[UsdPerKwh, Field(le=1e6)]
CarbonPrice = Annotated[UsdPerTonne, Field(le=1e9)]


class VariantSpec(Frozen):
    """One of the models that may answer a service, and how often it errs."""

    model: StrictStr = Field(
        description="A model of the catalog, in another precision as MODEL@fp8."
    )
    error: Share = Field(
        description="Share of answers that are wrong, as measured on requests like these, such as 6%."
    )
    min_share: Share = Field(
        default=0.0, description="Least share of the requests that it answers, such as 10%."
    )


class ObjectiveSpec(Frozen):
    """Prices of energy and carbon; a plan minimises the sum with rent."""

    cost: Annotated[float, Field(strict=True, ge=0, le=1e6)] = Field(
        default=1.0, description="Weight of a dollar of rent."
    )
    energy: EnergyPrice = Field(default=0.0, description="Price of energy, as $0.2/kWh.")
    carbon: CarbonPrice = Field(default=0.0, description="Price of CO2, as $100/t.")


ObjectiveField = Annotated[
    Annotated[Objective, Tag("text")] | Annotated[ObjectiveSpec, Tag("mapping")],
    Discriminator(text_or_mapping),
]


class GridSpec(Frozen):
    """Carbon intensity of electricity: by region, and elsewhere `default`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Intensity] = Field(init=False)

    default: Intensity | None = Field(
        default=None, description="CO2 of electricity in regions that are not named, as 300 g/kWh."
    )
    pue: Annotated[float, Field(strict=True, ge=1, le=5)] = Field(
        default=1.0, description="What a site draws over what its machines draw."
    )

    @property
    def by_region(self) -> dict[str, float]:
        """Grams of CO2 per kWh of the regions that are named."""
        return dict(sorted((self.__pydantic_extra__ or {}).items()))
