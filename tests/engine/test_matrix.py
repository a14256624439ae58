"""Weights in 8 and 4 bits: what is stored is what is multiplied with, whole and cut."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")
pytest.importorskip("transformers", reason="needs the extra 'engine'")
pytest.importorskip("safetensors", reason="needs the extra 'engine'")

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from atoll.catalog.hf_config import model_from_config
from atoll.core.errors import InputError, UsageError
from atoll.core.request_parameters import SamplingParams
from atoll.engine import matrix as matrices
from atoll.engine.kv import BlockTable
from atoll.engine.matrix import Fp8Matrix, Matrix, Mxfp4Matrix, PlainMatrix, StackedMatrix, join
from atoll.engine.model_stage import SequenceRows, StageModel
from atoll.engine.scheduler_core import GenerateRequest
from atoll.engine.weights.matrix_reader import MatrixReader, QuantizationScheme
from atoll.engine.weights.reader import WeightReader
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import LAYERS, Tiny
from tests.engine.quantized import VARIANTS, mxfp4, write_mxfp4, write_quantized
from tests.seeds import slow_except

pytestmark = pytest.mark.engine

PROMPTS = ([5, 17, 40, 8, 77, 23], [3, 90, 14])
COUNT = 10


def weights(outputs: int = 32, depth: int = 64, seed: int = 1) -> Any:
    return torch.randn(outputs, depth, generator=torch.Generator().manual_seed(seed))


def read(folder: Path, variant: str, weight: Any) -> tuple[Matrix, Any]:
    """A matrix as the engine reads it from a file in a variant, and what the file stands for."""
    how = VARIANTS[variant]
    assert how.store is not None
    tensors, dense = how.store(weight)
    folder.mkdir(exist_ok=True)
    save_file(
        {f"m.{end}": each.contiguous() for end, each in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"quantization_config": how.config}))
    found = MatrixReader(WeightReader(folder)).read_linear("m")
    assert found is not None
    return found, dense


def mx_matrix(weight: Any) -> tuple[Matrix, Any]:
    blocks, scales = mxfp4(weight)
    found = Mxfp4Matrix(blocks.flatten(1), scales)
    return found, found.dense(torch.float32)


def make(folder: Path, variant: str, weight: Any) -> tuple[Matrix, Any]:
    return mx_matrix(weight) if variant == "mxfp4" else read(folder, variant, weight)


ALL = (*VARIANTS, "mxfp4")


@pytest.mark.parametrize("variant", ALL)
def test_a_matrix_stands_for_the_weights_that_its_makers_mean(variant: str, tmp_path: Path) -> None:
    weight = weights()
    found, dense = make(tmp_path, variant, weight)
    assert torch.equal(found.dense(torch.float32), dense)
    # Far from the weights themselves it would be another format that fits by chance.
    error = (dense - weight).norm() / weight.norm()
    assert error < (0.04 if "8" in variant else 0.16)
    rows = weights(5, 64, seed=2)
    torch.testing.assert_close(found.product(rows), rows @ dense.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ALL)
def test_a_matrix_is_multiplied_slab_by_slab(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, dense = make(tmp_path, variant, weights())
    largest = []
    expand = type(found).dense

    def noted(self: Any, dtype: Any) -> Any:
        largest.append(self.outputs * self.depth)
        return expand(self, dtype)

    monkeypatch.setattr(type(found), "dense", noted)
    monkeypatch.setitem(matrices.SLAB_WEIGHTS, "cpu", 6 * 64)
    rows = weights(3, 64, seed=2)
    torch.testing.assert_close(found.product(rows), rows @ dense.t(), rtol=1e-5, atol=1e-5)
    assert max(largest) == 6 * 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("variant", ALL)
def test_products_on_a_gpu_are_those_of_plain_torch(variant: str, tmp_path: Path) -> None:
    made, dense = make(tmp_path, variant, weights(512, 768))
    found, dense = made.own(torch.device("cuda")), dense.cuda()
    cut = made.columns(256, 768).rows(64, 256).own(torch.device("cuda"))
    for rows in (1, 17, 64, 200):
        x = weights(rows, 768, seed=2).to("cuda", torch.bfloat16)
        for matrix, given, expanded in (
            (found, x, dense),
            (cut, x[:, 256:].contiguous(), dense[64:256, 256:]),
        ):
            exact = given.float() @ expanded.t()
            apart = (matrix.product(given).float() - exact).norm() / exact.norm()
            # Rows in FP8 have three bits of mantissa, others the eight of bfloat16.
            assert apart < (0.05 if isinstance(made, Fp8Matrix) else 0.01)


@pytest.mark.parametrize("variant", ALL)
def test_cuts_by_rows_and_columns_are_those_of_the_weights(variant: str, tmp_path: Path) -> None:
    found, dense = make(tmp_path, variant, weights())
    step = 32 if variant == "mxfp4" else 2
    for low, high in ((0, 32), (10, 14), (2, 30)):
        part = found.rows(low, high)
        assert torch.equal(part.dense(torch.float32), dense[low:high])
        for left, right in ((0, 64), (step, 64), (0, 64 - step), (32, 64)):
            cut = part.columns(left, right).rows(2, high - low)
            assert torch.equal(cut.dense(torch.float32), dense[low + 2 : high, left:right])
    # Two halves by columns add up to the whole, as over the GPUs of a node.
    rows = weights(3, 64, seed=2)
    halves = [found.columns(a, b).product(rows[:, a:b]) for a, b in ((0, 32), (32, 64))]
    torch.testing.assert_close(halves[0] + halves[1], rows @ dense.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ALL)
def test_joined_matrices_give_their_outputs_one_after_another(variant: str, tmp_path: Path) -> None:
    made = [make(tmp_path / str(n), variant, weights(16, 64, seed=n)) for n in range(3)]
    whole = join([found for found, _ in made])
    assert type(whole) is type(made[0][0])
    # The order of columns, if any, is held once.
    assert whole.bytes <= sum(found.bytes for found, _ in made)
    dense = torch.cat([dense for _, dense in made])
    assert torch.equal(whole.dense(torch.float32), dense)
    assert torch.equal(whole.rows(10, 40).dense(torch.float32), dense[10:40])


def test_matrices_of_unlike_formats_join_as_well(tmp_path: Path) -> None:
    plain = PlainMatrix(weights(8, 64))
    parts = [plain, *(make(tmp_path / v, v, weights(16, 64))[0] for v in ("awq", "gptq-order"))]
    whole = join(parts)
    assert isinstance(whole, StackedMatrix)
    dense = torch.cat([part.dense(torch.float32) for part in parts])
    rows = weights(3, 64, seed=2)
    torch.testing.assert_close(whole.product(rows), rows @ dense.t(), rtol=1e-5, atol=1e-5)
    assert torch.equal(whole.rows(4, 20).dense(torch.float32), dense[4:20])
    assert torch.equal(whole.columns(32, 64).dense(torch.float32), dense[:, 32:])
    assert whole.bytes == sum(part.bytes for part in parts)


def test_a_cut_through_a_byte_is_refused(tmp_path: Path) -> None:
    found, _ = make(tmp_path, "awq", weights())
    with pytest.raises(UsageError, match="multiples of 2"):
        found.columns(3, 64)


def test_products_in_fp8_are_within_a_few_hundredths() -> None:
    """Rows in FP8 too, as on Ada and later: the reference multiplies the same codes in 32 bits."""
    weight, rows = weights(48, 256), weights(9, 256, seed=2)
    found = Fp8Matrix.quantize(weight)
    product = found.product_in_fp8(rows.view(3, 3, 256))
    assert product.shape == (3, 3, 48)
    codes, scales = matrices.quantize_rows(rows)
    reference = (codes.float() * scales) @ found.dense(torch.float32).t()
    # bfloat16 has eight bits.
    torch.testing.assert_close(product.view(9, 48), reference, rtol=2**-7, atol=2e-2)
    exact = rows @ weight.t()
    assert (product.view(9, 48) - exact).norm() / exact.norm() < 0.05


def answers(folder: Path, cuts: list[tuple[int, int]], ranks: int = 1) -> list[list[int]]:
    cluster = Cluster(folder, LAYERS, [NodeSetup(a, b, tp=ranks) for a, b in cuts])
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=COUNT, ignore_eos=True)
        cluster.submit(GenerateRequest(tuple(prompt), sampling, id=f"r{number}"))
    cluster.run()
    return [cluster.tokens(f"r{number}") for number in range(len(PROMPTS))]


def expected(folder: Path, **how: Any) -> list[list[int]]:
    """What transformers answers with a folder that it loads by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()
    found = []
    for prompt in PROMPTS:
        tokens = model.generate(
            torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        found.append(tokens[0, len(prompt) :].tolist())
    assert len(set(found[0])) > 2, "an answer of one token proves little"
    return found


@pytest.mark.parametrize(
    "variant", slow_except(("fp8-block", "awq", "gptq-order", "w4a16-zeros"), VARIANTS)
)
def test_answers_are_those_of_transformers_with_the_same_weights(
    tiny: Callable[[str], Any], variant: str, tmp_path: Path
) -> None:
    stored, expanded = write_quantized(tiny("llama").folder, variant, tmp_path)
    assert answers(stored, [(0, 1), (1, 4)]) == expected(expanded)


@pytest.mark.parametrize(
    ("variant", "needed"),
    [
        ("fp8-block", "accelerate"),
        ("fp8-channel", "compressed_tensors"),
        ("w4a16", "compressed_tensors"),
    ],
)
def test_answers_are_those_of_transformers_own_loaders(
    tiny: Callable[[str], Any], variant: str, needed: str, tmp_path: Path
) -> None:
    pytest.importorskip(needed, reason="transformers loads the format with it")
    stored, _ = write_quantized(tiny("llama").folder, variant, tmp_path)
    assert answers(stored, [(0, 4)]) == expected(stored)


@pytest.mark.parametrize("architecture", ["qwen2", "phi3", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("variant", slow_except(("fp8-block",), ("fp8-block", "awq")))
def test_layers_of_other_shapes_answer_alike(
    tiny: Callable[[str], Any], architecture: str, variant: str, tmp_path: Path
) -> None:
    stored, expanded = write_quantized(tiny(architecture).folder, variant, tmp_path)
    assert answers(stored, [(0, 4)]) == expected(expanded)


@pytest.mark.parametrize(
    ("architecture", "variant"),
    slow_except(
        (("llama", "fp8-block"), ("phi3", "awq")),
        [
            *(
                ("llama", variant)
                for variant in ("fp8-channel", "fp8-block", "w4a16-zeros", "gptq-order")
            ),
            ("phi3", "awq"),
            ("qwen3-moe", "awq"),
        ],
    ),
)
def test_ranks_of_a_node_cut_matrices_of_every_format(
    tiny: Callable[[str], Any], architecture: str, variant: str, tmp_path: Path
) -> None:
    stored, expanded = write_quantized(tiny(architecture).folder, variant, tmp_path)
    assert answers(stored, [(0, 2), (2, 4)], ranks=2) == expected(expanded)


@pytest.mark.slow
def test_mxfp4_experts_answer_as_transformers_own_loader(tmp_path: Path) -> None:
    from transformers import Mxfp4Config

    plain = Tiny(tmp_path / "plain", "gpt-oss", hidden_size=64, intermediate_size=64)
    stored = write_mxfp4(plain.folder, tmp_path)
    wanted = expected(stored, quantization_config=Mxfp4Config(dequantize=True))
    assert answers(stored, [(0, 2), (2, 4)]) == wanted
    assert answers(stored, [(0, 4)], ranks=2) == wanted
    stage = StageModel(stored, 0, 1, blocks=1)
    experts = stage.layers[0].mlp.experts
    assert all(isinstance(each, Mxfp4Matrix) for each in (*experts.gate_up, *experts.down))


@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe", "gpt-oss"])
def test_plain_weights_are_turned_into_fp8_as_they_are_loaded(
    tiny: Callable[[str], Any], architecture: str
) -> None:
    model = tiny(architecture)
    plain = StageModel(model.folder, 0, 2, blocks=4, block_size=8)
    small = StageModel(model.folder, 0, 2, blocks=4, block_size=8, quantization="fp8")
    assert small.weight_bytes < 0.5 * plain.weight_bytes
    assert small.embed is not None
    assert small.embed.weight.dtype == torch.float32
    rows = SequenceRows(0, 2, 0, 6, BlockTable(b"", blocks=[0, 1]), PROMPTS[0])
    given, found = (stage.forward([rows]).of([0]) for stage in (plain, small))
    # Three bits of mantissa in every weight of two layers; a router may choose another expert.
    apart = (found - given).norm() / given.norm()
    assert 0.0 < apart < (0.2 if architecture == "llama" else 0.4)


TENSORS = (torch.Tensor, torch.nn.Parameter)


def held_bytes() -> int:
    """Bytes of all tensors of this process; what several share counts once."""
    gc.collect()
    stores = {}
    for each in gc.get_objects():
        if type(each) in TENSORS and each.device.type == "cpu" and each.layout == torch.strided:
            stores[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(stores.values())


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models whose rows are long, so that a scale a row is next to nothing, in 16 bits."""
    made: dict[str, Path] = {}

    def make_one(architecture: str) -> Path:
        if architecture not in made:
            more = {"moe_intermediate_size": 256} if architecture == "qwen3-moe" else {}
            folder = tmp_path_factory.mktemp("wide")
            Tiny(folder, architecture, **WIDE, **more, dtype="float16")
            path = folder / "config.json"
            # As published configurations have it; transformers writes another name.
            path.write_text(json.dumps({"num_experts": 4} | json.loads(path.read_text())))
            made[architecture] = folder
        return made[architecture]

    return make_one


@pytest.mark.parametrize(
    ("architecture", "variant"),
    slow_except(
        (("llama", "awq"), ("qwen3-moe", "fp8-channel")),
        [
            *(("llama", variant) for variant in ("plain", "fp8-at-load", *VARIANTS)),
            *(("qwen3-moe", variant) for variant in ("fp8-at-load", "fp8-channel", "awq")),
            ("gpt-oss", "mxfp4"),
        ],
    ),
)
def test_weights_take_the_bytes_that_plans_reckon_with(
    wide: Callable[[str], Path], architecture: str, variant: str, tmp_path: Path
) -> None:
    folder = wide(architecture)
    if variant in VARIANTS:
        folder, _ = write_quantized(folder, variant, tmp_path)
    elif variant == "mxfp4":
        folder = write_mxfp4(folder, tmp_path)
    spec = model_from_config(folder).llm
    at_load: Any = "fp8" if variant == "fp8-at-load" else None
    spec = spec.with_weights("fp8") if at_load else spec
    before = held_bytes()
    stage = StageModel(folder, 0, 2, blocks=1, block_size=1, dtype="float16", quantization=at_load)
    assert stage.weight_bytes == pytest.approx(spec.weight_bytes, rel=0.02)
    # Nothing else is kept but the tokens of a step: no file, no second copy, nothing expanded.
    kept = held_bytes() - before - stage.chosen.nbytes
    assert kept == pytest.approx(stage.weight_bytes, rel=0.01)


def test_methods_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    for said in (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
        with pytest.raises(InputError, match=f"quantised by {said['quant_method']}"):
            QuantizationScheme.read(tmp_path)


def test_a_matrix_of_another_shape_is_refused(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    stored, _ = write_quantized(tiny("llama").folder, "awq", tmp_path)
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(InputError, match="has shape"):
        StageModel(stored, 0, 1, blocks=1)
