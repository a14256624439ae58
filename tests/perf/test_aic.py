from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.gpus import default_gpus
from atoll.core.errors import MissingDependencyError, UnknownNameError, UsageError
from atoll.core.ids import Phase
from atoll.perf.aic import SYSTEMS, AicStepModel, aic
from atoll.perf.batch import Batch
from atoll.perf.capacity import RoleLoad, table_of
from atoll.perf.step import StepModel, analytic, step_seconds
from atoll.workload.lengths import LengthMix
from tests.perf.builders import node_type

CATALOG = Catalog.default()
INSTALLED = importlib.util.find_spec("aiconfigurator_core") is not None

needs_aic = pytest.mark.skipif(not INSTALLED, reason="needs the extra 'aic'")


def step_model(name: str, machine: str, **options: object) -> AicStepModel:
    return aic(CATALOG.model(name), node_type(machine), **options)  # type: ignore[arg-type]


CASES = [("llama-3.1-8b", "H100:1"), ("qwen3-32b", "H100:2"), ("gpt-oss-20b", "H100:1")]
EVERY = pytest.mark.parametrize(("name", "machine"), CASES, ids=[name for name, _ in CASES])


@pytest.mark.aic
@needs_aic
@EVERY
@pytest.mark.parametrize(
    ("prompts", "length", "before"), [(1, 128, 0), (4, 1000, 0), (1, 512, 2048), (3, 77, 100)]
)
def test_pieces_of_prefill_add_up(
    name: str, machine: str, prompts: int, length: int, before: int
) -> None:
    own = step_model(name, machine)
    batch = Batch.prefill(prompts * length, prompts, before)
    exact = own.handle.predict_prefill_latency(prompts, length + before, before) * 1e-3
    assert step_seconds(own, batch, 0, own.spec.layers) == pytest.approx(exact, rel=1e-6)


@pytest.mark.aic
@needs_aic
@EVERY
@pytest.mark.parametrize(("sequences", "context"), [(1, 100), (16, 1000), (128, 3000)])
def test_pieces_of_decode_add_up(name: str, machine: str, sequences: int, context: int) -> None:
    own = step_model(name, machine)
    # Its second token attends to the prompt and the first.
    exact = own.handle.predict_decode_latency(sequences, context - 1, 2) * 1e-3
    found = step_seconds(own, Batch.decode(sequences, context), 0, own.spec.layers)
    assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.aic
@needs_aic
@EVERY
def test_floats_and_arrays_agree(name: str, machine: str) -> None:
    own: StepModel = step_model(name, machine)
    rows = [(512.0, 2.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 8.0, 700.0), (64.0, 1.0, 9.0, 3.0, 50.0)]
    tokens, prompts, before, running, cached = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    many = step_seconds(own, Batch(tokens, prompts, before, running, cached), 0, own.spec.layers)
    for i, row in enumerate(rows):
        one = step_seconds(own, Batch(*row), 0, own.spec.layers)
        assert isinstance(one, float)
        assert many[i] == one > 0.0


@pytest.mark.aic
@needs_aic
def test_every_piece_is_there() -> None:
    own = step_model("llama-3.1-8b", "H100:1")
    for batch in (Batch.prefill(1024), Batch.decode(8, 1000)):
        parts = own.parts(batch)
        assert parts.host == 0.0
        assert len(parts.layers) == 1
        assert 0.0 < parts.embedding < parts.layers[0]
        # The output matrix reads 1 GB: at least 0.3 ms at 3.35 TB/s.
        assert 0.3e-3 < parts.head < 0.6e-3


@pytest.mark.aic
@needs_aic
def test_a_mixed_step_adds_both_phases() -> None:
    own = step_model("llama-3.1-8b", "H100:1")
    both = step_seconds(own, Batch(512.0, 1.0, 0.0, 16.0, 512.0), 0, 32)
    apart = [step_seconds(own, b, 0, 32) for b in (Batch.prefill(512), Batch.decode(16, 512))]
    assert both == pytest.approx(sum(apart))


@pytest.mark.aic
@needs_aic
def test_layers_of_a_hybrid_model_are_equal_shares() -> None:
    parts = step_model("gpt-oss-20b", "H100:1").parts(Batch.decode(8, 4000))
    assert len(parts.layers) == 2
    assert parts.layers[0] == parts.layers[1]


@pytest.mark.aic
@needs_aic
def test_host_time_of_an_engine() -> None:
    own = step_model("qwen3-32b", "H100:2", engine="vllm")
    assert own.parts(Batch.decode(1, 10)).host == own.engine.host_seconds(1) > 0.0
    assert own.tp == 2


@pytest.mark.aic
@needs_aic
def test_the_analytic_model_is_near_what_it_was_fitted_to() -> None:
    own = step_model("llama-3.1-8b", "H100:1")
    fitted = analytic(own.spec, own.node, engine="none")
    for batch in (Batch.prefill(4096, 4), Batch.decode(1, 1000), Batch.decode(64, 2000)):
        ratio = step_seconds(fitted, batch, 0, 32) / step_seconds(own, batch, 0, 32)
        assert 0.8 < ratio < 1.25


@pytest.mark.aic
@needs_aic
def test_capacity_from_these_tables() -> None:
    own = step_model("llama-3.1-8b", "H100:1", engine="vllm")
    load = RoleLoad("x", own.spec, Phase.DECODE, 0.05, LengthMix.fixed(1024, 256))
    table = table_of(load, own, 2)
    assert "aiconfigurator" in table.provenance
    exact = table_of(load, analytic(own.spec, own.node), 2)
    assert table.at(32, 1) == pytest.approx(exact.at(32, 1), rel=0.25)
    assert np.all(np.diff(table.throughput[:, :, 1:], axis=2) <= 0.0)


@pytest.mark.aic
@needs_aic
def test_other_precisions_and_shapes_are_not_answered_with_the_times_of_the_first() -> None:
    with pytest.raises(UsageError, match="in its own precision and shape only"):
        step_model("qwen3-32b@fp8", "H100:2")
    own = CATALOG.model("llama-3.1-8b")
    thinner = replace(own, components={"llm": replace(own.llm, layers=16, windows=())})
    with pytest.raises(UsageError, match="in its own precision and shape only"):
        aic(thinner, node_type("H100:1"))


@pytest.mark.aic
@needs_aic
def test_a_model_that_the_package_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(UsageError, match="cannot model HuggingFaceTB/SmolLM2-135M") as caught:
        step_model("smollm2-135m", "H100:1")
    assert "\n" not in str(caught.value)


# Without the package.


def test_systems_are_gpus_of_the_catalog() -> None:
    assert set(SYSTEMS) <= set(default_gpus())


@pytest.mark.parametrize("machine", ["L4:1", "T4:4", "V100-16:1", "A100-40:1"])
def test_a_gpu_without_tables(machine: str) -> None:
    with pytest.raises(UnknownNameError, match="GPU with aiconfigurator-core tables") as caught:
        step_model("llama-3.1-8b", machine)
    assert caught.value.known == tuple(sorted(SYSTEMS))


def test_a_group_that_does_not_divide_the_node() -> None:
    with pytest.raises(UsageError):
        step_model("llama-3.1-8b", "H100:8", tp=3)


def test_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("aiconfigurator_core", "aiconfigurator_core.sdk.engine"):
        monkeypatch.setitem(sys.modules, module, None)
    # On a node of its own, since compiled models are kept.
    with pytest.raises(MissingDependencyError, match=r"atoll\[aic\]"):
        step_model("llama-3-70b", "B200:4")
