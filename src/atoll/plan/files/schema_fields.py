"""Kinds of values that fields of fleet files take, with their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from atoll.core.quantities import Bandwidth, Duration, Rate, UsdPerHour

# A bare number is in seconds, so "ttft: 1600" would be half an hour: refuse what nobody promises.
FirstToken = Annotated[Duration, Field(gt=0, le=600)]
NextToken = Annotated[Duration, Field(gt=0, le=60)]
Requests = Annotated[Rate, Field(le=1e9)]
Price = Annotated[UsdPerHour, Field(le=1e6)]
Money = Annotated[UsdPerHour, Field(le=1e9)]
Count = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
Above = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Tokens = Annotated[float, Field(strict=True, ge=1, le=1e9)]
Speed = Annotated[Bandwidth, Field(ge=1e3, le=1e15)]
Latency = Annotated[Duration, Field(le=10)]
Number = Annotated[float, Field(strict=True, ge=0, le=1e6)]
Spoken = Annotated[Duration, Field(gt=0, le=86_400)]


def _share(value: object) -> object:
    """Read "50%" as 0.5; numbers pass as they are, unless they are meant as per cent."""
    if not isinstance(value, str):
        if isinstance(value, int | float) and 1 < value <= 100:
            said = f"a share of {value:g} is more than all"
            raise PydanticCustomError(
                "quantity",
                "{message}",
                {"message": said, "hint": f"write {value:g}% or {value / 100:g}"},
            )
        return value
    number, percent, rest = value.strip().partition("%")
    try:
        if percent and not rest:
            return float(number) / 100
    except ValueError:
        pass
    raise PydanticCustomError(
        "quantity",
        "{message}",
        {"message": f"cannot read {value!r} as a share", "hint": "write it like 50% or 0.5"},
    )


Share = Annotated[
    float,
    BeforeValidator(_share, json_schema_input_type=str | float),
    Field(strict=True, ge=0, le=1),
]


def text_or_mapping(value: object) -> str:
    """Return which of the two a value is, as a tag."""
    return "text" if isinstance(value, str) else "mapping"
