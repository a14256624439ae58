"""Real vLLM on cores over machines that are processes here: two copies of a pipeline with uneven layers.

vLLM's head goes on to say that it is well when another rank has died, and answers nobody: what must be seen,
taken down and replaced is seen by Atoll.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.deploy.commands.meeting import hold_address
from atoll.engines.engine import EngineLayout, ServedModel, ServerCommand, ServerHost
from atoll.engines.limits import EngineLaunch
from atoll.engines.vllm import ENGINE as VLLM
from tests.e2e.operated_site import Site
from tests.real.fleet import CORES, Door
from tests.runtime.gateway.harness import COMPLETIONS
from tools.real_engines import UnavailableError, find_engine

pytestmark = [pytest.mark.slow, pytest.mark.engine]
READY_S = 1500.0
CUTS = (3, 1)
TOKENS = 200
PROMPT = "The quick brown fox jumps over the lazy dog."
ASKED = {
    "model": "chat",
    "prompt": PROMPT,
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}
LAUNCH = EngineLaunch(max_model_len=512, max_num_seqs=4)
# On cores, vLLM 0.32 makes room for what the stage before sends as it warms up, which it leaves out where
# it is to compile nothing (`--enforce-eager`): so it traces the model, and runs it as it stands.
ON_CORES = ("--dtype", "float32", "--compilation-config", '{"mode":2,"backend":"eager"}')
FLEET = """\
name: lab
services:
  chat: {model: llama-3.1-8b, ttft: 1500ms, tpot: 80ms, rate: 0.2/s, lengths: 100x100}
pool:
  offers:
    - {region: here, node_type: L4:1, available: 3, usd_per_hour: 0.80}
    - {region: here, node_type: L40S:1, available: 1, usd_per_hour: 1.80}
settings: {max_nodes_per_instance: 1, engines: [vllm]}
"""


def until(reached: Callable[[], object], what: str, max_s: float = READY_S) -> None:
    end_s = time.monotonic() + max_s
    while not reached():
        assert time.monotonic() < end_s, f"not {what} after {max_s:g} s"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers; on cores, vLLM has attention for heads of 64."""
    pytest.importorskip("torch", reason="needs the extra 'engine'")
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", width=256)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program `vllm` that runs the real one on cores, whatever else it is told."""
    try:
        real = find_engine("vllm", build=True)
    except UnavailableError as error:
        pytest.skip(f"vLLM cannot run here: {error}")
    folder = tmp_path_factory.mktemp("bin")
    told = " ".join(f"{name}={value}" for name, value in {**real.environment, **CORES}.items())
    more = " ".join(f"'{word}'" for word in ON_CORES)
    program = folder / "vllm"
    program.write_text(
        f'#!/bin/sh\nexec env -u PYTHONPATH {told} {Path(real.python).with_name("vllm")} "$@" {more}\n'
    )
    program.chmod(0o755)
    return folder


