"""vLLM as a component: what it is asked and told, what is refused, and the server that it brings along."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.components.base import BadInputError, Done, Setup
from atoll.components.chat_inputs import SeenPicture
from atoll.components.component_registry import find_component
from atoll.core.errors import AtollError
from atoll.engine.engine_errors import EngineError
from atoll.engines.limits import EngineLaunch
from atoll.runtime.executor import vllm_chat
from atoll.runtime.executor.vllm_chat import VllmChat, unreadable
from atoll.runtime.executor.vllm_server import ServerOrder, VllmServer, check_loopback, visible_gpus
from atoll.runtime.http.http_client import FetchError, StatusError

pytestmark = pytest.mark.engine
torch = pytest.importorskip("torch", reason="needs the extra 'engine'")

STANDIN = Path(__file__).with_name("standin_vllm.py")
URL = "http://127.0.0.1:1"
ROWS = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(2, 32)
USER = {"role": "user", "content": "Hello"}
SEEN = {"role": "user", "content": [{"type": "embeds", "embeds": ROWS}]}


class LineServer:
    """Answers every question with the same lines, and keeps what it was asked."""

    def __init__(self) -> None:
        self.lines: tuple[Any, ...] = ()
        self.asked: list[dict[str, Any]] = []
        self.closed = 0

    async def stream_lines(
        self, url: str, *, body: Any, timeout_s: float, api_key: str | None
    ) -> AsyncGenerator[bytes, None]:
        del timeout_s, api_key
        self.asked.append({"url": url} | json.loads(json.dumps(body)))
        try:
            for each in self.lines:
                if isinstance(each, Exception):
                    raise each
                yield each if isinstance(each, bytes) else b"data: " + json.dumps(each).encode()
                yield b""
        finally:
            self.closed += 1


def chunk(tokens: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": "x", "token_ids": tokens, "finish_reason": finish} | more]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.engine.chatting import TinyChat

    folder = tmp_path_factory.mktemp("tiny")
    return TinyChat(folder), folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> LineServer:
    found = LineServer()
    monkeypatch.setattr(vllm_chat, "stream_lines", found.stream_lines)
    return found


@pytest.fixture
def component(model: Any) -> VllmChat:
    return VllmChat.load(Setup(options={"model": str(model[1]), "url": URL}))


def ask(component: VllmChat, **inputs: Any) -> tuple[list[Any], Any]:
    async def go() -> list[Any]:
        return [piece async for piece in component.stream({"messages": [USER]} | inputs)]

    *pieces, done = asyncio.run(go())
    assert isinstance(done, Done)
    return pieces, done.value


def test_text_goes_as_tokens_and_comes_as_tokens(component: VllmChat, server: LineServer) -> None:
    """Several tokens in a line, and none; its own text is not looked at, the tokenizer's is."""
    server.lines = (b": there", chunk([40, 41]), chunk([]), chunk([42], "length"), b"data: [DONE]")
    pieces, whole = ask(component, max_tokens=3, temperature=0.5, seed=3, top_p=0.9)
    assert [token for piece in pieces for token in piece["token_ids"]] == [40, 41, 42]
    text = component.engine.codec.decode([40, 41, 42])
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == text
    assert (whole["finish_reason"], whole["completion_tokens"]) == ("length", 3)
    (asked,) = server.asked
    assert asked["url"] == f"{URL}/v1/completions"
    prompt = component.engine.codec.encode("<|user|>Hello<|end|><|assistant|>", special=False)
    assert (asked["prompt"], whole["prompt_tokens"]) == (prompt, len(prompt))
    assert (asked["temperature"], asked["seed"], asked["top_p"]) == (0.5, 3, 0.9)
    assert (asked["max_tokens"], asked["stop_token_ids"]) == (3, [260])
    assert "prompt_embeds" not in asked
    assert server.closed == 1


