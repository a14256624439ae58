"""What a plan must survive: how many units may be lost at once, and what is kept then."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from atoll.core.frozen import Frozen
from atoll.core.units import format_share
from atoll.plan.name_types import Name
from atoll.plan.plan import Share

Unit = Literal["machine", "zone", "region"]
UNITS: tuple[Unit, ...] = get_args(Unit)
MAX_LOST = 3
"""Units that may be lost at once."""
_Number = Annotated[int, Field(strict=True, ge=0, le=MAX_LOST)]


class Survival(Frozen):
    """What may be lost at once, any `machines`, any `zones` or any `regions`, and what is kept then.

    After each of these losses the share `keep` of the demand that the plan serves is still served within its
    promises: of all services, or of those named. Units of a kind in `spared` ("L40S:4 in eu", "zone eu/a")
    are taken never to be lost, which says what surviving their loss costs.
    """

    machines: _Number = 0
    zones: _Number = 0
    regions: _Number = 0
    keep: Annotated[Share, Field(gt=0)] = 1.0
    services: tuple[Name, ...] = ()
    spared: tuple[str, ...] = ()

    @field_validator("services", "spared")
    @classmethod
    def _in_order(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(names)))

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out what is not set."""
        fields: dict[str, object] = write(self)
        blank: dict[str, object] = {"machines": 0, "zones": 0, "regions": 0, "keep": 1.0}
        blank |= {name: fields[name] for name in ("services", "spared") if not fields[name]}
        return {name: value for name, value in fields.items() if blank.get(name) != value}

    @property
    def lost(self) -> dict[Unit, int]:
        """How many units of each sort may be lost at once, of those that may."""
        numbers = (self.machines, self.zones, self.regions)
        return {unit: n for unit, n in zip(UNITS, numbers, strict=True) if n}

    def covers(self, service: str) -> bool:
        """Return whether a service must be kept."""
        return bool(self.lost) and (not self.services or service in self.services)

    def describe(self) -> str:
        """Return in words what may be lost: "any machine", "any 2 zones"."""
        each = [
            f"any {unit}" if number == 1 else f"any {number} {unit}s"
            for unit, number in self.lost.items()
        ]
        kept = "" if self.keep >= 1.0 else f" with {format_share(self.keep)} of the demand kept"
        return " or ".join(each) + kept
