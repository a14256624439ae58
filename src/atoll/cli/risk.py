"""Options of `atoll plan` about risk: the share of scenarios to hold in, and how far things may vary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.units import parse_share

if TYPE_CHECKING:
    from atoll.plan.problem import Problem
    from atoll.plan.robustness import RiskModel

CURVE: Literal["curve"] = "curve"
_KEYS = {
    "demand": "demand_sd",
    "demand_correlation": "demand_correlation",
    "spot_price": "spot_price_sd",
    "spot_loss": "spot_loss",
}
_SWITCHES = {"true": True, "on": True, "false": False, "off": False}


def parse_robust(robust: bool, certainty: str | None) -> float | Literal["curve"] | None:
    """Return the share of scenarios to hold in, as "95%" has it; the whole curve; or that nobody asked."""
    if certainty is None:
        return CURVE if robust else None
    try:
        share = parse_share(certainty, field="--certainty")
    except InputError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise InputError(
            f"cannot read {certainty!r} as a share of scenarios",
            field="--certainty",
            hint="write it like 95%",
        )
    return share


def parse_risk(texts: Sequence[str], problem: Problem) -> RiskModel | None:
    """Read "demand=30%", "demand.chat=50%", "performance=off" as changes to the fleet's risk."""
    from atoll.plan.robustness import RiskModel

    if not texts:
        return None
    base = problem.risk or RiskModel()
    fields: dict[str, object] = {}
    spreads = dict(base.demand_sd_of)
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise InputError(
                f"cannot read {text!r} as a risk", field="--risk", hint="write it like demand=30%"
            )
        if key == "performance":
            if value not in _SWITCHES:
                raise InputError(f"performance={value}", field="--risk", hint="write on or off")
            fields[key] = _SWITCHES[value]
        elif key.startswith("demand."):
            name = key.removeprefix("demand.")
            names = {*(service.name for service in problem.services), *problem.variants}
            if name not in names:
                raise UnknownNameError("service", name, sorted(names), field="--risk")
            spreads[name] = parse_share(value, field=f"--risk {key}")
        elif key in _KEYS:
            fields[_KEYS[key]] = parse_share(value, field=f"--risk {key}")
        else:
            raise UnknownNameError(
                "risk", key, (*_KEYS, "demand.SERVICE", "performance"), field="--risk"
            )
    return RiskModel.parse({**dict(base), **fields, "demand_sd_of": spreads})
