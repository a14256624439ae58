"""GPUs offered in equal shares: what a share is, which instances have one, what engines are told."""

from __future__ import annotations

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.gpus import SWITCHING_LOSS
from atoll.core.errors import InputError, UsageError
from atoll.core.ids import Phase, parse_node_type
from atoll.deploy.commands.node_commands import CommandSettings, ServiceWeights, plan_commands
from atoll.engines.sglang import ENGINE as SGLANG
from atoll.engines.stage import ENGINE as STAGE
from atoll.engines.vllm import ENGINE as VLLM
from atoll.perf.batch import Batch
from atoll.perf.energy import power_model
from atoll.perf.step import analytic, step_seconds
from atoll.plan.engine_layout import engine_layout, launch_of
from atoll.plan.files.fleet_file import build_problem
from atoll.plan.plan import Plan
from atoll.plan.problem import Offer, Problem
from atoll.plan.validate.check import validate
from atoll.runtime.endpoints.devices import assign_devices
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve

CATALOG = Catalog.default()
HALF, WHOLE = CATALOG.gpu("H200/2"), CATALOG.gpu("H200")
SERVICE = {
    "model": "llama-3.2-3b",
    "ttft": 3.0,
    "tpot": 0.03,
    "rate": 2.0,
    "lengths": "azure-conv",
}


def problem(machines: object, *, engines: object = ("vllm",), **service: object) -> Problem:
    return build_problem(
        {
            "name": "shares",
            "services": {"chat": SERVICE | service},
            "pool": {"owned": {"local": machines}},
            "settings": {"engines": engines},
        }
    )


HALVES = {"H200:1": {"count": 1, "shares": 2}}


@pytest.fixture(scope="module")
def pair() -> tuple[Problem, Plan]:
    asked = problem(HALVES, phases="apart")
    return asked, solve(asked, PlanRequest())


# A share


def test_a_share_has_its_part_of_memory_and_speed_and_is_the_same_hardware() -> None:
    assert (HALF.name, HALF.whole, HALF.shares) == ("H200/2", WHOLE, 2)
    assert HALF.memory_bytes == WHOLE.memory_bytes // 2
    assert 2 * HALF.tdp_w == WHOLE.tdp_w
    for name in ("fp16_tflops", "fp8_tflops", "bandwidth_bytes_per_s"):
        together = 2 * getattr(HALF, name) / getattr(WHOLE, name)
        assert together == pytest.approx(1.0 - SWITCHING_LOSS), name
    assert HALF.architecture == WHOLE.architecture
    assert power_model(HALF).tag == power_model(WHOLE).tag
    assert 2 * power_model(HALF).idle_w == power_model(WHOLE).idle_w


@pytest.mark.parametrize("engine", ["vllm", "atoll", "llamacpp"])
def test_a_step_on_a_share_takes_as_long_as_all_shares_in_turns(engine: str) -> None:
    spec = CATALOG.model("llama-3.1-8b").llm
    whole, third = (
        analytic(spec, CATALOG.node(kind), engine=engine) for kind in ("H200:1", "H200/3:1")
    )
    for batch in (Batch.decode(32.0, 1000.0), Batch.prefill(2048.0, 1.0)):
        alone, busy = (
            step_seconds(model, batch, 0, spec.layers, host=False) for model in (whole, third)
        )
        assert busy == pytest.approx(3.0 * alone / (1.0 - SWITCHING_LOSS))


@pytest.mark.parametrize(
    "name", ["H200/1", "H200/9", "H200/2/2", "H200/02", "H200/", "/2", "H200/x"]
)
def test_what_is_no_share_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        CATALOG.node(f"{name}:1")


def test_shares_of_one_gpu_split_no_layer() -> None:
    spec = CATALOG.model("llama-3.1-8b").llm
    assert analytic(spec, CATALOG.node("H200/2:2")).tp == 1
    with pytest.raises(UsageError, match="take turns"):
        analytic(spec, CATALOG.node("H200/2:2"), tp=2)


# Offers


def test_a_machine_in_shares_is_as_many_gpus_of_a_kind_of_their_own() -> None:
    (offer,) = problem({"H200:2": {"count": 3, "shares": 4}}).offers
    assert (offer.node_type, offer.available, offer.gpus) == ("H200/4:8", 3, 8)
    assert str(parse_node_type(offer.node_type).whole) == "H200:2"
    assert problem({"H200:2": {"count": 3, "shares": 1}}) == problem({"H200:2": 3})


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ({"H200:1": {"count": 1, "shares": 9}}, "shares"),
        ({"H200:1": {"count": 1, "shares": 2, "whole": True}}, "leave out 'shares' or 'whole'"),
        ({"H200/2:2": 1}, "write H200:COUNT, and 'shares: 2' in its entry"),
    ],
)
def test_offers_that_cannot_be_are_refused_with_the_fix(machines: object, said: str) -> None:
    with pytest.raises(InputError) as error:
        problem(machines)
    assert said in str(error.value)


def test_engines_and_models_that_need_whole_gpus_are_refused_by_name() -> None:
    with pytest.raises(InputError) as error:
        problem(HALVES, engines=("sglang",))
    assert "settings.engines: the pool offers shares of GPUs, and SGLang takes" in str(error.value)
    assert "add vllm or atoll or llamacpp" in str(error.value)
    assert problem(HALVES | {"L40S:1": 1}, engines=("sglang",)).offers
    classes = {"image+text": {"share": 1.0, "images": {}}}
    with pytest.raises(InputError, match="runs on whole GPUs"):
        build_problem(
            {
                "services": {"see": {"model": "qwen2.5-omni-7b", "rate": 1.0, "classes": classes}},
                "pool": {"owned": {"local": HALVES}},
            }
        )


