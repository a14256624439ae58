from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.accounts.journal import FinishedRequest
from atoll.runtime.accounts.key_limits import Counted
from atoll.runtime.accounts.ledger import TokenPrice, cost_nusd, rows_of, shares
from atoll.telemetry.usage_record import Attempt
from tests.runtime.accounts.helpers import record

attempts = st.lists(
    st.builds(
        Attempt,
        backend=st.sampled_from(["a", "b"]),
        tokens=st.integers(-3, 200),
        usd_per_mtoken_out=st.one_of(st.none(), st.floats(0, 100)),
    ),
    max_size=5,
).map(tuple)


@given(st.integers(0, 500), st.integers(0, 500), attempts)
def test_attempts_share_out_exactly_the_tokens_of_a_request(
    prompt: int, completion: int, tried: tuple[Attempt, ...]
) -> None:
    found = shares(record(prompt=prompt, completion=completion, attempts=tried))
    assert sum(share.prompt_tokens for share in found) == prompt
    assert sum(share.completion_tokens for share in found) == completion
    assert all(share.completion_tokens >= 0 for share in found)
    assert sum(share.prompt_tokens > 0 for share in found) <= 1


def test_what_attempts_say_is_kept_where_it_adds_up() -> None:
    tried = (
        Attempt("a", tokens=0, outcome="failed"),
        Attempt("b", tokens=3),
        Attempt("c", tokens=2),
    )
    found = shares(record(prompt=7, completion=6, attempts=tried))
    assert [share.completion_tokens for share in found] == [0, 3, 3]
    assert [share.prompt_tokens for share in found] == [0, 7, 0]


def test_without_attempts_the_last_backend_has_it_all() -> None:
    (share,) = shares(record(prompt=7, completion=6, backends=("a", "b")))
    assert share.attempt.backend == "b"
    assert share.completion_tokens == 6
    assert shares(record(prompt=0, completion=0, backends=())) == []


def test_cost_is_tokens_times_announced_prices_with_the_prompt_once() -> None:
    tried = (
        Attempt("a", tokens=1000, usd_per_mtoken_in=2.0, usd_per_mtoken_out=10.0),
        Attempt("b", tokens=500, usd_per_mtoken_in=4.0, usd_per_mtoken_out=20.0),
    )
    rows = rows_of(
        [FinishedRequest("o", None, 0, 0.0, record(prompt=3000, completion=1500, attempts=tried))]
    )
    # 3000 * 2 + 1000 * 10 micro-dollars at a, 500 * 20 at b.
    assert [row["cost_nusd"] for row in rows.attempts] == [16_000_000, 10_000_000]
    assert rows.operations[0]["cost_nusd"] == 26_000_000


def test_small_prices_are_not_lost() -> None:
    assert cost_nusd(Attempt("a", usd_per_mtoken_out=0.000001), 0, 10**6, None) == 1000
    assert cost_nusd(Attempt("a", usd_per_mtoken_out=0.15), 0, 1, None) == 150


def test_a_fallback_price_holds_where_none_was_announced() -> None:
    price = TokenPrice(1.0, 2.0)
    assert cost_nusd(Attempt("a"), 1, 1, price) == 3000
    assert cost_nusd(Attempt("a", usd_per_mtoken_in=0.0), 1, 1, price) == 2000
    done = FinishedRequest("o", None, 0, 0.0, record(prompt=1, completion=1))
    assert rows_of([done], {"m": price}).operations[0]["cost_nusd"] == 3000


@given(st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300]), st.integers(0, 2**48))
def test_prices_that_are_none_never_break_the_ledger(price: float, tokens: int) -> None:
    cost = cost_nusd(Attempt("a", usd_per_mtoken_out=price), 0, tokens, None)
    assert 0 <= cost < 2**63


def test_tokens_count_in_the_day_the_month_and_in_all_once() -> None:
    done = FinishedRequest("o", "k", 15, 1_800_000_000.0, record())
    other = FinishedRequest("p", "k", 1, 1_800_000_000.0 + 86_400, None)
    rows = rows_of([done, done, other])
    assert len(rows.operations) == 1
    assert rows.counters == {
        ("k", "2027-01-15"): Counted(15),
        ("k", "2027-01-16"): Counted(1),
        ("k", "2027-01"): Counted(16),
        ("k", "total"): Counted(16),
    }


def test_who_is_not_tracked_has_no_rows() -> None:
    rows = rows_of([FinishedRequest("o", "k", 15, 0.0, None)])
    assert not rows.operations
    assert not rows.attempts
    assert rows.counters[("k", "total")] == Counted(15)


def test_sound_and_pictures_belong_to_the_attempt_that_came_last() -> None:
    attempts = (Attempt("a", outcome="failed"), Attempt("b"))
    used = record(prompt=0, completion=0, attempts=attempts)._replace(
        audio_seconds=1.5, image_pixels=9
    )
    done = FinishedRequest("o", "k", 0, 1_800_000_000.0, used, 1500, 250, 9)
    rows = rows_of([done, done])
    media = ("audio_ms", "speech_ms", "image_pixels")
    assert [tuple(row[name] for name in media) for row in rows.attempts] == [
        (0, 0, 0),
        (1500, 250, 9),
    ]
    assert [tuple(row[name] for name in media) for row in rows.operations] == [(1500, 250, 9)]
    assert rows.counters[("k", "total")] == Counted(0, 1750, 9)
    alone = record(prompt=0, completion=0, backends=())._replace(speech_seconds=0.25)
    (share,) = rows_of([FinishedRequest("p", None, 0, 0.0, alone, 0, 250, 0)]).attempts
    assert share["speech_ms"] == 250
