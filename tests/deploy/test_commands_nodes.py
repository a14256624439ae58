"""What stands before an engine on a node: weights pulled once, nodes that meet, the stage engine's parts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError, InputError, UsageError
from atoll.deploy.commands import instance_member, meeting, stored_weights
from atoll.deploy.commands.instance_member import InstanceMember, fill_in, read_peers
from atoll.deploy.commands.meeting import (
    FabricMeeting,
    FolderMeeting,
    MemberAddress,
    PoolMember,
    PoolWord,
    digest_members,
    find_interface,
    gather_members,
    hold_address,
    list_lasting,
    own_address,
)
from atoll.deploy.commands.prefill_helpers import assemble_helpers, offer_of
from atoll.deploy.commands.stage_node import StageOrder, build_stage
from atoll.deploy.commands.stored_weights import pull_command, pull_weights
from atoll.engine.node import NodeConfig
from atoll.engines.limits import EngineLaunch
from atoll.runtime.instance.instance_config import InstanceConfig
from tests.runtime.join.live import world
from tests.runtime.local.test_placing import instance
from tests.seeds import examples

HERE = MemberAddress(host="127.0.0.1", ports=(4000, 4001))
THERE = MemberAddress(host="10.0.0.2", ports=(5000, 5001))


def found(name: str) -> str | None:
    return f"/bin/{name}"


class Puller:
    """Stands in for a store's tool: writes a file, or fails."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[Sequence[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.calls.append(arguments)
        target = Path(arguments[-1])
        if target.suffix == ".gguf":
            target.write_text("weights")
        else:
            (target / "config.json").write_text("{}")
        return self.code


def test_weights_are_pulled_once_by_many(tmp_path: Path) -> None:
    puller = Puller()
    folders: list[Path] = []

    def pull() -> None:
        folders.append(pull_weights("s3://bucket/qwen/", tmp_path, run=puller, which=found))

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(puller.calls) == 1
    (folder,) = set(folders)
    assert (folder / "config.json").exists()
    assert folder.name.startswith("qwen-")


def test_a_pull_that_fails_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match="could not be pulled"):
        pull_weights("gs://bucket/qwen", tmp_path, run=Puller(1), which=found)
    again = Puller()
    pull_weights("gs://bucket/qwen", tmp_path, run=again, which=found)
    assert len(again.calls) == 1


def test_a_single_file_stays_one(tmp_path: Path) -> None:
    path = pull_weights("s3://bucket/a/x.gguf", tmp_path, run=Puller(), which=found)
    assert path.suffix == ".gguf"
    assert path.read_text() == "weights"


def test_the_tool_of_the_store_is_used_and_named_where_it_is_missing(tmp_path: Path) -> None:
    assert pull_command("s3://b/x", tmp_path, found)[:3] == ("/bin/aws", "s3", "sync")
    assert pull_command("s3://b/x.gguf", tmp_path, found)[:3] == ("/bin/aws", "s3", "cp")
    assert pull_command("gs://b/x", tmp_path, found)[:3] == ("/bin/gcloud", "storage", "rsync")
    older = pull_command("gs://b/x", tmp_path, lambda n: found(n) if n == "gsutil" else None)
    assert older[0] == "/bin/gsutil"
    with pytest.raises(UsageError, match="gcloud or gsutil is needed"):
        pull_command("gs://b/x", tmp_path, lambda _name: None)
    with pytest.raises(UsageError, match="not in a store"):
        pull_weights("hf://org/name", tmp_path)


def test_the_command_gets_the_folder(tmp_path: Path) -> None:
    tool = tmp_path / "aws"
    tool.write_text('#!/bin/sh\nfor last; do :; done\necho "{}" > "$last/config.json"\n')
    tool.chmod(0o755)
    show = "import sys; print(open(sys.argv[1] + '/config.json').read())"
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "atoll.deploy.commands.stored_weights",
                "--cache",
                str(tmp_path),
            ),
            *("s3://bucket/qwen", "--", sys.executable, "-c", show, "{weights}"),
        ],
        env=dict(os.environ) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "{}"
    assert stored_weights.main(["ftp://x/y", "--", "true"]) == 3


