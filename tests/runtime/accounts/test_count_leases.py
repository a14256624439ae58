"""Counts that gateways share: never over the limit, nothing left lying about, and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.accounts.count_leases import CountAsk, SharedCount, lend
from atoll.runtime.accounts.rate_leases import OtherLease, SharedBucket, SharedLimit, settle


class Gateway:
    """One that lets requests in by its part of a quota; each may use so much and uses some of it."""

    def __init__(self, limit: int, *, strict: bool = True) -> None:
        self.spent = 0
        self.uncounted = 0
        self.running: list[tuple[int, int]] = []
        self.count = SharedCount(limit, lambda: self.spent + self.reserved, strict=strict)

    @property
    def reserved(self) -> int:
        return sum(most for most, _ in self.running)

    def begin(self, most: int, uses: int) -> bool:
        let_in = self.count.has_room(most)
        if let_in:
            self.running.append((most, min(most, uses)))
        return let_in

    def end(self) -> None:
        if self.running:
            _, used = self.running.pop(0)
            self.spent += used
            self.uncounted += used


class Shared:
    """A quota of a strict key, the counter of the database and the gateways; each settles by itself."""

    def __init__(self, limit: int, gateways: int) -> None:
        self.limit = limit
        self.counted = 0
        self.now_s = 0.0
        self.rows: dict[int, OtherLease] = {}
        self.gateways = [Gateway(limit) for _ in range(gateways)]

    def settle(self, which: int, *, wants: bool = True) -> None:
        self.now_s += 1.0
        gateway = self.gateways[which]
        self.counted += gateway.uncounted
        gateway.uncounted = 0
        ask = gateway.count.ask("k", "tokens_day", wants=wants, counted=gateway.spent)
        others = [row for number, row in self.rows.items() if number != which]
        grant = lend(ask, self.counted, others, self.now_s)
        self.rows.pop(which, None)
        if wants or grant.lent:
            self.rows[which] = OtherLease(grant.lent, grant.served_s)
        gateway.count.granted(grant, len(self.gateways), wants=wants)

    @property
    def used(self) -> int:
        return self.counted + sum(g.uncounted for g in self.gateways)

    @property
    def used_at_most(self) -> int:
        return self.used + sum(g.reserved for g in self.gateways)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "begin", "end", "settle", "idle"]),
            st.integers(0, 3),
            st.integers(1, 60),
            st.integers(0, 60),
        ),
        max_size=80,
    ),
    st.sampled_from([1, 7, 50, 300]),
    st.integers(1, 4),
)
def test_a_quota_is_never_exceeded(
    steps: list[tuple[str, int, int, int]], limit: int, gateways: int
) -> None:
    it = Shared(limit, gateways)
    for what, number, most, uses in steps:
        which = number % gateways
        if what == "begin":
            it.gateways[which].begin(most, uses)
        elif what == "end":
            it.gateways[which].end()
        else:
            it.settle(which, wants=what == "settle")
        assert it.used_at_most <= limit
        assert it.counted + sum(row.lent for row in it.rows.values()) <= limit


def test_all_of_a_quota_can_be_used_by_whoever_asks() -> None:
    it = Shared(100, 3)
    for turn in range(300):
        which = turn % 3
        it.settle(which)
        it.gateways[which].begin(9, 9)
        it.gateways[which].end()
    # What is left is less than a request may need.
    assert 91 < it.used <= 100


def test_places_go_round_where_there_are_fewer_than_gateways() -> None:
    served = [0, 0, 0]
    rows: dict[int, OtherLease] = {}
    lent = [-1.0, -1.0, -1.0]
    for turn in range(30):
        which = turn % 3
        ask = CountAsk("k", "running", 1, 0, True, lent[which], 0.0, "")
        others = [row for number, row in rows.items() if number != which]
        grant = lend(ask, 0.0, others, float(turn))
        lent[which] = grant.served_s
        rows[which] = OtherLease(grant.lent, grant.served_s)
        served[which] += grant.lent >= 1.0
        assert sum(row.lent for row in rows.values()) <= 1.0
    assert min(served) >= 2


@pytest.mark.parametrize("strict", [True, False])
def test_without_a_lease(strict: bool) -> None:
    gateway = Gateway(10, strict=strict)
    gateway.count.share(4)
    # An equal part, rounded up; nothing where nothing may go over.
    assert sum(gateway.begin(1, 1) for _ in range(20)) == (0 if strict else 3)


@given(
    st.lists(
        st.tuples(st.sampled_from("aasp"), st.integers(0, 3), st.integers(1, 30)), max_size=90
    ),
    st.sampled_from([1, 3, 20, 60, 600]),
    st.integers(1, 4),
)
def test_of_a_strict_key_no_minute_has_more_than_limit_and_rate(
    steps: list[tuple[str, int, int]], limit: int, gateways: int
) -> None:
    now_s, admitted = 0.0, 0
    bucket = SharedBucket(limit, 0.0)
    them = [SharedLimit(limit, 0.0, strict=True) for _ in range(gateways)]
    rows: dict[int, OtherLease] = {}
    for what, number, amount in steps:
        which = number % gateways
        if what == "a":
            for _ in range(amount):
                if them[which].wait_s(now_s) <= 0.0:
                    them[which].charge(now_s, 1)
                    admitted += 1
        elif what == "p":
            now_s += amount / 4
        else:
            wants = amount > 3
            ask = them[which].ask("k", "requests", wants=wants)
            others = [row for n, row in rows.items() if n != which]
            # Careful or not: nobody counts on what was not lent.
            bucket, grant = settle(bucket, ask, others, now_s, careful=amount % 2 == 0)
            rows.pop(which, None)
            if wants:
                rows[which] = OtherLease(grant.lent, grant.served_s)
            # An answer may be lost: what it lent is then nobody's.
            if amount % 7:
                them[which].granted(grant, gateways, now_s, wants=wants)
        assert admitted <= limit + limit / 60 * now_s + 1e-6
