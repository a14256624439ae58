"""The batch that a load leads to: Little's law, limits at both ends, and no surprises in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.operating_point import largest_batch, operating_point
from atoll.perf.step import analytic, step_seconds
from atoll.workload.lengths import LengthMix
from tests.seeds import examples

CATALOG = Catalog.default()
LLAMA = CATALOG.model("llama-3.1-8b").llm
MODEL = analytic(LLAMA, CATALOG.node("L40S:1"))
MIX = LengthMix.fixed(600.0, 120.0)
PHASES = st.sampled_from((Phase.PREFILL, Phase.DECODE, Phase.BOTH))
loads = examples(30)


def units(phase: Phase) -> float:
    return 1.0 if phase is Phase.PREFILL else MIX.output_mean


def test_nothing_to_do_is_no_step() -> None:
    point = operating_point(MODEL, Phase.DECODE, MIX, 0, LLAMA.layers, 0.0)
    assert (point.steps_per_s, point.busy, point.steps) == (0.0, 0.0, ())
    with pytest.raises(UsageError, match="requests/s"):
        operating_point(MODEL, Phase.DECODE, MIX, 0, LLAMA.layers, -1.0)


def test_a_rare_request_is_alone() -> None:
    rate = 1e-4
    point = operating_point(MODEL, Phase.DECODE, MIX, 0, LLAMA.layers, rate)
    alone_s = step_seconds(MODEL, Batch.decode(1.0, MIX.decode_context), 0, LLAMA.layers)
    assert point.sequences == pytest.approx(1.0, rel=1e-2)
    assert point.busy == pytest.approx(rate * MIX.output_mean * alone_s, rel=2e-2)


@loads
@given(phase=PHASES, rate=st.floats(0.01, 30.0))
def test_steps_finish_what_arrives(phase: Phase, rate: float) -> None:
    point = operating_point(MODEL, phase, MIX, 0, LLAMA.layers, rate)
    most = largest_batch(MODEL, phase, MIX)
    assert 0.0 < point.busy <= 1.0
    assert 1.0 - 1e-9 <= point.sequences <= most * (1.0 + 1e-9)
    finished = point.steps_per_s * point.sequences / units(phase)
    assert finished <= rate * (1.0 + 1e-9)
    if point.busy < 1.0:
        assert finished == pytest.approx(rate)
        seconds = sum(s * step_seconds(MODEL, b, 0, LLAMA.layers) for s, b in point.steps)
        assert point.busy == pytest.approx(point.steps_per_s * seconds, rel=0.05)
    prompts = sum(share * batch.prefill_sequences for share, batch in point.steps)
    decodes = sum(share * batch.decode_sequences for share, batch in point.steps)
    if phase is Phase.BOTH:
        # As many prompts come in as answers are finished.
        assert prompts == pytest.approx(decodes / MIX.output_mean)


@loads
@given(phase=PHASES, rate=st.floats(0.01, 20.0), more=st.floats(1.01, 4.0))
def test_more_requests_keep_it_no_less_busy_in_no_smaller_batches(
    phase: Phase, rate: float, more: float
) -> None:
    few, many = (
        operating_point(MODEL, phase, MIX, 0, LLAMA.layers, r) for r in (rate, rate * more)
    )
    assert many.busy >= few.busy - 1e-3
    assert many.sequences >= few.sequences - 1e-9


def test_too_many_requests_fill_the_largest_batch() -> None:
    point = operating_point(MODEL, Phase.DECODE, MIX, 0, LLAMA.layers, 1e6)
    assert point.busy == 1.0
    assert point.sequences == largest_batch(MODEL, Phase.DECODE, MIX)
