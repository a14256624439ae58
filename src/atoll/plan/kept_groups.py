"""What groups of requests keep of their promises, how sure that is, and whether enough came to tell.

A share of all requests may hide that most of a small class are late. So a promise holds for every group
(`plan.request_groups` says which there are): `judge_group` says what one keeps, between which bounds chance
may have put it, and whether it had enough requests. Simulator, planner, validator and reports ask it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from atoll.core.frozen import Frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    _Bools = NDArray[np.bool_]

GroupKind = Literal["class", "length"]
"""What requests of a group have in common: what they bring and want, or how long their prompts are."""
_BLOCKS = 10
"""Parts of one run, in order of arrival: what they differ by says how sure its share is."""
_Z = 1.959964
"""Standard deviations on both sides of a mean that hold 95 % of a normal distribution."""
_Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one service of which the share `target` must keep all promises."""

    name: str
    target: float
    kind: GroupKind = "class"


class KeptGroup(Frozen):
    """Promises that requests of a group kept in simulations.

    Of `requests` that were judged the share `kept` kept all promises (None: there were none), `low` to `high`
    is its 95 % confidence interval, and `target` the share that shall. `each` is by promise (ttft, tpot,
    ahead, image) the share that kept it.
    """

    name: str = Field(min_length=1, max_length=120)
    kind: GroupKind = "class"
    target: _Share
    requests: int = Field(ge=0)
    kept: _Share | None
    low: _Share
    high: _Share
    each: dict[str, _Share] = Field(default_factory=dict)

    @property
    def is_kept(self) -> bool | None:
        """Whether enough requests keep their promises; None where too few came to tell."""
        if self.kept is None:
            return None
        if self.low < self.target <= self.high and self.requests < enough_requests(self.target):
            return None
        return self.kept >= self.target

    @property
    def is_sure(self) -> bool:
        """Whether the whole confidence interval lies on one side of the target."""
        return self.low >= self.target or self.high < self.target

    def scale_to(self, target: float, share: float) -> float:
        """Return a kept share of the group as one of a service that promises `target`.

        It loses as many times what it may lose: it is below `target` where the group is below its own.
        """
        return scale_share(share, self.target, target)


def scale_share(share: float, target: float, to: float) -> float:
    """Return a kept share where `target` is promised as one where `to` is: as many times what may be lost."""
    return max(0.0, 1.0 - (1.0 - share) * (1.0 - to) / (1.0 - target))


def min_share(kept: float, target: float, groups: Iterable[KeptGroup]) -> float:
    """Return what a service keeps, or the group of its requests that falls shortest, as one that promises it.

    Groups count where enough of their requests came to tell.
    """
    told = [group for group in groups if group.kept is not None and group.is_kept is not None]
    return min([kept, *(group.scale_to(target, group.kept or 0.0) for group in told)])


def enough_requests(target: float) -> int:
    """Return how many requests tell whether a target is kept.

    With so many, chance moves a share at the target by no more than half of what may be lost.
    """
    return math.ceil(4.0 * _Z * _Z * target / (1.0 - target))


def judge_groups(
    groups: Iterable[tuple[RequestGroup, _Bools]],
    judged: _Bools,
    kept: _Bools,
    each: Mapping[str, tuple[_Bools, _Bools]],
) -> tuple[KeptGroup, ...]:
    """Return what groups keep in one run; requests are in order of arrival.

    `kept` is who kept all promises, of those who are `judged`; `each` is by promise to whom it was made and
    judged, and who kept it.
    """
    found = []
    for group, mine in groups:
        shares = {
            name: float(held[mine & known].mean())
            for name, (known, held) in each.items()
            if (mine & known).any()
        }
        found.append(judge_group(group, count_kept(kept[mine & judged]), shares))
    return tuple(found)


def count_kept(kept: _Bools) -> tuple[tuple[int, int], ...]:
    """Return (kept, judged) requests by part of a run, of judged requests in order of arrival."""
    import numpy as np

    return tuple((int(part.sum()), len(part)) for part in np.array_split(kept, _BLOCKS))


def pool_groups(runs: Sequence[Sequence[KeptGroup]]) -> tuple[KeptGroup, ...]:
    """Return what groups keep over several runs, each with arrivals of its own."""
    by_group: dict[RequestGroup, list[KeptGroup]] = {}
    for run in runs:
        for one in run:
            group = RequestGroup(one.name, one.target, one.kind)
            by_group.setdefault(group, []).append(one)
    return tuple(
        judge_group(
            group,
            [(round((one.kept or 0.0) * one.requests), one.requests) for one in some],
            _pool_each(some),
        )
        for group, some in by_group.items()
    )


def _pool_each(runs: Sequence[KeptGroup]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for one in runs for name in one.each):
        own = [one for one in runs if name in one.each]
        total = sum(one.requests for one in own)
        found[name] = sum(one.requests * one.each[name] for one in own) / max(1, total)
    return found


def judge_group(
    group: RequestGroup, counts: Sequence[tuple[int, int]], each: Mapping[str, float]
) -> KeptGroup:
    """Return what a group keeps: `counts` are of runs or parts of one, (kept, judged) requests.

    The interval is the wider of two: by what the counts differ, since requests that are late come together,
    and by how many there are, since few that differ by nothing prove little (Wilson's).
    """
    kept = sum(number for number, _ in counts)
    total = sum(number for _, number in counts)
    named = {"name": group.name, "kind": group.kind, "target": group.target}
    if not total:
        return KeptGroup(**named, requests=0, kept=None, low=0.0, high=1.0)
    share = kept / total
    low, high = _wilson(share, total)
    half = _half_width(share, [one for one in counts if one[1]])
    return KeptGroup(
        **named,
        requests=total,
        kept=share,
        low=max(0.0, min(low, share - half)),
        high=min(1.0, max(high, share + half)),
        each=dict(each),
    )


def _wilson(share: float, requests: int) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    z = _Z * _Z / requests
    middle = (share + z / 2.0) / (1.0 + z)
    half = math.sqrt(share * (1.0 - share) * z + z * z / 4.0) / (1.0 + z)
    return max(0.0, middle - half), min(1.0, middle + half)


def _half_width(share: float, counts: Sequence[tuple[int, int]]) -> float:
    """Half the width of the interval of a ratio of sums over runs, by Student's t."""
    from scipy.special import stdtrit

    runs = len(counts)
    if runs < 2:
        return 0.0
    off = sum((kept - share * number) ** 2 for kept, number in counts)
    error = math.sqrt(off * runs / (runs - 1)) / sum(number for _, number in counts)
    return float(stdtrit(runs - 1, 0.975)) * error
