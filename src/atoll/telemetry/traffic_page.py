"""Traffic of a gateway: sums over the last minute, five minutes and hour, for each model.

Sums, not means: whoever asks several gateways can put them together without loss. What a later version adds
is left out by an earlier one, so that either side can be replaced first.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from atoll.core.frozen import Frozen, without_blanks

Total = Annotated[float, Field(ge=0)]
Counted = Annotated[int, Field(ge=0)]


MAX_KINDS = 64
"""More than there are ways to put together what a request may bring and want."""


class _Said(Frozen):
    model_config = ConfigDict(extra="ignore")


class WindowSums(_Said):
    """Sums over the last `seconds`.

    `arrivals` are requests that came. Of the `measured` ones that were answered whole there are sums of
    prompt (`input`) and answer (`output`) lengths in tokens and of their squares. Of the `judged` ones, all
    that ended and had a promise, `kept` kept it. Of the measured ones `firsts` were streams, with the sum of
    their seconds to the first token; of their further tokens, `rest_tokens`, there is the sum of seconds.
    `kinds` are those of the arrivals that are not text for text, by what they bring and want ("text+image").
    """

    seconds: float = Field(gt=0)
    arrivals: Counted
    measured: Counted
    input_sum: Total
    input_square_sum: Total
    output_sum: Total
    output_square_sum: Total
    judged: Counted
    kept: Counted
    firsts: Counted = 0
    first_sum_s: Total = 0.0
    rest_tokens: Counted = 0
    rest_sum_s: Total = 0.0
    kinds: dict[str, Counted] = Field(default_factory=dict, max_length=MAX_KINDS)

    _without_blanks = without_blanks("kinds")


class GroupSums(_Said):
    """Requests of a group that were judged, and those of them that kept the promise."""

    judged: Counted
    kept: Counted


class ModelTraffic(_Said):
    """The traffic of one model; `groups` are those with a share of their own, over five minutes."""

    minute: WindowSums
    five_minutes: WindowSums
    hour: WindowSums
    groups: dict[str, GroupSums] = Field(default_factory=dict)

    _without_blanks = without_blanks("groups")


MAX_SERVING = 100_000


class InstanceEnd(_Said):
    """An instance says that it ends at `ends_s` (Unix time)."""

    instance: str = Field(min_length=1, max_length=256)
    ends_s: float


class InstancePace(_Said):
    """Pace of an instance over the last `seconds`, for whom it is compared with what is predicted.

    `requests` are those that it answered whole and alone; of the streams among them, `tokens` after the first
    took `sum_s` seconds together.
    """

    seconds: float = Field(gt=0)
    requests: Counted
    tokens: Counted
    sum_s: Total


class TrafficPage(_Said):
    """All that a gateway says; `routes` is the hash of those it was told, None if it was told none.

    `serving` are the instances that it sends requests to, `paces` how fast those of them were that answered
    within five minutes.
    """

    routes: str | None = Field(None, max_length=64)
    models: dict[str, ModelTraffic] = Field(default_factory=dict)
    ends: tuple[InstanceEnd, ...] = ()
    serving: tuple[str, ...] = Field((), max_length=MAX_SERVING)
    paces: dict[str, InstancePace] = Field(default_factory=dict, max_length=MAX_SERVING)

    _without_blanks = without_blanks("paces")
