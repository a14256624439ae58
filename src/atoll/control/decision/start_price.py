"""Price of starting instances, in dollars once: time, risk, cold cache.

An instance is paid for while it comes up (`startup_s`), with chance `start_risk` in vain, and answers slower
until its cache is filled, which counts as `cold_s` seconds of its rent. So the price of a start is the rent
of `ControlPolicy.start_rent_s`, which planners reckon with as K.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.control.decision.control_view import ControlPolicy
from atoll.core.units import format_usd
from atoll.plan.plan import Instance

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class StartPrice:
    """Dollars that starts cost once."""

    time_usd: float
    risk_usd: float
    cache_usd: float

    @property
    def usd(self) -> float:
        """All of them."""
        return self.time_usd + self.risk_usd + self.cache_usd

    def __add__(self, other: StartPrice) -> StartPrice:
        return StartPrice(
            self.time_usd + other.time_usd,
            self.risk_usd + other.risk_usd,
            self.cache_usd + other.cache_usd,
        )

    def describe(self) -> str:
        """Return the price and its parts in words."""
        if self.usd <= 0.0:
            return "nothing"
        parts = (("time", self.time_usd), ("risk", self.risk_usd), ("cold cache", self.cache_usd))
        return (
            f"{format_usd(self.usd)} once ({', '.join(f'{n} {format_usd(u)}' for n, u in parts)})"
        )


def price_starts(instances: Iterable[Instance], policy: ControlPolicy) -> StartPrice:
    """Return what starting instances costs, at the rent that they say."""
    usd_per_s = sum(one.usd_per_hour for one in instances) / _HOUR_S
    time_usd = usd_per_s * policy.startup_s
    return StartPrice(time_usd, policy.start_risk * time_usd, usd_per_s * policy.cold_s)
