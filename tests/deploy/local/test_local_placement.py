"""Plans on the GPUs of a machine: which instance gets which, under which engine, and why others get none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UsageError
from atoll.deploy.commands.node_commands import ServiceWeights
from atoll.deploy.local import local_placement
from atoll.deploy.local.gpu_slots import HeldSlots, PoolMachine
from atoll.deploy.local.local_placement import LocalGpus, LocalPlacement, place_here
from atoll.engines.limits import EngineLaunch
from atoll.plan.plan import Instance, Plan, Route
from atoll.runtime.endpoints.devices import visible_gpus
from atoll.runtime.local.instance_runner import list_lines
from tests.runtime.local.test_placing import instance, plan

LAYERS = 36  # of qwen3-8b
H200 = PoolMachine(name="local-H200", node_type="H200:1", gpu_ids=(0,))
L40S = PoolMachine(name="local-L40S", node_type="L40S:2", gpu_ids=(2, 5))
T4 = PoolMachine(name="local-T4", node_type="T4:1", gpu_ids=(1,))


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a `vllm`, the only one where programs are found."""
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def on(
    kind: str,
    name: str = "chat-0",
    cuts: Sequence[int] = (),
    engine: str | None = "vllm",
    layers: int = LAYERS,
) -> Instance:
    marks = [0, *cuts, layers]
    made = instance(list(pairwise(marks)), name)
    nodes = tuple(node.model_copy(update={"node_type": kind}) for node in made.nodes)
    return made.model_copy(update={"nodes": nodes, "engine": engine})


def place(
    made: Plan,
    *machines: PoolMachine,
    held: Sequence[HeldSlots] = (),
    model: str = "qwen3-8b",
    engine: str = "auto",
    stand_in: bool = False,
) -> LocalPlacement:
    weights = {"chat": ServiceWeights("hf://org/name", ("chat",), engine, stand_in=stand_in)}
    launches = {"chat": EngineLaunch(max_model_len=8192)}
    made = made.model_copy(update={"engines": launches})
    gpus = LocalGpus(machines, tuple(held))
    return place_here(made, weights, {"chat": model}, gpus, Catalog.default())


def test_planned_gpus_that_are_here_are_used_as_planned() -> None:
    here = place(plan(on("L40S:1"), on("L40S:1", "chat-1")), T4, L40S)
    assert [(r.engine, r.gpu, r.gpus, r.reason) for r in here.runners] == [
        ("vllm", "L40S", (2,), ""),
        ("vllm", "L40S", (5,), ""),
    ]
    assert [node.gpu_ids for one in here.plan.instances for node in one.nodes] == [(2,), (5,)]
    assert list_lines(here.runners)[0] == "chat-0 runs on 1x L40S (GPU 2) with vllm"
    here.refuse_cores()


def test_another_kind_that_holds_the_model_is_used_and_named() -> None:
    here = place(plan(on("L40S:1")), H200)
    assert list_lines(here.runners) == [
        "chat-0 runs on 1x H200 (GPU 0) with vllm because no L40S is here (found: 1x H200)"
    ]
    (node,) = here.plan.instances[0].nodes
    assert (node.kind, node.gpu_ids, node.tp) == ("H200:1", (0,), 1)


def test_fewer_gpus_that_hold_the_model_run_it_whole() -> None:
    here = place(plan(on("A10G:1", cuts=(18,))), H200)
    (one,) = here.plan.instances
    assert [(node.kind, node.start, node.end) for node in one.nodes] == [("H200:1", 0, LAYERS)]
    assert {(flow.src, flow.dst) for flow in one.flows} == {("source", "n0"), ("n0", "sink")}
    # 66 GB of weights take both: one alone is too small.
    (runner,) = place(plan(on("H200:1", layers=64)), L40S, model="qwen3-32b").runners
    assert (runner.gpus, runner.tp) == ((2, 5), 2)
    assert "on 2x L40S (GPUs 2, 5) with vllm TP 2 because no H200 is here" in runner.describe()


def test_what_is_too_small_is_named_and_cores_are_used() -> None:
    here = place(plan(on("L40S:1")), T4)
    (line,) = list_lines(here.runners)
    assert line == (
        "chat-0 runs on cores with qwen3-8b because no L40S is here (found: 1x T4: too small for qwen3-8b)"
    )
    assert not here.on_gpus("chat")
    with pytest.raises(UsageError, match="chat-0 has no GPU here: no L40S is here"):
        here.refuse_cores()


def test_an_engine_that_cannot_compute_there_is_no_use() -> None:
    (runner,) = place(plan(on("H100:1")), T4, model="qwen3-8b@fp8").runners
    assert runner.gpus == ()
    assert "vLLM has no fp8 on T4" in runner.reason


def test_no_gpu_and_no_engine() -> None:
    (runner,) = place(plan(on("L40S:1"))).runners
    assert (runner.engine, runner.reason) == ("atoll", "no GPU is here")


