"""Capacity with requests that arrive at random: never more than without, and as regular."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.link_table import Link
from atoll.core.ids import Phase
from atoll.engines.limits import EngineLimits
from atoll.engines.table import EngineChoice, profile_engine
from atoll.perf.capacity import CapacityModel, RoleLoad
from atoll.perf.operators import Array
from atoll.perf.step import Position, analytic
from atoll.workload.lengths import BUILT_IN, LengthMix
from tests.perf.builders import model, node_type
from tests.reference.capacity_tables import capacity
from tests.seeds import examples

MODELS = {name: model(name) for name in ("llama-3.1-8b", "gpt-oss-20b", "qwen3-32b@fp8")}
NODES = ("T4:1", "L4:1", "L40S:1", "H100:1", "H100:8")
LINKS = (None, Link(10e9 / 8, 0.5e-3), Link(1e7, 0.05))
STAGES = (1, 2, 3, 5)


def rates(role: RoleLoad, node: str, link: Link | None, factor: float = 1.0) -> Array:
    """Tokens/s in pipelines of `STAGES`, promises made looser by a factor."""
    found = CapacityModel(role, analytic(role.spec, node_type(node)), link=link)
    budgets = [role.slo_s * factor / count for count in STAGES]
    return found.throughput(STAGES, budgets, Position.MIDDLE)


@examples(40)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(NODES),
    st.sampled_from((*BUILT_IN.values(), LengthMix.fixed(1, 1), LengthMix.fixed(512, 128))),
    st.sampled_from(LINKS),
    st.sampled_from([(Phase.PREFILL, 10.0), (Phase.DECODE, 1.0)]),
    st.floats(0.02, 0.5),
    st.floats(1.0, 3.0),
)
def test_waiting_takes_capacity_and_stays_regular(
    spec: str,
    node: str,
    mix: LengthMix,
    link: Link | None,
    kind: tuple[Phase, float],
    tight_s: float,
    factor: float,
) -> None:
    phase, times = kind
    role = RoleLoad("x", MODELS[spec], phase, tight_s * times, mix, waits=True)
    found = rates(role, node, link)
    assert (found <= rates(replace(role, waits=False), node, link) * (1.0 + 1e-9)).all()
    assert (np.diff(found[:, 1:], axis=1) <= 0.0).all()
    assert (rates(role, node, link, factor) >= found * (1.0 - 1e-9)).all()


@pytest.mark.parametrize("waits", [False, True])
def test_what_an_engine_takes_beside_steps_comes_off_the_promise_once(waits: bool) -> None:
    """In a pipeline, too: each stage gives its part. A token does not wait for it."""
    spec, on = MODELS["llama-3.1-8b"], node_type("L40S:1")
    plain = profile_engine("none", on.gpu)
    for phase, asked_s, left_s in ((Phase.PREFILL, 0.31, 0.3), (Phase.DECODE, 0.03, 0.03)):
        role = RoleLoad("x", spec, phase, asked_s, LengthMix.fixed(512, 128), waits=waits)
        late = CapacityModel(role, analytic(spec, on, engine=replace(plain, request_s=0.01)))
        soon = CapacityModel(role, analytic(spec, on, engine=plain))
        for stages in STAGES:
            position = Position.WHOLE if stages == 1 else Position.FIRST
            found = late.throughput([stages], [asked_s / stages], position)
            expected = soon.throughput([stages], [left_s / stages], position)
            assert found.max() > 0.0
            np.testing.assert_allclose(found, expected, rtol=1e-9)
        within = late.detail(16, 2, asked_s / 2, Position.FIRST)
        other = soon.detail(16, 2, left_s / 2, Position.FIRST)
        assert within.limit == other.limit
        assert within.batch == pytest.approx(other.batch)


def test_a_token_goes_round_with_as_many_batches_in_flight_as_there_are_stages() -> None:
    """Two stages with room for all: engines pace their batches, and a step takes half of the promise."""
    spec = MODELS["llama-3.1-8b"]
    role = RoleLoad("x", spec, Phase.DECODE, 0.06, LengthMix.fixed(128, 128), waits=True)
    choice = EngineChoice("vllm", EngineLimits(max_num_seqs=4096))
    steps = analytic(spec, node_type("L40S:1"), engine=choice)
    found = capacity(role, steps, 16, stages=2)
    assert found.limit == "latency budget"
    assert found.step_s == pytest.approx(0.03, rel=1e-6)
