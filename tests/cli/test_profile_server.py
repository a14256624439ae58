"""`atoll profile --server` against a server over HTTP, and what plans and simulations then say."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import yaml

from atoll.cli.main import run
from atoll.runtime.http.handlers import Answer, EventStream, HandlerServer, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.local import server_profile
from atoll.runtime.local.load_probes import AskWords, ProbeAnswer

TOKEN_S = 2e-3
FIRST_S = 10e-3
FLEET = """\
services:
  chat: {model: smollm2-135m, ttft: 2s, tpot: 200ms, rate: 0.5/s, lengths: 64x32}
pool:
  owned: {here: {"L4:1": 1}}
settings: {engines: [vllm]}
"""
LOG = {
    "completed": 100, "duration": 50.0, "total_input_tokens": 25_600, "total_output_tokens": 10_100,
    "mean_ttft_ms": 40.0, "mean_tpot_ms": 3.0,
}  # fmt: skip


async def _tokens(count: int, prompt: int) -> AsyncGenerator[bytes, None]:
    for _ in range(count):
        await asyncio.sleep(TOKEN_S)
        yield b'data: {"choices": [{"text": "x"}]}\n\n'
    yield f'data: {{"choices": [], "usage": {{"prompt_tokens": {prompt}}}}}\n\n'.encode()


async def _answer(request: Request) -> Answer:
    if request.path == b"/v1/models":
        return Response(json.dumps({"data": [{"id": "m", "owned_by": "vllm"}]}).encode())
    if request.path == b"/version":
        return Response(b'{"version": "0.22.1+cu129"}')
    if request.path != b"/v1/completions":
        return Response(b"", status=404)
    body = json.loads(request.body)
    prompt = len(body["prompt"].split())
    if prompt > 1000:
        return Response(b"too long for this model", status=400)
    if not body.get("stream"):
        return Response(b'{"usage": {"completion_tokens": 1}}')
    return EventStream(_tokens(body["max_tokens"], prompt))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server that takes some milliseconds for a token."""
    loop, server = asyncio.new_event_loop(), HandlerServer(_answer)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        host, port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result()
        yield f"http://{host}:{port}"
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come as from a machine with nothing else to do: what others run here is not measured."""
    client = server_profile.words_client

    def words_client(url: str, model: str) -> AskWords:
        ask = client(url, model)

        async def ask_on_time(prompt: str, tokens: int) -> ProbeAnswer:
            answer = await ask(prompt, tokens)
            came_s = [answer.sent_s + FIRST_S + TOKEN_S * n for n in range(len(answer.came_s))]
            return ProbeAnswer(answer.sent_s, came_s, answer.prompt_tokens)

        return ask_on_time

    monkeypatch.setattr(server_profile, "words_client", words_client)


def asked(url: str, *more: str) -> list[str]:
    """The command for a short profile."""
    short = ["--prompts", "16,64", "--clients", "2", "--answer", "8"]
    return ["profile", "--server", url, "--name", "smollm2-135m", "--as", "L4:1", *short, *more]


@pytest.mark.usefixtures("on_time")
def test_a_profile_is_an_overlay_that_plans_and_simulations_name(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, fleet = tmp_path / "measured.yaml", tmp_path / "fleet.yaml"
    fleet.write_text(FLEET)
    assert run(asked(url, "-o", str(out), "--json")) == 0
    said = capsys.readouterr()
    assert "2 clients at a time, with answers of 8 tokens: this takes about" in said.err
    printed = json.loads(said.out)
    assert printed["server"]["engine"] == "vllm@0.22.1"
    # First tokens and further ones of two prompts alone and of one loop.
    assert len(printed["times"]) == 6
    assert yaml.safe_load(out.read_text())["servers"] == [printed["server"]]
    # A log of a load generator goes the same way, and is added.
    (tmp_path / "bench.json").write_text(json.dumps(LOG))
    of_log = [str(tmp_path / "bench.json"), "--model", "smollm2-135m", "--node", "L4:1"]
    assert run(["perf", "calibrate", *of_log, "--engine", "vllm@0.22.1", "-o", str(out)]) == 0
    assert len(yaml.safe_load(out.read_text())["servers"]) == 2
    capsys.readouterr()
    date = printed["server"]["date"]
    words = f"chat on L4:1: measured with the profile of {date} on L4:1, vllm@0.22.1"
    plan = tmp_path / "plan.json"
    planned = ["plan", str(fleet), "--overlay", str(out), "-o", str(plan)]
    assert run([*planned, "--solver", "homogeneous"]) == 0
    assert words in " ".join(capsys.readouterr().out.split())
    run_of = ["simulate", str(plan), "--fleet", str(fleet), "--overlay", str(out)]
    assert run([*run_of, "--for", "60s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"][0].startswith(words)
    assert run(["perf", "show", "smollm2-135m", "L4:1", "--overlay", str(out)]) == 0
    assert f"measured (profile of {date}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--prompts", "16,many"), "--prompts: '16,many' is no list of whole numbers"),
        (("--model", "other"), "--model: "),
        (("--as", "H200/2:1"), "share of a GPU"),
        (("-o", "out.csv"), "out.csv"),
    ],
)
def test_what_goes_wrong_is_one_line(
    url: str, more: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(asked(url, *more)) in (2, 3, 4)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert says in line


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(asked("http://127.0.0.1:9")) in (2, 3, 4)
    assert "--server: http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.usefixtures("on_time")
def test_an_overlay_of_other_facts_keeps_them(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the profile says is not looked at here, and fitting it takes most of the time.
    monkeypatch.setattr("atoll.perf.server_fit._least_squares", lambda _off, at: at)
    out = tmp_path / "own.yaml"
    out.write_text("# ours\ngpus: {L4: {memory: 23GB}}\n")
    assert run(asked(url, "-o", str(out))) == 0
    assert out.read_text().startswith("# ours\ngpus: {L4: {memory: 23GB}}\nservers:\n- model: ")
    odd = tmp_path / "odd.yaml"
    odd.write_text("servers: []\nprices: []\n")
    capsys.readouterr()
    assert run(asked(url, "-o", str(odd))) == 3
    assert "last section" in capsys.readouterr().err
