"""Price of right answers: how often choices between models err, what a point is worth, who is unused."""

from __future__ import annotations

from pydantic import Field

from atoll.core.frozen import Frozen
from atoll.core.units import format_price, format_share

_MIN_USD = 0.005
"""USD per hour that round to nothing."""


class ErrorStep(Frozen):
    """Cost of a plan where `max_error` is another, USD per hour; None where nothing serves it all."""

    max_error: float
    usd_per_hour: float | None


class UnusedModel(Frozen):
    """A model that answers nothing: how often it errs, and what it would cost if it answered everything.

    `usd_per_hour` is None where nothing on offer serves all of it, or where it was not `asked`.
    """

    model: str
    error: float
    usd_per_hour: float | None = None
    asked: bool = True


class ChoiceQuality(Frozen):
    """The quality of a choice and its price.

    `error` is the mean error of the plan. `usd_per_point` is what one more point (1 %) saves per hour where
    machines can be had in parts. `usd_per_hour` is what the whole fleet costs as it is asked for, for
    capacity, and `looser` and `tighter` what it costs with a point of error more and less: whole machines,
    so nothing may change for one point and much for the next. None where nobody asked; `usd_per_hour` also
    where not all demand is met as it is asked for. With `promised` the plan explained keeps promises, which
    costs more than capacity.
    """

    choice: str
    error: float
    max_error: float | None = None
    usd_per_point: float | None = None
    usd_per_hour: float | None = None
    looser: ErrorStep | None = None
    tighter: ErrorStep | None = None
    unused: tuple[UnusedModel, ...] = Field(default=())
    promised: bool = False

    @property
    def lines(self) -> tuple[str, ...]:
        """The quality in sentences: errors, their price, and each model that answers nothing."""
        errs = f"{self.choice}: {format_share(self.error)} of the answers err"
        if self.max_error is None:
            return (f"{errs}, and nothing bounds it", *map(self._unused, self.unused))
        said = [f"{errs}, {format_share(self.max_error)} may"]
        if self.usd_per_point is not None:
            said.append(f"a point is worth about {format_price(self.usd_per_point)} (estimate)")
        steps = [self._step(step) for step in (self.looser, self.tighter) if step is not None]
        if steps and self.promised:
            steps[0] = f"for capacity alone, {steps[0]}"
        said += steps
        return ("; ".join(said), *map(self._unused, self.unused))

    def _step(self, step: ErrorStep) -> str:
        at = f"with {format_share(step.max_error)}"
        if step.usd_per_hour is None:
            return f"{at} not all demand could be met"
        if self.usd_per_hour is None:
            return f"{at} all demand would be met, for {format_price(step.usd_per_hour)}"
        change = step.usd_per_hour - self.usd_per_hour
        if abs(change) <= _MIN_USD:
            return f"{at} the fleet would cost the same"
        more = f"{format_price(abs(change))} {'more' if change > 0 else 'less'}"
        return f"{at} the fleet would cost {more}"

    def _unused(self, unused: UnusedModel) -> str:
        text = f"{unused.model} answers nothing: it errs {format_share(unused.error)}"
        if not unused.asked:
            return text
        if unused.usd_per_hour is None:
            return f"{text}, and nothing on offer serves all of {self.choice} with it"
        price = format_price(unused.usd_per_hour)
        if self.usd_per_hour is None:
            return f"{text}; alone the fleet would cost {price}"
        allowed = self.max_error is None or unused.error <= self.max_error
        rule = "" if allowed else ", which is too often"
        now = format_price(self.usd_per_hour) + (" for capacity" if self.promised else "")
        return f"{text}{rule}; alone the fleet would cost {price} instead of {now}"
