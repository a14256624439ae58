"""Clients of the demonstration: they ask a gateway over HTTP, with text, sound and pictures."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.core.errors import AtollError

SOUND_RATE_HZ = 24_000
_PICTURE_SIDE_PX = 224
_PATIENCE_S = 120.0
_SPOKEN_TOKENS = 48


class DemoError(AtollError):
    """The demonstration did not show what it should have."""


@dataclass(slots=True)
class HeardAnswer:
    """A spoken answer: text and sound (16-bit samples), the executors it went over, and when it began."""

    text: str = ""
    sound: bytearray = field(default_factory=bytearray)
    path: str = ""
    first_text_s: float | None = None
    first_sound_s: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of speech."""
        return len(self.sound) / 2 / SOUND_RATE_HZ


async def stream_text(
    url: str, model: str, question: str, max_tokens: int
) -> AsyncGenerator[str, None]:
    """Yield the pieces of a written answer as they come."""
    chat = _chat(model, question, max_tokens)
    async with contextlib.aclosing(_stream_deltas(url, chat)) as deltas:
        async for delta in deltas:
            if text := delta.get("content"):
                yield text


async def ask_aloud(
    url: str,
    model: str,
    sound: bytes,
    picture: bytes,
    interrupt: Callable[[], None] | None = None,
    after: int = 0,
) -> HeardAnswer:
    """Ask with sound and picture; `interrupt` is called when so many pieces of the answer are there."""
    answer, pieces = HeardAnswer(), 0
    image = {"url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"}
    speech = {"data": base64.b64encode(sound).decode(), "format": "wav"}
    content = [
        {"type": "image_url", "image_url": image},
        {"type": "input_audio", "input_audio": speech},
    ]
    chat = _chat(model, content, _SPOKEN_TOKENS)
    chat |= {"modalities": ["text", "audio"], "audio": {"voice": "heart", "format": "pcm16"}}
    begun_s = time.monotonic()

    def note_headers(headers: dict[str, str]) -> None:
        answer.path = headers.get("x-atoll-path", "")

    async with contextlib.aclosing(_stream_deltas(url, chat, note_headers)) as deltas:
        async for delta in deltas:
            audio = delta.get("audio") or {}
            if text := audio.get("transcript"):
                answer.first_text_s = answer.first_text_s or time.monotonic() - begun_s
                answer.text += text
                pieces += 1
                if pieces == after and interrupt is not None:
                    interrupt()
            if data := audio.get("data"):
                answer.first_sound_s = answer.first_sound_s or time.monotonic() - begun_s
                answer.sound += base64.b64decode(data)
    if interrupt is not None and pieces < after:
        raise DemoError("the answer was too short to kill anything")
    return answer


def _chat(model: str, content: object, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }


async def _stream_deltas(
    url: str, chat: dict[str, Any], on_headers: Callable[[dict[str, str]], None] | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    from atoll.runtime.http.http_client import stream_lines

    lines = stream_lines(
        f"{url}/v1/chat/completions", body=chat, timeout_s=_PATIENCE_S, on_headers=on_headers
    )
    async with contextlib.aclosing(lines):
        async for line in lines:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if text.startswith("data: "):
                event = json.loads(text.removeprefix("data: "))
                if "error" in event:
                    raise DemoError(f"the stream broke: {event['error']['message']}")
                for choice in event["choices"]:
                    yield choice["delta"]
    raise DemoError("the stream ended early")


async def speak(url: str, model: str, text: str) -> bytes:
    """Return text as speech: a WAV file."""
    order = {"model": model, "input": text, "voice": "heart", "response_format": "wav"}
    return await _post(f"{url}/v1/audio/speech", body=order)


async def transcribe(url: str, model: str, sound: bytes) -> str:
    """Return what is said in a WAV file."""
    boundary = "atoll-demo-boundary"
    head = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{model}\r\n'
        f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="question.wav"\r\n'
        "content-type: audio/wav\r\n\r\n"
    )
    answer = await _post(
        f"{url}/v1/audio/transcriptions",
        data=head.encode() + sound + f"\r\n--{boundary}--\r\n".encode(),
        headers={"content-type": f"multipart/form-data; boundary={boundary}"},
    )
    return str(json.loads(answer)["text"])


async def _post(url: str, **what: Any) -> bytes:
    from atoll.runtime.http.http_client import request

    answer = await request(url, method="POST", timeout_s=_PATIENCE_S, **what)
    if answer.status != 200:
        shown = answer.body[:200].decode("utf-8", "replace")
        raise DemoError(f"status {answer.status}: {shown}")
    return answer.body


def draw_circle(colour: tuple[int, int, int] = (220, 30, 30)) -> bytes:
    """Return a PNG of a circle on white."""
    from atoll.runtime.media.pictures import encode_png

    offsets = np.arange(_PICTURE_SIDE_PX) - (_PICTURE_SIDE_PX - 1) / 2.0
    inside = offsets[:, None] ** 2 + offsets**2 <= (0.3 * _PICTURE_SIDE_PX) ** 2
    return encode_png(np.where(inside[..., None], colour, 255).astype(np.uint8))
