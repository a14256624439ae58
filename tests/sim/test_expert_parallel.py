"""Experts spread over GPUs, from the fleet file over capacities to the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml

from atoll.core.errors import InputError
from atoll.perf.batch import Batch
from atoll.perf.step import analytic, step_seconds
from atoll.plan.capacities import role_table
from atoll.plan.files.fleet_file import parse_fleet
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from tests.sim.builders import CATALOG, problem, requests, service, whole


def fleet(model: str = "qwen3-235b-a22b@fp8", engines: list[str] | None = None) -> str:
    chat: dict[str, Any] = {
        "model": model,
        "ttft": "2s",
        "tpot": "50ms",
        "rate": "2/s",
        "lengths": "1024x256",
        "phases": "together",
        "engine": {"expert_parallel": True},
    }
    return yaml.safe_dump(
        {
            "services": {"chat": chat},
            "settings": {"engines": engines or ["vllm", "sglang"]},
            "pool": {"owned": {"lab": {"H200:8": 1}}},
        }
    )


def test_a_rank_takes_what_the_performance_model_says() -> None:
    own = parse_fleet(fleet()).run_by("vllm")
    layers = CATALOG.model("qwen3-235b-a22b@fp8").llm.layers
    plan = whole(own, node="H200:8")
    found = simulate(
        plan, own, CATALOG, requests([0.0], 300, 20), SimOptions(coordinator_s=0.0)
    ).requests
    model = analytic(
        CATALOG.model("qwen3-235b-a22b@fp8").llm,
        CATALOG.node("H200:8"),
        tp=plan.instances[0].nodes[0].tp,
        engine=own.engine_of(own.services[0]),
    )
    expected = sum(step_seconds(model, Batch.decode(1, 300 + k), 0, layers) for k in range(1, 20))
    assert found.e2e_s[0] - found.ttft_s[0] == pytest.approx(expected, rel=1e-9)
    plain = problem(service(model="qwen3-235b-a22b@fp8"))
    alone = simulate(
        whole(plain, node="H200:8"),
        plain,
        CATALOG,
        requests([0.0], 300, 20),
        SimOptions(coordinator_s=0.0),
    ).requests
    assert not np.isclose(alone.e2e_s[0], found.e2e_s[0])


def test_copies_of_the_rest_are_layouts_that_there_are() -> None:
    own = parse_fleet(fleet())
    rates = {}
    for tp in (1, 2, 4, 8):
        table = role_table(
            own.run_by("vllm"), CATALOG, own.services[0], "chat/llm/both", "H200:8", 1, tp=tp
        )
        rates[tp] = float(table[-1, 0, -1])
    # One GPU has not room for a copy of all, but for one whose experts lie on eight.
    assert rates[1] > 0.0
    plain = own.services[0].model_copy(
        update={
            "engine_limits": own.services[0].engine_limits.model_copy(
                update={"expert_parallel": None}
            )
        }
    )
    bare = own.model_copy(update={"services": (plain,)}).run_by("vllm")
    assert role_table(bare, CATALOG, plain, "chat/llm/both", "H200:8", 1, tp=1)[-1, 0, -1] == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (fleet(engines=["atoll"]), "the stage engine does not spread experts over GPUs"),
        (fleet(model="llama-3.1-8b"), "llama-3.1-8b has no experts"),
    ],
)
def test_what_cannot_be_is_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        parse_fleet(text)
    assert "expert_parallel" in str(error.value)


def test_asked_for_all_it_holds_for_models_with_experts() -> None:
    data = yaml.safe_load(fleet(model="llama-3.1-8b"))
    data["services"]["chat"].pop("engine")
    data["settings"]["engine_limits"] = {"expert_parallel": True}
    assert parse_fleet(yaml.safe_dump(data)).services[0].engine_limits.expert_parallel is None
    data["services"]["chat"]["model"] = "qwen3-235b-a22b@fp8"
    assert parse_fleet(yaml.safe_dump(data)).services[0].engine_limits.expert_parallel is True


def test_ranks_go_in_step() -> None:
    own = parse_fleet(fleet()).run_by("vllm")
    plan = whole(own, node="H200:8")
    node = plan.instances[0].nodes[0]
    ranks = plan.instances[0].model_copy(update={"nodes": (node.model_copy(update={"tp": 1}),)})
    spread = plan.model_copy(update={"instances": (ranks,)})
    options = SimOptions(coordinator_s=0.0, policy="least-load")
    alone = simulate(spread, own, CATALOG, requests([0.0], 300, 40), options).requests
    both = simulate(
        spread, own, CATALOG, requests([0.0, 0.3], [300, 8000], [40, 2]), options
    ).requests
    # The prompt that another rank computes holds its tokens up.
    assert both.e2e_s[0] > alone.e2e_s[0] + 0.05
    assert both.ttft_s[0] == pytest.approx(alone.ttft_s[0], rel=1e-9)
