from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from atoll.catalog.nodes import AllReduceCost, NodeType
from atoll.core.errors import InputError, MissingDependencyError
from atoll.perf.batch import Batch
from atoll.perf.constants import OpClass, OpConstants, Tag
from atoll.perf.layers import model_ops
from atoll.perf.measurements import Points
from research.fitting.layer_fit import (
    MIN_POINTS,
    LayerConditions,
    LayerFit,
    fit_all_reduce,
    fit_gpu,
    predict_layers,
)
from tests.perf.builders import model, node, points, timed

LLAMA = model("llama-2-70b")
UNGROUPED = model("llama-1-30b")
CONDITIONS = LayerConditions(prompt_tokens=763.0, decode_context=950.0)
TRUTH = LayerFit(
    OpConstants(e_f=0.7, e_b=0.75, p=1.9, t0_us=8.0, tag=Tag.LAYER_FITTED, source="truth"),
    OpConstants(e_f=0.07, e_b=0.4, t0_us=10.0, p=1.1, tag=Tag.LAYER_FITTED, source="truth"),
    grouped_e_b=0.35,
)


def layer_points() -> Points:
    prefill = [16, 64, 128, 256, 512, 763, 1024, 1526, 2048, 4096, 8192, 16384]
    decode = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512]
    return points(
        "layer",
        {"tokens_in_batch": [float(n) for n in prefill + decode]},
        {"model": "llama", "kind": ["prefill"] * len(prefill) + ["decode"] * len(decode)},
    )


def measured(machine: NodeType, noise: float = 0.0) -> Points:
    own = layer_points()
    constants = TRUTH.constants("TEST", grouped=True)
    seconds = predict_layers(LLAMA, machine, constants, own, CONDITIONS)
    rng = np.random.default_rng(3)
    return timed(own, seconds * np.exp(rng.normal(0.0, noise, len(own))))


def test_predictions_are_layers_of_the_step_model() -> None:
    constants = TRUTH.constants("TEST", grouped=True)
    machine = node()
    own = layer_points()
    found = predict_layers(LLAMA, machine, constants, own, CONDITIONS)
    layer = model_ops(LLAMA, machine, 1, constants).layers[0]
    for i, (kind, tokens) in enumerate(
        zip(own.labels["kind"], own.sizes["tokens_in_batch"], strict=True)
    ):
        batch = (
            Batch.prefill(tokens, max(1.0, tokens / 763.0))
            if kind == "prefill"
            else Batch.decode(tokens, 950.0)
        )
        assert found[i] == pytest.approx(layer.seconds(batch), rel=1e-12)


@pytest.mark.parametrize(("noise", "worst"), [(0.0, 0.01), (0.01, 0.02)])
def test_a_known_gpu_is_recovered(noise: float, worst: float) -> None:
    machine = node()
    found = fit_gpu(LLAMA, machine, measured(machine, noise), CONDITIONS, source="a test")
    own = layer_points()
    exact = measured(machine).seconds
    predicted = predict_layers(
        LLAMA, machine, found.constants("TEST", grouped=True), own, CONDITIONS
    )
    assert np.max(np.abs(predicted / exact - 1.0)) < worst
    assert np.median(np.abs(predicted / exact - 1.0)) < 0.01
    assert found.products.tag is Tag.LAYER_FITTED
    assert found.products.source == found.prefill_attention.source == "a test"
    # Prefill fixes the products' arithmetic, small decode batches their bandwidth.
    assert found.products.e_f == pytest.approx(TRUTH.products.e_f, rel=0.1)
    assert found.products.e_b == pytest.approx(TRUTH.products.e_b, rel=0.1)


def test_an_outlier_does_not_rule() -> None:
    machine = node()
    own = measured(machine)
    spoiled = own.seconds.copy()
    spoiled[[3, 20]] *= 3.0
    found = fit_gpu(LLAMA, machine, timed(own, spoiled), CONDITIONS, source="a test")
    predicted = predict_layers(
        LLAMA, machine, found.constants("TEST", grouped=True), own, CONDITIONS
    )
    assert np.median(np.abs(predicted / own.seconds - 1.0)) < 0.01


def test_what_carries_over_to_models_without_groups() -> None:
    grouped, plain = (TRUTH.constants("TEST", grouped=flag) for flag in (True, False))
    assert grouped.op(OpClass.ATTENTION_DECODE).e_b == 0.35
    assert plain.op(OpClass.ATTENTION_DECODE).e_b == TRUTH.products.e_b
    assert grouped.op(OpClass.GEMM) == plain.op(OpClass.GEMM) == TRUTH.products
    assert plain.op(OpClass.ATTENTION_DECODE).tag is Tag.LAYER_FITTED
    assert plain.op(OpClass.ELEMENTWISE).tag is Tag.PROXY
    own = layer_points()
    decode = own.labels["kind"] == "decode"
    slow, fast = (
        predict_layers(UNGROUPED, node(), constants, own, CONDITIONS)
        for constants in (grouped, plain)
    )
    assert np.all(fast[decode] < slow[decode])
    assert fast[~decode].tolist() == slow[~decode].tolist()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_known_all_reduce_is_recovered(count: int, noise: float) -> None:
    machine = node(count, alpha_us=120.0, bus_bytes_per_s=4e9)
    blank = replace(machine, interconnect=replace(machine.interconnect, allreduce={}))
    constants = TRUTH.constants("TEST", grouped=True)
    found = fit_all_reduce(LLAMA, blank, constants, measured(machine, noise), CONDITIONS)
    assert found.p == 1.0
    assert found.alpha_us == pytest.approx(120.0, rel=0.01 if noise == 0.0 else 0.1)
    assert found.bus_bandwidth_bytes_per_s == pytest.approx(4e9, rel=0.01 if not noise else 0.05)
    rebuilt = NodeType(machine.gpu, count, replace(machine.interconnect, allreduce={count: found}))
    predicted = predict_layers(LLAMA, rebuilt, constants, layer_points(), CONDITIONS)
    assert np.max(np.abs(predicted / measured(machine).seconds - 1.0)) < 0.01
    assert isinstance(found, AllReduceCost)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingDependencyError, match=r"atoll\[calibrate\]"):
        fit_gpu(LLAMA, node(), measured(node()), CONDITIONS, source="a test")
    constants = TRUTH.constants("TEST", grouped=True)
    with pytest.raises(MissingDependencyError, match=r"atoll\[calibrate\]"):
        fit_all_reduce(LLAMA, node(2), constants, measured(node(2)), CONDITIONS)


@pytest.mark.parametrize("count", [0, 1, MIN_POINTS - 1, 12 + MIN_POINTS - 1])
def test_too_few_points(count: int) -> None:
    """Twelve of prefill come first, then decode."""
    few = measured(node()).where(np.arange(len(layer_points())) < count)
    phase, number = ("decode", count - 12) if count > 12 else ("prefill", count)
    says = f"{number} layers of {phase} on TEST:"
    with pytest.raises(InputError, match=says):
        fit_gpu(LLAMA, node(), few, CONDITIONS, source="a test")
    constants = TRUTH.constants("TEST", grouped=True)
    with pytest.raises(InputError, match=says) as caught:
        fit_all_reduce(LLAMA, node(2), constants, few, CONDITIONS)
    assert "at least 8" in (caught.value.hint or "")
