"""Clients of an any-to-any model: what they ask, what they hear, and whether it is what they should.

Five kinds of requests: text, a picture with a question, a spoken question that is answered aloud (all three
streamed), a transcription, and speech as sound.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import AtollError
from atoll.runtime.http.http_client import FetchError, request, stream_lines

SILENT_S = 60.0
"""How long a client waits for the next word."""
WHOLE_S = 180.0
"""How long a client waits for a whole answer."""
KINDS = ("chat", "vision", "spoken", "transcription", "speech")
_BOUNDARY = "atoll-benchmark-boundary"


class AskError(AtollError):
    """An answer did not come, was an error, or broke off."""


@dataclass(frozen=True, slots=True)
class ClientOrder:
    """A request: its name, its kind (of `KINDS`), where it goes, and a body in JSON or as a form."""

    name: str
    kind: str
    path: str
    body: dict[str, Any] | None = None
    form: bytes = b""


@dataclass(slots=True)
class HeardReply:
    """What came: text and sound, on which way, and the longest silence in between, in seconds."""

    text: str = ""
    sound: bytearray = field(default_factory=bytearray)
    pieces: int = 0
    way: tuple[str, ...] = ()
    """Executors, as the headers name them: in the order in which they came to be needed."""
    first_s: float | None = None
    gap_s: float = 0.0
    took_s: float = 0.0

    def is_same(self, other: HeardReply) -> bool:
        """Whether text and sound are the same, letter by letter and byte by byte."""
        return self.text == other.text and self.sound == other.sound

    def difference(self, other: HeardReply) -> str:
        """Return how this differs from what it should be."""
        if self.text != other.text:
            return f"{self.text!r} instead of {other.text!r}"
        return f"{len(self.sound)} bytes of sound instead of {len(other.sound)}, or others"


def chat_order(
    name: str, model: str, kind: str, content: Any, tokens: int, *, aloud: bool = False
) -> ClientOrder:
    """Return a chat, streamed; `aloud` wants it spoken, too."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    if aloud:
        body |= {"modalities": ["text", "audio"], "audio": {"voice": "heart", "format": "pcm16"}}
    return ClientOrder(name, kind, "/v1/chat/completions", body)


def picture_part(image: bytes) -> dict[str, Any]:
    """Return a PNG as a part of a message."""
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def sound_part(sound: bytes) -> dict[str, Any]:
    """Return a WAV file as a part of a message."""
    data = base64.b64encode(sound).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def speech_order(name: str, model: str, text: str) -> ClientOrder:
    """Return a text to be spoken, as sound."""
    body = {"model": model, "input": text, "voice": "heart", "response_format": "wav"}
    return ClientOrder(name, "speech", "/v1/audio/speech", body)


def transcription_order(name: str, model: str, sound: bytes) -> ClientOrder:
    """Return a sound to be written down."""
    head = (
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="model"\r\n\r\n{model}\r\n'
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
        "content-type: audio/wav\r\n\r\n"
    )
    form = head.encode() + sound + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return ClientOrder(name, "transcription", "/v1/audio/transcriptions", form=form)


async def ask(
    url: str,
    order: ClientOrder,
    reply: HeardReply,
    *,
    silent_s: float = SILENT_S,
    whole_s: float = WHOLE_S,
) -> None:
    """Ask, and write down what comes as it comes; AskError if that is not all of an answer."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(whole_s):
            if order.body is not None and order.body.get("stream"):
                await _ask_stream(url, order, reply, began_s, silent_s)
            else:
                await _ask_whole(url, order, reply, whole_s)
    except TimeoutError:
        raise AskError(f"no answer within {whole_s:g} s") from None
    except FetchError as error:
        raise AskError(str(error)) from error
    reply.took_s = time.monotonic() - began_s


async def _ask_whole(url: str, order: ClientOrder, reply: HeardReply, whole_s: float) -> None:
    sent: dict[str, Any] = {"body": order.body}
    if order.body is None:
        kind = f"multipart/form-data; boundary={_BOUNDARY}"
        sent = {"method": "POST", "data": order.form, "headers": {"content-type": kind}}
    answer = await request(f"{url}{order.path}", timeout_s=whole_s, **sent)
    if answer.status != 200:
        raise AskError(f"status {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}")
    reply.way = _way(answer.headers.get("x-atoll-path", ""))
    if order.kind == "transcription":
        reply.text = json.loads(answer.body)["text"]
    else:
        reply.sound += answer.body


async def _ask_stream(
    url: str, order: ClientOrder, reply: HeardReply, began_s: float, silent_s: float
) -> None:
    def note_headers(headers: dict[str, str]) -> None:
        reply.way = _way(headers.get("x-atoll-path", ""))

    last_s: float | None = None
    ended = False
    async with contextlib.aclosing(_events(url, order, note_headers, silent_s)) as events:
        async for choice in events:
            delta = choice["delta"]
            ended = ended or choice["finish_reason"] is not None
            audio = delta.get("audio") or {}
            text, sound = delta.get("content") or audio.get("transcript"), audio.get("data")
            if not text and not sound:
                continue
            now_s = time.monotonic()
            if last_s is None:
                reply.first_s = now_s - began_s
            else:
                reply.gap_s = max(reply.gap_s, now_s - last_s)
            last_s = now_s
            reply.pieces += 1
            reply.text += text or ""
            reply.sound += base64.b64decode(sound or "")
    if not ended:
        raise AskError("the stream has no finish_reason")


async def _events(
    url: str, order: ClientOrder, on_headers: Callable[[dict[str, str]], None], silent_s: float
) -> AsyncGenerator[dict[str, Any], None]:
    lines = stream_lines(
        f"{url}{order.path}", body=order.body, timeout_s=silent_s, on_headers=on_headers
    )
    async with contextlib.aclosing(lines):
        async for line in lines:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if not text.startswith("data: "):
                continue
            event = json.loads(text.removeprefix("data: "))
            if "error" in event:
                raise AskError(f"the stream broke: {event['error']['message']}")
            for choice in event["choices"]:
                yield choice
    raise AskError("the stream ended early")


def _way(path: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(step.partition("=")[2] for step in path.split(";") if "=" in step))
