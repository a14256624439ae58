"""The local target with real small processes: servers on the loopback, commands that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.deploy.labels import Labels
from atoll.deploy.local.daemon import (
    DaemonOrder,
    DaemonState,
    ProcessId,
    announces_nothing,
    last_word,
    process_start,
    take_lock,
)
from atoll.deploy.local.gpu_slots import PoolMachine
from atoll.deploy.local.local_deployer import LocalDeployer
from atoll.deploy.node_command import NodeCommand
from atoll.deploy.target import DeployError, InstanceStatus, StartOrder, classify_exit
from tests.runtime.local.test_placing import instance

SERVER = """
import http.server, os, signal, sys, threading
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(os.environ.get("CUDA_VISIBLE_DEVICES", "none").encode())
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
print("listening, secret file", os.environ.get("SECRET_FILE"), flush=True)
server.serve_forever()
print("drained", flush=True)
"""
# They would listen, so that none is taken for ready while its interpreter starts.
LAST = "import sys; sys.argv[1]; print('the model is not there', file=sys.stderr); sys.exit(3)"
HUNGRY = (
    "import sys; sys.argv[1]; raise MemoryError('CUDA out of memory. Tried to allocate 20 GiB')"
)
SLEEP = "import time; time.sleep(600)"
MACHINES = (
    PoolMachine(name="a", node_type="L40S:2", gpu_ids=(4, 5)),
    PoolMachine(name="b", node_type="L4:1"),
)


def order(
    name: str = "chat-0", *scripts: str, term: int = 0, node_type: str = "L40S:2", gpus: int = 1
) -> StartOrder:
    commands = tuple(
        NodeCommand(
            node=f"n{at}",
            node_type=node_type,
            argv=(sys.executable, "-c", textwrap.dedent(script))
            + (("{port}",) if "sys.argv[1]" in script else ()),
            gpus=gpus,
        )
        for at, script in enumerate(scripts or (SERVER,))
    )
    labels = Labels(
        fleet="lab",
        instance=name,
        plan="p",
        placement="l",
        service="chat",
        role="chat/llm/both",
        term=term,
    )
    held = [(2 * at, 2 * at + 2) for at in range(len(commands))]
    return StartOrder(instance([*held]), labels, commands, ready_s=60.0)


def wait(done: Callable[[], bool], max_s: float = 60.0) -> None:
    until_s = time.monotonic() + max_s
    while not done():
        assert time.monotonic() < until_s, "it took too long"
        time.sleep(0.02)


def state_of(deployer: LocalDeployer, handle: str) -> InstanceStatus:
    return next(each for each in deployer.list("lab") if each.handle == handle)


def daemon_of(folder: Path, name: str = "chat-0") -> DaemonState:
    return DaemonState.from_json((folder / "f-lab" / f"i-{name}" / "state.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "local"
    deployer = LocalDeployer(MACHINES, tmp_path / "local")
    for status in deployer.list("lab"):
        deployer.stop(status.handle, 10**6)


def test_an_instance_becomes_ready_drains_and_is_gone(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder)
    handle = deployer.start(order()).handle
    wait(lambda: state_of(deployer, handle).state == "ready")
    ready = state_of(deployer, handle)
    assert (ready.labels.instance, ready.hosts, ready.reason) == ("chat-0", ("a",), "")
    assert "listening" in deployer.logs(handle)
    # Whoever comes next knows it by its folder alone.
    deployer = LocalDeployer(MACHINES, folder)
    deployer.drain(handle, 0)
    wait(lambda: state_of(deployer, handle).state == "gone")
    assert deployer.logs(handle, 1) == "drained"
    deployer.drain(handle, 0)
    deployer.stop(handle, 0)


def test_it_sees_only_its_gpus_and_none_is_given_twice(folder: Path) -> None:
    from urllib.request import urlopen

    deployer = LocalDeployer(MACHINES, folder)
    handle = deployer.start(order(gpus=2)).handle
    wait(lambda: state_of(deployer, handle).state == "ready")
    kept = (folder / "f-lab" / "i-chat-0" / "order.json").read_text()
    port = kept.partition('"port": ')[2].partition("\n")[0]
    with urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        assert answer.read().decode() == "4,5"
    with pytest.raises(DeployError, match=r"no room for 1 of L40S:2 of chat-2 here") as caught:
        deployer.start(order("chat-2"))
    assert caught.value.kind == "capacity"
    deployer.stop("lab/chat-0", 0)
    assert deployer.start(order("chat-2")).hosts == ("a",)


@pytest.mark.slow
def test_shares_of_a_gpu_are_given_beside_each_other_and_kept_account_of(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder, settle_s=0.05)
    for at in range(4):
        deployer.start(order(f"chat-{at}", SLEEP, node_type="L40S/2:2"))
    held = sorted((each.slots, each.shares) for each in deployer.list_held())
    assert held == [((0,), 2), ((0,), 2), ((1,), 2), ((1,), 2)]
    env = [
        DaemonOrder.from_json((folder / "f-lab" / f"i-chat-{at}" / "order.json").read_text())
        .nodes[0]
        .env["CUDA_VISIBLE_DEVICES"]
        for at in range(4)
    ]
    assert env == ["4", "4", "5", "5"]
    for kind in ("L40S/2:2", "L40S:2"):
        with pytest.raises(DeployError, match="no room"):
            deployer.start(order("chat-4", SLEEP, node_type=kind))


@pytest.mark.slow
def test_another_controller_adopts_what_runs_and_starts_nothing_twice(folder: Path) -> None:
    script = f"""
    from pathlib import Path
    from atoll.deploy.local.local_deployer import LocalDeployer
    from tests.deploy.local.test_local_deployer import MACHINES, order
    print(LocalDeployer(MACHINES, Path({str(folder)!r})).start(order()).handle)
    """
    root = Path(__file__).parents[3]
    first = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=dict(os.environ) | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    handle = first.stdout.strip()
    deployer = LocalDeployer(MACHINES, folder)
    wait(lambda: state_of(deployer, handle).state == "ready")
    before = daemon_of(folder)
    again = deployer.start(order(term=3))
    assert (again.handle, again.state) == (handle, "ready")
    assert daemon_of(folder) == before
    assert len(deployer.list("lab")) == 1
    assert deployer.list("another") == ()
    deployer.stop(handle, 3)
    assert state_of(deployer, handle).state == "gone"
    assert all(process_start(each.pid) != each.start for each in before.processes)


def test_a_daemon_loads_no_problems() -> None:
    """Each instance has a daemon: loading what plans are made of took longer than all else it needs."""
    code = (
        "import sys, atoll.deploy.local.daemon\n"
        "sys.exit(','.join(m for m in ('atoll.plan.problem', 'numpy') if m in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_orders_of_an_older_term_are_refused(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder)
    handle = deployer.start(order(term=2)).handle
    older: tuple[Callable[[], object], ...] = (
        lambda: deployer.start(order("chat-1", term=1)),
        lambda: deployer.drain(handle, 1),
        lambda: deployer.stop(handle, 1),
    )
    for act in older:
        with pytest.raises(DeployError, match="an order of term 1 for lab") as caught:
            act()
        assert caught.value.kind == "superseded"
    assert len(deployer.list("lab")) == 1
    deployer.stop(handle, 2)


def test_a_machine_that_is_set_aside_gets_nothing(folder: Path) -> None:
    machines = (PoolMachine(name="a", node_type="L4:1"), PoolMachine(name="b", node_type="L4:1"))
    deployer = LocalDeployer(machines, folder, settle_s=0.0)
    made = replace(order("chat-0", SLEEP, node_type="L4:1"), avoid_hosts=("a", "elsewhere"))
    assert deployer.start(made).hosts == ("b",)
    more = replace(order("chat-1", SLEEP, node_type="L4:1"), avoid_hosts=("a",))
    with pytest.raises(DeployError, match=r"no room .*, a set aside") as caught:
        deployer.start(more)
    assert caught.value.kind == "capacity"


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (LAST, "settings", "n0 ended with code 3: the model is not there"),
        pytest.param(HUNGRY, "memory", "CUDA out of memory", marks=pytest.mark.slow),
    ],
)
def test_what_ends_at_once_is_an_error_with_its_last_line(
    folder: Path, script: str, kind: str, words: str
) -> None:
    deployer = LocalDeployer(MACHINES, folder, settle_s=60.0)
    with pytest.raises(DeployError) as caught:
        deployer.start(order("chat-0", script))
    assert caught.value.kind == kind
    assert words in str(caught.value)
    (failed,) = deployer.list("lab")
    assert (failed.state, failed.kind) == ("failed", kind)
    # What it held is free again.
    assert deployer.start(order("chat-1", SLEEP, gpus=2)).state == "ready"


def test_a_program_that_is_not_here_and_an_open_secret_are_refused(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder)
    made = order()
    (command,) = made.commands

    def start(**changes: object) -> None:
        values = {
            "node": "n0",
            "node_type": "L40S:2",
            "argv": command.argv,
            "gpus": 1,
        } | changes
        deployer.start(StartOrder(made.instance, made.labels, (NodeCommand(**values),)))  # type: ignore[arg-type]

    for argv in (("no-such-engine",), (sys.executable, "--", "no-such-engine", "serve")):
        with pytest.raises(DeployError, match="no-such-engine, which is not here") as caught:
            start(argv=argv)
        assert caught.value.kind == "settings"
    secret = folder / "token"
    secret.write_text("very secret")
    secret.chmod(0o644)
    with pytest.raises(DeployError, match=r"chmod 600"):
        start(secrets=(("SECRET_FILE", str(secret)),))
    assert deployer.list("lab") == ()
    secret.chmod(0o600)
    start(secrets=(("SECRET_FILE", str(secret)),))
    wait(lambda: "secret file" in deployer.logs("lab/chat-0"))
    assert str(secret) in deployer.logs("lab/chat-0")
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert written.count(b"very secret") == 1


def test_when_one_node_ends_the_instance_has_failed_and_nothing_is_left(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder)
    handle = deployer.start(order("chat-0", SLEEP, SLEEP)).handle
    wait(lambda: state_of(deployer, handle).state == "ready")
    wait(lambda: len(daemon_of(folder).processes) == 2)
    first, second = daemon_of(folder).processes
    os.kill(first.pid, signal.SIGKILL)
    wait(lambda: state_of(deployer, handle).state == "failed")
    failed = state_of(deployer, handle)
    assert (failed.kind, failed.reason) == ("ended", "n0 ended by signal 9: no word")
    wait(lambda: process_start(second.pid) != second.start)


HEAD = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)  # it finishes what runs, which never ends
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


@pytest.mark.slow
def test_a_rank_that_dies_takes_its_instance_along_and_another_takes_the_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_MEETING", str(folder.parent / "meeting"))
    monkeypatch.setenv("ATOLL_ADDRESS", "127.0.0.1")
    deployer = LocalDeployer(MACHINES, folder)

    def ranks(name: str) -> StartOrder:
        made = order(name, HEAD, SLEEP)
        member = (sys.executable, "-m", "atoll.deploy.commands.instance_member", "--meeting", name)
        commands = [
            replace(each, argv=(*member, "--node", each.node, "--nodes", "n0,n1", "--", *each.argv))
            for each in made.commands
        ]
        return replace(made, commands=tuple(commands))

    handle = deployer.start(ranks("chat-0")).handle
    # It answers that it is well, whatever becomes of the other rank.
    wait(lambda: state_of(deployer, handle).state == "ready")
    first, second = daemon_of(folder).processes
    (rank,) = children_of(second.pid)
    os.kill(rank, signal.SIGKILL)
    wait(lambda: state_of(deployer, handle).state == "failed")
    failed = state_of(deployer, handle)
    assert (failed.kind, failed.reason) == ("ended", "n1 ended by signal 9: no word")
    wait(lambda: process_start(first.pid) != first.start)
    # Nothing of it is held, and the next one meets nobody who is dead.
    again = deployer.start(ranks("chat-1")).handle
    wait(lambda: state_of(deployer, again).state == "ready")


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_daemon_leaves_nothing_behind(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder)
    handle = deployer.start(order("chat-0", SLEEP)).handle
    wait(lambda: len(daemon_of(folder).processes) == 1)
    state = daemon_of(folder)
    os.kill(state.daemon.pid, signal.SIGKILL)
    wait(lambda: state_of(deployer, handle).state == "failed")
    assert state_of(deployer, handle).kind == "ended"
    wait(lambda: process_start(state.processes[0].pid) != state.processes[0].start)
    assert deployer.start(order("chat-1", SLEEP, gpus=2)).hosts == ("a",)


def test_a_number_used_again_is_never_killed(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder)
    handle = deployer.start(order("chat-0", SLEEP)).handle
    wait(lambda: len(daemon_of(folder).processes) == 1)
    deployer.stop(handle, 0)
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as innocent:
        # As if the numbers of the daemon and of its process had been given to somebody else since.
        other = ProcessId(pid=innocent.pid, start="1")
        state = daemon_of(folder).model_copy(
            update={"daemon": other, "processes": (other,), "state": "ready"}
        )
        (folder / "f-lab" / "i-chat-0" / "state.json").write_text(state.to_json())
        deployer.drain(handle, 0)
        deployer.stop(handle, 0)
        assert innocent.poll() is None
        innocent.kill()


def test_a_controller_that_ended_between_order_and_start_is_made_good(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder)
    handle = deployer.start(order("chat-0", SLEEP)).handle
    wait(lambda: state_of(deployer, handle).state == "ready")
    deployer.stop(handle, 0)
    home = folder / "f-lab" / "i-chat-0"
    (home / "state.json").unlink()
    (half,) = deployer.list("lab")
    assert (half.state, half.kind) == ("failed", "ended")
    deployer.start(order("chat-0", SLEEP))
    wait(lambda: state_of(deployer, handle).state == "ready")


@pytest.mark.slow
def test_a_daemon_that_is_slow_to_begin_is_waited_for(folder: Path) -> None:
    deployer = LocalDeployer(MACHINES, folder)
    handle = deployer.start(order("chat-0", SLEEP)).handle
    deployer.stop(handle, 0)
    home = folder / "f-lab" / "i-chat-0"
    (home / "state.json").unlink()

    def start_late() -> subprocess.Popen[bytes]:
        # Its controller was killed while the daemon still loads Python.
        lock = take_lock(home)
        assert lock is not None
        words = [sys.executable, "-m", "atoll.deploy.local.daemon", str(home), str(lock)]
        late = subprocess.Popen(words, pass_fds=(lock,))
        late.send_signal(signal.SIGSTOP)
        os.close(lock)
        return late

    late = start_late()
    assert state_of(deployer, handle).state == "starting"
    assert deployer.start(order("chat-0", SLEEP)).state == "starting"
    with ThreadPoolExecutor() as threads:
        stopping = threads.submit(deployer.stop, handle, 1)
        late.send_signal(signal.SIGCONT)
        assert late.wait(60) == 0
        stopping.result()
    assert state_of(deployer, handle).state == "gone"
    # One that ends before it has begun was never born: nothing of it stays.
    (home / "state.json").unlink()
    late = start_late()
    late.kill()
    late.wait()
    assert state_of(deployer, handle).state == "failed"
    deployer.stop(handle, 1)
    assert not home.exists()
    assert deployer.list("lab") == ()


def test_ended_instances_are_listed_for_a_while_only(folder: Path) -> None:
    now_s = time.time()
    deployer = LocalDeployer(MACHINES, folder, clock=lambda: now_s)
    handle = deployer.start(order("chat-0", SLEEP)).handle
    deployer.stop(handle, 0)
    assert len(deployer.list("lab")) == 1
    now_s += 4000.0
    deployer.start(order("chat-1", SLEEP))
    assert [each.labels.instance for each in deployer.list("lab")] == ["chat-1"]


def test_why_a_command_ended() -> None:
    assert classify_exit("ended by signal 9", "no word") == "memory"
    assert classify_exit("ended with code 1", "torch.OutOfMemoryError: CUDA ...") == "memory"
    assert classify_exit("ended with code 2", "unknown option --tensor") == "settings"


def test_the_last_word_is_one_for_people() -> None:
    event = '{"time":1,"event":"node.joined","sid":"s"}'
    assert last_word(["it burns", event]) == "it burns"
    assert last_word([event]) == last_word([]) == "no word"


def test_a_node_of_a_fabric_is_ready_when_it_has_announced_something() -> None:
    joined = '{"time":1,"event":"node.joined","sid":"s"}'
    serving = '{"time":2,"event":"node.announced","models":["m"]}'
    silent = '{"time":3,"event":"node.announced","models":[]}'
    assert not announces_nothing("plain words\n")
    assert announces_nothing(f"{joined}\n")
    assert not announces_nothing(f"{joined}\n{serving}\n")
    assert announces_nothing(f"{joined}\n{serving}\n{silent}\n")
    assert not announces_nothing(f'{joined}\n{serving}\n{{"time":broken "event":"node.')
