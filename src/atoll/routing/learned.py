"""Load balancing by speed learned from the traffic itself, for replicas that nobody has measured.

A replica that runs n requests needs s(n) = a + b n seconds for one more unit of work (a token, say) of a
request: `a` alone, `b` for every other request beside it. That holds for engines that batch (b small
against a) as for those that take turns (b = a). It then does n / s(n) units a second, and one more
request adds

    gain(n) = (n + 1) / s(n + 1) - n / s(n) = a / (s(n) s(n + 1)).

The next request goes where the gain is largest. Since the sum of all rates is concave, that is the split
which does the given traffic with the fewest requests in the system, i.e. with the least mean latency
(Little); when all are busy every replica gets its share of the capacity.

`a` and `b` come from a regression of what finished requests took on how many ran beside them, in which old
requests are forgotten. While too little varies to tell a from b their ratio is held near a usual one, so
that the speed alone, which one request shows already, is enough. A replica that nobody has seen is taken
to be like the others, but gets a few requests only until the first one is back; one that has had nothing
for a while is tried again now and then, since it may have become faster. Time is a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

_KEEP = 0.97
"""Weight of an observation once another was made."""
_HALF_LIFE_S = 60.0
"""In this time an observation loses half of its weight, whatever else happens."""
_MAX_WEIGHT = 4.0
"""Of a request that is longer than others."""
_RATIO = 1 / 8
_RATIO_WEIGHT = 2.0
"""b / a until it is known, and the observations that this counts for."""
_MIN_ALONE_SHARE = 0.02
"""Of what requests take, `a` is at least this share."""
_JUMP = 4.0
_TRUSTED = 8
"""A known replica's time counts up to so many times what was expected: one stall is no slow replica."""
_UNKNOWN_RUNNING = 2
"""Requests a replica gets before it has answered one."""
_ALIKE = 1.25
"""Replicas that take up to so many times as long as another at the same load are taken for as fast."""
_EXPLORE_EVERY = 50
"""At most one in so many requests tries a replica that the others leave idle."""
_STALE_S = 10.0
"""A replica without requests for so long is tried again."""


class Speed:
    """Measured speed of one replica."""

    __slots__ = (
        "_heard_s",
        "_w",
        "_work",
        "_wx",
        "_wxx",
        "_wxy",
        "_wy",
        "alone_s",
        "asked_s",
        "beside_s",
        "seen",
    )

    def __init__(self) -> None:
        self.alone_s = 1.0
        """Seconds for a unit of work with nothing else running (a)."""
        self.beside_s = _RATIO
        """Seconds more for every other request that runs (b)."""
        self.seen = 0
        self.asked_s = float("-inf")
        """When it was last chosen."""
        self._heard_s = self._work = 0.0
        self._w = self._wx = self._wy = self._wxx = self._wxy = 0.0

    def observe(self, work: float, seconds: float, beside: float, now_s: float) -> None:
        """Take in a request of `work` units that took `seconds` with `beside` others on average."""
        if work <= 0.0 or seconds <= 0.0:
            return
        took_s = seconds / work
        if self.seen >= _TRUSTED:
            took_s = min(took_s, _JUMP * self.time_s(beside))
        keep = _KEEP
        if self.seen:
            keep *= 0.5 ** (max(0.0, now_s - self._heard_s) / _HALF_LIFE_S)
        self.seen += 1
        self._heard_s = now_s
        x = max(0.0, beside)
        # A short request that waited for its turn seems slow beyond measure: work counts, not requests.
        self._work += (work - self._work) * max(1.0 / self.seen, 1.0 - _KEEP)
        weight = min(work / self._work, _MAX_WEIGHT)
        self._w = keep * self._w + weight
        self._wx = keep * self._wx + weight * x
        self._wy = keep * self._wy + weight * took_s
        self._wxx = keep * self._wxx + weight * x * x
        self._wxy = keep * self._wxy + weight * x * took_s
        self._fit()

    def _fit(self) -> None:
        # Least squares of y = a + b x, and of 0 = b - ratio a, weighted like data at the usual x.
        mean_x, mean_y = self._wx / self._w, self._wy / self._w
        pull = _RATIO_WEIGHT * (1.0 + mean_x) ** 2
        aa = self._w + pull * _RATIO * _RATIO
        ab = self._wx - pull * _RATIO
        bb = self._wxx + pull
        determinant = aa * bb - ab * ab
        alone = (self._wy * bb - self._wxy * ab) / determinant
        beside = (self._wxy * aa - self._wy * ab) / determinant
        if beside < 0.0:
            # More company cannot make requests faster: that is noise, and the mean is all there is to know.
            alone, beside = mean_y, 0.0
        elif alone < _MIN_ALONE_SHARE * mean_y:
            # With an `a` of 0 one more request would seem to gain nothing, ever.
            alone = _MIN_ALONE_SHARE * mean_y
            # The line still goes through the mean.
            beside = (mean_y - alone) / max(mean_x, 1e-9)
        self.alone_s, self.beside_s = alone, beside

    def time_s(self, beside: float) -> float:
        """Return the seconds for a unit of work with `beside` other requests."""
        return self.alone_s + self.beside_s * beside

    def gain(self, running: float) -> float:
        """Return the units of work a second that one more request adds to `running` ones."""
        return self.alone_s / (self.time_s(running) * self.time_s(running + 1.0))


