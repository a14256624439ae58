"""Limits that gateways share: never more than stated, and everybody gets some."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.accounts.rate_leases import (
    LeaseAsk,
    LeaseGrant,
    OtherLease,
    SharedBucket,
    SharedLimit,
    settle,
    slice_of,
)

_IDLE_S = 3.0


class Shared:
    """One limit in a database, and gateways that share it; time is simulated."""

    def __init__(self, limit: int, gateways: int) -> None:
        self.limit = limit
        self.now_s = 0.0
        self.bucket = SharedBucket(limit, 0.0)
        self.gateways = [SharedLimit(limit, 0.0) for _ in range(gateways)]
        self.touched = [-100.0] * gateways
        self.rows: dict[int, OtherLease] = {}
        self.admitted = [0] * gateways
        for gateway in self.gateways:
            gateway.begin(limit, gateways, 0.0)

    def ask(self, which: int) -> bool:
        """Have one request come to a gateway; return whether it was let in."""
        gateway = self.gateways[which]
        self.touched[which] = self.now_s
        if gateway.wait_s(self.now_s) > 0.0:
            return False
        gateway.charge(self.now_s, 1)
        self.admitted[which] += 1
        return True

    def settle(self, which: int, *, lost: bool = False) -> None:
        gateway = self.gateways[which]
        wants = self.now_s - self.touched[which] < _IDLE_S
        if not gateway.settles(wants=wants):
            return
        ask = gateway.ask("k", "requests", wants=wants)
        others = [row for n, row in self.rows.items() if n != which]
        self.bucket, grant = settle(self.bucket, ask, others, self.now_s)
        self.rows.pop(which, None)
        if wants:
            self.rows[which] = OtherLease(grant.lent, grant.served_s)
        if not lost:
            gateway.granted(grant, len(self.gateways), self.now_s, wants=wants)

    def most(self) -> float:
        """What may have been let in by now."""
        return (
            self.limit
            + self.limit / 60 * self.now_s
            + (len(self.gateways) + 1) * slice_of(self.limit)
        )


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "burst", "settle", "lost", "pass", "idle"]),
        st.integers(0, 3),
        st.integers(1, 40),
    ),
    min_size=10,
    max_size=120,
)


@given(steps=steps, limit=st.sampled_from([1, 3, 20, 60, 600, 60_000]), count=st.integers(1, 4))
def test_never_more_than_limit_and_rate_and_slices(
    steps: list[tuple[str, int, int]], limit: int, count: int
) -> None:
    it = Shared(limit, count)
    for what, which, amount in steps:
        which %= count
        if what == "ask":
            it.ask(which)
        elif what == "burst":
            for _ in range(amount * 3):
                it.ask(which)
        elif what in ("settle", "lost"):
            it.settle(which, lost=what == "lost")
        else:
            # Everybody settles once a second, or a little later.
            for _ in range(amount if what == "pass" else 6 * amount):
                it.now_s += 0.1
                for number in range(count):
                    if round(it.now_s * 10) % 10 == 2 * number:
                        it.settle(number)
        assert sum(it.admitted) <= it.most()
        held = sum(row.lent for row in it.rows.values())
        assert it.bucket.level + held <= limit + 1e-6


@pytest.mark.parametrize("limit", [3, 30, 600])
@pytest.mark.parametrize("shift", [0.01, 0.5, 0.99])
def test_a_greedy_gateway_does_not_starve_another(limit: int, shift: float) -> None:
    """Whoever settles first in every second: the modest one gets what it asks for, up to its half."""
    it = Shared(limit, 2)
    rate = limit / 60
    every_s = 2.5 / rate  # the modest one asks for 40 % of the rate
    asked, waited, due_s = 0, 0.0, 30.0
    events = sorted(
        [(float(t), "greedy settles") for t in range(601)]
        + [(t + shift, "modest settles") for t in range(601)]
        + [(t / 10, "tick") for t in range(6001)]
    )
    pending_s: float | None = None
    for at_s, what in events:
        it.now_s = at_s
        if what == "greedy settles":
            it.settle(0)
        elif what == "modest settles":
            it.settle(1)
        for _ in range(3 * limit):
            if not it.ask(0):
                break
        if pending_s is None and at_s >= due_s:
            pending_s, due_s, asked = at_s, due_s + every_s, asked + 1
        if pending_s is not None and it.ask(1):
            waited = max(waited, at_s - pending_s)
            pending_s = None
    assert asked - it.admitted[1] <= max(2, 0.1 * asked)
    assert waited <= 3 * 2 / rate + 5.0
    # Nothing is left lying about: together they get the rate.
    assert sum(it.admitted) >= 0.9 * (limit + rate * 600) - 2


def test_many_gateways_and_less_than_one_request_for_each() -> None:
    it = Shared(3, 10)
    for tick in range(6000):
        it.now_s = tick / 10
        it.settle(tick % 10)
        for number in range(10):
            it.ask(number)
    assert sum(it.admitted) <= it.most()
    assert sum(it.admitted) >= 0.9 * (3 + 0.05 * 600)
    assert min(it.admitted) >= 1


def test_one_gateway_has_all_of_it_at_once() -> None:
    it = Shared(60, 1)
    assert sum(it.ask(0) for _ in range(100)) == 60
    it.settle(0)
    assert not it.ask(0)
    it.now_s = 1.0
    it.settle(0)
    assert [it.ask(0), it.ask(0)] == [True, False]


def test_a_key_that_is_new_to_a_gateway_gets_a_slice_then_its_share() -> None:
    it = Shared(60, 2)
    assert sum(it.ask(1) for _ in range(100)) == 2
    it.settle(1)
    # Nobody else works for the key: all of it.
    assert sum(it.ask(1) for _ in range(100)) == 58
    it.settle(1)
    assert sum(it.ask(0) for _ in range(100)) == 2
    it.settle(0)
    assert not it.ask(0)
    for _ in range(20):
        it.now_s += 1.0
        for number in (0, 1):
            it.settle(number)
            while it.ask(number):
                pass
    assert sum(it.admitted) <= 60 + 20 + 3 * 2
    assert it.admitted[0] >= 8


def test_without_the_database_each_has_an_equal_share() -> None:
    limits = [SharedLimit(60, 0.0) for _ in range(3)]
    for limit in limits:
        limit.fall_back(3, 0.0)
    admitted = 0
    for tick in range(601):
        for limit in limits:
            while limit.wait_s(tick / 10) == 0.0:
                limit.charge(tick / 10, 1)
                admitted += 1
    assert 117 <= admitted <= 120


def test_what_was_spent_while_it_was_away_is_settled_when_it_is_back() -> None:
    limit = SharedLimit(60, 0.0)
    limit.charge(0.0, 10)
    limit.ask("k", "requests", wants=True)  # the answer never came
    limit.fall_back(2, 0.0)
    limit.charge(1.0, 5)
    ask = limit.ask("k", "requests", wants=True)
    assert (ask.spent, ask.held) == (15.0, 0.0)
    bucket, grant = settle(SharedBucket(60.0, 0.0), ask, [], 0.0)
    limit.granted(grant, 2, 1.0, wants=True)
    assert (bucket.level, limit.level(1.0), limit.spent) == (0.0, 45.0, 0.0)


def test_a_lease_is_charged_while_it_is_being_settled() -> None:
    limit = SharedLimit(60, 0.0)
    ask = limit.ask("k", "requests", wants=True)
    limit.charge(0.0, 7)
    _, grant = settle(SharedBucket(60.0, 0.0), ask, [], 0.0)
    limit.granted(grant, 1, 0.0, wants=True)
    assert (limit.level(0.0), limit.spent, limit.held) == (53.0, 7.0, 60.0)


def test_debt_is_of_all_together() -> None:
    ask = LeaseAsk("k", "tokens", 60.0, 20.0, 100.0, True, 0.0)
    bucket, grant = settle(SharedBucket(40.0, 0.0), ask, [OtherLease(0.0, 0.0)], 0.0)
    assert bucket.level == -40.0
    assert grant == LeaseGrant(0.0, -40.0, 2, 0.0)
    limit = SharedLimit(60, 0.0)
    limit.granted(grant, 2, 0.0, wants=True)
    assert limit.wait_s(0.0) == pytest.approx(41.0)
    later, _ = settle(bucket, ask._replace(held=0.0, spent=0.0), [], 41.0)
    assert later.level == 0.0  # one, and it is lent


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = SharedBucket(0.0, 100.0)
    ask = LeaseAsk("k", "requests", 60.0, 0.0, 0.0, False, 0.0)
    for now_s, level in itertools.product((50.0, 100.0), (0.0,)):
        assert settle(bucket, ask, [], now_s)[0] == (level, 100.0)


def test_a_changed_limit_keeps_what_was_used() -> None:
    limit = SharedLimit(100, 0.0)
    limit.charge(0.0, 80)
    limit.resize(50, 0.0)
    assert limit.level(0.0) == -30
    limit.resize(50, 0.0)
    assert limit.full_s(0.0) == pytest.approx(96.0)


def test_what_is_held_is_given_back_once_even_if_nobody_answers() -> None:
    limit = SharedLimit(60, 0.0)
    limit.granted(LeaseGrant(30.0, 30.0, 2, 0.0), 2, 0.0, wants=True)
    assert limit.ask("k", "requests", wants=True).held == 30.0
    # Whether that was heard is not known; saying it again might give it back twice.
    assert limit.ask("k", "requests", wants=True).held == 0.0


def test_the_last_whole_request_goes_to_who_has_waited_longest() -> None:
    ask = LeaseAsk("k", "requests", 3.0, 0.0, 0.0, True, 50.0)
    bucket = SharedBucket(1.5, 60.0)
    for served_s, lent in ((40.0, 0.0), (50.0, 1.0), (55.0, 1.0)):
        kept, grant = settle(bucket, ask, [OtherLease(0.0, served_s)], 60.0)
        assert (grant.lent, kept.level) == (lent, 1.5 - lent)
        assert grant.served_s == (60.0 if lent else 50.0)