def test_vectors_go_among_the_models_own(
    component: VllmChat, server: LineServer, model: Any
) -> None:
    """Text is what the table says, pictures are as they came, and an answer so far is part of the prompt."""
    server.lines = (chunk([7], "stop"),)
    known = {"text": "?", "token_ids": [5, 6]}
    _, whole = ask(component, messages=[SEEN], resume=known, max_tokens=4)
    assert whole["completion_tokens"] == 3
    (asked,) = server.asked
    assert asked["max_tokens"] == 2
    assert "prompt" not in asked
    saved = io.BytesIO(base64.b64decode(asked["prompt_embeds"]))
    rows = torch.load(saved, weights_only=True)
    codec = component.engine.codec
    start = codec.encode("<|user|>", special=False)
    end = codec.encode("<|end|><|assistant|>", special=False)
    own = model[0].own_rows
    expected = np.concatenate([own(start), ROWS, own([*end, 5, 6])])
    assert np.array_equal(rows.numpy(), expected)
    # What was asked for is there already: nobody is asked.
    pieces, whole = ask(component, messages=[SEEN], resume=known, max_tokens=2)
    assert not any(piece["token_ids"] for piece in pieces)
    assert (whole["finish_reason"], whole["completion_tokens"]) == ("length", 2)
    assert len(server.asked) == 1


def test_probabilities_and_forms_are_asked_for(component: VllmChat, server: LineServer) -> None:
    told = {
        "tokens": ["token_id:40"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:40": -0.5, "token_id:41": -1.5, "token_id:9": -2.0}],
    }
    server.lines = (chunk([40], "length", logprobs=told),)
    pieces, _ = ask(component, max_tokens=1, logprobs=True, top_logprobs=2)
    (said,) = pieces[0]["logprobs"]
    assert said["logprob"] == -0.5
    assert [other["logprob"] for other in said["top_logprobs"]] == [-0.5, -1.5]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ask(component, max_tokens=1, response_format=form)
    ask(component, max_tokens=1, response_format={"type": "json_object"})
    forms: list[Any] = [asked.get("structured_outputs") for asked in server.asked]
    assert forms[0] is None
    assert forms[1]["json"]["required"] == ["a"]
    assert forms[2] == {"json_object": True}
    with pytest.raises(EngineError, match="cannot be gone on with"):
        ask(component, response_format=form, resume={"text": "{", "token_ids": [90]}, max_tokens=9)


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        ((chunk([5]),), EngineError, "broke off"),
        ((chunk([5], "abort"),), EngineError, "'abort'"),
        ((chunk([5]), FetchError("gone")), EngineError, "gone"),
        (({"error": {"message": "no room"}},), EngineError, "no room"),
        ((b"data: {",), EngineError, "cannot be read"),
        (({"choices": [7]},), EngineError, "cannot be read"),
        ((StatusError(URL, 500, b"oh"),), EngineError, "500"),
        (
            (StatusError(URL, 400, b'{"error": {"message": "too long"}}'),),
            BadInputError,
            "too long",
        ),
    ],
)
def test_what_goes_wrong_is_told_apart(
    component: VllmChat, server: LineServer, lines: Any, error: Any, message: str
) -> None:
    """The client's fault is never tried again; anything else is, elsewhere."""
    server.lines = lines
    with pytest.raises(error, match=message):
        ask(component, max_tokens=4)
    assert server.closed == 1


def test_leaving_early_ends_the_question(component: VllmChat, server: LineServer) -> None:
    server.lines = (chunk([40]), chunk([41]), chunk([42], "length"))

    async def go() -> None:
        stream: Any = component.stream({"messages": [USER], "max_tokens": 3})
        await anext(stream)
        await stream.aclose()

    asyncio.run(go())
    assert server.closed == 1


