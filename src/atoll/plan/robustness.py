"""How sure a plan is when things turn out otherwise: what is uncertain, and what certainty costs.

A fleet file gives demand, prices and promises as if they were known. A *risk model* says how far they may be
off. A *scenario* is one way that things may turn out: so much demand of each service, such spot prices, some
spot machines lost, and GPUs that are faster or slower than the performance model has them. A plan *holds* in
a scenario if enough requests of every service keep their promises there.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from atoll.core.frozen import Frozen
from atoll.plan.name_types import Name

_Share = Annotated[float, Field(ge=0, le=1)]
_NotNegative = Annotated[float, Field(ge=0)]
_Spread = Annotated[float, Field(ge=0, le=2)]

DEMAND_SD = 0.2
"""Standard deviation of demand, relative, unless a fleet file says otherwise."""
DEMAND_CORRELATION = 0.3
"""Correlation of demand between services, likewise."""
SPOT_PRICE_SD = 0.15
"""Standard deviation of spot prices, relative, likewise."""
SPOT_LOSS = 0.05
"""Chance that a spot machine is lost, likewise."""


class RiskModel(Frozen):
    """How far things may turn out otherwise than the fleet file says.

    `demand_sd` is the standard deviation of the logarithm of each service's demand, other than by
    `demand_sd_of` it; demands go up and down together with `demand_correlation` (of the logarithms).
    `spot_price_sd` is that of spot prices; other prices stay. The means are those of the fleet file.
    `spot_loss` is the chance that, in an hour, all spot machines of one type in one region are lost; None is
    what the fleet's `limits.spot_loss` makes of it, or 5 %. With `performance` times of the performance model
    are off as far as its constants may be.
    """

    demand_sd: _Spread = DEMAND_SD
    demand_sd_of: dict[Name, _Spread] = Field(default_factory=dict)
    demand_correlation: _Share = DEMAND_CORRELATION
    spot_price_sd: _Spread = SPOT_PRICE_SD
    spot_loss: _Share | None = None
    performance: bool = True

    @field_validator("demand_sd_of")
    @classmethod
    def _in_order(cls, spreads: dict[str, float]) -> dict[str, float]:
        return dict(sorted(spreads.items()))

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = write(self)
        if not self.demand_sd_of:
            fields.pop("demand_sd_of", None)
        if self.spot_loss is None:
            fields.pop("spot_loss", None)
        return fields

    def demand_spread(self, service: str) -> float:
        """Return the standard deviation of the logarithm of a service's demand.

        Ways to answer a choice ("chat.MODEL") have that of the choice ("chat").
        """
        for name in (service, *(n for n in self.demand_sd_of if service.startswith(f"{n}."))):
            if name in self.demand_sd_of:
                return self.demand_sd_of[name]
        return self.demand_sd


class CertaintyLevel(Frozen):
    """One point of the curve: a plan, what it costs and how often it holds.

    `asked` is the share of scenarios in which it should hold, None for the plan that knows of no risk.
    `usd_per_hour` is what its nodes cost at the fleet's prices and `expected_usd_per_hour` on average over
    price scenarios, machines that are lost unpaid. `planned` is the share of scenarios in which it holds of
    those it was chosen with. All else was found with fresh scenarios: `holds` is the share in which all
    promises are kept and `low` to `high` its 95 % confidence interval, `requests_kept` the share of requests
    that keep their promises, `kept_by_service` the share of scenarios in which each service keeps enough.
    `unserved_per_hour` are requests that do not keep them, and `unserved_usd` what those cost per hour, where
    they have a price. `headroom` is by service what its instances carry over the demand of the fleet file.
    """

    asked: _Share | None = None
    usd_per_hour: _NotNegative
    expected_usd_per_hour: _NotNegative
    nodes: int = Field(ge=0)
    spot_nodes: int = Field(default=0, ge=0)
    planned: _Share
    holds: _Share
    low: _Share
    high: _Share
    requests_kept: _Share
    unserved_per_hour: _NotNegative = 0.0
    unserved_usd: _NotNegative | None = None
    kept_by_service: dict[Name, _Share] = Field(default_factory=dict)
    headroom: dict[Name, _NotNegative] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = write(self)
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def expected_total_usd(self) -> float:
        """Expected rent and, where they have a price, broken promises: USD per hour."""
        return self.expected_usd_per_hour + (self.unserved_usd or 0.0)

    @property
    def shortfall(self) -> float:
        """By how much it holds less often than asked, as a share of scenarios; 0 where it does not."""
        return 0.0 if self.asked is None else max(0.0, self.asked - self.holds)


class Robustness(Frozen):
    """Cost of certainty: plans for rising shares of scenarios, and which of them this plan is.

    `levels` are in rising order of what was asked, the plan that knows of no risk first; costs never fall
    along them. `chosen` is the place of this plan among them, and `best` of the one with the least rent and
    price of broken promises together, where `unserved_usd_per_1000` requests was given. Plans were chosen
    with `scenarios` of them and judged with `judged` fresh ones, of which `simulated` were simulated and the
    others told by capacity. `capped` says that even the surest plan found does not hold as often as asked.
    """

    risk: RiskModel
    levels: tuple[CertaintyLevel, ...] = Field(min_length=1)
    chosen: int = Field(ge=0)
    best: int | None = Field(default=None, ge=0)
    unserved_usd_per_1000: _NotNegative | None = None
    scenarios: int = Field(ge=1)
    judged: int = Field(ge=1)
    simulated: int = Field(ge=1)
    capped: bool = False

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = write(self)
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def level(self) -> CertaintyLevel:
        """The level that this plan is."""
        return self.levels[self.chosen]

    @property
    def nominal(self) -> CertaintyLevel:
        """The plan that knows of no risk."""
        return self.levels[0]
