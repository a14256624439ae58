"""Prefill and decode on two real vLLM servers on cores: the same tokens as on one, by way of the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.core.ids import Phase
from atoll.engines.engine import EngineLayout, ServedModel, ServerHost
from atoll.engines.limits import EngineLaunch, Handover
from atoll.engines.vllm import ENGINE as VLLM
from atoll.engines.vllm import KV_KEPT_S
from atoll.runtime.gateway.app import Gateway
from atoll.runtime.gateway.prefill_leg import prefill_body
from atoll.runtime.gateway.settings import Deadlines, GatewaySettings
from atoll.runtime.pool.member import Backend
from atoll.runtime.pool.pool import BackendPool
from tests.real.fleet import CORES, Door, free_port
from tests.runtime.gateway.harness import CHAT, COMPLETIONS, Bench, Json, Reply
from tools.real_engines import UnavailableError, find_engine, find_nixl

pytestmark = [pytest.mark.slow, pytest.mark.engine]
SIDES: tuple[Handover, ...] = ("prefill", "decode")
READY_S = 900.0


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """The ports of two servers, started with the words that a plan has for them."""
    pytest.importorskip("torch", reason="needs the extra 'engine'")
    from tests.tiny_model import LAYERS, write_tiny_model

    try:
        real, nixl = find_engine("vllm", build=True), find_nixl(build=True)
    except UnavailableError as error:
        pytest.skip(f"vLLM with NIXL cannot run here: {error}")
    folder = tmp_path_factory.mktemp("pairs")
    # On cores, vLLM has attention for heads of 64.
    model = write_tiny_model(folder / "tiny", width=256)
    found, started = dict[str, int](), list[subprocess.Popen[bytes]]()
    try:
        for side in SIDES:
            found[side] = free_port()
            launch = EngineLaunch(max_model_len=512, max_num_seqs=4, handover=side)
            command = VLLM.command(
                EngineLayout(side, 1, 1, 1, (LAYERS,), phase=Phase(side)),
                ServedModel(str(model), ("m",), launch),
                ServerHost(str(found[side]), "python3", handover_port=str(free_port())),
            )
            program = str(Path(real.python).with_name("vllm"))
            words = [program, *command.arguments[1:], "--dtype", "float32", "--enforce-eager"]
            own = {**os.environ, **real.environment, **CORES, **command.environment}
            with (folder / f"{side}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        words,
                        env=own | {"PYTHONPATH": str(nixl)},
                        cwd=folder,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        asyncio.run(asyncio.wait_for(_wait_for(found, started, folder), READY_S))
        yield found
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _wait_for(
    ports: dict[str, int], started: list[subprocess.Popen[bytes]], folder: Path
) -> None:
    for side, process in zip(ports, started, strict=True):
        while True:
            assert process.poll() is None, (folder / f"{side}.log").read_text()[-3000:]
            try:
                if Door(ports[side]).get("/health").status == 200:
                    break
            except OSError:
                await asyncio.sleep(0.5)


def ask_both(ports: dict[str, int], folder: Path, path: str, bodies: list[Json]) -> list[Reply]:
    """Ask by way of a gateway that pairs the two."""

    async def go() -> list[Reply]:
        pool = BackendPool(
            Backend(
                id=side,
                url=f"http://127.0.0.1:{port}",
                models=("m",),
                kind="vllm",
                metadata={"handover": f"nixl/{side}"},
            )
            for side, port in ports.items()
        )
        patient = Deadlines(prefill_s=300.0, answer_s=300.0, first_token_s=300.0)
        settings = GatewaySettings(
            port=0, admin_socket=str(folder / "admin.sock"), deadlines=patient
        )
        gateway = Gateway(pool, settings)
        try:
            _, port = await gateway.start()
            return [await Bench(gateway, [], port).post(path, body) for body in bodies]
        finally:
            await gateway.close()

    return asyncio.run(go())


def read_metric(port: int, name: str) -> float:
    """The value of a counter of a server."""
    page = str(Door(port).get("/metrics").body)
    found = [line for line in page.splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.split()[-1]) for line in found)


def test_tokens_are_those_of_one_server(ports: dict[str, int], tmp_path: Path) -> None:
    prompts = [(f"The quick brown fox jumps over {n} dogs. " * 20)[:n] for n in (70, 300)]
    bodies = [
        {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        for prompt in prompts
    ]
    before = read_metric(ports["decode"], "nixl_bytes_transferred_count")
    replies = ask_both(ports, tmp_path, COMPLETIONS, bodies)
    taken = read_metric(ports["decode"], "nixl_bytes_transferred_count") - before
    for reply, body in zip(replies, bodies, strict=True):
        assert reply.headers["x-atoll-path"] == "prefill=prefill decode=decode"
        # Computed by itself, from nothing that is cached.
        alone = Door(ports["decode"]).post(COMPLETIONS, body | {"cache_salt": "alone"}).body
        assert reply.json["choices"][0]["text"] == alone["choices"][0]["text"]
        assert reply.json["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert taken >= len(prompts)
    assert read_metric(ports["decode"], "nixl_num_failed_transfers_total") == 0


def test_kv_cache_that_nobody_fetches_is_let_go(ports: dict[str, int]) -> None:
    door, expired = Door(ports["prefill"]), "nixl_num_kv_expired_reqs_total"
    asked: Json = {"model": "m", "prompt": "nobody will come for this " * 8, "max_tokens": 20}
    kept = door.post(COMPLETIONS, json.loads(prefill_body(json.dumps(asked).encode()))).body
    assert kept["kv_transfer_params"]["remote_block_ids"]
    assert read_metric(ports["prefill"], "kv_cache_usage_perc") > 0.0
    until_s = time.monotonic() + 3 * KV_KEPT_S
    while not read_metric(ports["prefill"], expired):
        assert time.monotonic() < until_s, "it keeps what nobody fetches"
        # It looks at its clock when it computes something.
        door.post(COMPLETIONS, {"model": "m", "prompt": "x", "max_tokens": 1})
        time.sleep(1.0)
    assert read_metric(ports["prefill"], "kv_cache_usage_perc") == 0.0


def test_a_stream_with_log_probabilities(ports: dict[str, int], tmp_path: Path) -> None:
    message = {"role": "user", "content": "hello there, all of you " * 8}
    body = {"model": "m", "messages": [message], "max_tokens": 16, "temperature": 0}
    asked = {**body, "logprobs": True, "top_logprobs": 2, "stream": True}
    (reply,) = ask_both(ports, tmp_path, CHAT, [asked])
    alone = Door(ports["decode"]).post(CHAT, body | {"cache_salt": "alone"}).body
    assert reply.text == alone["choices"][0]["message"]["content"]
    first = next(c for chunk in reply.chunks for c in chunk["choices"] if c.get("logprobs"))
    assert len(first["logprobs"]["content"][0]["top_logprobs"]) == 2
