"""Asks an assistant aloud, over its gateway, and notes when text and sound came."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    """Ask one question aloud; RuntimeError where the answer is not whole."""
    return await ask_chat(url, spoken_body(model, asked, max_tokens), number, zero_s)


def spoken_body(model: str, asked: SpokenQuestion, max_tokens: int) -> dict[str, Any]:
    """Return the body of a chat in which a question is spoken, to be answered aloud."""
    sound = {"data": base64.b64encode(asked.wav).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": sound}]
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "heart", "format": "pcm16"}}
    return chat_body(model, content, max_tokens) | spoken


def chat_body(model: str, content: Any, max_tokens: int) -> dict[str, Any]:
    """Return the body of a chat of one message, streamed with its usage."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask_chat(url: str, body: dict[str, Any], number: int, zero_s: float) -> TimedAnswer:
    """Ask, and take note of the times; RuntimeError where the answer is not whole."""
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
                if text := audio.get("transcript") or choice["delta"].get("content"):
                    found.first_text_s = found.first_text_s or now_s
                    found.text += text
                if sent := audio.get("data"):
                    found.first_audio_s = found.first_audio_s or now_s
                    found.speech_s += len(base64.b64decode(sent)) / 2 / _RATE_HZ
    found.took_s = time.perf_counter() - began_s
    if not (ended and found.text and (found.speech_s or "modalities" not in body)):
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


Ask = Callable[[float], Awaitable[TimedAnswer]]
"""Asks something; takes when its run began, on the clock of `time.perf_counter`."""


def questions_of(
    url: str, model: str, questions: Sequence[tuple[int, SpokenQuestion]], max_tokens: int
) -> list[Ask]:
    """Return spoken questions as what loops ask."""
    return [partial(ask, url, model, asked, n, max_tokens) for n, asked in questions]


async def closed_loop(asks: Sequence[Ask], clients: int) -> list[TimedAnswer]:
    """Let clients ask everything, each its next one as soon as it is answered."""
    left = list(reversed(asks))
    found: list[TimedAnswer] = []
    zero_s = time.perf_counter()

    async def client() -> None:
        while left:
            found.append(await left.pop()(zero_s))

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


async def open_loop(asks: Sequence[Ask], arrivals_s: Sequence[float]) -> list[TimedAnswer]:
    """Ask each when its time has come, however many are being answered."""
    zero_s = time.perf_counter()

    async def later(each: Ask, at_s: float) -> TimedAnswer:
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - zero_s)))
        return await each(zero_s)

    timed = zip(asks, arrivals_s, strict=True)
    return await asyncio.gather(*(later(each, at_s) for each, at_s in timed))
