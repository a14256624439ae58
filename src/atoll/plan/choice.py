"""Which model answers: acceptable models of a service, their errors, and the mix that a plan takes.

A person asks for a *choice* ("chat"). What is placed are *ways* to answer it: plain services, each of one
model, named as variants of the choice. A way at level y serves a share y of every choice that names it, so a
way that two choices name is one whose instances they share. Without a choice a service is at level 1.

    sum of the levels of a choice's variants        = 1
    sum of their levels times their errors          <= max_error
    levels of the variants of a model               >= min_share of that model

`Problem.settled` puts levels into rates: what is left is a problem of plain services.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.plan.name_types import ModelName, Name, refuse

NO_LEVEL = 1e-9
"""Ways at a lower level than this serve nothing and are left out."""
_ROUNDING = 1e-9
SHARE_TOLERANCE = 1e-6
"""Shares and mean errors of a solver may be off by this much."""
_Share = Annotated[float, Field(ge=0, le=1)]


class Variant(Frozen):
    """One way to answer a choice: a service of the problem, the model it is of, and how often it errs."""

    service: Name
    model: ModelName
    error: _Share = 0.0


class Choice(Frozen):
    """A service that several models may answer, as long as they err no more than `max_error` on average.

    `min_share` is by model the least share of requests that it answers. With `sticky`, requests of one
    conversation are answered by one model.
    """

    name: Name
    variants: tuple[Variant, ...] = Field(min_length=1)
    max_error: _Share | None = None
    min_share: dict[ModelName, _Share] = Field(default_factory=dict)
    sticky: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        object.__setattr__(
            self, "variants", tuple(sorted(self.variants, key=lambda variant: variant.service))
        )
        object.__setattr__(self, "min_share", dict(sorted(self.min_share.items())))
        names = [variant.service for variant in self.variants]
        if len(set(names)) < len(names):
            raise refuse(InputError(f"{self.name} names a variant twice", hint="name each once"))
        for model in self.min_share:
            if model not in self.models:
                raise refuse(
                    InputError(
                        f"{self.name} has no model {model}", hint=f"it has {', '.join(self.models)}"
                    )
                )
        floor = sum(self.min_share.values())
        if floor > 1.0 + _ROUNDING:
            raise refuse(
                InputError(
                    f"least shares of {self.name} add up to {floor:g}", hint="at most 1 (100%)"
                )
            )
        if self.max_error is not None and self.min_error > self.max_error + _ROUNDING:
            raise refuse(
                InputError(
                    f"models of {self.name} err {self.min_error:.2%} at best, with their least "
                    f"shares; max_error is {self.max_error:.2%}",
                    hint="allow more error, name a better model, or lower min_share",
                )
            )
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The models that may answer, sorted."""
        return tuple(sorted({variant.model for variant in self.variants}))

    @property
    def min_error(self) -> float:
        """The least mean error that its models allow, with the least shares that are asked for."""
        errors = self.errors
        rest = 1.0 - sum(self.min_share.values())
        floors = sum(share * errors[model] for model, share in self.min_share.items())
        return floors + max(0.0, rest) * min(errors.values())

    @property
    def errors(self) -> dict[str, float]:
        """The error of each model; that of its best variant, should they differ."""
        return {
            model: min(v.error for v in self.variants if v.model == model) for model in self.models
        }