def start(
    command: ServerCommand, programs: Path, folder: Path, name: str
) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [str(programs / "vllm"), *command.arguments[1:]],
            env={**os.environ, **command.environment},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def answer(layout: EngineLayout, model: Path, programs: Path, folder: Path) -> str:
    """What one server with all of a layout answers."""
    served = ServedModel(str(model), ("chat",), LAUNCH)
    with hold_address("127.0.0.1:9") as address:
        port = address.ports[0]
        command = VLLM.command(layout, served, ServerHost(str(port), "python3"))
        process = start(command, programs, folder, layout.instance)
        try:

            def answers() -> bool:
                said = folder / f"{layout.instance}.log"
                assert process.poll() is None, said.read_text()[-3000:]
                try:
                    return Door(port).get("/health").status == 200
                except OSError:
                    return False

            until(answers, "ready")
            return str(Door(port).post(COMPLETIONS, ASKED).body["choices"][0]["text"])
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def expected(model: Path, programs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process answers."""
    layout = EngineLayout("one", 1, 1, 1, (sum(CUTS),))
    return answer(layout, model, programs, tmp_path_factory.mktemp("one"))


@pytest.fixture
def site(tmp_path: Path, model: Path, programs: Path) -> Iterator[Site]:
    """A fleet whose plan has two copies of a pipeline over two machines each."""
    here = Site(tmp_path, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "lab.yaml").write_text(FLEET)
    here.run("plan", "lab.yaml", "-o", "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(cut_in_two(plan)))
    try:
        yield here
    finally:
        here.end()


def cut_in_two(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with two copies of its instance, each over two machines, for a model of four layers.

    The machines of one are alike, those of the other are not.
    """
    (one,) = plan["instances"]
    (node,) = one["nodes"]

    def cut(*kinds: str) -> list[dict[str, Any]]:
        return [
            {**node, "id": f"n{at}", "node_type": kind, "start": start, "end": start + layers}
            for at, (kind, start, layers) in enumerate(zip(kinds, (0, CUTS[0]), CUTS, strict=True))
        ]

    ways = (("source", "n0"), ("n0", "n1"), ("n1", "sink"))
    flows = [{"src": src, "dst": dst, "per_s": one["throughput_per_s"]} for src, dst in ways]
    copies = [
        {**one, "id": f"chat-{at}", "stages": 2, "nodes": cut("L4:1", kind), "flows": flows}
        for at, kind in enumerate(("L4:1", "L40S:1"))
    ]
    routes = [{"service": "chat", "instances": [each["id"]], "share": 0.5} for each in copies]
    return {
        **plan,
        "instances": copies,
        "routes": routes,
        "engines": {"chat": LAUNCH.model_dump(exclude_none=True)},
    }


def up(model: Path, wait_s: float) -> list[str]:
    """The command that brings up what the plan has and does not stand."""
    return [
        *("up", "plan.json", "--fleet", "lab.yaml", "--pretend", "--engine", "vllm"),
        *("--model", f"chat={model}", "--yes", "--port", "0", "--json", "--wait", f"{wait_s:g}s"),
    ]


def ranks(site: Site) -> dict[str, dict[str, int]]:
    """The process of vLLM of each rank, by instance and node."""
    found: dict[str, dict[str, int]] = {}
    for state in (site.folder / "state").rglob("i-*/state.json"):
        members = [each["pid"] for each in json.loads(state.read_text())["processes"]]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue
            pid = int(path.parent.name)
            if "serve" in words[:3] and set(parents_of(pid)) & set(members):
                node = words[words.index("--node-rank") + 1]
                found.setdefault(state.parent.name[2:], {})[f"n{node}"] = pid
    return found


def parents_of(pid: int) -> list[int]:
    found = list[int]()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def ports_of(pid: int) -> Mapping[str, str]:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return {
        name: words[words.index(name) + 1] for name in ("--master-port", "--port") if name in words
    }


def test_a_pipeline_on_one_machine_answers_as_one_process(
    model: Path, programs: Path, expected: str, tmp_path: Path
) -> None:
    assert answer(EngineLayout("row", 2, 1, 1, CUTS), model, programs, tmp_path) == expected


def test_pipelines_over_machines_answer_as_one_process_and_dead_ranks_are_replaced(
    site: Site, model: Path, expected: str
) -> None:
    said = json.loads(site.run(*up(model, 0.0)).splitlines()[-1])
    door = Door(int(said["url"].rpartition(":")[2]))
    until(lambda: len(site.ready()) == 2, "ready")
    first = site.ready()

    # Two copies on one host: nobody listens where another does.
    running = ranks(site)
    assert {name: set(nodes) for name, nodes in running.items()} == {
        name: {"n0", "n1"} for name in first
    }
    heads = [ports_of(nodes["n0"]) for nodes in running.values()]
    assert len({port for head in heads for port in head.values()}) == 4
    for nodes in running.values():
        assert ports_of(nodes["n1"]) == {"--master-port": ports_of(nodes["n0"])["--master-port"]}

    # Each of them answers as one process does.
    for name in first:
        one = Door(door.port, {"x-atoll-node": f"instances/{name}"})
        answer = one.post(COMPLETIONS, ASKED)
        assert answer.headers["x-atoll-node"] == f"instances/{name}"
        assert answer.body["choices"][0]["text"] == expected

    # A rank dies while a stream runs: it goes on at the other copy, and the instance is seen to have failed.
    stream, text = door.stream(COMPLETIONS, ASKED), ""
    name = stream.headers["x-atoll-node"].rpartition("/")[2]
    for number, event in enumerate(stream):
        text += event["choices"][0]["text"] if event.get("choices") else ""
        if number == 10:
            os.kill(running[name]["n1"], signal.SIGKILL)
    assert text == expected
    until(lambda: site.ready() == first - {name}, "seen to have failed", 60.0)
    until(lambda: not alive(running[name]["n0"]), "taken down whole", 60.0)

    # The plan still has it: another takes its place, with ranks and ports of its own.
    with site.running(*up(model, READY_S)) as rollout:
        until(lambda: rollout.poll() is not None, "replaced")
    assert rollout.returncode == 0, (site.folder / "said.log").read_text()
    (new,) = site.ready() - first
    one = Door(door.port, {"x-atoll-node": f"instances/{new}"})
    assert one.post(COMPLETIONS, ASKED).body["choices"][0]["text"] == expected

    # Without its head, which waits for nobody, an instance is of no use either.
    (other,) = first - {name}
    os.kill(running[other]["n0"], signal.SIGKILL)
    until(lambda: site.ready() == {new}, "seen to have no head", 60.0)
    until(lambda: not alive(running[other]["n1"]), "taken down whole", 60.0)
    assert door.post(COMPLETIONS, ASKED).body["choices"][0]["text"] == expected


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
