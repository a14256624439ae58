"""Weights that models are served from: published, turned into fp8 as they are loaded, or not known."""

from __future__ import annotations

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.models import Checkpoint
from atoll.catalog.overlay import apply_overlay
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.vllm import ENGINE as VLLM

CATALOG = Catalog.default()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-3.1-8b", Checkpoint("meta-llama/Llama-3.1-8B-Instruct")),
        ("llama-3-70b", Checkpoint("meta-llama/Meta-Llama-3-70B-Instruct")),
        ("llama-3.3-70b@fp8", Checkpoint("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic")),
        ("qwen3-32b@int4", Checkpoint("Qwen/Qwen3-32B-AWQ")),
        ("qwen3-32b@int4,kv=fp8", Checkpoint("Qwen/Qwen3-32B-AWQ")),
        ("qwen3-32b@kv=fp8", Checkpoint("Qwen/Qwen3-32B")),
        ("qwen3-32b@bf16", Checkpoint("Qwen/Qwen3-32B")),
        ("gpt-oss-20b", Checkpoint("openai/gpt-oss-20b")),
        ("gpt-oss-20b@mxfp4", Checkpoint("openai/gpt-oss-20b")),
        ("codellama-34b@fp8", Checkpoint("codellama/CodeLlama-34b-Instruct-hf", "fp8")),
        ("codellama-34b@int4", None),
        ("deepseek-v3", Checkpoint("deepseek-ai/DeepSeek-V3")),
        ("deepseek-v3@int4", None),
    ],
)
def test_a_model_is_served_from_weights_in_its_precision(
    model: str, expected: Checkpoint | None
) -> None:
    assert CATALOG.model(model).checkpoint == expected


def test_weights_as_published_are_counted_as_published() -> None:
    named, plain = CATALOG.model("gpt-oss-20b@mxfp4"), CATALOG.model("gpt-oss-20b")
    assert named.weight_bytes == plain.weight_bytes


def test_no_variant_is_served_from_weights_in_another_precision() -> None:
    for model in CATALOG.models.values():
        own = {model.hf_id}
        for dtype, repository in model.checkpoints.items():
            assert repository not in own
            own.add(repository)
            spec = CATALOG.model(f"{model.name}@{dtype}")
            assert spec.checkpoint == Checkpoint(repository)
            assert spec.weight_bytes is not None
            assert model.weight_bytes is not None
            assert spec.weight_bytes < model.weight_bytes


def test_an_overlay_names_weights() -> None:
    changed = apply_overlay(
        CATALOG, {"models": {"codellama-34b": {"checkpoints": {"int4": "me/mine"}}}}
    )
    assert changed.model("codellama-34b@int4").checkpoint == Checkpoint("me/mine")
    assert changed.model("codellama-34b").checkpoint == CATALOG.model("codellama-34b").checkpoint


def test_engines_are_told_what_reads_answers() -> None:
    from atoll.engines.limits import EngineLaunch

    for model in CATALOG.models.values():
        launch = EngineLaunch(
            tool_parser=model.tool_parser, reasoning_parser=model.reasoning_parser
        )
        # A parser that SGLang has under no name would be left out of its command.
        for engine in (VLLM, SGLANG):
            settled = engine.settle(launch)
            assert settled.tool_parser == model.tool_parser
            assert settled.reasoning_parser == model.reasoning_parser
