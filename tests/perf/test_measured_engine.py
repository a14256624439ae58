"""What was measured of a server holds for such servers, and for no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll.engines.limits import EngineLimits, HostTime
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.constants import (
    ConstantTable,
    GpuConstants,
    OpClass,
    Tag,
    default_constants,
    sample_constants,
)
from atoll.perf.step import AnalyticStepModel, analytic, step_seconds
from tests.perf.builders import model
from tests.perf.test_server_fit import LLM, NODE, TRUTH, served

HERE = served(NODE, TRUTH)


def steps_of(*, engine: str | EngineChoice = "vllm", spec=LLM, node=HERE) -> AnalyticStepModel:  # type: ignore[no-untyped-def]
    """The steps of a server here."""
    return analytic(spec, node, tp=1, engine=engine)


def test_a_measured_server_is_named_and_its_times_count() -> None:
    steps, usual = steps_of(), steps_of(node=NODE)
    assert steps.provenance == (
        "measured (profile of 2026-11-18 on H200:1, vllm@0.22 with llama-3.1-8b)"
    )
    assert usual.provenance.startswith(Tag.MEASURED.value)
    assert steps.engine.host == HostTime(step_s=TRUTH.step_s, sequence_s=TRUTH.sequence_s)
    assert (steps.engine.request_s, steps.engine.stream_s) == (TRUTH.request_s, TRUTH.stream_s)
    batch = Batch.decode(8.0, 1000.0)
    kernels = [step_seconds(one, batch, 0, LLM.layers, host=False) for one in (steps, usual)]
    # Decodes are memory and starts.
    assert kernels[0] / kernels[1] == pytest.approx(TRUTH.memory, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "spec"),
    [
        ("sglang", LLM),
        ("vllm@0.12", LLM),
        ("vllm@0.23", LLM),
        (EngineChoice("vllm", EngineLimits(scheduling="sync")), LLM),
        ("vllm", model("llama-3.1-8b@fp8")),
        ("vllm", model("llama-3.2-3b")),
    ],
)
def test_other_servers_are_predicted_as_before(engine: str | EngineChoice, spec: object) -> None:
    assert steps_of(engine=engine, spec=spec).engine.measured is None
    assert (
        steps_of(engine=engine, spec=spec).engine
        == steps_of(engine=engine, spec=spec, node=NODE).engine
    )


def test_versions_agree_as_far_as_both_say_them() -> None:
    exact = served(NODE, replace(TRUTH, version="0.22.1"))
    assert steps_of(engine="vllm@0.22", node=exact).engine.measured is not None
    assert steps_of(engine="vllm@0.22.2", node=exact).engine.measured is None
    assert steps_of(engine="vllm", node=exact).engine.measured is not None


def test_a_host_time_that_is_stated_stays() -> None:
    own = HostTime(step_s=3e-3)
    choice = EngineChoice("vllm", EngineLimits(host=own))
    assert steps_of(engine=choice).engine.host == own


def test_of_several_the_last_counts() -> None:
    later = replace(TRUTH, date="2026-12-01", memory=1.3)
    assert steps_of(node=served(NODE, TRUTH, later)).engine.measured == later


def test_error_bars_shrink_for_what_was_measured_alone() -> None:
    table = ConstantTable([default_constants().gpu("H200")])
    batch = Batch.decode(8.0, 1000.0)
    luck = np.random.default_rng(3)
    draws = [sample_constants(table, luck, (NODE.gpu,)) for _ in range(80)]

    def spread(node: object) -> float:
        models = [analytic(LLM, node, tp=1, constants=one) for one in draws]  # type: ignore[arg-type]
        return float(np.std(np.log([step_seconds(one, batch, 0, LLM.layers) for one in models])))

    assert spread(HERE) == pytest.approx(TRUTH.error, rel=0.2)
    assert spread(NODE) > 0.2
    firsts = [np.log([one.first_token(server) for one in draws]) for server in (TRUTH, None)]
    assert np.std(firsts[0]) == pytest.approx(TRUTH.first_token_error, rel=0.2)
    assert np.std(firsts[1]) > 0.4


def test_constants_that_are_not_drawn_are_scaled() -> None:
    own = default_constants().gpu("H200")
    found = own.as_measured(TRUTH)
    assert isinstance(found, GpuConstants)
    gemm, before = found.op(OpClass.GEMM), own.op(OpClass.GEMM)
    assert (gemm.e_f, gemm.e_b) == (before.e_f / TRUTH.compute, before.e_b / TRUTH.memory)
    assert found.host == 1.0
