"""What a plan draws, in words."""

from __future__ import annotations

import math
from collections.abc import Callable

from atoll.core.units import format_price, format_share
from atoll.plan.footprint import PowerUse


def format_watts(watts: float) -> str:
    """Write power: "950 W", "2.50 kW"."""
    return f"{watts:.0f} W" if watts < 1e3 else f"{watts / 1e3:.2f} kW"


def format_carbon(kg_per_hour: float) -> str:
    """Write what is emitted: "0.76 kg CO2/h"."""
    return f"{kg_per_hour:.3g} kg CO2/h"


def describe_power(use: PowerUse) -> str:
    """Say in a line or two what a plan draws, what that counts, and what the cheapest plan does."""
    text = f"Draws {format_watts(use.watts)}"
    if use.kg_per_hour is not None:
        text += f", {format_carbon(use.kg_per_hour)}"
    if use.joules_per_token:
        each = ", ".join(f"{name} {joules:.2g}" for name, joules in use.joules_per_token.items())
        text += f"; joules per generated token: {each}"
    text += "."
    text += _describe_weighted(use)
    if use.cheapest_usd_per_hour is not None and use.cheapest_watts is not None:
        text += (
            f" The cheapest plan costs {format_price(use.cheapest_usd_per_hour)} and draws "
            f"{format_watts(use.cheapest_watts)}."
        )
    return text


def _describe_weighted(use: PowerUse) -> str:
    """Say what was made small, in its own unit where that is energy or carbon alone, and what is proven."""
    value, bound = use.weighted_usd_per_hour, use.weighted_bound
    if value is None:
        return ""
    alone: Callable[[float], str] | None = None
    if use.kg_per_hour is not None and math.isclose(value, use.kg_per_hour / 1e3):
        alone = format_carbon
    elif math.isclose(value, use.watts / 1e3):
        alone = format_watts
    if bound is None or value <= 0.0:
        return "" if alone is not None else f" As weighed: {value:.4g} an hour."
    gap = format_share(max(0.0, 1.0 - bound / value))
    if alone is not None:
        least = alone(1e3 * bound)
        return f" Proven: nothing within its settings needs less than {least} (gap {gap})."
    return (
        f" As weighed: {value:.4g} an hour, proven: nothing within its settings is below "
        f"{bound:.4g} (gap {gap})."
    )
