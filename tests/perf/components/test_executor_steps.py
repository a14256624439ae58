"""What simulators are given agrees with what planners are."""

from __future__ import annotations

import pytest

from atoll.perf.components.executor import executor_work
from atoll.perf.components.executor_steps import executor_steps
from tests.perf.components.builders import IMAGE, PICTURE, SPEECH, TEXT, model, node, work


def test_batches_agree_with_seconds() -> None:
    image = model("qwen-image")
    parts = ["text", "dit", "vae"]
    steps = executor_steps(image, parts, node("A100-80:2"), [PICTURE])
    planned = executor_work(image, parts, node("A100-80:2"), [PICTURE])
    assert steps is not None
    assert planned is not None
    assert (steps.tp, steps.copies) == (planned.tp, 2 // planned.tp)
    for key, part in steps.steps.items():
        batch = part.rounds * (part.fixed_s + part.max_batch * part.item_s)
        assert planned.seconds[key] == pytest.approx(batch / part.max_batch / steps.copies)
        alone = part.rounds * (part.fixed_s + part.item_s)
        assert planned.latency_s[key] == pytest.approx(alone)
    assert steps.steps["text -> image", "dit"].rounds == 20


def test_parts_that_make_tokens_have_models_and_room() -> None:
    omni = model("qwen2.5-omni-7b")
    parts = ["vision", "llm", "talker", "vocoder"]
    steps = executor_steps(omni, parts, node("A100-80:1"), [IMAGE, TEXT, SPEECH])
    assert steps is not None
    assert set(steps.steps) == {
        ("image+text", "vision"),
        ("image+text", "llm"),
        ("text", "llm"),
        ("text -> audio", "llm"),
        ("text -> audio", "talker"),
        ("text -> audio", "vocoder"),
    }
    llm, talker = steps.steps["text -> audio", "llm"], steps.steps["text -> audio", "talker"]
    assert llm.model is not None
    assert talker.model is not None
    assert talker.model.spec.hidden == 896
    assert (
        llm.kv_tokens == work("qwen2.5-omni-7b", parts, "A100-80:1", IMAGE, TEXT, SPEECH).kv_tokens
    )
    # Both caches, all weights and what is set aside fit.
    kv = llm.kv_tokens * llm.model.spec.kv_bytes_per_token
    kv += talker.kv_tokens * talker.model.spec.kv_bytes_per_token
    weights = work("qwen2.5-omni-7b", parts, "A100-80:1", IMAGE, TEXT, SPEECH).weight_bytes
    assert kv + weights < 0.9 * node("A100-80:1").memory_bytes
    assert talker.lengths is not None
    assert talker.lengths.output_mean == 1500
    assert steps.steps["image+text", "vision"].model is None


def test_what_does_not_fit() -> None:
    found = executor_steps(model("internvl3-38b"), ["vision", "llm"], node("A100-80:1"), [IMAGE])
    assert found is None
