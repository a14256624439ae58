"""vLLM-Omni: stages from executors of a plan, what it has no split for, and its command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError, InputError
from atoll.engines.engine import ServedModel, ServerHost
from atoll.engines.table import find_executor_engine, list_launched
from atoll.engines.vllm_omni import ENGINE, STAGES, OmniExecutor

OMNI = "qwen2.5-omni-7b"
WEIGHTS = {"vision": 0.02, "audio": 0.02, "llm": 0.19, "talker": 0.03, "vocoder": 0.01}


def executor(name: str, parts: Sequence[str], gpus: tuple[int, ...], **more: Any) -> OmniExecutor:
    weights = {part: WEIGHTS.get(part.partition(".")[0], 0.2) for part in parts}
    return OmniExecutor(
        name, tuple(parts), more.pop("machine", "m"), gpus, len(gpus), 0.9, weights, **more
    )


THINKER = ("vision", "audio", "llm")
APART = (
    executor("think-0", THINKER, (2,)),
    executor("think-1", THINKER, (5,)),
    executor("talk", ("talker",), (3,)),
    executor("sound", ("vocoder",), (4,)),
)


def test_stages_are_those_of_models_of_the_catalog() -> None:
    for name, stages in STAGES.items():
        parts = {part.name for part in Catalog.default().model(name).graph.components}
        assert parts == set().union(*(stage.parts for stage in stages))
        assert sum(len(stage.parts) for stage in stages) == len(parts)


def test_executors_become_devices_and_copies() -> None:
    """Devices are counted among the GPUs that the server sees, in the order of executors."""
    made = ENGINE.deploy(OMNI + "@bf16", APART)
    assert (made.machine, made.gpus) == ("m", (2, 3, 4, 5))
    assert made.stages == {
        "0": {
            "devices": "0,3",
            "num_replicas": 2,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.9,
        },
        "1": {
            "devices": "1",
            "num_replicas": 1,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.9,
        },
        "2": {
            "devices": "2",
            "num_replicas": 1,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.9,
        },
    }


def test_one_executor_is_all_stages_on_its_gpus() -> None:
    whole = executor("all", (*THINKER, "talker", "vocoder"), (6,))
    made = ENGINE.deploy(OMNI, [whole])
    assert (made.gpus, [stage["devices"] for stage in made.stages.values()]) == ((6,), ["0"] * 3)
    shares = [stage["gpu_memory_utilization"] for stage in made.stages.values()]
    # Weights first, a tenth for the work of the one without a cache, the rest by weights.
    assert shares[2] == pytest.approx(0.11, abs=1e-3)
    assert shares[0] / shares[1] == pytest.approx(0.23 / 0.03, rel=0.02)
    assert 0.89 < sum(shares) <= 0.9


@given(
    memory=st.floats(0.1, 1.0),
    weights=st.lists(st.floats(0.001, 0.3), min_size=5, max_size=5),
)
def test_stages_have_room_for_their_weights_and_no_more_than_there_is(
    memory: float, weights: list[float]
) -> None:
    parts = (*THINKER, "talker", "vocoder")
    whole = replace(
        executor("all", parts, (0,)), memory=memory, weights=dict(zip(parts, weights, strict=True))
    )
    try:
        stages = ENGINE.deploy(OMNI, [whole]).stages
    except InputError:
        assert sum(weights) + 0.1 >= min(memory, 0.95) - 1e-9
        return
    shares = [stage["gpu_memory_utilization"] for stage in stages.values()]
    assert sum(shares) <= min(memory, 0.95) + 1e-9
    for share, stage in zip(shares, STAGES[OMNI], strict=True):
        assert share >= sum(whole.weights[part] for part in stage.parts) - 1e-3


def test_an_executor_of_several_gpus_splits_its_layers() -> None:
    image = executor("draw", ("text", "dit", "vae"), (4, 1))
    made = ENGINE.deploy("qwen-image", [replace(image, memory=0.9)])
    (stage,) = made.stages.values()
    assert (stage["devices"], stage["tensor_parallel_size"]) == ("1,0", 2)
    assert stage["gpu_memory_utilization"] == 0.9


def test_parts_that_nothing_uses_are_left_out_of_a_stage() -> None:
    """Where no class brings sound, a plan has no audio encoder, and the stage is whole without it."""
    seeing = [executor("see", ("vision", "llm"), (0,)), *APART[2:]]
    assert ENGINE.deploy(OMNI, seeing).stages["0"]["devices"] == "0"


@pytest.mark.parametrize(
    ("model", "executors", "why"),
    [
        ("qwen2.5-vl-7b", APART, "no stages of qwen2.5-vl-7b"),
        (OMNI, [*APART[:3], replace(APART[3], machine="n")], "stand on 2 machines"),
        (OMNI, [*APART[:3], executor("sound", ("vocoder",), (6, 7))], "runs it on one"),
        (OMNI, APART[:3], "no executor runs vocoder"),
        (OMNI, [replace(APART[0], memory=0.1), *APART[1:]], "0.10 of its GPUs' memory"),
        (OMNI, [executor("eye", ("vision",), (0,)), *APART], "without audio"),
        (OMNI, [executor("p", ("llm.prefill",), (0,)), *APART], "phases together"),
        (OMNI, [executor("big", THINKER, (0, 1)), *APART], "unlike numbers of GPUs"),
        (OMNI, [replace(APART[0], tp=2), *APART[1:]], "unlike numbers of GPUs"),
        (OMNI, [executor("again", THINKER, (5,)), *APART], "share a GPU"),
    ],
)
def test_other_splits_are_refused(model: str, executors: Any, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        ENGINE.deploy(model, executors)
    assert "--parts" in str(caught.value)


def test_the_command_says_stages_and_shows_the_gpus() -> None:
    served = ServedModel("hf://Qwen/Qwen2.5-Omni-7B@main", ("assistant",))
    made = ENGINE.deploy(OMNI, APART)
    command = ENGINE.serve(made, served, ServerHost("8003", "python3"))
    words = list(command.arguments)
    assert words[:6] == ["vllm", "serve", "Qwen/Qwen2.5-Omni-7B", "--revision", "main", "--omni"]
    assert json.loads(words[words.index("--stage-overrides") + 1]) == made.stages
    assert words[words.index("--port") + 1] == "8003"
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert command.environment == {"CUDA_VISIBLE_DEVICES": "2,3,4,5"}


def test_it_is_no_engine_of_plain_services() -> None:
    assert find_executor_engine("vllm-omni") is ENGINE
    assert ENGINE not in list_launched()
    with pytest.raises(AtollError, match="vllm"):
        find_executor_engine("vllm")