class Learned:
    """Chooses among replicas of one model."""

    def __init__(self) -> None:
        self._since = 0
        """Requests since a replica was tried again."""

    def pick(
        self,
        speeds: Sequence[Speed],
        running: Sequence[float],
        closed: Sequence[bool],
        now_s: float,
    ) -> tuple[int, bool]:
        """Return the replica for the next request and whether it is only tried; -1: all are closed.

        `running` are the requests at each, of whoever sent them.
        """
        self._since += 1
        usual = _best(speeds, closed)
        gains = [
            -1.0 if shut else _gain(speed, n, usual)
            for speed, n, shut in zip(speeds, running, closed, strict=True)
        ]
        best_gain = max(gains, default=-1.0)
        if best_gain < 0.0:
            return -1, False
        first = gains.index(best_gain)
        # What is measured of replicas that are about as fast differs by chance: among them the fewest
        # requests decide, and of equals the one that waited longest, which stays known that way.
        limit_s = _ALIKE * _time_s(speeds[first], running[first], usual)
        best = min(
            (
                i
                for i, gain in enumerate(gains)
                if gain > 0.0 and _time_s(speeds[i], running[first], usual) <= limit_s
            ),
            key=lambda i: (running[i], speeds[i].asked_s),
            default=first,
        )
        tried = min(
            (
                i
                for i, speed in enumerate(speeds)
                if not closed[i] and running[i] == 0 and now_s - speed.asked_s > _STALE_S
            ),
            key=lambda i: speeds[i].asked_s,
            default=best,
        )
        explores = tried != best and self._since > _EXPLORE_EVERY
        if explores:
            best = tried
            self._since = 0
        speeds[best].asked_s = now_s
        return best, explores


def _best(speeds: Sequence[Speed], closed: Sequence[bool]) -> Speed | None:
    known = [s for s, shut in zip(speeds, closed, strict=True) if s.seen and not shut]
    return max(known, key=lambda s: s.gain(0.0), default=None)


def _time_s(speed: Speed, running: float, usual: Speed | None) -> float:
    known = speed if speed.seen or usual is None else usual
    return known.time_s(running)


def _gain(speed: Speed, running: float, usual: Speed | None) -> float:
    if speed.seen:
        return speed.gain(running)
    if usual is None:
        return 1.0 / (1.0 + running)
    # Like the best there is, but not many at a time.
    return usual.gain(running) if running < _UNKNOWN_RUNNING else 0.0
