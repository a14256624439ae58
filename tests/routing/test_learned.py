"""Speeds learned from traffic: unequal replicas get the split that is best for them, without being told.

Replicas of a small simulation share their time among what they run: with n requests each advances at
1 / (a + b (n - 1)) units of work a second. The best split of a given traffic is computed from a and b, which
the policy never sees.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.routing.affinity import Affinity, blocks, chain
from atoll.routing.learned import Learned, Speed
from tests.slow.routing.router_policies import compare, draw_mix

WORK = 100.0
"""Mean of a request."""


@dataclass
class Replica:
    alone_s: float
    beside_s: float
    closed: bool = False
    running: int = 0
    area: float = 0.0
    _done: float = 0.0
    """Work that a request present all the time would have had done."""
    _now_s: float = 0.0
    _left: list[tuple[float, int, float, float, float]] = field(default_factory=list)

    def step_s(self) -> float:
        return self.alone_s + self.beside_s * (self.running - 1)

    def advance(self, now_s: float) -> None:
        if self.running:
            self._done += (now_s - self._now_s) / self.step_s()
        self.area += self.running * (now_s - self._now_s)
        self._now_s = now_s

    def end_s(self) -> float:
        return (
            self._now_s + (self._left[0][0] - self._done) * self.step_s()
            if self._left
            else math.inf
        )

    def begin(self, number: int, work: float) -> None:
        heapq.heappush(self._left, (self._done + work, number, work, self._now_s, self.area))
        self.running += 1

    def end(self) -> tuple[int, float, float, float]:
        """Number, work and seconds of the request that ended, and the others beside it."""
        self._done, number, work, began_s, area = heapq.heappop(self._left)
        self.running -= 1
        seconds = self._now_s - began_s
        return number, work, seconds, (self.area - area) / seconds - 1.0


Choose = Callable[[list[Replica], float], int]


@dataclass
class Outcome:
    shares: list[float]
    seconds_per_work: float
    speeds: list[Speed]


def simulate(
    replicas: list[Replica],
    rate: float,
    choose: Choose | None = None,
    *,
    requests: int = 8000,
    change: Callable[[float, list[Replica]], None] = lambda _now, _replicas: None,
    counted_from: float = 0.5,
) -> Outcome:
    """Send requests at random times; None: by learned speed. Counts from a part of them on."""
    # The same requests whoever chooses.
    rng, chance = random.Random(7), random.Random(8)
    learned, speeds = Learned(), [Speed() for _ in replicas]
    sent = done = 0
    next_s = now_s = 0.0
    counts, took = [0] * len(replicas), []
    while done < requests:
        soonest = min(replicas, key=Replica.end_s)
        if sent < requests and next_s <= soonest.end_s():
            now_s = next_s
            change(now_s, replicas)
            for replica in replicas:
                replica.advance(now_s)
            if choose is not None:
                chosen = choose(replicas, chance.random())
            else:
                running = [float(r.running) for r in replicas]
                chosen, _ = learned.pick(speeds, running, [r.closed for r in replicas], now_s)
            replicas[chosen].begin(sent, max(1.0, rng.expovariate(1 / WORK)))
            counts[chosen] += sent >= counted_from * requests
            sent += 1
            next_s = now_s + rng.expovariate(rate)
        else:
            soonest.advance(soonest.end_s())
            number, work, seconds, beside = soonest.end()
            speeds[replicas.index(soonest)].observe(work, seconds, beside, soonest._now_s)
            done += 1
            if number >= counted_from * requests:
                took.append(seconds / work)
    return Outcome([c / sum(counts) for c in counts], sum(took) / len(took), speeds)


def best_shares(replicas: Sequence[Replica], rate: float) -> list[float]:
    """Return the split of the work with the fewest requests in the system (equal marginal gains)."""
    low, high = 1e-9, 1e9
    rates: list[float] = []
    for _ in range(200):
        gain = math.sqrt(low * high)
        rates = []
        for r in replicas:
            running = max(0.0, (math.sqrt(r.alone_s / gain) - r.alone_s) / r.beside_s)
            rates.append(running / (r.alone_s + r.beside_s * running))
        if sum(rates) < rate * WORK:
            high = gain
        else:
            low = gain
    return [r / sum(rates) for r in rates]


def unequal(times: float, batching: float = 10.0) -> list[Replica]:
    """Two replicas, and two that are so many times slower."""
    return [Replica(0.01 * k, 0.01 * k / batching) for k in (1.0, 1.0, times, times)]


def capacity(replicas: Sequence[Replica]) -> float:
    return sum(1 / r.beside_s for r in replicas) / WORK


def min_running(replicas: list[Replica], _chance: float) -> int:
    return min(range(len(replicas)), key=lambda i: replicas[i].running)


def two_choices(replicas: list[Replica], chance: float) -> int:
    pairs = [(i, j) for i in range(len(replicas)) for j in range(len(replicas)) if i != j]
    one, two = pairs[int(chance * len(pairs))]
    return one if replicas[one].running <= replicas[two].running else two


# How many times slower, how loaded, how much less a request takes beside another.
TELLING = ((2.0, 0.85, 10.0), (20.0, 0.5, 1.0))


@pytest.mark.parametrize(
    ("times", "load", "batching"),
    [
        pytest.param(*case, marks=[] if case in TELLING else pytest.mark.slow)
        for case in product((2.0, 5.0, 20.0), (0.5, 0.85), (10.0, 1.0))
    ],
)
def test_unequal_replicas_get_the_best_split(times: float, load: float, batching: float) -> None:
    rate = load * capacity(unequal(times, batching))
    found = simulate(unequal(times, batching), rate)
    best = best_shares(unequal(times, batching), rate)
    # Of a split between the fast and the slow; 10 % of what the fast should have.
    assert sum(found.shares[:2]) == pytest.approx(sum(best[:2]), rel=0.10)
    assert abs(found.shares[0] - found.shares[1]) < 0.05
    for other in (min_running, two_choices):
        theirs = simulate(unequal(times, batching), rate, other)
        # Where speeds are close the others are nearly as good; nowhere are they better.
        assert found.seconds_per_work < theirs.seconds_per_work * 1.03
        if times > 2.0:
            assert found.seconds_per_work < theirs.seconds_per_work * 0.9


def test_speeds_are_found() -> None:
    rate = 0.85 * capacity(unequal(5.0))
    for speed, replica in zip(simulate(unequal(5.0), rate).speeds, unequal(5.0), strict=True):
        for beside in (4.0, 12.0):
            true_s = replica.alone_s + replica.beside_s * beside
            assert speed.time_s(beside) == pytest.approx(true_s, rel=0.25)


def test_a_replica_that_becomes_slow_or_fast_is_noticed() -> None:
    for times in (0.2, 8.0):
        replicas = [Replica(0.01, 0.001) for _ in range(3)]
        now = [Replica(0.01 * times, 0.001 * times), *(Replica(0.01, 0.001) for _ in range(2))]
        rate = 0.6 * min(capacity(replicas), capacity(now))

        def change(now_s: float, them: list[Replica], times: float = times) -> None:
            if now_s > 20.0 and them[0].alone_s == 0.01:
                them[0].alone_s, them[0].beside_s = 0.01 * times, 0.001 * times

        found = simulate(replicas, rate, change=change)
        best = best_shares(now, rate)
        assert found.shares[0] == pytest.approx(best[0], abs=0.1)


def test_a_replica_that_comes_late_gets_its_share() -> None:
    replicas = [Replica(0.01, 0.001), Replica(0.01, 0.001), Replica(0.005, 0.0005, closed=True)]
    rate = 0.6 * capacity(replicas[:2])

    def change(now_s: float, them: list[Replica]) -> None:
        if now_s > 15.0:
            them[2].closed = False

    found = simulate(replicas, rate, change=change)
    assert found.shares[2] == pytest.approx(best_shares(replicas, rate)[2], abs=0.1)


def test_nobody_is_known_at_first() -> None:
    learned, speeds = Learned(), [Speed() for _ in range(4)]
    running = [0.0] * 4
    for _ in range(8):
        chosen, explored = learned.pick(speeds, running, [False] * 4, 0.0)
        assert not explored
        running[chosen] += 1
    assert running == [2.0] * 4
    # Once one is known the others get few requests until they have answered one.
    speeds[0].observe(100.0, 1.0, 0.0, 1.0)
    for _ in range(20):
        chosen, _ = learned.pick(speeds, running, [False] * 4, 1.0)
        running[chosen] += 1
    assert running == [22.0, 2.0, 2.0, 2.0]
    assert learned.pick(speeds, running, [True] * 4, 1.0) == (-1, False)
    assert learned.pick([], [], [], 1.0) == (-1, False)


def test_idle_replicas_are_tried_again_but_seldom() -> None:
    learned, speeds = Learned(), [Speed(), Speed()]
    speeds[0].observe(100.0, 1.0, 0.0, 0.0)
    speeds[1].observe(100.0, 30.0, 0.0, 0.0)
    tried = 0
    for number in range(1000):
        chosen, explored = learned.pick(speeds, [0.0, 0.0], [False, False], number * 0.1)
        assert chosen == int(explored)
        tried += explored
    assert 5 <= tried <= 12
    # One that turns out to be fast again is used.
    for number in range(30):
        speeds[1].observe(100.0, 0.5, 0.0, 100.0 + number)
    assert learned.pick(speeds, [0.0, 0.0], [False, False], 131.0)[0] == 1


def test_one_stall_does_not_make_a_replica_slow() -> None:
    speed = Speed()
    for number in range(50):
        speed.observe(100.0, 1.0, 2.0, number * 1.0)
    before_s = speed.time_s(2.0)
    speed.observe(100.0, 500.0, 2.0, 50.0)
    assert speed.time_s(2.0) < 1.2 * before_s
    speed.observe(0.0, 1.0, 0.0, 51.0)
    speed.observe(1.0, 0.0, 0.0, 51.0)
    assert speed.seen == 51


@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e5), st.floats(1e-6, 1e5), st.floats(-1.0, 1e3)),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_is_seen_times_stay_sane(seen: list[tuple[float, float, float]]) -> None:
    speed = Speed()
    for number, (work, seconds, beside) in enumerate(seen):
        speed.observe(work, seconds, beside, float(number))
        assert speed.alone_s > 0.0
        assert speed.beside_s >= 0.0
        gains = [speed.gain(n) for n in (0.0, 1.0, 5.0, 50.0)]
        assert all(g > 0.0 and math.isfinite(g) for g in gains)
        assert gains == sorted(gains, reverse=True)


def test_the_longest_known_beginning_counts() -> None:
    affinity = Affinity(max_conversations=3)
    first = chain("m", ["system", "question"])
    longer = chain("m", ["system", "question", "answer", "more"])
    assert longer[:2] == first
    assert chain("other", ["system", "question"]) != first
    affinity.note(first[-1], "a")
    assert affinity.find(longer[::-1]) == "a"
    affinity.note(longer[-1], "b")
    assert affinity.find(longer[::-1]) == "b"
    assert affinity.find(first[::-1]) == "a"
    assert affinity.find(chain("m", ["system", "another"])[::-1]) is None
    for number in range(3):
        affinity.note(number, "c")
    assert len(affinity) == 3
    assert affinity.find(first) is None
    assert len(chain("m", range(1000))) == 128


def test_long_prompts_are_cut_into_blocks() -> None:
    assert list(blocks("short")) == ["short"]
    text = "x" * 5000
    assert [len(b) for b in blocks(text)] == [1024] * 4
    assert list(blocks(text + "y" * 5000))[:4] == list(blocks(text))


@pytest.mark.parametrize("seed", [0, 97])
def test_never_much_worse_than_the_fewest_outstanding(seed: int) -> None:
    """Nearly full, of about equal speed, with a cap on what runs at once: chance must not decide."""
    assert compare(draw_mix(seed), 3000) < 1.02


def test_much_better_where_speeds_differ() -> None:
    assert compare(draw_mix(2), 2000) < 0.7
