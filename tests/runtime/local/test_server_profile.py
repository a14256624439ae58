"""A server profiled from outside: one that batches as engines do, on a virtual clock, stands for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from atoll.core.errors import InputError
from atoll.runtime.http.handlers import Answer, EventStream, HandlerServer, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.local.server_profile import (
    ServerProbes,
    completions_client,
    count_tokens,
    mean_gap,
    measure_server,
)

BESIDE_S = 0.015
ONE_S, ROW_S, SEQUENCE_S = 0.03, 0.001, 0.004
PROBES = ServerProbes(
    prompts=(32, 96), sequences=(1, 2, 4), mixed=((96, 3),), context=16, repeats=2
)


class BatchingServer:
    """Runs all that is there in one step: weights once, prompt rows and sequences beside them.

    Time is that of the steps; answers wait on events, so nothing sleeps.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._came: list[tuple[int, int, list[float], asyncio.Event]] = []
        self._decoding: list[tuple[int, list[float], asyncio.Event]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, prompt: int, tokens: int) -> list[float]:
        done = asyncio.Event()
        times = [self.now_s]
        if not self._came and not self._decoding:
            self.now_s += BESIDE_S
        self._came.append((prompt, tokens, times, done))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        await done.wait()
        return times

    async def _run(self) -> None:
        # Clients that ask at once are all there before the first step.
        await asyncio.sleep(0)
        while self._came or self._decoding:
            new, self._came = self._came, []
            rows = sum(prompt for prompt, *_ in new)
            sequences = len(self._decoding)
            self.now_s += ONE_S + ROW_S * max(0, rows - 1) + SEQUENCE_S * max(0, sequences - 1)
            still = []
            for tokens, times, done in self._decoding:
                times.append(self.now_s)
                still += [(tokens, times, done)] if len(times) <= tokens else []
                if len(times) > tokens:
                    done.set()
            for _, tokens, times, done in new:
                times.append(self.now_s)
                still += [(tokens, times, done)] if tokens > 1 else []
                if tokens == 1:
                    done.set()
            self._decoding = still
            for _ in range(4):
                await asyncio.sleep(0)


def test_the_steps_of_a_server_are_found() -> None:
    server = BatchingServer()
    found = asyncio.run(measure_server(server.ask, 30, PROBES))
    assert found.beside_s == pytest.approx(BESIDE_S)
    prompts = {32: ONE_S + 31 * ROW_S, 96: ONE_S + 95 * ROW_S}
    assert dict(found.steps.prefill_s) == pytest.approx(prompts)
    decodes = {n: ONE_S + SEQUENCE_S * (n - 1) for n in (1, 2, 4)}
    assert dict(found.steps.decode_s) == pytest.approx(decodes)
    # One step with a prompt and three sequences.
    assert found.steps.mixed_s[0][2] == pytest.approx(ONE_S + 95 * ROW_S + 2 * SEQUENCE_S, rel=0.05)
    profile = found.profile(3000.0)
    assert profile.shared_s_per_layer * 30 == pytest.approx(ONE_S, rel=0.1)
    assert (profile.max_layers, profile.kv_tokens[-1]) == (30, 3000.0)


def test_the_gap_is_that_of_the_time_all_answer() -> None:
    early = [0.0, *(0.1 * k for k in range(1, 11)), *(1.0 + 0.2 * k for k in range(1, 6))]
    late = [0.9, *(1.0 + 0.2 * k for k in range(1, 10))]
    assert mean_gap([early, late]) == pytest.approx(0.2)
    with pytest.raises(InputError, match="never ran at the same time"):
        mean_gap([[0.0, 0.1, 0.2], [1.0, 1.1, 1.2]])


def test_tokens_that_come_together_are_counted() -> None:
    piece = {"choices": [{"text": "a"}]}
    assert count_tokens(piece, 3) == 4
    assert count_tokens(piece | {"usage": {"completion_tokens": 6}}, 3) == 6
    assert count_tokens(piece | {"usage": {"completion_tokens": 2}}, 3) == 3
    assert count_tokens({"choices": [], "usage": {"completion_tokens": 6}}, 5) == 5


@pytest.mark.parametrize("url", ["localhost:8000", "http://here", "https://here:1", "http://:1"])
def test_an_address_is_checked(url: str) -> None:
    with pytest.raises(InputError, match="is no address"):
        completions_client(url, "m")


@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_server_is_asked_for_streams(pieces: int) -> None:
    asked: list[dict[str, Any]] = []

    async def stream() -> AsyncGenerator[bytes, None]:
        for _ in range(pieces):
            yield b'data: {"choices": [{"text": "x"}]}\n\n'
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> Answer:
        asked.append(json.loads(request.body))
        if asked[-1]["model"] != "m":
            return Response(b"who is that?", status=404)
        return EventStream(stream())

    server = HandlerServer(answer)
    host, port = await server.start("127.0.0.1", 0)
    try:
        url = f"http://{host}:{port}/"
        with pytest.raises(InputError, match="404: who is that"):
            await completions_client(url, "other")(4, 3)
        ask = completions_client(url, "m")
        if pieces < 3:
            with pytest.raises(InputError, match="1 tokens came one by one where 3"):
                await ask(4, 3)
        else:
            times = await ask(4, 3)
            assert len(times) == 4
            assert times == sorted(times)
    finally:
        await server.close()
    assert (len(asked[-1]["prompt"]), asked[-1]["max_tokens"]) == (4, 3)
