"""Scripted answers of chat: the stream and the whole of one, and an engine that gives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.runtime.gateway.engine import Fault, ScriptedEngine, _die

Json = dict[str, Any]
USAGE: Json = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


@dataclass
class ScriptedCall:
    """A call of a tool, its arguments in pieces."""

    name: str = "look"
    pieces: Sequence[str] = ('{"wh', 'at":"sea"}')
    call_id: str = "call_1"

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass
class ScriptedAnswer:
    """What a model says, in pieces."""

    reasoning: Sequence[str] = ()
    text: Sequence[str] = ()
    refusal: Sequence[str] = ()
    calls: Sequence[ScriptedCall] = ()
    reason: str = "stop"
    stop: str | None = None
    mixed: bool = False
    """Whether the pieces of the calls take turns."""
    usage: Json = field(default_factory=lambda: dict(USAGE))

    def deltas(self) -> list[Json]:
        found: list[Json] = [{"role": "assistant", "content": ""}]
        found += [{"reasoning_content": piece} for piece in self.reasoning]
        found += [{"content": piece} for piece in self.text]
        found += [{"refusal": piece} for piece in self.refusal]
        begun, more = [], []
        for index, call in enumerate(self.calls):
            named = {"name": call.name, "arguments": ""}
            head = {"index": index, "id": call.call_id, "type": "function", "function": named}
            begun.append([{"tool_calls": [head]}])
            more.append(
                [
                    {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
                    for piece in call.pieces
                ]
            )
        if not self.mixed:
            return found + [d for b, m in zip(begun, more, strict=True) for d in (*b, *m)]
        found += [delta for (delta,) in begun]
        for turn in range(max(map(len, more), default=0)):
            found += [pieces[turn] for pieces in more if turn < len(pieces)]
        return found

    def events(self, name: str = "c", model: str = "m") -> list[bytes]:
        """The stream as a backend sends it, with the usage."""
        head = {"id": name, "object": "chat.completion.chunk", "created": 5, "model": model}
        choices = [{"index": 0, "delta": d, "finish_reason": None} for d in self.deltas()]
        last: Json = {"index": 0, "delta": {}, "finish_reason": self.reason}
        if self.stop is not None:
            last["stop_reason"] = self.stop
        chunks = [{**head, "choices": [choice]} for choice in (*choices, last)]
        chunks.append({**head, "choices": [], "usage": self.usage})
        events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
        return [*events, b"data: [DONE]\n\n"]

    def whole(self, model: str = "m") -> Json:
        message: Json = {"role": "assistant", "content": "".join(self.text) or None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.refusal:
            message["refusal"] = "".join(self.refusal)
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        choice: Json = {"index": 0, "message": message, "finish_reason": self.reason}
        if self.stop is not None:
            choice["stop_reason"] = self.stop
        head = {"id": "c", "object": "chat.completion", "created": 5, "model": model}
        return {**head, "choices": [choice], "usage": self.usage}


@dataclass
class ScriptedTalker(ScriptedEngine):
    """Gives scripted answers, one a turn of the conversation; `die` after n events is a fault."""

    kind: str = "openai"
    answers: list[ScriptedAnswer] = field(default_factory=list)

    async def _answer(
        self, writer: asyncio.StreamWriter, path: str, body: Json, fault: Fault
    ) -> None:
        if path == "/tokenize" and fault.what == "none":
            words = json.dumps(body["messages"] + body.get("tools", [])).split()
            _send(writer, json.dumps({"count": len(words), "max_model_len": 9, "tokens": []}))
            return
        assert path == "/v1/chat/completions" or fault.what != "none"
        if fault.what not in ("none", "die"):
            await super()._answer(writer, path, body, fault)
            return
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        answer = self.answers[turn]
        if not body.get("stream"):
            _send(writer, json.dumps(answer.whole(self.model)))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for number, event in enumerate(answer.events(f"{self.name}-1", self.model)):
            if fault.what == "die" and number == fault.after:
                await _die(writer)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")


def _send(writer: asyncio.StreamWriter, text: str) -> None:
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
    raw = text.encode()
    writer.write(head.format(len(raw)).encode() + raw)
