"""What a controller tells a gateway: who serves which share of a model, and what is promised for it.

Instances are named as their labels name them, wherever they stand. Weights hold for those that come later
too. An instance that no weight was told for gets a share like its kind, not nothing: it may have joined
before the controller knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, NamedTuple

from pydantic import Field

from atoll.core.frozen import Frozen

MOST_BYTES = 4 * 2**20
"""Of all that is told at once."""
MOST_MODELS = 1024

InstanceName = Annotated[str, Field(min_length=1, max_length=256)]
ModelLabel = Annotated[str, Field(min_length=1, max_length=512)]
Weight = Annotated[float, Field(ge=0, le=1e9)]
PromisedSeconds = Annotated[float, Field(gt=0, le=1e6)]


class ModelPromise(Frozen):
    """Seconds to the first token and for each further one, and the share of requests that shall keep both."""

    ttft_s: PromisedSeconds
    tpot_s: PromisedSeconds
    target: float = Field(gt=0, le=1)


class ModelRoutes(Frozen):
    """Weights by instance, in any unit, and the promise of one model.

    Weight 0: no new requests, unless nobody else is there.
    """

    weights: dict[InstanceName, Weight] = Field(default_factory=dict, max_length=16_384)
    promise: ModelPromise | None = None


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
    """

    fleet: str = Field("", max_length=256)
    models: dict[ModelLabel, ModelRoutes] = Field(default_factory=dict, max_length=MOST_MODELS)

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
        usual = _mean(known) or 1.0
        by_kind: dict[object, list[float]] = {}
        for seat, weight in zip(seats, given, strict=True):
            if weight is not None:
                by_kind.setdefault(seat.kind, []).append(weight)
        return [
            weight if weight is not None else _mean(by_kind.get(seat.kind, ())) or usual
            for seat, weight in zip(seats, given, strict=True)
        ]

    def _find(self, told: ModelRoutes, seat: Seat) -> float | None:
        if not seat.instance or (self.fleet and seat.fleet and seat.fleet != self.fleet):
            return None
        return told.weights.get(seat.instance)


def _mean(weights: Sequence[float]) -> float:
    """Return the mean of those that serve; 0 if none does."""
    positive = [weight for weight in weights if weight > 0.0]
    return fmean(positive) if positive else 0.0
