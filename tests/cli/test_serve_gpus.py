"""`atoll serve` on GPUs: a driver and an engine that are scripts, and everything else as it is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll import Fleet
from atoll.cli import main as cli
from atoll.deploy.commands.node_commands import CommandSettings, ServiceWeights, node_commands
from atoll.plan.engine_layout import launch_of
from atoll.runtime.http.http_client import request
from atoll.runtime.join import hardware

FLEET = """
services:
  chat: {model: qwen3-8b@fp8, ttft: 2s, tpot: 100ms, rate: 0.5/s, lengths: 512x128, phases: together}
pool: {owned: {here: {"L40S:1": 1}}}
"""
ENGINE = """
import http.server, json, os, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        told = json.dumps([os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[1:]])
        choice = {"index": 0, "text": told, "message": {"role": "assistant", "content": told}}
        body = json.dumps({"choices": [choice | {"finish_reason": "stop"}], "usage": {}}).encode()
        self.send_response(200); self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
at = sys.argv.index("--port")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[at + 1])), Answer).serve_forever()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, and programs first on the path: an H200's driver, and an engine."""
    plan = Fleet.read(FLEET).plan(capacity_only=True)
    plan.save(tmp_path / "plan.json")
    (tmp_path / "bin").mkdir()
    write(tmp_path / "bin" / "nvidia-smi", "print('NVIDIA H200, 143771, 570.1')")
    write(tmp_path / "bin" / "vllm", ENGINE)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if [gpu.type for gpu in hardware.list_gpus()] != ["H200"]:
        pytest.skip("this machine has GPUs of its own")
    return tmp_path


def write(path: Path, script: str) -> None:
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(script)}")
    path.chmod(0o755)


@contextmanager
def serving(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`atoll serve plan.json`, ended whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll", "serve", "plan.json", "--port", "0", "--json", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ask(url: str) -> list[Any]:
    chat = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
    answer = asyncio.run(request(f"{url}/v1/chat/completions", body=chat, timeout_s=60.0))
    assert answer.status == 200
    told: list[Any] = json.loads(json.loads(answer.body)["choices"][0]["message"]["content"])
    return told


def test_the_plans_engine_runs_on_the_gpu_until_ctrl_c(site: Path) -> None:
    with serving() as process:
        assert process.stdout is not None
        state = json.loads(process.stdout.readline())
        (runner,) = state["instances"]
        assert (runner["engine"], runner["gpu"], runner["gpus"]) == ("vllm", "H200", [0])
        assert (runner["planned"], runner["model"]) == ("L40S:1", "qwen3-8b@fp8")
        pid, visible, *words = ask(state["url"])
        assert visible == "0"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
    assert f"{runner['instance']} runs on 1x H200 (GPU 0) with vllm because no L40S is here" in said
    assert not is_running(pid)
    # It is what `atoll up --on local` would start.
    plan = Fleet.read(FLEET).plan(capacity_only=True)
    (instance,) = plan.instances
    known = plan.problem.catalog().model("qwen3-8b@fp8").checkpoint
    assert known is not None
    weights = ServiceWeights(known.source, ("chat",), quantization=known.quantization)
    launch = launch_of(plan, instance)
    (command,) = node_commands(instance, weights, CommandSettings(), launch=launch)
    port = words[words.index("--port") + 1]
    assert ["vllm", *words] == [word.replace("{port}", port) for word in command.argv]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "gpu"), "has no GPU here: vllm is not installed here"),
        ((), "qwen3-8b@fp8) on cores, since vllm is not installed here"),
        (("--device", "cpu"), "the plan's weights are needed: chat (qwen3-8b@fp8)"),
        (("--device", "tpu"), "unknown device 'tpu'"),
    ],
)
def test_cores_are_not_used_in_silence(
    site: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "bin" / "vllm").unlink()
    assert cli.run(["serve", "plan.json", "--port", "0", *words]) != 0
    assert said in " ".join(capsys.readouterr().err.split())
