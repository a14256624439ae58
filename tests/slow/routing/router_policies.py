"""How gateways choose among replicas that nobody measured: by learned speeds, or by the fewest requests.

Seeded mixes of replicas, in virtual time: two to eight of equal or unequal speed, batching more or less, with
or without a cap on what they run at once (the rest waits there), from nearly idle to nearly full. Each mix is
served twice, with the same requests at the same times. A ratio is the mean time of a request under learned
speeds over that under the fewest outstanding: below 1 learning is better.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.routing.learned import Learned, Speed
from benchmarks.report import Figure, options
from tests.slow.verdict import conclude

MIXES = 100
_REQUESTS = 20_000
_COUNTED_FROM = 0.1
"""Of the requests: those before are for finding out."""
_WORK = 100.0
"""Mean of a request, in units: tokens, say."""
_WORSE = 1.02


class _Replica:
    """Runs requests at 1 / (a + b (n - 1)) units a second each, up to `cap` of them; others wait in order."""

    def __init__(self, alone_s: float, beside_s: float, cap: int) -> None:
        self.alone_s, self.beside_s, self.cap = alone_s, beside_s, cap
        self.held = 0
        """Running and waiting."""
        self.area = 0.0
        self._now_s = self._done = 0.0
        self._running: list[tuple[float, int]] = []
        self._waiting: deque[tuple[int, float]] = deque()

    def capacity(self) -> float:
        """Return the units a second it does when full."""
        n = min(self.cap, 256)
        return n / (self.alone_s + self.beside_s * (n - 1))

    def step_s(self) -> float:
        """Return the seconds for a unit of each request that runs."""
        return self.alone_s + self.beside_s * (len(self._running) - 1)

    def end_s(self) -> float:
        """Return when the next request ends."""
        if not self._running:
            return math.inf
        return self._now_s + (self._running[0][0] - self._done) * self.step_s()

    def advance(self, now_s: float) -> None:
        """Let time pass in which nothing ends."""
        if self._running:
            self._done += (now_s - self._now_s) / self.step_s()
        self.area += self.held * (now_s - self._now_s)
        self._now_s = now_s

    def begin(self, number: int, work: float) -> None:
        """Take a request."""
        self.held += 1
        self._waiting.append((number, work))
        self._fill()

    def end(self) -> int:
        """Return the number of the request that ends now."""
        self._done, number = heapq.heappop(self._running)
        self.held -= 1
        self._fill()
        return number

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.cap:
            number, work = self._waiting.popleft()
            heapq.heappush(self._running, (self._done + work, number))


@dataclass(frozen=True)
class ReplicaMix:
    """Replicas (seconds alone, seconds for each beside it, most at once) and requests a second."""

    replicas: tuple[tuple[float, float, int], ...]
    rate: float
    load: float
    seed: int

    @property
    def text(self) -> str:
        """The mix in a line."""
        speeds = " ".join(f"{1e3 * a:.0f}+{1e3 * b:.1f}/{cap}" for a, b, cap in self.replicas)
        return f"load {self.load:.2f}, ms alone+beside/cap: {speeds}"


def draw_mix(seed: int) -> ReplicaMix:
    """Return the mix of a seed."""
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    spread = rng.choice((1.0, 1.0, 1.1, 1.3, 2.0, 4.0, 8.0))
    batching = rng.choice((1.0, 4.0, 16.0, 64.0))
    cap = rng.choice((4, 16, 64, 1024))
    replicas = []
    for _ in range(count):
        slower = spread ** rng.random() if spread > 1.0 else 1.0
        replicas.append((0.01 * slower, 0.01 * slower / batching, cap))
    load = rng.choice((0.1, 0.3, 0.5, 0.7, 0.85, 0.95))
    capacity = sum(_Replica(*each).capacity() for each in replicas)
    return ReplicaMix(tuple(replicas), load * capacity / _WORK, load, seed)


class LearnedChoice:
    """Chooses as a gateway with the policy `learned`."""

    def __init__(self, count: int) -> None:
        self._learned, self._speeds = Learned(), [Speed() for _ in range(count)]
        self._open = [False] * count

    def choose(self, held: Sequence[int], now_s: float) -> int:
        """Return who gets the next request."""
        running = [float(n) for n in held]
        return self._learned.pick(self._speeds, running, self._open, now_s)[0]

    def note(self, replica: int, work: float, seconds: float, beside: float, now_s: float) -> None:
        """Hear that a request ended."""
        self._speeds[replica].observe(work, seconds, beside, now_s)


class FewestChoice:
    """Chooses who has the fewest requests, of several the one that had none for longest."""

    def __init__(self, count: int) -> None:
        self._asked = [-1] * count
        self._number = 0

    def choose(self, held: Sequence[int], now_s: float) -> int:
        """Return who gets the next request."""
        del now_s
        best = min(range(len(held)), key=lambda i: (held[i], self._asked[i]))
        self._asked[best] = self._number = self._number + 1
        return best

    def note(self, replica: int, work: float, seconds: float, beside: float, now_s: float) -> None:
        """Hear that a request ended, and learn nothing."""


Choice = LearnedChoice | FewestChoice


@dataclass
class _Sent:
    work: float
    at_s: float
    area: float


def serve(mix: ReplicaMix, choice: Choice, requests: int) -> float:
    """Return the mean seconds of a request."""
    rng = random.Random(mix.seed + 1)
    replicas = [_Replica(*each) for each in mix.replicas]
    sent: dict[int, _Sent] = {}
    number, next_s, total_s, counted = 0, 0.0, 0.0, 0
    while number < requests or sent:
        ends = [replica.end_s() for replica in replicas]
        soonest_s = min(ends)
        if number < requests and next_s <= soonest_s:
            at = choice.choose([replica.held for replica in replicas], next_s)
            replicas[at].advance(next_s)
            work = max(1.0, rng.expovariate(1 / _WORK))
            sent[number] = _Sent(work, next_s, replicas[at].area)
            replicas[at].begin(number, work)
            number += 1
            next_s += rng.expovariate(mix.rate)
            continue
        at = ends.index(soonest_s)
        replicas[at].advance(soonest_s)
        ended = replicas[at].end()
        was = sent.pop(ended)
        seconds = soonest_s - was.at_s
        beside = (replicas[at].area - was.area) / seconds - 1.0
        choice.note(at, was.work, seconds, beside, soonest_s)
        if ended >= _COUNTED_FROM * requests:
            total_s += seconds
            counted += 1
    return total_s / counted


def compare(mix: ReplicaMix, requests: int = _REQUESTS) -> float:
    """Return the mean time of requests under learned speeds over that under the fewest outstanding."""
    count = len(mix.replicas)
    return serve(mix, LearnedChoice(count), requests) / serve(mix, FewestChoice(count), requests)


def main() -> None:
    """Serve all mixes both ways."""
    arguments = options(__doc__ or "")
    mixes, requests = (20, 5_000) if arguments.quick else (MIXES, _REQUESTS)
    ratios: dict[int, float] = {}
    for seed in range(mixes):
        mix = draw_mix(seed)
        ratios[seed] = compare(mix, requests)
        mark = "  WORSE" if ratios[seed] > _WORSE else ""
        print(f"  {seed:3d} {ratios[seed]:6.3f}  {mix.text}{mark}", flush=True)
    found = sorted(ratios.values())
    conclude(
        [
            Figure("cases", mixes),
            Figure("worse_than_least_outstanding", sum(r > _WORSE for r in found), 0),
            Figure("worst_ratio", found[-1], _WORSE),
            Figure("best_ratio", found[0]),
        ]
    )


if __name__ == "__main__":
    main()
