"""Pydantic field types that accept "1600ms" as well as 1.6 and always hold the base unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from atoll.core import units
from atoll.core.errors import InputError


def _validator(parse: Callable[[str | float], float]) -> BeforeValidator:
    def read(value: str | float) -> float:
        try:
            return parse(value)
        except InputError as error:
            # Pydantic knows the field's full path, so the parser's message goes in without one.
            # Passed as data, not as the template: the text may itself hold braces.
            raise PydanticCustomError(
                "quantity", "{message}", {"message": error.message, "hint": error.hint}
            ) from error

    return BeforeValidator(read, json_schema_input_type=str | float)


Duration = Annotated[float, _validator(units.parse_duration)]
"""Seconds."""
Rate = Annotated[float, _validator(units.parse_rate)]
"""Events per second."""
Bytes = Annotated[float, _validator(units.parse_bytes)]
"""Bytes."""
Bandwidth = Annotated[float, _validator(units.parse_bandwidth)]
"""Bytes per second."""
Count = Annotated[int, _validator(units.parse_count)]
"""A whole number of things: 8192, "8k"."""
Share = Annotated[float, _validator(lambda value: units.parse_share(str(value)))]
"""A part of a whole, 0 to 1: 0.95, "95%"."""
UsdPerHour = Annotated[float, _validator(units.parse_price)]
"""US dollars per hour."""
GramsPerKwh = Annotated[float, _validator(units.parse_intensity)]
"""Grams of CO2 per kWh of electricity."""
UsdPerKwh = Annotated[float, _validator(units.parse_energy_price)]
"""US dollars per kWh."""
UsdPerTonne = Annotated[float, _validator(units.parse_carbon_price)]
"""US dollars per tonne of CO2."""