def test_an_engine_that_is_not_installed_is_named(programs: Path) -> None:
    (programs / "vllm").unlink()
    (runner,) = place(plan(on("L40S:1")), L40S).runners
    assert (runner.engine, runner.reason) == ("atoll", "vllm is not installed here")
    (runner,) = place(plan(on("L40S:1", engine="sglang")), L40S).runners
    assert runner.reason == "sglang is not installed here"


def test_gpus_of_others_are_not_taken_and_the_rest_is_left_out() -> None:
    held = [HeldSlots(node="n0", machine="local-L40S", slots=(0,))]
    here = place(plan(on("L40S:1"), on("L40S:1", "chat-1")), L40S, T4, held=held)
    assert [(r.engine, r.gpus) for r in here.runners] == [("vllm", (5,)), ("", ())]
    assert [one.id for one in here.plan.instances] == ["chat-0"]
    assert [route.instances for route in here.plan.routes] == [("chat-0",)]
    assert list_lines(here.runners)[1] == (
        "chat-1 is left out because no L40S is free (found: 2x L40S: taken, 1x T4: too small for qwen3-8b)"
    )
    here.refuse_cores()  # nothing is on cores


def test_planned_kinds_come_before_others() -> None:
    mixed = PoolMachine(name="local-L40S", node_type="L40S:1", gpu_ids=(3,))
    here = place(plan(on("A10G:1"), on("L40S:1", "chat-1")), mixed, H200)
    assert {r.instance: r.gpu for r in here.runners} == {"chat-0": "H200", "chat-1": "L40S"}


def test_what_stands_in_or_was_planned_for_cores_needs_no_gpu() -> None:
    (runner,) = place(plan(on("L40S:1")), L40S, stand_in=True).runners
    assert (runner.engine, runner.gpus, runner.reason) == ("atoll", (), "a stand-in needs no GPU")
    here = place(plan(on("CORE-L:1", engine=None)), L40S)
    assert here.runners[0].gpus == ()
    assert list_lines(here.runners) == []  # nothing is otherwise than planned


def test_pairs_on_a_server_are_left_to_up() -> None:
    made = [
        on("L40S:1", name).model_copy(update={"role": f"chat/llm/{name}"})
        for name in ("prefill", "decode")
    ]
    route = Route(service="chat", instances=("prefill", "decode"), share=1.0)
    here = place(plan(*made).model_copy(update={"routes": (route,)}), L40S)
    assert {r.reason for r in here.runners} == {
        "prompts and answers apart on vLLM are started by `atoll up`"
    }
    assert not any(r.gpus for r in here.runners)


def test_the_stage_engine_needs_a_pytorch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    made = plan(on("L40S:1", cuts=(20,), engine="atoll"))
    monkeypatch.setattr(torch.version, "cuda", None)
    (runner,) = place(made, L40S).runners
    assert runner.reason == "the PyTorch that is installed here computes on cores"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    (runner,) = place(made, L40S).runners
    assert (runner.engine, runner.gpus) == ("atoll", (2, 5))
    monkeypatch.setattr(local_placement, "find_spec", lambda _name: None)
    assert "needs PyTorch" in place(made, L40S).runners[0].reason
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    wide = on("L40S:2", engine="atoll")
    assert (
        "1 copy of its layers on a node, and chat-0 has 2"
        in place(plan(wide), L40S).runners[0].reason
    )
    split = wide.nodes[0].model_copy(update={"tp": 2})
    (runner,) = place(plan(wide.model_copy(update={"nodes": (split,)})), L40S).runners
    assert (runner.engine, runner.gpus, runner.tp) == ("atoll", (2, 5), 2)


def test_instances_on_shares_of_a_gpu_run_beside_each_other_and_a_third_is_left_out() -> None:
    halves = [on("H200/2:2", f"chat-{at}").nodes[0] for at in range(3)]
    made = [
        on("H200/2:2", f"chat-{at}").model_copy(
            update={"nodes": (node.model_copy(update={"gpu_ids": (at % 2,), "slot": at // 2}),)}
        )
        for at, node in enumerate(halves)
    ]
    here = place(plan(*made), H200)
    assert [(r.engine, r.gpu, r.gpus) for r in here.runners] == [
        ("vllm", "H200/2", (0,)),
        ("vllm", "H200/2", (0,)),
        ("", "", ()),
    ]
    assert list_lines(here.runners)[0] == "chat-0, chat-1 run on 1x H200/2 (GPU 0) with vllm"
    assert "left out because no H200/2 is free (found: 1x H200: taken)" in str(
        list_lines(here.runners)[1]
    )
    for one in here.plan.instances:
        assert visible_gpus(one.nodes) == {"CUDA_VISIBLE_DEVICES": "0"}
