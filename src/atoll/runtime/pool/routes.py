"""Orders of a controller to a gateway: who serves which share of a model, and what is promised for it.

Instances are named as their labels name them, wherever they stand. Weights hold for those that come later
too. An instance that no weight was told for gets a share like its kind, not nothing: it may have joined
before the controller knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen, without_blanks
from atoll.plan.name_types import refuse
from atoll.plan.request_groups import length_ranges

if TYPE_CHECKING:
    from atoll.plan.choice import ModelMix
    from atoll.plan.problem import Service

MAX_BYTES = 4 * 2**20
"""Of all that is told at once."""
MAX_MODELS = 1024
MAX_GROUPS = 16
"""Groups of requests of one model; one that has more is judged as a whole."""

InstanceName = Annotated[str, Field(min_length=1, max_length=256)]
ModelLabel = Annotated[str, Field(min_length=1, max_length=512)]
Weight = Annotated[float, Field(ge=0, le=1e9)]
PromisedSeconds = Annotated[float, Field(gt=0, le=1e6)]


class LengthGroup(Frozen):
    """Requests with prompts of at most `up_to` tokens (None: any), longer than those of the group before.

    `target` is the share of them that shall keep the promise: `ttft_s` and `tpot_s`, None where they are the
    model's.
    """

    name: str = Field(min_length=1, max_length=120)
    up_to: float | None = Field(gt=0)
    target: float = Field(gt=0, le=1)
    ttft_s: PromisedSeconds | None = None
    tpot_s: PromisedSeconds | None = None

    # Older gateways read what has nothing that came later.
    _without_blanks = without_blanks("ttft_s", "tpot_s")


class ModelPromise(Frozen):
    """Seconds to the first token and for each further one, and the share of requests that shall keep both.

    `groups` are those that must keep a share of their own and that the length of a prompt tells apart, short
    ones first.
    """

    ttft_s: PromisedSeconds
    tpot_s: PromisedSeconds
    target: float = Field(gt=0, le=1)
    groups: tuple[LengthGroup, ...] = Field((), max_length=MAX_GROUPS)

    @classmethod
    def of(cls, service: Service) -> Self:
        """Return the promise of a service of a fleet."""
        own = {klass.name: klass for klass in service.text_classes}
        groups = []
        for group, edge in length_ranges(service):
            klass = own.get(group.name)
            groups.append(
                LengthGroup(
                    name=group.name,
                    up_to=None if isinf(edge) else edge,
                    target=group.target,
                    ttft_s=klass.ttft_s if klass and klass.ttft_s != service.ttft_s else None,
                    tpot_s=klass.tpot_s if klass and klass.tpot_s != service.tpot_s else None,
                )
            )
        return cls(
            ttft_s=service.ttft_s,
            tpot_s=service.tpot_s,
            target=service.attainment,
            groups=tuple(groups) if len(groups) <= MAX_GROUPS else (),
        )

    def group_of(self, prompt_tokens: int | None) -> int | None:
        """Return the number of the group that a prompt falls into; None where none or nobody knows."""
        if prompt_tokens is None:
            return None
        edges = enumerate(group.up_to for group in self.groups)
        return next((at for at, edge in edges if edge is None or prompt_tokens <= edge), None)

    _without_blanks = without_blanks("groups")


class ModelRoutes(Frozen):
    """Weights by instance, in any unit, and the promise of one model.

    Weight 0: no new requests, unless nobody else is there. `pairs` are the shares of those that run prefill
    and decode apart, each with the two instances.
    """

    weights: dict[InstanceName, Weight] = Field(default_factory=dict, max_length=16_384)
    pairs: tuple[tuple[InstanceName, InstanceName, Weight], ...] = Field((), max_length=16_384)
    promise: ModelPromise | None = None

    _without_blanks = without_blanks("pairs")


class ChoiceRoutes(Frozen):
    """Shares of a choice: the share of each of the names that backends serve models under.

    `errors` are how often each errs, `models` what the models are called for people. With `sticky` a
    conversation stays with one of them.
    """

    shares: dict[ModelLabel, Weight] = Field(min_length=1, max_length=64)
    errors: dict[ModelLabel, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)
    models: dict[ModelLabel, ModelLabel] = Field(default_factory=dict)
    sticky: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not any(self.shares.values()):
            raise refuse(InputError("nobody has a share", hint="give one more than 0"))
        for name in (*self.errors, *self.models):
            if name not in self.shares:
                known = ", ".join(self.shares)
                raise refuse(InputError(f"{name} has no share", hint=f"known are {known}"[:300]))
        return self

    @classmethod
    def of(cls, mix: ModelMix) -> ChoiceRoutes:
        """Return the shares of a plan's mix."""
        return cls(
            shares=dict(sorted(mix.shares.items())),
            errors={name: mix.errors[name] for name in sorted(mix.shares) if name in mix.errors},
            models={name: mix.models[name] for name in sorted(mix.shares) if name in mix.models},
            sticky=mix.sticky,
        )