class ModelMix(Frozen):
    """Shares that a plan gives the services of a choice.

    `shares` add up to 1. `error` is the mean error that this gives. `usd_per_point` is what one more point
    of error (1 %) would save per hour, as the relaxation has it; None where nobody asked. `errors` are those
    of the services, for whoever must let one answer in place of another.
    """

    name: Name
    shares: dict[Name, _Share]
    models: dict[Name, ModelName]
    error: _Share
    errors: dict[Name, _Share] = Field(default_factory=dict)
    max_error: _Share | None = None
    sticky: bool = False
    usd_per_point: float | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        """Whoever reads a mix deals requests by it: refuse one that cannot be right on its own."""
        total = math.fsum(self.shares.values())
        if abs(total - 1.0) > SHARE_TOLERANCE:
            raise refuse(
                InputError(
                    f"shares of {self.name} add up to {total:.6g}", hint="make them add up to 1"
                )
            )
        for field, known in (("models", self.models), ("errors", self.errors or self.shares)):
            missing = sorted(set(self.shares) - set(known))
            if missing:
                raise refuse(
                    InputError(
                        f"{field} of {self.name} lack {missing[0]}", hint=f"add it to '{field}'"
                    )
                )
        if self.errors:
            mean = math.fsum(share * self.errors[name] for name, share in self.shares.items())
            if abs(mean - self.error) > SHARE_TOLERANCE:
                raise refuse(
                    InputError(
                        f"{self.name} errs {mean:.4%} by its shares, {self.error:.4%} is stated",
                        hint="plan again",
                    )
                )
        return self

    @model_serializer(mode="wrap")
    def _without_blanks(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = write(self)
        return {name: value for name, value in fields.items() if value not in (None, {})}

    @classmethod
    def of(
        cls, choice: Choice, levels: Mapping[str, float], usd_per_point: float | None = None
    ) -> ModelMix:
        """Return the mix of a choice at these levels of services, made to add up to 1."""
        used = [v for v in choice.variants if levels.get(v.service, 0.0) > NO_LEVEL]
        total = sum(levels[v.service] for v in used)
        if total <= 0.0:
            raise InputError(f"no model answers {choice.name}", hint="give one of them a level")
        errors = {v.service: v.error for v in used}
        shares, error = _keep_error(
            {v.service: min(1.0, levels[v.service] / total) for v in used},
            errors,
            choice.max_error,
        )
        return cls(
            name=choice.name,
            shares=shares,
            models={v.service: v.model for v in used},
            error=min(1.0, error),
            errors=errors,
            max_error=choice.max_error,
            sticky=choice.sticky,
            usd_per_point=usd_per_point,
        )

    @property
    def model_shares(self) -> dict[str, float]:
        """The share of requests that each model answers."""
        shares: dict[str, float] = {}
        for service, share in self.shares.items():
            model = self.models[service]
            shares[model] = shares.get(model, 0.0) + share
        return dict(sorted(shares.items()))


def _keep_error(
    shares: dict[str, float], errors: Mapping[str, float], max_error: float | None
) -> tuple[dict[str, float], float]:
    """Return shares and their mean error, which is not above `max_error` where only rounding put it there."""

    def mean() -> float:
        return math.fsum(share * errors[service] for service, share in shares.items())

    if max_error is None or not max_error < mean() <= max_error + SHARE_TOLERANCE:
        return shares, mean()
    shares = dict(shares)
    worst = max(shares, key=lambda service: (errors[service], service))
    best = min(shares, key=lambda service: (errors[service], service))
    if errors[best] < errors[worst]:
        # What is to be moved is next to nothing: more of it each time, until the mean is kept.
        moved = max((mean() - max_error) / (errors[worst] - errors[best]), math.ulp(1.0))
        while mean() > max_error and moved <= shares[worst]:
            shares[worst] -= moved
            shares[best] = min(1.0, shares[best] + moved)
            moved *= 2.0
    return shares, min(mean(), max_error) if mean() <= max_error + _ROUNDING else mean()


def fit_mixes(choices: Sequence[Choice], mixes: Sequence[ModelMix]) -> tuple[ModelMix, ...] | None:
    """Return mixes as these choices have them; None where they are for others or break their rules."""
    if {mix.name for mix in mixes} != {choice.name for choice in choices}:
        return None
    levels = levels_of(mixes)
    known = {mix.name: mix for mix in mixes}
    found = []
    for choice in choices:
        before = known[choice.name]
        models = {variant.service: variant.model for variant in choice.variants}
        if any(models.get(service) != model for service, model in before.models.items()):
            return None
        mine = sum(levels.get(service, 0.0) for service in models)
        # A way that another choice uses would have to serve this one too.
        if abs(mine - 1.0) > SHARE_TOLERANCE:
            return None
        mix = ModelMix.of(choice, levels, before.usd_per_point)
        if choice.max_error is not None and mix.error > choice.max_error + SHARE_TOLERANCE:
            return None
        shares = mix.model_shares
        if any(shares.get(m, 0.0) < x - SHARE_TOLERANCE for m, x in choice.min_share.items()):
            return None
        found.append(mix)
    return tuple(found)


def levels_of(mixes: Iterable[ModelMix]) -> dict[str, float]:
    """Return the level of every service that mixes name; where several do they agree."""
    return {service: share for mix in mixes for service, share in mix.shares.items()}