def test_what_is_more_than_vectors_is_refused(component: VllmChat, server: LineServer) -> None:
    for name, more in (("grid", {"grid": [1, 2, 4]}), ("deepstack", {"deepstack": ROWS[None]})):
        part = {"type": "embeds", "embeds": {"embeds": ROWS} | more}
        with pytest.raises(BadInputError, match=f"cannot take {name}"):
            ask(component, messages=[{"role": "user", "content": [part]}])
    assert isinstance(SeenPicture(ROWS), SeenPicture)
    assert server.asked == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen2_5_vl"}, "M-RoPE"),
        ({"model_type": "qwen3_vl_moe"}, "M-RoPE"),
        ({"model_type": "gemma3"}, "both ways"),
        ({"model_type": "gemma2"}, "multiplies"),
        ({"model_type": "granite", "embedding_multiplier": 12.0}, "multiplies"),
        ({"model_type": "internvl", "text_config": {}}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_models_that_vectors_do_not_tell_enough_are_refused(
    config: dict[str, Any], reason: str | None
) -> None:
    found = unreadable(config)
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://10.0.0.1:8000"}, "another machine"),
        ({"url": "https://127.0.0.1:8000"}, "no url"),
        ({"url": "127.0.0.1:8000"}, "no url"),
        ({"url": URL, "max_batch": 4}, "max_batch is said to a server that runs"),
        ({"max_batch": 0}, "vllm-chat.max_batch"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"batch": 1}, "unknown option 'batch'"),
        ({"dtype": "int8"}, "unknown dtype"),
    ],
)
def test_options_are_checked(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AtollError, match=message):
        VllmChat.load(Setup(options={"model": str(model[1])} | options))


def test_addresses_of_this_machine_are_taken() -> None:
    assert find_component("vllm-chat") is VllmChat
    for given in ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"):
        assert check_loopback(given) == "http://127.0.0.1:8000"
    assert check_loopback("http://[::1]:8000/v1") == "http://[::1]:8000"


def test_gpus_are_those_that_are_visible() -> None:
    assert visible_gpus("cpu", 1, {}) == ()
    assert visible_gpus("cuda:1", 2, {}) == ("1", "2")
    assert visible_gpus("cuda:0", 2, {"CUDA_VISIBLE_DEVICES": "5,7,2"}) == ("5", "7")
    with pytest.raises(AtollError, match="more than are visible"):
        visible_gpus("cuda:1", 2, {"CUDA_VISIBLE_DEVICES": "5,7"})


def test_the_command_says_limits_and_no_key(tmp_path: Path) -> None:
    launch = EngineLaunch(max_num_seqs=8, gpu_memory_utilization=0.4, max_model_len=4096)
    order = ServerOrder(tmp_path, launch, None, str(STANDIN), ("3", "4"), language_only=True)
    command = order.command(8123)
    words = " ".join(command.arguments)
    for said in (
        f"serve {tmp_path} --host 127.0.0.1 --port 8123",
        "--tensor-parallel-size 2",
        "--max-num-seqs 8",
        "--gpu-memory-utilization 0.4",
        "--max-model-len 4096",
        "--enable-prompt-embeds",
        "--language-model-only",
    ):
        assert said in words
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "3,4"
    assert "KEY" not in " ".join(command.environment)
    with pytest.raises(AtollError, match="no program 'no-such-vllm'"):
        ServerOrder(tmp_path, launch, program="no-such-vllm").command(1)


def own_server(folder: Path, log: Path) -> VllmServer:
    return VllmServer(ServerOrder(folder, EngineLaunch(), "float32", str(STANDIN), log=log))


async def test_a_server_of_ones_own_comes_and_goes(model: Any, tmp_path: Path) -> None:
    """It serves whoever started it; killed, what runs fails and what comes is refused; closed, it is gone."""
    options = {"model": str(model[1]), "program": str(STANDIN), "log": str(tmp_path / "log")}
    component = VllmChat.load(Setup(options=options))

    async def answer(tokens: int) -> list[Any]:
        given = {"messages": [USER], "max_tokens": tokens, "temperature": 0.0}
        return [piece async for piece in component.stream(given)]

    await component.start()
    server = component.engine._server
    try:
        assert component.engine.max_length == 48
        (*_, done) = await answer(3)
        assert done.value["completion_tokens"] == 3
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        assert server._ended is not None
        await asyncio.wait_for(asyncio.shield(server._ended), 10.0)
        assert server.has_ended
        with pytest.raises(EngineError):
            await answer(3)
    finally:
        await component.close()
    await component.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "broken").touch(), "no such architecture"),
        (lambda _: None, "not ready within 0.01 s"),
    ],
)
async def test_a_server_that_does_not_come_says_why(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(tmp_path)
    server = own_server(tmp_path, tmp_path / "log")
    try:
        with pytest.raises(EngineError, match=message):
            await server.start(0.01 if "0.01" in message else 30.0)
    finally:
        await server.close()
    assert server.has_ended