def test_members_meet_in_a_folder(tmp_path: Path) -> None:
    async def meet() -> None:
        first, second = FolderMeeting(tmp_path, "i"), FolderMeeting(tmp_path, "i")
        await first.enter("n0", HERE)
        with pytest.raises(AtollError, match="n1 did not come within 0 s"):
            await gather_members(first, ("n0", "n1"), 0.0)
        await second.enter("n1", THERE)
        assert await gather_members(first, ("n0", "n1"), 5.0) == {"n0": HERE, "n1": THERE}
        await second.leave()
        assert await first.members() == {"n0": HERE}

    asyncio.run(meet())
    with pytest.raises(InputError):
        FolderMeeting(tmp_path, "../x")


SPLIT = instance([(0, 16), (16, 32)], name="chat-3", phase="prefill")


def test_a_prefill_instance_is_known_again_from_what_its_nodes_say() -> None:
    said = [(node.id, offer_of(SPLIT, node), HERE) for node in SPLIT.nodes]
    (part,) = assemble_helpers("chat", said).parts
    assert part.inboxes == {"n0": "tcp://127.0.0.1:4000", "n1": "tcp://127.0.0.1:4000"}
    assert part.instance.flows == SPLIT.flows
    assert [(n.start, n.end) for n in part.instance.nodes] == [(0, 16), (16, 32)]
    assert part.instance.phase == "prefill"
    # One of its nodes is not there: it is of no use.
    assert assemble_helpers("chat", said[:1]).parts == ()
    wide = instance([(0, 16)] + [(16, 32)] * 40, phase="prefill")
    with pytest.raises(InputError, match="too many neighbours"):
        offer_of(wide, wide.nodes[0])


async def test_helpers_are_found_in_a_folder_until_they_withdraw(tmp_path: Path) -> None:
    helper, helped = FolderMeeting(tmp_path, "lab.p"), FolderMeeting(tmp_path, "lab.d")
    assert await helped.helpers("lab.chat") == []
    await helper.enter("n0", HERE, PoolWord("lab.chat", "words"))
    assert await helped.helpers("lab.chat") == [PoolMember("n0", "words", HERE)]
    assert await helped.helpers("lab.code") == []
    await helper.withdraw()
    assert await helped.helpers("lab.chat") == []
    assert await helper.members() == {"n0": HERE}


