"""What nodes carry: Helix's published tables, curves, and profiles from the performance model."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.engines.table import EngineChoice
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.plan.cluster_profiles import (
    at,
    max_layers,
    profile_tps,
    rates,
    service_profiles,
    service_rates,
    tabulate,
)
from atoll.plan.files.helix import MODELS, NODE_TYPES, PROFILES, TABLES, HelixCluster, read_profiles
from atoll.plan.problem import Problem
from atoll.workload.lengths import LengthMix
from tests.plan.clusters import HELIX, LINKS, cluster, problem, profile, service

CATALOG = Catalog.default()
MIX = LengthMix.fixed(600.0, 200.0)
VLLM = EngineChoice("vllm")


@pytest.mark.skipif(not HELIX.is_dir(), reason="needs ../shared/data/helix beside the repository")
@pytest.mark.parametrize("model", MODELS)
def test_published_tables(model: str) -> None:
    layers = CATALOG.model(MODELS[model]).llm.layers
    compositions = json.loads((HELIX / TABLES).read_text())
    for entry in compositions.values():
        counts = Counter(entry["counts"])
        own = HelixCluster("any", tuple(counts.elements()), {})
        profiles, constants = read_profiles(HELIX / PROFILES, model, own)
        found = rates(
            profiles,
            {NODE_TYPES[kind]: n for kind, n in counts.items()},
            layers,
            input_mean=constants["avg_input_len"],
            output_mean=constants["avg_output_len"],
            fill=constants["kv_cache_hwm"],
        )
        for kind, published in entry[model].items():
            # The file has six decimals.
            assert found[NODE_TYPES[kind]] == pytest.approx(published, rel=1e-9, abs=5.1e-7)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), min_size=1, max_size=6), st.floats(0, 20)
)
def test_curves_are_linear_between_points(points: list[tuple[float, float]], x: float) -> None:
    curve = tuple(sorted(dict(points).items()))
    value = at(curve, x)
    for px, py in curve:
        assert at(curve, px) == pytest.approx(py)
    inside = [(a, b) for a, b in pairwise(curve) if a[0] <= x <= b[0]]
    for (_, y0), (_, y1) in inside:
        assert min(y0, y1) - 1e-9 <= value <= max(y0, y1) + 1e-9


def test_given_profiles_come_first() -> None:
    asked = problem()
    own = service()
    found = service_profiles(asked, CATALOG, own)
    assert found == cluster().profiles["llama-3.2-1b"]
    mine = cluster(profiles={**cluster().profiles, "chat": {"L4:1": profile(4, 99.0)}})
    assert service_rates(problem(cluster=mine), CATALOG, own)["L4:1"][0] == 99.0


def test_what_a_service_may_not_stand_on_carries_nothing() -> None:
    asked = problem(services=(service(avoid=("L4",)),))
    assert set(service_rates(asked, CATALOG, asked.services[0])) == {"L40S:1"}


def test_a_request_must_fit_beside_the_layers() -> None:
    own = cluster()
    small = profile(4, 100.0, kv_tokens=(900.0, 500.0, 223.0, 222.0))
    assert max_layers(small, own, service()) == 3  # 90 % of 223 tokens are a request of 200
    nothing = profile(1, 100.0, kv_tokens=(10.0,))
    tight = cluster(profiles={"chat": {"L4:1": nothing, "L40S:1": profile(16, 100.0)}})
    assert set(service_profiles(problem(cluster=tight), CATALOG, service())) == {"L40S:1"}


def test_tabulated_times_add_up_to_the_model() -> None:
    spec, node = CATALOG.model("qwen3-32b").llm, CATALOG.node("A100-80:1")
    own = tabulate(spec, node, VLLM, MIX, 1)
    assert own is not None
    model = analytic(spec, node, engine=VLLM)
    for sequences in (1.0, 256.0):
        whole = step_seconds(model, Batch.decode(sequences, MIX.decode_context), 0, spec.layers)
        tabled = own.step_s + spec.layers * at(own.decode_s_per_layer, sequences)
        assert tabled == pytest.approx(whole, rel=1e-9)
    prompts = step_seconds(model, Batch.prefill(2048.0, 2048.0 / 600.0), 0, spec.layers)
    tabled = own.step_s + spec.layers * at(own.prefill_s_per_layer, 2048.0)
    assert tabled == pytest.approx(prompts, rel=1e-9)


def test_tabulated_memory() -> None:
    spec = CATALOG.model("qwen3-32b").llm
    own = tabulate(spec, CATALOG.node("L4:1"), VLLM, MIX, 1)
    assert own is not None
    assert 0 < own.max_layers < spec.layers
    assert list(own.kv_tokens) == sorted(own.kv_tokens, reverse=True)
    assert own.kv_tokens[-1] >= 800
    large = tabulate(CATALOG.model("qwen3-235b-a22b").llm, CATALOG.node("T4:1"), VLLM, MIX, 1)
    assert large is None or large.max_layers < 4


def test_rates_of_the_performance_model_fall_with_layers() -> None:
    asked = problem(cluster=cluster(profiles={}), services=(service(model="qwen3-32b"),))
    for own in service_rates(asked, CATALOG, asked.services[0]).values():
        assert list(own) == sorted(own, reverse=True)
        assert own[-1] > 0


def boxes(number: int, model: str) -> Problem:
    nodes = tuple(
        {"name": f"m{i}", "node_type": "L40S:8", "region": "north"} for i in range(number)
    )
    return problem(
        cluster=cluster(profiles={}, links=LINKS[:1], nodes=nodes),
        services=(service(model=model),),
    )


def test_nodes_split_their_layers_as_carries_most() -> None:
    asked = boxes(1, "llama-3.1-8b")
    own = asked.services[0]
    assert profile_tps(asked, CATALOG, own) == {f"L40S:{gpus}": 1 for gpus in (1, 2, 4, 8)}
    spec, node = CATALOG.model("llama-3.1-8b").llm, CATALOG.node("L40S:8")
    alone = tabulate(spec, node, VLLM, own.lengths.mix(), 1)
    assert service_profiles(asked, CATALOG, own)["L40S:8"] == alone


def test_nodes_split_further_where_the_model_would_not_fit() -> None:
    one, eight = (boxes(number, "llama-3-70b") for number in (1, 8))
    # One machine holds 80 layers only if each is split; many hold a few each, in copies.
    less, more = (profile_tps(own, CATALOG, own.services[0])["L40S:8"] for own in (eight, one))
    assert less < more
    assert service_profiles(one, CATALOG, one.services[0])["L40S:8"].max_layers == 80
