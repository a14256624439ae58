"""A prompt and sequences in one step: both curves, less what they share."""

from __future__ import annotations

import pytest

from atoll.plan.cluster import NodeProfile
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from tests.sim.builders import CATALOG, LAYERS, cluster_plan, cluster_problem, requests

PROMPT_S, TOKEN_S = 0.3 / LAYERS, 0.05 / LAYERS


@pytest.mark.parametrize("shared_s", [0.0, 0.02, 0.05])
def test_a_prompt_beside_a_sequence_takes_less_by_what_they_share(shared_s: float) -> None:
    own = cluster_problem((1e4,), latency_s=0.0, bytes_per_s=1e15)
    assert own.cluster is not None
    profile = NodeProfile(
        max_layers=LAYERS,
        kv_tokens=(1e6,) * LAYERS,
        prefill_s_per_layer=((1.0, PROMPT_S),),
        decode_s_per_layer=((1.0, TOKEN_S),),
        shared_s_per_layer=shared_s / LAYERS,
    )
    cluster = own.cluster.model_copy(update={"profiles": {"m": {"A100-80:1": profile}}})
    own = own.replace(cluster=cluster)
    plan = cluster_plan(own, ((0, LAYERS),), (("source", "n0", 1.0), ("n0", "sink", 1.0)))
    # The second comes in the middle of a step of the first, and its prompt goes into the next.
    work = requests([0.0, 0.375], 16, [21, 1])
    found = simulate(plan, own, CATALOG, work, SimOptions(order="arrival")).requests
    mixed_s = 0.3 + 0.05 - shared_s
    assert found.ttft_s.tolist() == pytest.approx([0.3, 0.025 + mixed_s])
    assert found.tpot_s[0] == pytest.approx((19 * 0.05 + mixed_s) / 20)
