"""A scripted engine that calls tools: its answers are drawn by chance from the grammar of the stage engine.

Of kind `atoll` it goes on from the tokens it is given, as the instance does; of another kind it knows nothing
of tokens, and answers the same again to the same seed.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field

from atoll.core.request_parameters import OutputFormat
from atoll.engine.scheduler_core import TokenEvent
from atoll.engine.text import TextCodec
from atoll.runtime.gateway.events import event_of, payload, read_chunk
from atoll.runtime.instance import instance_requests as requests
from atoll.runtime.instance.instance_answers import ChoiceText, ResponseWriter
from tests.runtime.gateway.engine import Fault, Json, ScriptedEngine, _Chunks, _misbehave
from tests.runtime.instance.tool_models import LONGEST, draw_answer


@dataclass
class CallingEngine(ScriptedEngine):
    """An engine with the tokenizer and template of a model."""

    codec: TextCodec | None = None
    answers: list[list[int]] = field(default_factory=list)
    """The tokens of every answer, whole."""

    async def _stream(
        self, writer: asyncio.StreamWriter, path: str, body: Json, fault: Fault
    ) -> None:
        assert self.codec is not None
        parsed = requests.read(path, json.dumps(body).encode(), self.codec, LONGEST)
        (asked,) = parsed.choices
        guide = asked.sampling.guide or OutputFormat(kind="regex", text="[a-z]{20}")
        seed = body.get("seed", 0 if body.get("temperature") == 0 else random.getrandbits(30))
        tokens = draw_answer(self.codec, guide, seed, begin=asked.generated)
        self.answers.append(tokens)
        answer, text = ResponseWriter(parsed, 1), ChoiceText(0, asked, self.codec)
        chunks = _Chunks(self, writer, path, body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        await chunks.send(answer.roles())
        known = len(asked.generated)
        for number, token in enumerate(tokens[known:]):
            ends = known + number + 1 == len(tokens)
            piece = text.add(TokenEvent("r", number, token, finish_reason="stop" if ends else None))
            event = b"" if piece is None else self._told(answer.chunk(piece))
            if number == fault.after:
                await _misbehave(writer, fault.what, event or b": \n\n", chunks)
            if event:
                await chunks.send(event)
        await chunks.send(answer.end(len(tokens)))
        writer.write(b"0\r\n\r\n")

    def _told(self, event: bytes) -> bytes:
        """An event as an engine of this kind tells it."""
        if self.kind == "atoll":
            return event
        chunk = read_chunk(payload(event) or b"")
        assert chunk is not None
        for choice in chunk["choices"]:
            choice.pop("token_ids", None)
        return event_of(chunk)