async def test_members_meet_in_a_fabric_and_others_do_not_count(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        first = await FabricMeeting.connect(made.address, "lab.chat-0", "n0")
        second = await FabricMeeting.connect(made.address, "lab.chat-0", "n1")
        stranger = await FabricMeeting.connect(made.address, "lab.chat-1", "n1")
        await first.enter("n0", HERE)
        await stranger.enter("n1", HERE, PoolWord("lab.chat", "words"))
        await second.enter("n1", THERE)
        assert await gather_members(first, ("n0", "n1"), 60.0) == {"n0": HERE, "n1": THERE}
        assert await gather_members(second, ("n0", "n1"), 60.0) == {"n0": HERE, "n1": THERE}
        # Nodes that only meet get no requests.
        met = [p for p in made.observer.peers() if meeting.MEETING in p.metadata.labels]
        assert len(met) == 3
        assert not any(peer.routable for peer in met)
        # Whoever helps is seen by all, until it withdraws.
        assert await second.helpers("lab.chat") == [PoolMember("n1", "words", HERE)]
        await stranger.withdraw()
        async with asyncio.timeout(60):
            while await second.helpers("lab.chat"):
                await asyncio.sleep(0.02)
        await first.leave()

        async def gone() -> bool:
            return "n0" not in await second.members()

        async with asyncio.timeout(60):
            while not await gone():
                await asyncio.sleep(0.02)
        await second.leave()
        await stranger.leave()


def test_addresses_go_where_the_command_says() -> None:
    members = {"n0": HERE, "n1": THERE}
    words = fill_in(["--addr", "@host:n1:@port:n1", "@peers", "{port}", "{x}"], members)
    assert words[:2] == ["--addr", "10.0.0.2:5000"]
    assert read_peers(words[2]) == members
    assert words[3:] == ["{port}", "{x}"]
    with pytest.raises(UsageError, match=r"@host:n7 is no node"):
        fill_in(["@host:n7"], members)


def test_an_address_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1:7447").host == "127.0.0.1"
    monkeypatch.setenv(meeting.ADDRESS_VARIABLE, "203.0.113.7")
    with pytest.raises(InputError, match="no address of this machine"):
        own_address()


NODE = """
import signal, sys, time
name, log = sys.argv[1], sys.argv[2]
def end(*_):
    time.sleep(0.5 if name == "n0" else 0.0)
    with open(log, "a") as stream: stream.write(f"{name} ended\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
with open(log, "a") as stream: stream.write(f"{name} knows {sys.argv[3]}\\n")
time.sleep(600)
"""


@pytest.mark.slow
def test_processes_of_followers_end_after_that_of_their_leader(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "atoll.deploy.commands.instance_member", "--meeting", "i"),
                *("--node", node, "--nodes", "n0,n1", "--", sys.executable, "-c"),
                *(textwrap.dedent(NODE), node, str(log), "@host:n0"),
            ],
            env=dict(os.environ) | {"ATOLL_MEETING": str(tmp_path), "ATOLL_ADDRESS": "127.0.0.1"},
        )
        for node in ("n1", "n0")
    ]
    try:
        wait(lambda: log.read_text().count("knows 127.0.0.1") == 2)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert log.read_text().splitlines()[2:] == ["n0 ended", "n1 ended"]
    assert list((tmp_path / "i").iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells children alone")
def test_a_command_ends_when_its_member_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    member = subprocess.Popen(
        [
            *(sys.executable, "-m", "atoll.deploy.commands.instance_member", "--meeting", "i"),
            *("--node", "n1", "--nodes", "n1", "--", sys.executable, "-c"),
            *(textwrap.dedent(NODE), "n1", str(log), "@host:n1"),
        ],
        env=dict(os.environ) | {"ATOLL_MEETING": str(tmp_path), "ATOLL_ADDRESS": "127.0.0.1"},
    )
    try:
        wait(lambda: "knows" in log.read_text())
    finally:
        member.kill()
        member.wait()
    wait(lambda: log.read_text().endswith("n1 ended\n"))


LONG = (sys.executable, "-c", "import time; time.sleep(600)")
DRAINS = """
import pathlib, signal, sys, time
told = []
def end(*_):
    told.append(1)
    if len(told) > 1: sys.exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
pathlib.Path(sys.argv[1]).touch()
while True: time.sleep(0.05)
"""


async def run_member(
    folder: Path, node: str, words: Sequence[str], address: MemberAddress = HERE
) -> int:
    member = InstanceMember(FolderMeeting(folder, "i"), node, ("n0", "n1"), 600.0)
    return await member.run(words, address, 60.0)


async def test_followers_end_after_their_leader_though_all_are_told_at_once(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    log.touch()
    nodes = ("n1", "n0")
    members = [
        InstanceMember(FolderMeeting(tmp_path, "i"), node, nodes[::-1], 600.0) for node in nodes
    ]
    running = [
        asyncio.create_task(
            member.run(
                (sys.executable, "-c", textwrap.dedent(NODE), node, str(log), "@host:n0"),
                HERE,
                60.0,
            )
        )
        for node, member in zip(nodes, members, strict=True)
    ]
    async with asyncio.timeout(60):
        while log.read_text().count("knows 127.0.0.1") < 2:
            await asyncio.sleep(0.02)
    for member in members:
        member.stop()
    assert await asyncio.gather(*running) == [0, 0]
    assert log.read_text().splitlines()[2:] == ["n0 ended", "n1 ended"]
    assert list((tmp_path / "i").iterdir()) == []


async def came(path: Path) -> None:
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.02)


async def test_when_a_node_is_lost_the_leader_ends_at_once_and_streams_are_not_waited_for(
    tmp_path: Path,
) -> None:
    begun = tmp_path / "begun"
    leads = (sys.executable, "-c", DRAINS, str(begun))
    # A rank that dies once the leader has begun.
    dies = ("sh", "-c", f"while [ ! -e {begun} ]; do sleep 0.05; done; exit 137")
    leader = asyncio.create_task(run_member(tmp_path, "n0", leads))
    async with asyncio.timeout(60):
        assert await run_member(tmp_path, "n1", dies, THERE) == 137
        with pytest.raises(AtollError, match="n1 of this instance has ended"):
            await leader
    assert list((tmp_path / "i").iterdir()) == []


async def test_a_node_whose_machine_is_gone_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = FolderMeeting(tmp_path, "i")
    await gone.enter("n1", THERE)
    now_s, seen = 1000.0, FolderMeeting(tmp_path, "i")
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s)
        assert await seen.members() == {"n1": THERE}
        now_s += 4.0
        os.utime(tmp_path / "i" / "n1.json", ns=(1, 1))
        assert await seen.members() == {"n1": THERE}
        now_s += 4.0
        assert await seen.members() == {"n1": THERE}
        now_s += 2.0
        assert await seen.members() == {}
        await gone.stay()
        assert await seen.members() == {"n1": THERE}
    monkeypatch.setattr(meeting, "_STALE_S", 0.2)
    monkeypatch.setattr(instance_member, "_MISSING_S", 0.2)
    async with asyncio.timeout(60):
        with pytest.raises(AtollError, match="n1 of this instance has ended"):
            await run_member(tmp_path, "n0", LONG)


