"""Commands and refusals of the engines' adapters, fleets' files, and what `serve` is told."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.engine.node import NodeConfig
from atoll.engines.engine import ServedModel
from atoll.engines.limits import EngineLaunch
from atoll.engines.llamacpp import ENGINE as LLAMACPP
from atoll.engines.table import find_engine, profile_engine
from atoll.plan.cluster import NodeProfile
from atoll.plan.plan import Instance
from atoll.runtime.endpoints.devices import DeviceAssignment, assign_devices
from atoll.runtime.endpoints.endpoint import (
    MachineShare,
    RunDirectory,
    gguf_file,
    server_endpoint,
)
from atoll.runtime.endpoints.stage_endpoint import stage_endpoint
from atoll.runtime.local.fleet_state import FleetState, list_running_fleets, new_home, write_state
from atoll.runtime.local.layer_profile import RangeTable, profile_of
from atoll.runtime.local.local_endpoints import LocalOptions, list_warnings
from atoll.runtime.local.local_fleet import LivenessTracker
from atoll.runtime.supervise.supervised_process import Command
from tests.runtime.local.test_placing import instance, plan

SERVED = ServedModel("hf://org/name", ("chat",))


def start(engine: str, made: Instance, served: ServedModel, home: Path) -> Command:
    """The command of an instance under an engine, on this machine."""
    server = server_endpoint(find_engine(engine), made, served, 9000, RunDirectory(home)).server
    assert server is not None
    command = server.command
    if "--" not in command.arguments:
        return command
    # Behind what finds compilations of earlier starts.
    return replace(command, arguments=command.arguments[command.arguments.index("--") + 1 :])


def test_vllm_gets_uneven_layers(tmp_path: Path) -> None:
    command = start("vllm", instance([(0, 20), (20, 32)]), SERVED, tmp_path)
    assert command.environment == {"VLLM_PP_LAYER_PARTITION": "20,12"}
    text = " ".join(command.arguments)
    assert text.startswith("vllm serve org/name --host 127.0.0.1 --port 9000")
    assert "--pipeline-parallel-size 2" in text


def test_vllm_on_one_node_has_no_pipeline(tmp_path: Path) -> None:
    command = start("vllm", instance([(0, 32)]), SERVED, tmp_path)
    assert "--pipeline-parallel-size" not in command.arguments
    assert command.environment == {}


def test_engines_are_started_with_the_limits_that_were_planned_with(tmp_path: Path) -> None:
    launch = EngineLaunch(
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.85,
        kv_cache_dtype="fp8",
        prefix_caching=False,
        scheduling="sync",
    )
    served = ServedModel("hf://org/name", ("chat",), launch)
    made = instance([(0, 32)])
    vllm = start("vllm", made, served, tmp_path).arguments
    assert flag(vllm, "--max-num-seqs") == "64"
    assert flag(vllm, "--max-num-batched-tokens") == "4096"
    assert flag(vllm, "--gpu-memory-utilization") == "0.85"
    assert flag(vllm, "--kv-cache-dtype") == "fp8"
    assert {"--no-enable-prefix-caching", "--no-async-scheduling"} <= set(vllm)
    sglang = start("sglang", made, served, tmp_path).arguments
    assert flag(sglang, "--max-running-requests") == "64"
    assert flag(sglang, "--chunked-prefill-size") == "4096"
    assert flag(sglang, "--mem-fraction-static") == "0.85"
    assert flag(sglang, "--kv-cache-dtype") == "fp8_e4m3"
    assert {"--disable-radix-cache", "--disable-overlap-schedule"} <= set(sglang)


def stage_nodes(
    launch: EngineLaunch | None, home: RunDirectory, device: str = "cpu"
) -> list[NodeConfig]:
    """What the nodes of a pipeline of two are told."""
    made, served = instance([(0, 2), (2, 4)]), ServedModel("/model", ("chat",), launch)
    share = MachineShare(device=device)
    endpoint = stage_endpoint("x", [made], served, 9000, home, share, lambda _node: 0.0)
    paths = [Path(str(flag(node.command.arguments, "--config"))) for node in endpoint.nodes]
    return [NodeConfig.from_json(path.read_text(encoding="utf-8")) for path in paths]


def test_nodes_of_the_stage_engine_get_the_promise_and_the_limits(tmp_path: Path) -> None:
    home = RunDirectory(tmp_path)
    launch = EngineLaunch(
        max_num_seqs=64, max_num_batched_tokens=2048, prefix_caching=False, promised_ttft_s=1.5
    )
    for node in stage_nodes(launch, home):
        assert node.steps == (64, 2048, 2048)
        assert (node.prefix_caching, node.promised_ttft_s) == (False, 1.5)
    for node in stage_nodes(None, home):
        assert node.steps == (None, 512, 256)
        assert (node.prefix_caching, node.promised_ttft_s) == (True, None)
    for node in stage_nodes(EngineLaunch(quantization="fp8", kv_cache_dtype="fp8"), home):
        assert (node.quantization, node.kv_dtype) == ("fp8", "fp8")
    for node in stage_nodes(EngineLaunch(kv_cache_dtype="bf16"), home):
        assert (node.quantization, node.kv_dtype) == (None, None)
        assert node.scheduling is None, "async on a GPU, sync on cores"
    for node in stage_nodes(EngineLaunch(scheduling="sync"), home):
        assert node.scheduling == "sync"
    # A step has room for a token of every sequence.
    (first, _) = stage_nodes(EngineLaunch(max_num_seqs=1000), home)
    assert first.steps == (1000, 1000, 256)


@given(
    st.none() | st.integers(16, 8192),
    st.none() | st.integers(1, 4096),
    st.none() | st.sampled_from(sorted(Catalog.default().gpus)),
)
def test_nodes_on_gpus_take_the_steps_that_plans_reckon_with(
    tokens: int | None, sequences: int | None, kind: str | None
) -> None:
    if tokens is not None and sequences is not None:
        sequences = min(sequences, tokens)
    limits = EngineLaunch(max_num_batched_tokens=tokens, max_num_seqs=sequences)
    gpu = None if kind is None else Catalog.default().gpu(kind)
    planned = profile_engine("atoll", gpu, limits)
    with tempfile.TemporaryDirectory() as folder:
        (node, _) = stage_nodes(limits, RunDirectory(Path(folder)), "cuda")
    assert node.steps == (planned.max_sequences, planned.max_tokens, planned.max_tokens)
    assert planned.mixed_tokens == planned.max_tokens
    if limits == EngineLaunch():
        assert node.steps == (512, 2048, 2048)


def test_limits_that_an_engine_does_not_keep_are_named() -> None:
    launch = EngineLaunch(
        max_num_seqs=64,
        gpu_memory_utilization=0.85,
        kv_cache_dtype="fp8",
        scheduling="async",
        promised_ttft_s=1.5,
    )
    made = plan(instance([(0, 4)])).model_copy(update={"engines": {"chat": launch}})
    said = list_warnings(made, ["chat"], LocalOptions())
    assert [line.partition("the plan's ")[2].partition(":")[0] for line in said] == [
        "gpu_memory_utilization 85%",
    ]
    assert all(line.startswith("chat: the engine 'atoll' does not keep ") for line in said)
    assert len(list_warnings(made, ["chat"], LocalOptions(engine="llamacpp"))) == 3
    assert list_warnings(made, ["chat"], LocalOptions(engine="vllm")) == ()
    int8 = made.model_copy(update={"engines": {"chat": EngineLaunch(kv_cache_dtype="int8")}})
    (line,) = list_warnings(int8, ["chat"], LocalOptions())
    assert line.endswith("kv_cache_dtype int8: its KV cache is in fp32")
    same = EngineLaunch(kv_cache_dtype="fp32", scheduling="sync", promised_ttft_s=1.5)
    kept = made.model_copy(update={"engines": {"chat": same}})
    assert list_warnings(kept, ["chat"], LocalOptions()) == ()


def test_a_plan_without_limits_sets_the_step_it_reckons_with_and_nothing_else(
    tmp_path: Path,
) -> None:
    made = instance([(0, 32)])
    planned = ServedModel("hf://org/name", ("chat",), EngineLaunch())
    more = set(start("vllm", made, planned, tmp_path).arguments) - set(
        start("vllm", made, SERVED, tmp_path).arguments
    )
    assert more == {"--max-num-batched-tokens", "2048"}
    # vLLM refuses steps with less than a token for every sequence.
    wide = ServedModel("hf://org/name", ("chat",), EngineLaunch(max_num_seqs=4096))
    command = start("vllm", made, wide, tmp_path)
    assert flag(command.arguments, "--max-num-batched-tokens") == "4096"


def test_a_format_that_an_engine_does_not_have_is_refused(tmp_path: Path) -> None:
    served = ServedModel("hf://org/name", ("chat",), EngineLaunch(kv_cache_dtype="int4"))
    with pytest.raises(InputError, match="vLLM has no KV cache in int4"):
        start("vllm", instance([(0, 32)]), served, tmp_path)


def cut(
    node_type: str, tp: int, gpu_ids: tuple[int, ...] | None, held: list[tuple[int, int]]
) -> Instance:
    """Return an instance on GPUs of machines of a type, the nodes' GPUs one after the other."""
    made = instance(held)
    update = {"node_type": node_type, "tp": tp, "gpu_ids": gpu_ids}
    nodes = [node.model_copy(update=update) for node in made.nodes]
    if gpu_ids is not None:
        for at, node in enumerate(nodes):
            ids = tuple(gpu + at * len(gpu_ids) for gpu in gpu_ids)
            nodes[at] = node.model_copy(update={"gpu_ids": ids})
    return made.model_copy(update={"nodes": tuple(nodes)})


