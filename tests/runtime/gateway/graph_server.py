"""A graph server for tests: it hears, speaks, draws and embeds by a script, and fails as it is told to."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from typing import Any

from tests.runtime.gateway.engine import Fault, ScriptedEngine, _die

PIECE = bytes(range(256)) * 18 + bytes(192)
"""A tenth of a second of sound: 4800 bytes at 24 kHz."""
PIECES = 10
WAV_HEADER = b"RIFF" + bytes(40)
SOUND = PIECE * PIECES
SPOKEN = base64.b64encode(PIECE * 40).decode()
"""A delta of a chat: larger than what one read of a socket brings."""
PATH = "encoder:e1 > llm:l1"
TEXT = ["I", " see", " a", " sea"]


@dataclass
class ScriptedGraphServer(ScriptedEngine):
    """Answers OpenAI's requests for media; a fault after n pieces kills it there."""

    kind: str = "openai"
    notes: str = ""
    """More headers, with their line ends."""

    async def _answer(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], fault: Fault
    ) -> None:
        if fault.what in ("404", "405"):
            _send(writer, int(fault.what), b'{"error":{"message":"not here","type":"x"}}')
        elif fault.what != "die_after" and fault.what != "none":
            await super()._answer(writer, path, body, fault)
        elif path == "/v1/audio/speech":
            await self._speak(writer, body, fault)
        elif path == "/v1/audio/transcriptions":
            await self._transcribe(writer, fault)
        elif path == "/v1/images/generations":
            usage = {"image_pixels": 128 * 128 * (body.get("n") or 1)}
            drawn = [{"b64_json": "AAAA"} for _ in range(body.get("n") or 1)]
            _send_json(writer, {"created": 1, "data": drawn, "usage": usage})
        elif path == "/v1/embeddings":
            vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
            usage = {"prompt_tokens": 3, "total_tokens": 3}
            data = {"object": "list", "model": "m", "data": [vector], "usage": usage}
            _send_json(writer, data)
        else:
            await self._chat(writer, body, fault)

    async def _speak(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], fault: Fault
    ) -> None:
        kind = body.get("response_format") or "wav"
        if body.get("stream_format") == "sse":
            delta = {"type": "speech.audio.delta", "audio": SPOKEN}
            done = {"type": "speech.audio.done", "usage": {"speech_seconds": 1.25}}
            pieces = [*[_event(delta)] * 3, _event(done)]
            await self._pieces(writer, "text/event-stream", pieces, fault)
            return
        pieces = [PIECE] * PIECES
        if kind == "wav":
            pieces[0] = WAV_HEADER + PIECE
        await self._pieces(writer, f"audio/{kind}", pieces, fault)

    async def _transcribe(self, writer: asyncio.StreamWriter, fault: Fault) -> None:
        if b'name="stream"\r\n\r\ntrue' in self.seen[-1].raw:
            pieces = [_event({"type": "transcript.text.delta", "delta": w}) for w in TEXT]
            done = {"type": "transcript.text.done", "text": "".join(TEXT)}
            pieces.append(_event(done | {"usage": {"type": "duration", "seconds": 2.5}}))
            await self._pieces(writer, "text/event-stream", pieces, fault)
        else:
            usage = {"audio_seconds": 2.5}
            _send_json(writer, {"text": "".join(TEXT), "usage": usage})

    async def _chat(self, writer: asyncio.StreamWriter, body: dict[str, Any], fault: Fault) -> None:
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": len(TEXT),
            "total_tokens": 5 + len(TEXT),
            "audio_seconds": 0.5,
            "speech_seconds": 2.0,
            "image_pixels": 77,
        }
        head = {"id": "c", "created": 1, "model": "m"}
        if not body.get("stream"):
            audio = {"id": "a", "data": SPOKEN, "expires_at": 1, "transcript": "".join(TEXT)}
            message = {"role": "assistant", "content": None, "audio": audio}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            data = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            _send_json(writer, data)
            return
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for word in TEXT:
            deltas += [{"content": word}, {"audio": {"id": "a", "data": SPOKEN}}]
        chunk = {**head, "object": "chat.completion.chunk"}
        pieces = [_event({**chunk, "choices": [{"index": 0, "delta": d}]}) for d in deltas]
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        pieces.append(_event({**chunk, "choices": [last]}))
        pieces += [_event({**chunk, "choices": [], "usage": usage}), b"data: [DONE]\n\n"]
        await self._pieces(writer, "text/event-stream", pieces, fault)

    async def _pieces(
        self, writer: asyncio.StreamWriter, kind: str, pieces: list[bytes], fault: Fault
    ) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n"
        writer.write(f"{head}x-atoll-path: {PATH}\r\nx-internal: 1\r\n{self.notes}\r\n".encode())
        for number, piece in enumerate(pieces):
            if fault.what == "die_after" and number == fault.after:
                await writer.drain()
                # What was sent is to arrive first: a reset would take it along.
                await asyncio.sleep(0.05)
                await _die(writer)
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(self.step_s)
        writer.write(b"0\r\n\r\n")


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _send_json(writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
    _send(writer, 200, json.dumps(data).encode())


def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nx-atoll-path: {PATH}\r\n"
    writer.write(f"{head}x-internal: 1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
