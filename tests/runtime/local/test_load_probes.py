"""A load of our own on a server: one on a virtual clock stands for it, then one that answers over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from atoll.core.errors import InputError
from atoll.perf.server_fit import ServerLoad
from atoll.runtime.http.handlers import Answer, EventStream, HandlerServer, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.local.load_probes import (
    LoadProbes,
    ProbeAnswer,
    Words,
    measure_alone,
    measure_loops,
)
from atoll.runtime.local.server_profile import words_client

PER_WORD = 2
FIRST_S, PROMPT_S, TOKEN_S, SEQUENCE_S = 0.012, 1e-4, 0.01, 0.001
PROBES = LoadProbes(prompts=(16, 64), clients=(1, 3), prompt=32, answer=8, repeats=3, rounds=4)


class SteppingServer:
    """Each step gives all that run a token; its length is set by how many they are. Nothing sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.prompts: list[str] = []
        self._running: list[tuple[int, list[float], asyncio.Event]] = []
        self._stepping: asyncio.Task[None] | None = None

    async def ask(self, prompt: str, tokens: int) -> ProbeAnswer:
        self.prompts.append(prompt)
        counted = PER_WORD * len(prompt.split())
        alone, sent_s = not self._running, self.now_s
        if alone:
            self.now_s += FIRST_S + PROMPT_S * counted
        came_s, done = [self.now_s], asyncio.Event()
        self._running.append((tokens, came_s, done))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        await done.wait()
        return ProbeAnswer(sent_s, came_s, counted)

    async def _step(self) -> None:
        await asyncio.sleep(0)
        while self._running:
            self.now_s += TOKEN_S + SEQUENCE_S * (len(self._running) - 1)
            for one in list(self._running):
                tokens, came_s, done = one
                if len(came_s) < tokens:
                    came_s.append(self.now_s)
                if len(came_s) >= tokens:
                    self._running.remove(one)
                    done.set()
            for _ in range(6):
                await asyncio.sleep(0)


async def test_what_clients_see_alone_and_together_is_found() -> None:
    server, words, said = SteppingServer(), Words(seed=3), []

    def say(share: float, what: str) -> None:
        said.append((share, what))

    alone = await measure_alone(server.ask, words, PROBES, say)
    # Words are counted as the server counts them.
    assert [load.input_tokens for load in alone] == [16.0, 64.0]
    for load in alone:
        assert (load.clients, load.output_tokens) == (1.0, 16.0)
        assert load.ttft_s == pytest.approx(FIRST_S + PROMPT_S * load.input_tokens)
        assert load.tpot_s == pytest.approx(TOKEN_S)
    one, three = [load async for load in measure_loops(server.ask, words, PROBES, say)]
    assert (one.clients, three.clients) == (1.0, 3.0)
    assert one.tpot_s == pytest.approx(TOKEN_S)
    assert TOKEN_S < (three.tpot_s or 0.0) <= TOKEN_S + 2 * SEQUENCE_S + 1e-9
    assert three.varied
    assert 4.0 <= three.output_tokens <= 12.0
    # No cache knows a prompt, and none begins as another does for long.
    assert len(set(server.prompts)) == len(server.prompts)
    assert said[-1] == (0.5, "3 clients at a time")


def test_probes_are_made_to_fit_a_deadline() -> None:
    alone = [ServerLoad(1.0, 512.0, 16.0, 0.05, 0.01)]
    whole = LoadProbes()
    assert whole.within(alone, 1e6) == whole
    less = whole.within(alone, whole.seconds(alone) / 2.0)
    assert less.answer < whole.answer
    assert less.seconds(alone) <= whole.seconds(alone) / 2.0
    short = replace(whole, answer=32)
    assert short.within(alone, short.seconds(alone) * 0.6).clients == (4, 16)
    with pytest.raises(InputError, match="4 clients take about"):
        whole.within(alone, 0.1)


async def test_a_server_is_asked_in_words() -> None:
    asked: list[dict[str, object]] = []

    async def stream(tokens: int, usage: bool) -> AsyncGenerator[bytes, None]:
        for _ in range(tokens):
            yield b'data: {"choices": [{"text": "x"}]}\n\n'
        if usage:
            yield b'data: {"choices": [], "usage": {"prompt_tokens": 7}}\n\n'
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> Answer:
        body = json.loads(request.body)
        asked.append(body)
        if body["model"] == "broken":
            return Response(b"out of memory", status=500)
        return EventStream(stream(body["max_tokens"], body["model"] == "m"))

    server = HandlerServer(answer)
    host, port = await server.start("127.0.0.1", 0)
    url = f"http://{host}:{port}"
    try:
        found = await words_client(url, "m")("a b c", 4)
        assert (found.prompt_tokens, len(found.came_s)) == (7, 4)
        assert found.sent_s <= found.came_s[0]
        assert asked[0]["prompt"] == "a b c"
        with pytest.raises(InputError, match="does not say how many tokens"):
            await words_client(url, "mute")("a b c", 4)
        with pytest.raises(InputError, match="500: out of memory"):
            await words_client(url, "broken")("a b c", 4)
    finally:
        await server.close()