def flag(arguments: tuple[str, ...], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


@pytest.mark.parametrize(
    ("tp", "gpu_ids", "copies", "visible"),
    [
        (8, None, None, None),
        (1, None, "8", None),
        (2, None, "4", None),
        (2, (4, 5), None, "4,5"),
        (1, (0, 1, 2, 3), "4", "0,1,2,3"),
    ],
)
def test_copies_are_data_parallel_on_the_gpus_of_the_slice(
    tp: int,
    gpu_ids: tuple[int, ...] | None,
    copies: str | None,
    visible: str | None,
    tmp_path: Path,
) -> None:
    made = cut("L40S:8", tp, gpu_ids, [(0, 32)])
    vllm = start("vllm", made, SERVED, tmp_path)
    assert flag(vllm.arguments, "--tensor-parallel-size") == str(tp)
    assert flag(vllm.arguments, "--data-parallel-size") == copies
    sglang = start("sglang", made, SERVED, tmp_path)
    assert (flag(sglang.arguments, "--tp"), flag(sglang.arguments, "--dp")) == (str(tp), copies)
    for command in (vllm, sglang):
        assert command.surroundings().get("CUDA_VISIBLE_DEVICES") == visible


def test_a_pipeline_of_slices_sees_the_gpus_of_all_its_stages(tmp_path: Path) -> None:
    made = cut("L40S:8", 2, (0, 1), [(0, 20), (20, 32)])
    command = start("vllm", made, SERVED, tmp_path)
    assert command.environment == {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "VLLM_PP_LAYER_PARTITION": "20,12",
    }


def test_vllm_refuses_slices_of_different_sizes(tmp_path: Path) -> None:
    made = cut("L40S:8", 2, (0, 1), [(0, 20), (20, 32)])
    wider = made.nodes[1].model_copy(update={"gpu_ids": (4, 5, 6, 7)})
    mixed = made.model_copy(update={"nodes": (made.nodes[0], wider)})
    with pytest.raises(InputError, match="mixes tensor parallel sizes"):
        start("vllm", mixed, SERVED, tmp_path)


def test_a_stage_node_sees_its_own_gpus(tmp_path: Path) -> None:
    made = cut("L40S:8", 1, (2, 3), [(0, 2), (2, 4)])
    endpoint = stage_endpoint(
        "x", [made], SERVED, 9000, RunDirectory(tmp_path), MachineShare(), lambda _node: 0.0
    )
    seen = [node.command.surroundings().get("CUDA_VISIBLE_DEVICES") for node in endpoint.nodes]
    assert seen == ["2,3", "4,5"]
    assert endpoint.server is not None
    assert "CUDA_VISIBLE_DEVICES" not in endpoint.server.command.surroundings()


@pytest.mark.parametrize(("device", "tp"), [("cuda", 2), ("cpu", 1)])
def test_a_stage_node_splits_layers_over_its_gpus_alone(
    tmp_path: Path, device: str, tp: int
) -> None:
    made = cut("L40S:8", 2, (2, 3), [(0, 2), (2, 4)])
    home, share = RunDirectory(tmp_path), MachineShare(device=device)
    endpoint = stage_endpoint("x", [made], SERVED, 9000, home, share, lambda _node: 0.0)
    configs = [home.file(spec.name, ".json").read_text() for spec in endpoint.nodes]
    assert [NodeConfig.from_json(text).tp for text in configs] == [tp, tp]


def test_a_stage_node_keeps_what_it_compiles_for_its_gpus(tmp_path: Path) -> None:
    made, home = cut("L40S:8", 1, (2,), [(0, 2)]), RunDirectory(tmp_path)
    for device, folder in (("cuda", Path("/kept")), ("cuda", None), ("cpu", Path("/kept"))):
        share = MachineShare(device=device)
        endpoint = stage_endpoint(
            *("x", [made], SERVED, 9000, home, share, lambda _node: 0.0), compiled=folder
        )
        (node,) = endpoint.nodes
        words = node.command.arguments
        wrapped = device == "cuda" and folder is not None
        assert (flag(words, "/kept") == "atoll") is wrapped
        assert ('{"TRITON_CACHE_DIR":"triton"}' in words) is wrapped
        assert words[-4:-1] == ("-m", "atoll.engine.node", "--config")
        assert endpoint.server is not None
        assert "/kept" not in endpoint.server.command.arguments


def test_devices_of_a_node() -> None:
    whole, part = cut("H100:8", 4, None, [(0, 4)]), cut("H100:8", 2, (4, 5, 6, 7), [(0, 4)])
    found = assign_devices(whole, whole.nodes[0])
    assert found == DeviceAssignment("here/H100:8/owned/i.n0", {}, ((0, 1, 2, 3), (4, 5, 6, 7)))
    slot = part.nodes[0].model_copy(update={"slot": 3, "market": "spot", "region": "us-west-2"})
    assert assign_devices(part, slot) == DeviceAssignment(
        "us-west-2/H100:8/spot/3", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ((4, 5), (6, 7))
    )
    host = slot.model_copy(update={"host": "box-1", "slot": None})
    assert assign_devices(part, host).machine == "box-1"


@given(st.data())
def test_slices_of_one_machine_have_its_name_and_gpus_of_their_own(data: st.DataObject) -> None:
    gpus = data.draw(st.sampled_from([2, 4, 8]))
    size = data.draw(st.sampled_from([n for n in (1, 2, 4) if n < gpus]))
    tp = data.draw(st.sampled_from([n for n in (1, 2, 4) if n <= size]))
    slots = data.draw(st.integers(1, 3))
    order = data.draw(st.permutations(range(gpus)))
    seen: dict[str, list[int]] = {}
    for slot in range(slots):
        for at in range(0, gpus, size):
            made = cut(f"H100:{gpus}", tp, tuple(order[at : at + size]), [(0, 4)])
            node = made.nodes[0].model_copy(update={"slot": slot})
            found = assign_devices(made, node)
            assert {len(copy) for copy in found.copies} == {tp}
            visible = [int(gpu) for gpu in found.environment["CUDA_VISIBLE_DEVICES"].split(",")]
            assert [gpu for copy in found.copies for gpu in copy] == visible
            seen.setdefault(found.machine, []).extend(visible)
    assert len(seen) == slots
    assert all(sorted(ids) == list(range(gpus)) for ids in seen.values())


@pytest.mark.parametrize(
    ("held", "why"),
    [([(0, 16), (16, 32), (16, 32)], "several nodes in a stage"), ([(0, 20), (16, 32)], "overlap")],
)
def test_vllm_refuses_what_it_cannot_run(
    held: list[tuple[int, int]], why: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=why):
        start("vllm", instance(held), SERVED, tmp_path)


def test_sglang_cuts_layers_as_planned_and_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    command = start("sglang", instance([(0, 20), (20, 32)]), SERVED, tmp_path)
    words = command.arguments
    assert words[words.index("--pp-size") + 1] == "2"
    assert command.environment["SGLANG_PP_LAYER_PARTITION"] == "20,12"
    with pytest.raises(InputError, match="several nodes in a stage"):
        start("sglang", instance([(0, 16), (16, 32), (16, 32)]), SERVED, tmp_path)


def test_llamacpp_needs_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a GGUF file"):
        gguf_file(LLAMACPP, str(tmp_path))


def test_sockets_must_be_short(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too long for a socket"):
        RunDirectory(tmp_path / ("x" * 100)).inbox("a/n0")


def test_silence_counts_only_while_the_instance_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("atoll.runtime.local.local_fleet.time.monotonic", lambda: now_s)
    liveness = LivenessTracker()
    assert liveness.silent_s("n") == 0.0
    liveness.heard([("n", True)])
    now_s = 102.0
    liveness.heard([("n", False)])
    assert liveness.silent_s("n") == 2.0
    now_s = 150.0
    assert liveness.silent_s("n") == 2.0
    liveness.heard([("n", False)])
    assert liveness.silent_s("n") == 0.0


def test_fleets_that_died_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name, pid in (("mine", os.getpid()), ("dead", 2**22 + 1)):
        folder = new_home()
        write_state(FleetState(name=name, pid=pid, url="u", started_s=1, folder=str(folder)))
    assert [fleet.name for fleet in list_running_fleets()] == ["mine"]
    assert len(list((tmp_path / "atoll").iterdir())) == 1


def test_a_profile_takes_what_was_measured() -> None:
    full = RangeTable(start=0, end=10, prefill_s=((1, 0.012), (64, 0.102)), decode_s=((1, 0.012),))
    half = RangeTable(start=5, end=10, prefill_s=((1, 0.007), (64, 0.052)), decode_s=((1, 0.007),))
    made: NodeProfile = profile_of(full, half, tuple(float(10 - i) for i in range(10)))
    assert made.step_s == pytest.approx(0.002)
    for points, measured in (
        (made.prefill_s_per_layer, full.prefill_s),
        (made.decode_s_per_layer, full.decode_s),
    ):
        for (_, per_layer), (_, seconds) in zip(points, measured, strict=True):
            assert made.step_s + 10 * per_layer == pytest.approx(seconds)
