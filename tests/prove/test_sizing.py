"""How much phases may lose: tightened where too much is lost, searched between enough and too much."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.ids import Phase
from atoll.prove.kept import KeptShares
from atoll.prove.sizing import Allowance, Multiple

SHARES = st.floats(0.0, 1.0)


@given(st.lists(st.booleans(), max_size=30))
def test_a_multiple_is_searched_between_what_was_enough_and_what_was_not(lost: list[bool]) -> None:
    one = Multiple()
    for too_much in lost:
        if too_much:
            one.tighten(1.0, 0.5)
        else:
            one.note_enough()
            one.probe()
        assert 0.0 < one.now <= 16.0
        assert one.good <= one.now <= one.bad or one.good == 0.0
    one.settle()
    assert one.good == 0.0 or one.now == one.good


def test_what_may_be_lost_is_bisected_by_its_logarithm() -> None:
    one = Multiple()
    one.tighten(1.0, 0.5)
    assert one.now == 1.0
    one.note_enough()
    assert one.probe()
    assert one.now == math.sqrt(16.0)
    one.tighten(1.0, 0.5)
    assert one.now == 2.0


@given(SHARES, SHARES, SHARES)
def test_services_that_fall_short_may_lose_less_and_never_more(
    ttft: float, tpot: float, part: float
) -> None:
    own = Allowance(0.95)
    before = {phase: own.share(phase) for phase in Phase}
    assert set(before.values()) == {0.0}
    kept = KeptShares(part * min(ttft, tpot), ttft, tpot)
    for _ in range(5):
        own.tighten(kept, together=False)
        now = {phase: own.share(phase) for phase in Phase}
        assert all(now[phase] >= before[phase] - 1e-12 for phase in Phase)
        before = now
    assert max(before.values()) > 0.5


def test_the_phase_that_loses_max_is_tightened() -> None:
    late = Allowance(0.95)
    late.tighten(KeptShares(0.8, 0.8, 1.0), together=False)
    assert late.prompts.bad == 16.0
    assert late.answers.bad == math.inf

    slow = Allowance(0.95)
    slow.tighten(KeptShares(0.8, 0.99, 0.8), together=False)
    assert slow.prompts.is_free
    assert slow.answers.bad == 16.0


def test_first_tokens_that_prefill_does_not_explain_are_put_down_to_decode() -> None:
    own = Allowance(0.95)
    own.tighten(KeptShares(0.1, 0.1, 1.0), together=False)
    prompts = own.prompts.now
    answers = own.answers.now
    own.tighten(KeptShares(0.1, 0.1, 1.0), together=False)
    assert own.prompts.now == prompts
    assert own.answers.now < answers
    # That did not help either.
    own.tighten(KeptShares(0.1, 0.1, 1.0), together=False)
    assert own.prompts.now < prompts


def test_use_is_cut_where_phases_lose_more_together_than_alone() -> None:
    own = Allowance(0.95)
    assert own.trim(KeptShares(0.9, 0.9, 1.0))
    assert own.used[Phase.PREFILL] < 1.0
    assert Phase.DECODE not in own.used
    while own.trim(KeptShares(0.9, 0.9, 1.0)):
        pass
    assert own.used[Phase.PREFILL] <= 0.6