async def test_nodes_that_start_anew_begin_together(tmp_path: Path) -> None:
    before = {"n0": HERE, "n1": THERE}
    leader, anew = FolderMeeting(tmp_path, "i"), FolderMeeting(tmp_path, "i")
    old = HERE.model_copy(update={"begun": digest_members(before)})
    await leader.enter("n0", old)
    await anew.enter("n1", THERE)
    assert (await gather_members(anew, ("n0", "n1"), 5.0))["n0"] == old
    # Started anew it has other ports; the leader still works with the one that was.
    await anew.enter("n1", MemberAddress(host="10.0.0.2", ports=(6000, 6001)))
    with pytest.raises(AtollError, match="n0 did not come"):
        await gather_members(anew, ("n0", "n1"), 0.0)
    await leader.enter("n0", MemberAddress(host="127.0.0.1", ports=(7000, 7001)))
    assert (await gather_members(anew, ("n0", "n1"), 5.0))["n0"].ports == (7000, 7001)


async def test_nodes_that_somebody_starts_again_find_together(tmp_path: Path) -> None:
    # As in pods, whose commands are started again where they stand, each at its own time.
    ports = itertools.count(4000)
    says = f"echo $$ @port:n0 @port:n1 >> {tmp_path}/$0; exec sleep 600"

    async def pod(node: str) -> None:
        while True:
            address = MemberAddress(host="127.0.0.1", ports=(next(ports), next(ports)))
            with contextlib.suppress(AtollError):
                await run_member(tmp_path, node, ("sh", "-c", says, node), address)

    def starts(node: str) -> list[tuple[int, str]]:
        path = tmp_path / node
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.partition(" ")[0]), line.partition(" ")[2]) for line in lines]

    async def begun(times: int) -> None:
        while [len(starts("n0")), len(starts("n1"))] != [times, times]:
            await asyncio.sleep(0.02)

    pods = [asyncio.create_task(pod(node)) for node in ("n0", "n1")]
    try:
        async with asyncio.timeout(60):
            await begun(1)
            os.kill(starts("n1")[0][0], signal.SIGKILL)
            await begun(2)
        before, after = zip(starts("n0"), starts("n1"), strict=True)
        assert before[0][1] == before[1][1]
        assert after[0][1] == after[1][1] != before[0][1]
    finally:
        for each in pods:
            each.cancel()
        await asyncio.gather(*pods, return_exceptions=True)
    assert not [pid for pid, _ in (*starts("n0"), *starts("n1")) if Path(f"/proc/{pid}").exists()]


