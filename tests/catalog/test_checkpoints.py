"""Weights that models are served from: published, turned into fp8 as they are loaded, or not known."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.checkpoints import METHODS, Checkpoint, read_checkpoint
from atoll.catalog.overlay import apply_overlay
from atoll.catalog.transformer import TransformerSpec
from atoll.core.errors import InputError
from atoll.engines.engine import Engine, EngineLayout, ServedModel, ServerHost
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.vllm import ENGINE as VLLM
from atoll.perf.batch import Batch
from atoll.perf.memory_model import MemoryModel
from atoll.perf.step import Position, analytic

CATALOG = Catalog.default()
GIB = 2**30


@pytest.mark.parametrize(
    ("model", "repository", "method"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "bf16"),
        ("llama-3-70b", "meta-llama/Meta-Llama-3-70B-Instruct", "bf16"),
        ("llama-2-70b", "meta-llama/Llama-2-70b-hf", "fp16"),
        ("llama-3.3-70b@fp8", "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8"),
        ("qwen3-32b@fp8", "Qwen/Qwen3-32B-FP8", "fp8-block"),
        ("qwen3-32b@int4", "Qwen/Qwen3-32B-AWQ", "awq"),
        ("qwen3-32b@int4,kv=fp8", "Qwen/Qwen3-32B-AWQ", "awq"),
        ("qwen3-30b-a3b@int4", "Qwen/Qwen3-30B-A3B-GPTQ-Int4", "gptq"),
        ("qwen3-32b@kv=fp8", "Qwen/Qwen3-32B", "bf16"),
        ("qwen3-32b@bf16", "Qwen/Qwen3-32B", "bf16"),
        ("gpt-oss-20b", "openai/gpt-oss-20b", "mxfp4"),
        ("gpt-oss-20b@mxfp4", "openai/gpt-oss-20b", "mxfp4"),
        ("deepseek-v3", "deepseek-ai/DeepSeek-V3", "fp8"),
        ("deepseek-v3@fp8", "deepseek-ai/DeepSeek-V3", "fp8"),
        ("qwen-image", "Qwen/Qwen-Image", None),
        ("qwen3-8b@q4_k_m", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "q4_k_m"),
    ],
)
def test_a_model_is_served_from_weights_in_its_precision(
    model: str, repository: str, method: str | None
) -> None:
    found = CATALOG.model(model).checkpoint
    assert found is not None
    assert (found.repository, found.method, found.quantization) == (repository, method, None)


def test_weights_nobody_published_become_fp8_as_they_are_loaded_or_are_not_known() -> None:
    assert CATALOG.model("codellama-34b@fp8").checkpoint == Checkpoint(
        "codellama/CodeLlama-34b-Instruct-hf", method="fp8", quantization="fp8"
    )
    for name in ("codellama-34b@int4", "deepseek-v3@int4"):
        assert CATALOG.model(name).checkpoint is None


def test_weights_as_published_are_counted_as_published() -> None:
    named, plain = CATALOG.model("gpt-oss-20b@mxfp4"), CATALOG.model("gpt-oss-20b")
    assert named.weight_bytes == plain.weight_bytes


def test_no_variant_is_served_from_weights_in_another_precision() -> None:
    for model in CATALOG.models.values():
        own = {model.hf_id}
        for dtype, checkpoint in model.checkpoints.items():
            assert checkpoint.repository not in own
            own.add(checkpoint.repository)
            if dtype == "gguf":
                assert model.gguf == checkpoint
                continue
            spec = CATALOG.model(f"{model.name}@{dtype}")
            assert spec.checkpoint == checkpoint
            assert spec.weight_bytes is not None
            assert model.weight_bytes is not None
            assert spec.weight_bytes < model.weight_bytes


def test_revisions_are_commits() -> None:
    revisions = [each.revision for m in CATALOG.models.values() for each in m.checkpoints.values()]
    revisions += [model.revision for model in CATALOG.models.values()]
    known = [each for each in revisions if each is not None]
    assert len(known) == len(set(known)) >= 8
    assert all(len(each) == 40 and set(each) <= set("0123456789abcdef") for each in known)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen3-8b", "unsloth/Qwen3-8B-GGUF:BF16"),
        ("qwen3-8b@q8_0", "Qwen/Qwen3-8B-GGUF:Q8_0"),
        ("qwen3-8b@int4", None),
        ("gpt-oss-20b", "ggml-org/gpt-oss-20b-GGUF"),
        ("llama-3.1-8b", None),
    ],
)
def test_gguf_files_are_those_of_the_precision(model: str, expected: str | None) -> None:
    found = CATALOG.model(model).gguf
    assert (found and found.repository) == expected


# Bytes of the files in repositories that the catalog names.
@pytest.mark.parametrize(
    ("model", "q8_0", "q4_k_m"),
    [
        ("llama-3.1-8b", 8.54e9, 4.92e9),
        ("llama-3.2-1b", 1.32e9, 0.81e9),
        ("llama-3.2-3b", 3.42e9, 2.02e9),
        ("llama-3.3-70b", 74.98e9, 42.52e9),
        ("qwen3-8b", 8.71e9, 5.03e9),
        ("qwen3-14b", 15.7e9, 9.00e9),
        ("qwen3-32b", 34.82e9, 19.76e9),
        ("qwen3-30b-a3b", 32.48e9, 18.56e9),
    ],
)
def test_gguf_weights_are_as_large_as_the_files(model: str, q8_0: float, q4_k_m: float) -> None:
    for dtype, size in (("q8_0", q8_0), ("q4_k_m", q4_k_m)):
        counted = CATALOG.model(f"{model}@{dtype}").weight_bytes
        assert counted is not None
        assert 0.98 * size <= counted <= 1.045 * size


def test_an_overlay_names_weights() -> None:
    given = {"repository": "me/mine", "revision": "v2", "method": "w4a16", "group": 64}
    for entry, expected in (
        ("me/mine", Checkpoint("me/mine", method="awq")),
        (given, Checkpoint("me/mine", "v2", "w4a16", 64)),
        (
            {**given, "kept": ["attention"]},
            Checkpoint("me/mine", "v2", "w4a16", 64, ("attention",)),
        ),
    ):
        changed = apply_overlay(
            CATALOG, {"models": {"codellama-34b": {"checkpoints": {"int4": entry}}}}
        )
        assert changed.model("codellama-34b@int4").checkpoint == expected
        assert (
            changed.model("codellama-34b").checkpoint == CATALOG.model("codellama-34b").checkpoint
        )
    pinned = apply_overlay(CATALOG, {"models": {"codellama-34b": {"revision": "v1"}}})
    assert pinned.model("codellama-34b").checkpoint == Checkpoint(
        "codellama/CodeLlama-34b-Instruct-hf", "v1", "bf16"
    )
    # Weights of one's own are not at the revision of the catalog's.
    mine = apply_overlay(CATALOG, {"models": {"gpt-oss-20b": {"hf_id": "me/mine"}}})
    assert mine.model("gpt-oss-20b").revision is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"repository": "a/b", "method": "fp8-block"}, "method"),
        ({"repository": "a/b", "method": "awk"}, "did you mean awq"),
        ({"repository": "a/b", "kept": ["head"]}, "part of a model"),
        ({"repository": "a/b", "revision": "-x"}, "no revision"),
        ({"repository": "a/b", "revision": "a b"}, "no revision"),
        ({"repository": "a/b", "group": 0}, "greater than"),
        ({"repository": "a/b", "bits": 4}, "no such field"),
        ({"method": "awq"}, "required"),
    ],
)
def test_an_overlay_that_is_wrong_is_refused(entry: dict[str, object], message: str) -> None:
    overlay = {"models": {"codellama-34b": {"checkpoints": {"int4": entry}}}}
    with pytest.raises(InputError, match=message):
        apply_overlay(CATALOG, overlay)


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


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
@pytest.mark.parametrize("source", ["hf://a/b@0499c3ac83fd", "hf://a/b", "/models/a@b"])
def test_commands_name_the_revision_and_are_read_back(engine: Engine, source: str) -> None:
    layout = EngineLayout("chat-0", nodes=1, tp=1, copies=1, layers=(4,))
    command = engine.command(layout, ServedModel(source, ("chat",)), ServerHost("8000", "python3"))
    said = "--revision" in command.arguments
    assert said == (source == "hf://a/b@0499c3ac83fd")
    assert "a/b" in command.arguments or source in command.arguments
    read = engine.parse(command).served
    assert read.source == (source if said else source.removeprefix("hf://"))


# Layouts


def params(spec: TransformerSpec) -> tuple[int, int]:
    """Parameters of the matrices of all layers, by hand, and all others."""
    matrices = sum(spec.attention_params + spec.mlp_params(i) for i in range(spec.layers))
    if spec.moe is not None:
        width = 3 * spec.hidden * spec.moe.intermediate * spec.moe.experts
        matrices += sum(width for i in range(spec.layers) if spec.is_moe_layer(i))
    return matrices, spec.total_params - matrices


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("llama-3.3-70b@fp8", 8),
        ("qwen3-32b@fp8", 8 + 32 / (128 * 128)),
        ("qwen3-32b@int4", 4 + (16 + 4) / 128),
        ("qwen3-30b-a3b@int4", 4 + (16 + 4) / 128),
        ("phi-4-14b@int4", 4 + 16 / 128),
        ("llama-3.3-70b@nvfp4", 4 + 8 / 16),
        ("qwen3-8b@int8", 8),
        ("llama-2-70b@int4", 4 + (16 + 4) / 128),
    ],
)
def test_bytes_are_those_of_the_method(name: str, bits: float) -> None:
    spec = CATALOG.model(name).llm
    narrow, wide = params(spec)
    assert spec.weight_bytes == pytest.approx(narrow * bits / 8 + wide * 2, rel=1e-9)


def test_parts_that_a_checkpoint_keeps_stay_wide() -> None:
    plain = CATALOG.model("llama-3.1-405b").llm
    stored = CATALOG.model("llama-3.1-405b@fp8").llm
    mlp, attention = 3 * 16384 * 53248, plain.attention_params
    norms = 2 * 16384
    for i in range(plain.layers):
        expected = 2 * (attention + norms) + (2 * mlp if i in (0, 125) else mlp)
        assert stored.layer_weight_bytes(i) == expected
    assert stored.range_weight_bytes(0, 126) == sum(map(stored.layer_weight_bytes, range(126)))
    maverick = CATALOG.model("llama-4-maverick@fp8").llm
    names = [maverick.attention_dtype.name, maverick.mlp_dtype.name, maverick.expert_dtype.name]
    assert names == ["bf16", "bf16", "fp8"]
    # A layer left wide is as large and as slow as one of the model in 16 bits.
    node = CATALOG.node("H200:8")
    whole, part = MemoryModel.of(plain, node), MemoryModel.of(stored, node)
    assert part.layer_weight_bytes(0, 1) == whole.layer_weight_bytes(0, 1)
    assert part.layer_weight_bytes(1, 2) < whole.layer_weight_bytes(1, 2)


def test_layers_that_are_left_wide_take_the_time_of_wide_ones() -> None:
    node, batch = CATALOG.node("H200:8"), Batch.decode(16, 1000)
    stored = analytic(CATALOG.model("llama-3.1-405b@fp8").llm, node)
    plain = analytic(CATALOG.model("llama-3.1-405b").llm, node)
    times = dict(zip(stored.kinds, stored.parts(batch).layers, strict=True))
    (wide,) = plain.parts(batch).layers
    assert {kind.wide: seconds == wide for kind, seconds in times.items()} == {
        True: True,
        False: False,
    }


def test_a_group_of_another_size_has_more_scales() -> None:
    spec = CATALOG.model("llama-3.1-8b").llm
    stored = read_checkpoint("int4", {"repository": "a/b", "group": 32}).stored(spec, "int4")
    assert stored.mlp_dtype.bits_per_weight == 4 + (16 + 4) / 32
    assert METHODS["awq"].dtype(128) == METHODS["awq"].dtype()


class Published(NamedTuple):
    """Bytes of a checkpoint as published or as a server holds it, on how many GPUs, and who says so."""

    size: float
    source: str
    gpus: int = 1
    beside: float = 0.0
    """Bytes that the catalog does not count: a layer for a second token, a vision tower."""


_LLAMA4_TOWER = 2 * 0.87e9
_MEASURED = "vLLM's `Model loading took`, "
SIZES = {
    "gpt-oss-20b": Published(13_761_264_768, "total_size of its index, in several public copies"),
    "gpt-oss-120b": Published(65_248_815_744, "total_size of its index"),
    "deepseek-v3": Published(688_586_727_753, "files of the repository, DeepSeek-V3 and R1 alike"),
    "gemma-3-27b": Published(
        54_864_980_440, "files of the repository, with the vision tower", beside=2 * 0.42e9
    ),
    "llama-4-scout": Published(
        217_283_738_720, "files of the repository, with the vision tower", beside=_LLAMA4_TOWER
    ),
    "llama-3.3-70b@fp8": Published(72.7e9, "the hub's list of files"),
    "llama-3.1-70b@int4": Published(37.09 * GIB, _MEASURED + "0.14, RTX PRO 6000"),
    "llama-3.1-8b@int4": Published(5.3473 * GIB, _MEASURED + "a GPTQ of the same shapes"),
    "llama-4-maverick@fp8": Published(
        48.8682 * GIB, _MEASURED + "0.8, issue 16152", gpus=8, beside=_LLAMA4_TOWER / 8
    ),
    "qwen3-32b@int4": Published(19.3e9, "the hub's list of files"),
    "qwen3-14b": Published(27.5185 * GIB, _MEASURED + "several public logs"),
    "qwen3-14b@int4": Published(9.3619 * GIB, _MEASURED + "several public logs"),
    "qwen3-8b@int4": Published(5.7071 * GIB, _MEASURED + "0.10 and later"),
    "qwen3-8b@fp8": Published(8.8 * GIB, _MEASURED + "several public logs"),
    "qwen3-30b-a3b@fp8": Published(29.0972 * GIB, _MEASURED + "0.11, the 2507 release"),
    "qwen3-30b-a3b@int4": Published(15.6841 * GIB, _MEASURED + "issue 17327, a w4a16 of it"),
    "qwen3-8b@nvfp4": Published(5.98 * GIB, _MEASURED + "a 16 GB Blackwell card"),
    "qwen3-14b@nvfp4": Published(9.97 * GIB, _MEASURED + "a 16 GB Blackwell card"),
    "qwen3-30b-a3b@nvfp4": Published(16.86 * GIB, _MEASURED + "a 16 GB Blackwell card"),
}
"""Looked up in public repositories and threads in November 2026."""


@pytest.mark.parametrize("name", sorted(SIZES))
def test_sizes_are_those_of_published_checkpoints(name: str) -> None:
    spec, published = CATALOG.model(name).llm, SIZES[name]
    beside = published.beside
    if name == "deepseek-v3":
        # The layer that predicts a second token, with embedding, output matrix and a joining one.
        joining = 2 * spec.hidden * spec.hidden
        beside = spec.layer_weight_bytes(60) + spec.embedding_bytes + spec.head_bytes + joining
    held = MemoryModel.of(spec, CATALOG.node(f"H200:{published.gpus}"), tp=published.gpus)
    counted = held.layer_weight_bytes(0, spec.layers) + held.outer_bytes(Position.WHOLE)
    # Beside tensors, servers hold rotary tables and workspaces, and files headers.
    within = 3e-4 if name in ("gpt-oss-20b", "gpt-oss-120b", "deepseek-v3") else 0.02
    assert counted + beside == pytest.approx(published.size, rel=within)