def test_an_offer_has_all_shares_of_its_gpus() -> None:
    with pytest.raises(InputError, match="all shares"):
        Offer.parse({"region": "a", "node_type": "H200/2:3", "available": 1, "usd_per_hour": 0.0})


def test_what_is_offered_in_shares_is_not_offered_whole_as_well() -> None:
    pool = {
        "owned": {"local": {"H200:1": 1}},
        "offers": [
            {"region": "local", "node_type": "H200:1", "market": "owned", "available": 1}
            | {"usd_per_hour": 0.0, "shares": 2}
        ],
    }
    made = build_problem({"services": {"chat": SERVICE}, "pool": pool})
    assert [offer.node_type for offer in made.offers] == ["H200/2:2"]


def test_a_service_stands_on_one_share_and_names_it_by_either_name() -> None:
    chat = problem(HALVES).services[0]
    assert chat.allows("H200/2:1")
    assert not chat.allows("H200/2:2")
    assert problem(HALVES, only=["H200"]).services[0].allows("H200/2:1")
    assert not problem(HALVES | {"L4:1": 1}, avoid=["H200/2"]).services[0].allows("H200/2:1")
    assert problem(HALVES | {"L4:1": 1}, avoid=["H200/2"]).services[0].allows("H200:1")


def test_engines_that_take_what_is_free_run_on_whole_gpus() -> None:
    spec = CATALOG.model("llama-3.2-3b").llm
    assert VLLM.refuses(spec, HALF) is STAGE.refuses(spec, HALF) is SGLANG.refuses(spec, WHOLE)
    assert "takes what is free" in str(SGLANG.refuses(spec, HALF))


# Plans


def test_prefill_and_decode_stand_on_the_shares_of_one_gpu(pair: tuple[Problem, Plan]) -> None:
    asked, plan = pair
    assert {one.phase for one in plan.instances} == {Phase.PREFILL, Phase.DECODE}
    nodes = [one.nodes[0] for one in plan.instances]
    assert sorted(node.gpu_ids or () for node in nodes) == [(0,), (1,)]
    assert {node.kind for node in nodes} == {"H200/2:1"}
    assert validate(plan, asked) == []
    assert plan.describe_gpus() == "2 shares of GPUs"
    assert "GPU 0, share 1" in nodes[0].describe() + nodes[1].describe()
    # What all take together is no more than the GPU has.
    spec = CATALOG.model("llama-3.2-3b").llm
    taken = sum((node.kv_bytes or 0) + spec.weight_bytes for node in nodes)
    assert 0.8 * WHOLE.memory_bytes < taken < 0.9 * WHOLE.memory_bytes


def test_engines_are_told_their_share_of_the_gpu(pair: tuple[Problem, Plan]) -> None:
    _, plan = pair
    weights = {"chat": ServiceWeights("hf://org/name", ("chat",))}
    commands = plan_commands(plan, weights, CommandSettings())
    for instance in plan.instances:
        launch = launch_of(plan, instance)
        assert launch.gpu_memory_utilization == 0.45
        assert launch.kv_bytes == instance.nodes[0].kv_bytes
        words = commands[instance.id][0].argv
        assert words[words.index("--gpu-memory-utilization") + 1] == "0.45"
        assert words[words.index("--kv-cache-memory-bytes") + 1] == str(launch.kv_bytes)
        devices = assign_devices(instance, instance.nodes[0])
        assert devices.environment == {"CUDA_VISIBLE_DEVICES": "0"}
        assert devices.copies == ((0,),)


def test_the_validator_finds_more_kv_cache_than_a_share_has_and_shares_held_twice(
    pair: tuple[Problem, Plan],
) -> None:
    asked, plan = pair
    first, second = plan.instances

    def changed(**fields: object) -> list[str]:
        nodes = (first.nodes[0].model_copy(update=fields),)
        made = plan.model_copy(
            update={"instances": (first.model_copy(update={"nodes": nodes}), second)}
        )
        return [one.rule for one in validate(made, asked)]

    assert changed() == []
    assert changed(kv_bytes=(first.nodes[0].kv_bytes or 0) + 1) == ["memory"]
    assert changed(kv_bytes=None) == ["memory"]
    assert "slice" in changed(gpu_ids=second.nodes[0].gpu_ids)
    assert "slice" in changed(gpu_ids=(0, 1))


def test_only_the_stage_engine_cuts_a_model_over_shares(pair: tuple[Problem, Plan]) -> None:
    _, plan = pair
    one = plan.instances[0]
    node = one.nodes[0]
    cut = one.model_copy(
        update={
            "role": "chat/llm/both",
            "nodes": (
                node.model_copy(update={"end": 14}),
                node.model_copy(update={"id": "n1", "start": 14}),
            ),
        }
    )
    assert STAGE.list_limits(engine_layout(cut)) == ()
    assert VLLM.list_limits(engine_layout(cut)) == ("pipelines over shares of GPUs",)


def test_a_model_that_fits_no_share_is_not_planned_for() -> None:
    asked = problem(HALVES, model="llama-3.1-70b")
    plan = solve(asked, PlanRequest())
    assert plan.status == "infeasible"
