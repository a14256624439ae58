"""Asks an assistant aloud, over its gateway, and notes when text and sound came."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.runtime.http.http_client import request, stream_lines

_TIMEOUT_S = 180.0
_RATE_HZ = 24_000
_BOUNDARY = "benchmark-of-speech"


@dataclass(frozen=True, slots=True)
class SpokenQuestion:
    """A question: its text, and a WAV file of somebody who says it."""

    text: str
    wav: bytes
    seconds: float


@dataclass(slots=True)
class TimedAnswer:
    """An answer, with seconds since it was asked for; `began_s` is on the clock of its run."""

    question: int
    began_s: float
    first_text_s: float = 0.0
    first_audio_s: float = 0.0
    took_s: float = 0.0
    text: str = ""
    speech_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def ask(
    url: str, model: str, asked: SpokenQuestion, number: int, max_tokens: int, zero_s: float
) -> TimedAnswer:
    """Ask one question; RuntimeError where the answer is not whole."""
    sound = {"data": base64.b64encode(asked.wav).decode(), "format": "wav"}
    body = {
        "model": model,
        "messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "heart", "format": "pcm16"},
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = time.perf_counter()
    found = TimedAnswer(number, began_s - zero_s)
    ended = False
    lines = stream_lines(f"{url}/v1/chat/completions", body=body, timeout_s=_TIMEOUT_S)
    async with contextlib.aclosing(lines):
        async for line in lines:
            if not line.startswith(b"data: "):
                continue
            now_s = time.perf_counter() - began_s
            data = line[6:].strip()
            if data == b"[DONE]":
                ended = True
                break
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"question {number}: {event['error']['message']}")
            if usage := event.get("usage"):
                found.prompt_tokens = usage["prompt_tokens"]
                found.completion_tokens = usage["completion_tokens"]
            for choice in event["choices"]:
                audio = choice["delta"].get("audio") or {}
                if text := audio.get("transcript"):
                    found.first_text_s = found.first_text_s or now_s
                    found.text += text
                if sent := audio.get("data"):
                    found.first_audio_s = found.first_audio_s or now_s
                    found.speech_s += len(base64.b64decode(sent)) / 2 / _RATE_HZ
    found.took_s = time.perf_counter() - began_s
    if not (ended and found.text and found.speech_s):
        raise RuntimeError(f"question {number}: the answer is not whole: {found}")
    return found


async def transcribe(url: str, model: str, asked: SpokenQuestion) -> str:
    """Return what the assistant's ears hear."""
    head = (
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{model}\r\n'
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="question.wav"\r\n'
        "content-type: audio/wav\r\n\r\n"
    )
    answer = await request(
        f"{url}/v1/audio/transcriptions",
        method="POST",
        data=head.encode() + asked.wav + f"\r\n--{_BOUNDARY}--\r\n".encode(),
        headers={"content-type": f"multipart/form-data; boundary={_BOUNDARY}"},
        timeout_s=_TIMEOUT_S,
    )
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.body[:200]!r}")
    return str(json.loads(answer.body)["text"])


async def closed_loop(
    url: str,
    model: str,
    questions: Sequence[tuple[int, SpokenQuestion]],
    clients: int,
    max_tokens: int,
) -> list[TimedAnswer]:
    """Let clients ask all questions, each its next one as soon as it is answered."""
    left = list(reversed(questions))
    found: list[TimedAnswer] = []
    zero_s = time.perf_counter()

    async def client() -> None:
        while left:
            number, asked = left.pop()
            found.append(await ask(url, model, asked, number, max_tokens, zero_s))

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def open_loop(
    url: str,
    model: str,
    questions: Sequence[tuple[int, SpokenQuestion]],
    arrivals_s: Sequence[float],
    max_tokens: int,
) -> list[TimedAnswer]:
    """Ask each question when its time has come, however many are being answered."""
    zero_s = time.perf_counter()

    async def later(number: int, asked: SpokenQuestion, at_s: float) -> TimedAnswer:
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - zero_s)))
        return await ask(url, model, asked, number, max_tokens, zero_s)

    timed = zip(questions, arrivals_s, strict=True)
    return await asyncio.gather(*(later(n, asked, at_s) for (n, asked), at_s in timed))
