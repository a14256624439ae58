"""How sure a plan is of its promises."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.perf.constants import PROXY_ERROR, OpClass, default_constants, sample_constants
from atoll.perf.layers import ground_constants
from atoll.plan.plan import Plan
from atoll.prove import uncertainty
from atoll.prove.planning import NO_ERROR_BARS, _add_error_bars
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.prove.uncertainty import _matters_most, judge_certainty
from atoll.solve.deadline import Deadline
from tests.prove.test_rent_promises import CATALOG, CHAT, FRESH, PROBLEM, solve


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(PROBLEM, FRESH, 60.0)


def test_a_plan_with_plenty_is_sure_and_one_with_too_little_is_not(plan: Plan) -> None:
    easy = PROBLEM.replace(services=(CHAT.model_copy(update={"rate_per_s": 3.0}),))
    hard = PROBLEM.replace(services=(CHAT.model_copy(update={"rate_per_s": 60.0}),))

    assert judge_certainty(plan, easy, CATALOG, draws=4).chance == {"chat": 1.0}
    assert judge_certainty(plan, hard, CATALOG, draws=4).chance == {"chat": 0.0}


@pytest.mark.slow
def test_the_same_draws_every_time(plan: Plan) -> None:
    tight = PROBLEM.replace(services=(CHAT.model_copy(update={"attainment": 0.99}),))
    first = judge_certainty(plan, tight, CATALOG, draws=5)
    assert first == judge_certainty(plan, tight, CATALOG, draws=5)
    assert 0.0 <= first.chance["chat"] <= 1.0


def test_no_draw_is_simulated_after_the_deadline(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncertainty, "simulate_kept", lambda *_, **__: pytest.fail("simulated"))
    with pytest.raises(SimulationCutShortError):
        judge_certainty(plan, PROBLEM, CATALOG, deadline=Deadline(0.0))


def test_a_plan_without_error_bars_says_why(plan: Plan) -> None:
    promised = plan.model_copy(update={"notes": ("one",)})
    late = _add_error_bars(promised, PROBLEM, CATALOG, Deadline(0.0))
    assert late.notes == ("one", NO_ERROR_BARS)
    assert late.model_copy(update={"notes": promised.notes}) == promised


def test_what_goes_with_what_is_kept_is_to_be_measured() -> None:
    kept = [{"a": 0.9, "b": share} for share in (0.8, 0.7, 0.6, 0.5)]
    factors = [
        {("L4", "gemm"): slower, ("L4", "experts"): luck}
        for slower, luck in zip((0.0, 0.1, 0.2, 0.3), (0.1, -0.1, 0.1, -0.1), strict=True)
    ]
    assert _matters_most(kept, factors) == ("L4", "gemm")
    assert _matters_most([{"a": 1.0}] * 4, factors) is None


def test_gpus_without_constants_of_their_own_are_to_be_measured_too() -> None:
    gpu = CATALOG.gpu("MI300X")
    table = ground_constants(default_constants(), [CATALOG.model("llama-3.1-8b").llm], [gpu])
    drawn = sample_constants(table, np.random.default_rng(1), [gpu])
    found = uncertainty._factors(table, drawn, ["MI300X"])
    assert {"gemm", "attention_decode", "host", "links"} <= {what for _, what in found}
    assert all(factor != 0.0 for factor in found.values())


def test_what_a_report_calls_a_proxy_is_drawn_as_one() -> None:
    gpu, spec = CATALOG.gpu("H200"), CATALOG.model("deepseek-v3").llm
    for op in (OpClass.ATTENTION_PREFILL, OpClass.ATTENTION_DECODE):
        plain = default_constants().gpu("H200").op(op)
        assert plain.error < PROXY_ERROR
        own = ground_constants(default_constants(), [spec], [gpu]).gpu("H200").op(op)
        assert (own.error, own.e_b) == (PROXY_ERROR, plain.e_b)
