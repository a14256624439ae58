"""Options that say what a plan of rented nodes shall make small: dollars, energy, carbon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.units import parse_carbon_price, parse_energy_price

if TYPE_CHECKING:
    from atoll.plan.footprint import ObjectiveWeights

RENTED = ("cost", "energy", "carbon")
"""Objectives of fleets whose nodes are rented."""


def read_weights(
    objective: str | None, energy_price: str | None, carbon_price: str | None
) -> ObjectiveWeights | None:
    """Return what counts, None where the fleet file says.

    Prices are for what is paid beside rent: they go with the objective cost, or none.
    """
    from atoll.plan.footprint import ObjectiveWeights

    priced = [
        o for o, p in (("--energy-price", energy_price), ("--carbon-price", carbon_price)) if p
    ]
    if objective not in (None, *RENTED):
        if priced:
            raise UsageError(f"{priced[0]} with --objective {objective}", hint="leave one out")
        return None
    if objective in ("energy", "carbon"):
        if priced:
            raise UsageError(
                f"{priced[0]} with --objective {objective}",
                hint=f"leave one out: with {objective} nothing else counts",
            )
        if objective == "energy":
            return ObjectiveWeights(usd=0.0, usd_per_kwh=1.0)
        return ObjectiveWeights(usd=0.0, usd_per_tonne=1.0)
    if objective is None and not priced:
        return None
    return ObjectiveWeights(
        usd_per_kwh=parse_energy_price(energy_price, field="--energy-price")
        if energy_price
        else 0.0,
        usd_per_tonne=parse_carbon_price(carbon_price, field="--carbon-price")
        if carbon_price
        else 0.0,
    )


def check_objective(objective: str | None, placing: tuple[str, ...]) -> None:
    """Raise UnknownNameError for an objective that no kind of fleet has."""
    known = (*RENTED, *placing)
    if objective is not None and objective not in known:
        raise UnknownNameError("objective", objective, known)
