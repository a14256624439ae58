"""Tokens that come faster or slower than predicted are said so, once, with what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.control.decision.control_view import PaceSeen
from atoll.control.decision.drift import MIN_TOKENS, find_drift
from atoll.core.ids import Phase
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from tests.sim.builders import CATALOG, placed, problem, service

OWN = problem(service(), nodes=("H200:1",))
LAYERS = CATALOG.model("llama-3.1-8b").llm.layers
WHOLE = placed(OWN, "one", Phase.BOTH, (0, LAYERS, ("H200:1",)))
PACE = PaceSeen("one", 1.0, MIN_TOKENS, 1e-6)


def test_a_server_as_fast_as_predicted_is_not_worth_a_word() -> None:
    # Requests so far apart run alone: 63 of 64 of their steps have no prompt in them.
    steps = analytic(CATALOG.model("llama-3.1-8b").llm, CATALOG.node("H200:1"), engine="vllm")
    alone = step_seconds(steps, Batch.decode(1.0, 544.0), 0, LAYERS)
    found = find_drift(replace(PACE, token_s=alone), WHOLE, OWN)
    assert found is not None
    assert found.predicted_s == pytest.approx(alone, rel=0.1)
    assert not found.is_large


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_one_that_drifts_is_named_with_the_command(factor: float) -> None:
    expected = find_drift(PACE, WHOLE, OWN)
    assert expected is not None
    served = replace(PACE, token_s=factor * expected.predicted_s)
    found = find_drift(served, WHOLE, OWN)
    assert found is not None
    assert found.is_large
    assert found.share == pytest.approx(factor - 1.0)
    assert f"({factor - 1.0:+.0%})" in found.text()
    command = (
        "atoll profile --server URL --name llama-3.1-8b --as H200:1 --engine vllm -o measured.yaml"
    )
    assert command in found.text()


def test_a_server_that_was_measured_is_what_it_is_compared_with() -> None:
    server = {
        "model": "llama-3.1-8b", "node": "H200:1", "engine": "vllm", "date": "2026-11-18",
        "memory": 1.5, "compute": 1.5, "step": 0, "sequence": 0, "request": 0, "tokenize": 0,
        "stream": 0, "error": 0.05, "first_token_error": 0.1,
    }  # fmt: skip
    measured = OWN.replace(overlays=({"servers": [server]},))
    before, after = (find_drift(PACE, WHOLE, one) for one in (OWN, measured))
    assert before is not None
    assert after is not None
    assert after.predicted_s == pytest.approx(1.5 * before.predicted_s, rel=0.03)


def test_what_cannot_be_compared_is_left_alone() -> None:
    halves = placed(OWN, "two", Phase.BOTH, (0, 16, ("H200:1",)), (16, LAYERS, ("H200:1",)))
    assert find_drift(replace(PACE, tokens=MIN_TOKENS - 1), WHOLE, OWN) is None
    assert find_drift(PACE, halves, OWN) is None
    assert find_drift(PACE, WHOLE.model_copy(update={"service": "other"}), OWN) is None