async def test_a_leader_sees_that_a_node_was_started_anew(tmp_path: Path) -> None:
    begun, other = tmp_path / "begun", FolderMeeting(tmp_path, "i")
    await other.enter("n1", THERE)
    leads = (sys.executable, "-c", DRAINS, str(begun))
    leader = asyncio.create_task(run_member(tmp_path, "n0", leads))
    await came(begun)
    await other.enter("n1", MemberAddress(host="10.0.0.2", ports=(6000, 6001)))
    async with asyncio.timeout(60):
        with pytest.raises(AtollError, match="n1 of this instance has ended"):
            await leader


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux keeps ports so")
@given(st.lists(st.integers(1, 4), min_size=2, max_size=24))
@examples(25)
def test_ports_of_many_nodes_of_a_host_are_their_own(counts: list[int]) -> None:
    def listen(port: int) -> socket.socket:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        return server

    with contextlib.ExitStack() as stack:
        held, others = list[int](), list[int]()
        for count in counts:
            address = stack.enter_context(hold_address("127.0.0.1:9", count))
            first, second = address.ports
            held += [*range(first, first + count), second]
            # Engines open ports of their own meanwhile, wherever there is one.
            others.append(stack.enter_context(listen(0)).getsockname()[1])
        assert len({*held, *others}) == len(held) + len(others)
        # Whoever was told a port listens there, late, and nobody else can by chance.
        for port in held:
            with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
                stranger.bind(("127.0.0.1", port))
            stack.enter_context(listen(port))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux keeps ports so")
