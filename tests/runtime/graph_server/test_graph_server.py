"""A graph server over real executor processes; those that are killed are in `tests/slow/tasks`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from atoll.runtime.http.http_client import FetchError, request
from atoll.runtime.http.listen_address import free_ports
from atoll.runtime.media.sounds import encode_wav
from tests.runtime.graph_server.conftest import NAMES, ExecutorFarm, sse
from tests.runtime.graph_server.toys import HERE, RATE_HZ, words_of

CHAT = "/v1/chat/completions"
SERVICE = {
    "tasks": {"chat": f"{HERE}:ToyAssistant", "speech": f"{HERE}:ToySpeech"},
    "options": {**NAMES, "sees": False},
}
TEXT = "one. two. three. four. five. six. seven. eight"
PATIENCE_S = 60.0


def turn(text: str = TEXT, *, audio: bool = False, sound: bool = False) -> dict[str, Any]:
    content: list[Any] = [{"type": "text", "text": text}]
    if sound:
        data = base64.b64encode(encode_wav(np.zeros(16_000, np.float32), 16_000)).decode()
        content.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    body: dict[str, Any] = {"model": "omni", "messages": [{"role": "user", "content": content}]}
    if audio:
        body |= {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
    return body


def answer_to(text: str, *heard: str) -> str:
    parts = [{"type": "text", "text": each} for each in (text, *heard)]
    return "".join(words_of([{"content": parts}]))


def spoken_bytes(text: str) -> int:
    """Return how many bytes the toy voice speaks of a text, sentence by sentence."""
    return 2 * 240 * sum(len(sentence) + 1 for sentence in text.split(". ") if sentence)


async def settled(farm: ExecutorFarm) -> None:
    """Wait until nothing is stored anywhere any more."""
    async with asyncio.timeout(PATIENCE_S):
        while farm.stored():
            await asyncio.sleep(0.02)


async def test_sound_goes_over_two_executors_and_comes_back_as_speech(pair: ExecutorFarm) -> None:
    async with pair.serve(SERVICE) as url:
        answer = await request(url + CHAT, body=turn(audio=True, sound=True), timeout_s=PATIENCE_S)
        assert answer.status == 200, answer.body
        message = json.loads(answer.body)["choices"][0]["message"]
        transcript = message["audio"]["transcript"]
        assert transcript == answer_to(TEXT, "2000 steps")
        spoken = base64.b64decode(message["audio"]["data"])
        assert len(spoken) == spoken_bytes(transcript)
        for step in ("Encoder=ears-0", "Chat=think-0", "Voice=ears-0"):
            assert step in answer.headers["x-atoll-path"]
        usage = json.loads(answer.headers["x-atoll-usage"])
        assert usage["audio_seconds"] == 1.0
        assert usage["speech_seconds"] * RATE_HZ * 2 == len(spoken)
        await settled(pair)


async def test_a_client_that_leaves_cancels_everything(pair: ExecutorFarm) -> None:
    async with pair.serve(SERVICE) as url:
        body = turn(audio=True, sound=True) | {"stream": True}
        events = sse(url + CHAT, body)
        await anext(events)
        await events.aclose()
        await settled(pair)
        async with asyncio.timeout(PATIENCE_S):
            while json.loads((await request(url + "/atoll/v1/status")).body)["running"]:
                await asyncio.sleep(0.02)


async def test_a_voice_that_is_not_there_is_a_plain_error(pair: ExecutorFarm) -> None:
    async with pair.serve(SERVICE, routing="dynamic") as url:
        body = {"model": "omni", "input": "Hi.", "voice": "nobody"}
        answer = await request(url + "/v1/audio/speech", body=body, timeout_s=PATIENCE_S)
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["param"] == "voice"
        answer = await request(
            url + "/v1/audio/speech", body=body | {"voice": "heart"}, timeout_s=PATIENCE_S
        )
        assert answer.headers["content-type"] == "audio/wav"
        assert len(answer.body) == 44 + 2 * 240 * 3


async def test_what_clients_brought_is_fetched_by_executors_on_other_hosts(
    pair: ExecutorFarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graph server claims to be elsewhere: its files are no use, and its door is asked for the bytes.
    monkeypatch.setattr("atoll.runtime.executor.store.identify_host", lambda: "elsewhere")

    async with pair.serve(SERVICE) as url:
        answer = await request(url + CHAT, body=turn(sound=True), timeout_s=PATIENCE_S)
        assert answer.status == 200, answer.body
        assert b"2000 steps" in answer.body


def test_the_process_finishes_a_stream_before_it_stops(pair: ExecutorFarm) -> None:
    (port,) = free_ports(1)
    config = pair.graph_server_config(SERVICE, port=port, store=str(pair.folder / "process.store"))
    file = pair.folder / "graph-server.json"
    file.write_text(config.to_json())
    code = (
        "import sys\n"
        "from atoll.runtime.graph_server.graph_server_process import main\n"
        f"code = main(['--config', {str(file)!r}])\n"
        "heavy = {'torch', 'onnxruntime', 'transformers', 'numba'} & set(sys.modules)\n"
        "sys.exit(code if not heavy else f'it loaded {heavy}')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen((sys.executable, "-c", code), env=environment)

    async def go() -> None:
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(FetchError):
                    if (await request(url + "/health")).status == 200:
                        break
                await asyncio.sleep(0.05)
        texts, last = "", None
        async for event in sse(url + CHAT, turn() | {"stream": True}):
            last = event
            if event != "[DONE]":
                texts += event["choices"][0]["delta"].get("content", "")
                if texts.count(" ") == 2:
                    process.send_signal(signal.SIGTERM)
        assert last == "[DONE]"
        assert texts == answer_to(TEXT)

    try:
        asyncio.run(go())
        assert process.wait(PATIENCE_S) == 0
        assert not (pair.folder / "process.store").exists()
    finally:
        process.kill()
        process.wait()
