"""A machine that measures itself before it joins says in its labels what was found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError
from atoll.fabric.registry.measured import pack_measured, unpack_measured
from atoll.fabric.registry.records import Gpu, Hardware, Metadata, encode_metadata
from atoll.runtime.join import measuring

PROFILE = {
    "max_layers": 30,
    "kv_tokens": [123456 - 3000 * n for n in range(30)],
    "prefill_s_per_layer": [[1, 0.00123456], [256, 0.0123456789]],
    "decode_s_per_layer": [[1, 0.00123456]],
    "step_s": 0.0019999,
}


def test_cores_are_measured_by_layers_and_gpus_by_operators(tmp_path: Path) -> None:
    words = measuring.list_words(Hardware(cpus=4), tmp_path / "a.json")
    assert words[1:4] == ["-m", "atoll", "profile"]
    assert words[-2:] == ["--threads", "4"]
    with_gpu = Hardware(gpus=(Gpu(type="L4", count=1, memory_bytes=24 * 2**30),), cpus=8)
    assert "--operators" in measuring.list_words(with_gpu, tmp_path / "a.yaml")


def test_what_was_found_fits_into_labels_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"smollm2-135m": {"CPU:1": PROFILE}}))
    found = measuring.read_found(path)
    assert found["model"] == "smollm2-135m"
    assert found["profile"]["prefill_s_per_layer"][1] == [256, 0.01235]
    labels = pack_measured(found)
    assert unpack_measured(labels) == found
    metadata = Metadata(name="gpu7", provider="lab", role="worker", labels=labels)
    assert encode_metadata(metadata)
    overlay = tmp_path / "found.yaml"
    overlay.write_text("gpus:\n  L4:\n    operators:\n      gemm: {e_f: 0.81, e_b: 0.7}\n")
    found = measuring.read_found(overlay)
    assert found == {
        "kind": "operators",
        "gpu": "L4",
        "operators": {"gemm": {"e_f": 0.81, "e_b": 0.7}},
    }


def test_what_is_too_long_or_torn_is_no_measurement() -> None:
    assert pack_measured({"much": "x" * 10_000}) == {}
    labels = pack_measured({"kind": "layers", "profile": PROFILE})
    del labels["atoll.measured.1"]
    assert unpack_measured(labels) is None
    assert unpack_measured({}) is None


@given(st.dictionaries(st.text(max_size=9), st.floats(allow_nan=False, allow_infinity=False)))
def test_labels_tell_what_was_packed(measured: dict[str, float]) -> None:
    labels = pack_measured(measured)
    assert not measured or unpack_measured(labels) == measured or not labels
    assert all(len(piece) <= 256 for piece in labels.values())


async def test_a_failure_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('there is no GPU')"]
    monkeypatch.setattr(measuring, "list_words", lambda _hardware, _out: words)
    with pytest.raises(AtollError, match="there is no GPU"):
        await measuring.measure(Hardware())