def test_ports_of_a_launch_are_the_same_at_its_next_start() -> None:
    wanted = list_lasting("llama-H100-3f2a")
    assert wanted == list_lasting("llama-H100-3f2a") != list_lasting("llama-H100-77aa")
    assert len({*wanted}) == len(wanted)

    def hold(stack: contextlib.ExitStack, count: int) -> int:
        address = stack.enter_context(hold_address("127.0.0.1:9", count, first=wanted))
        # A start is known by the other one.
        assert address.ports[1] not in wanted
        return address.ports[0]

    def starts(count: int) -> list[int]:
        with contextlib.ExitStack() as stack:
            return [hold(stack, count) for _ in range(3)]

    once = starts(1)
    assert len({*once}) == 3
    assert {*once} <= {*wanted}
    assert starts(1) == starts(8) == once
    # Connections that linger after a server has left are in nobody's way, but a server that is there is.
    with contextlib.ExitStack() as stack:
        port = hold(stack, 1)
        server = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        server.accept()[0].close()
        assert client.recv(1) == b""
        server.close()
        client.close()
    assert starts(1) == once
    with socket.create_server(("127.0.0.1", once[1])):
        assert starts(1)[0] == once[0]
        assert once[1] not in starts(1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux names interfaces so")
async def test_engines_speak_from_the_address_that_others_were_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.7") is None
    shows = ("sh", "-c", f'echo "$GLOO_SOCKET_IFNAME" > {tmp_path}/said')
    other = FolderMeeting(tmp_path, "i")
    await other.enter("n1", THERE)
    assert await run_member(tmp_path, "n0", shows) == 0
    assert (tmp_path / "said").read_text() == "lo\n"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert await run_member(tmp_path, "n0", shows) == 0
    assert (tmp_path / "said").read_text() == "eth7\n"


def wait(done: Callable[[], bool], max_s: float = 60.0) -> None:
    until_s = time.monotonic() + max_s
    while not done():
        assert time.monotonic() < until_s, "it took too long"
        time.sleep(0.02)


def configurations(home: Path, endpoint: object) -> tuple[list[NodeConfig], InstanceConfig | None]:
    nodes = [
        NodeConfig.from_json(path.read_text())
        for path in sorted(home.glob("i.n*.json"))
        if getattr(endpoint, "nodes", ())
    ]
    server = home / "i.json"
    return nodes, InstanceConfig.from_json(server.read_text()) if server.exists() else None


PEERS: Mapping[str, MemberAddress] = {"n0": HERE, "n1": THERE}


def test_a_node_binds_its_own_address_and_the_leader_knows_all(tmp_path: Path) -> None:
    made = instance([(0, 20), (20, 32)])
    order = StageOrder(
        instance=made,
        source="/m",
        names=("chat",),
        launch=EngineLaunch(max_num_seqs=4),
        device="cuda",
        dtype="bfloat16",
    )
    leader = build_stage(order, "n0", 9000, PEERS, tmp_path, 32, ())
    assert [spec.name for spec in leader.nodes] == ["i/n0"]
    assert leader.server is not None
    nodes, server = configurations(tmp_path, leader)
    assert (nodes[0].bind, nodes[0].device) == ("tcp://127.0.0.1:4000", "cuda")
    assert (nodes[0].dtype, nodes[0].max_sequences) == ("bfloat16", 4)
    assert server is not None
    assert server.parts[0].inboxes == {"n0": "tcp://127.0.0.1:4000", "n1": "tcp://10.0.0.2:5000"}
    assert (server.scheduler, server.port) == ("tcp://127.0.0.1:4001", 9000)
    follower = build_stage(order, "n1", 1, PEERS, tmp_path, 32, ())
    assert [spec.name for spec in follower.processes] == ["i/n1"]


@pytest.mark.parametrize("told", [None, 2**24])
def test_nodes_on_shares_of_a_gpu_have_the_planned_kv_cache_unless_told_otherwise(
    tmp_path: Path, told: int | None
) -> None:
    made = instance([(0, 20), (20, 32)])
    shares = tuple(
        node.model_copy(update={"node_type": "H200/4:4", "gpu_ids": (at,), "kv_bytes": 10**9 + at})
        for at, node in enumerate(made.nodes)
    )
    order = StageOrder(
        instance=made.model_copy(update={"nodes": shares}),
        source="/m",
        names=("chat",),
        device="cuda",
        kv_bytes=told,
    )
    nodes, _ = configurations(tmp_path, build_stage(order, "n0", 9, PEERS, tmp_path, 32, ()))
    assert [node.kv_bytes for node in nodes] == [told or 10**9, told or 10**9 + 1]


@pytest.mark.parametrize("split", [True, False])
def test_a_node_splits_its_layers_over_as_many_processes_as_planned(
    tmp_path: Path, split: bool
) -> None:
    made = instance([(0, 20), (20, 32)])
    wide = made.nodes[0].model_copy(update={"node_type": "CORE:2", "tp": 2})
    made = made.model_copy(update={"nodes": (wide, made.nodes[1])})
    order = StageOrder(instance=made, source="/m", names=("chat",), split=split)
    nodes, _ = configurations(tmp_path, build_stage(order, "n0", 9, PEERS, tmp_path, 32, ()))
    assert [node.tp for node in nodes] == [2 if split else 1, 1]


def test_other_weights_than_planned_are_refused_unless_they_stand_in(tmp_path: Path) -> None:
    order = StageOrder(instance=instance([(0, 20), (20, 32)]), source="/m", names=("chat",))
    with pytest.raises(InputError, match="the weights have 16 layers, and i is planned for 32"):
        build_stage(order, "n0", 9000, PEERS, tmp_path, 16, ())
    build_stage(order.model_copy(update={"stand_in": True}), "n0", 9000, PEERS, tmp_path, 16, ())
    config = json.loads((tmp_path / "i.n0.json").read_text())
    assert (config["start"], config["end"]) == (0, 10)