class Seat(NamedTuple):
    """A backend as far as weights depend on it: its names in its fleet, and what it is like.

    `instance` is empty where it belongs to no fleet that could be told of.
    """

    fleet: str
    instance: str
    kind: object


class RoutesTold(Frozen):
    """All that a controller tells; it replaces what was told before.

    With `fleet` only instances of that fleet have the weights: names are unique in a fleet alone.
    `choices` are names that several models answer to.
    """

    fleet: str = Field("", max_length=256)
    models: dict[ModelLabel, ModelRoutes] = Field(default_factory=dict, max_length=MAX_MODELS)
    choices: dict[ModelLabel, ChoiceRoutes] = Field(default_factory=dict, max_length=MAX_MODELS)

    _without_blanks = without_blanks("choices")

    def weigh(self, model: str, seats: Sequence[Seat]) -> list[float] | None:
        """Return the weights of the backends of a model; None where nobody was told of any of them.

        | told        | backends                      | weights      |
        |-------------|-------------------------------|--------------|
        | a 0.6 b 0.2 | a, b                          | 0.6 0.2      |
        | a 0.6 b 0.2 | a, b and c, which is like b   | 0.6 0.2 0.2  |
        | a 0.6 b 0.2 | a, b and d, which is like no other | 0.6 0.2 0.4 |
        | a 0.6 b 0   | a, b and c, which is like b   | 0.6 0 0.6    |
        | a 0.6       | c                             | as announced |
        """
        told = self.models.get(model)
        if told is None:
            return None
        given = [self._find(told, seat) for seat in seats]
        known = [weight for weight in given if weight is not None]
        if not known:
            return None
        # Where all that are known have weight 0, one that nobody told of gets a share still.
        usual = _mean(known) or 1.0
        by_kind: dict[object, list[float]] = {}
        for seat, weight in zip(seats, given, strict=True):
            if weight is not None:
                by_kind.setdefault(seat.kind, []).append(weight)
        return [
            weight if weight is not None else _mean(by_kind.get(seat.kind, ())) or usual
            for seat, weight in zip(seats, given, strict=True)
        ]

    def pair_shares(self, model: str) -> dict[tuple[str, str], float]:
        """Return the shares of pairs of instances that run prefill and decode of a model."""
        told = self.models.get(model)
        return {} if told is None else {(first, last): share for first, last, share in told.pairs}

    # Names are unique within a fleet only; an instance of another fleet is not the one meant.
    def _find(self, told: ModelRoutes, seat: Seat) -> float | None:
        if not seat.instance or (self.fleet and seat.fleet and seat.fleet != self.fleet):
            return None
        return told.weights.get(seat.instance)


def _mean(weights: Sequence[float]) -> float:
    """Return the mean of those that serve; 0 if none does."""
    positive = [weight for weight in weights if weight > 0.0]
    return fmean(positive) if positive else 0.0
