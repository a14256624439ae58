"""Measured rates, and Cornserve's algorithm 3 on an example worked out by hand."""

from __future__ import annotations

import pytest

from atoll.core.errors import InputError
from atoll.perf.components.executor import executor_work
from atoll.perf.components.executor_steps import executor_steps
from atoll.perf.components.measured import (
    MeasuredRate,
    MeasuredRates,
    amount,
    rates_from_profile,
)
from tests.perf.components.builders import SPEECH, TEXT, model, node

CLASSES = {"text": frozenset({"L"}), "image": frozenset({"E", "L"})}
MIX = {"text": 0.6, "image": 0.4}
EXECUTORS = {"E": frozenset({"E"}), "L": frozenset({"L"}), "EL": frozenset({"E", "L"})}


def test_algorithm_3_by_hand() -> None:
    found = rates_from_profile(CLASSES, MIX, EXECUTORS, {"E": 10.0, "L": 4.0, "EL": 2.0})
    # E alone: 0.1 s per request of the mix, of which 0.4 use it; all use L.
    assert found.seconds["E", "image", "E"] == pytest.approx(0.25)
    assert found.seconds["L", "text", "L"] == pytest.approx(0.25)
    # Together a mean request would take 0.4 * 0.25 + 0.25 = 0.35 s, and took 0.5.
    assert found.alpha == pytest.approx({"E": 1.0, "L": 1.0, "EL": 0.5 / 0.35})
    assert found.seconds["EL", "image", "E"] == pytest.approx(0.25 * 0.5 / 0.35)
    mean = 0.6 * found.seconds["EL", "text", "L"] + 0.4 * (
        found.seconds["EL", "image", "E"] + found.seconds["EL", "image", "L"]
    )
    assert mean == pytest.approx(1.0 / 2.0)
    assert ("E", "text", "E") not in found.seconds


@pytest.mark.parametrize(
    ("mix", "rates", "executors", "field"),
    [
        ({"text": 0.6, "image": 0.6}, {"E": 1.0, "L": 1.0, "EL": 1.0}, EXECUTORS, "mix"),
        (MIX, {"E": 1.0, "L": 1.0}, EXECUTORS, "throughput"),
        (MIX, {"EL": 1.0}, {"EL": frozenset({"E", "L"})}, "executors"),
    ],
)
def test_profiles_that_say_too_little(
    mix: dict[str, float],
    rates: dict[str, float],
    executors: dict[str, frozenset[str]],
    field: str,
) -> None:
    with pytest.raises(InputError) as caught:
        rates_from_profile(CLASSES, mix, executors, rates)
    assert caught.value.field == field


def test_a_measured_rate_replaces_a_prediction() -> None:
    omni = model("qwen2.5-omni-7b")
    rate = MeasuredRate(part="vocoder", on="A100-80", per_s=60.0, unit="speech_s")
    measured = MeasuredRates(rates=(rate,), source="our rig, June")
    pair = node("A100-80:2")
    found = executor_work(omni, ["vocoder"], pair, [SPEECH], measured=measured)
    assert found is not None
    # 30 s of speech at 60 a second on each of two GPUs.
    assert found.seconds == {("text -> audio", "vocoder"): 0.25}
    assert found.limits["text -> audio", "vocoder"] == "measured"
    assert found.provenance == "vocoder: our rig, June"
    steps = executor_steps(omni, ["vocoder"], pair, [SPEECH], measured=measured)
    assert steps is not None
    assert steps.steps["text -> audio", "vocoder"].item_s == 0.25 * steps.copies


def test_a_node_goes_before_its_gpus_and_llms_can_be_measured() -> None:
    measured = MeasuredRates(
        rates=(
            MeasuredRate(part="llm", on="A100-80", per_s=1.0),
            MeasuredRate(part="llm", on="A100-80:2", per_s=8.0),
        )
    )
    found = executor_work(
        model("qwen3-32b"), ["llm"], node("A100-80:2"), [TEXT], tp=2, measured=measured
    )
    assert found is not None
    assert found.seconds == {("text", "llm"): 1.0 / 8.0}
    assert found.latency_s["text", "llm"] > 0.0


def test_measured_rates_are_json() -> None:
    measured = MeasuredRates(rates=(MeasuredRate(part="vae", on="L4", per_s=2.0, unit="image"),))
    assert MeasuredRates.model_validate_json(measured.model_dump_json()) == measured
    assert amount(TEXT, "token") == 1100
