"""Streams of `/v1/messages`: one message, its blocks one after the other."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.runtime.gateway.dialects.chat import AnswerBlock, AnswerEnding, AnswerHead, BlockKind
from atoll.runtime.gateway.dialects.messages.answer import MessageWriter, empty_block, usage
from atoll.runtime.gateway.dialects.pieces import ChatStreamReader

_DELTAS = {
    "text": ("text_delta", "text"),
    "refusal": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""For each kind of block: the type of its deltas, and the field with what is new."""


class MessagesStream:
    """Writes the events of one message; `asked` is the model that was asked for."""

    def __init__(self, writer: MessageWriter, asked: str, seed: str) -> None:
        self._writer = writer
        self._reader = ChatStreamReader(self, asked, seed)
        self._out: list[bytes] = []
        self._index = 0
        self._kinds: set[BlockKind] = set()

    def feed(self, data: bytes) -> bytes:
        """Take bytes of a chat stream, cut anywhere; return the events they bring."""
        self._reader.feed(data)
        return self._take()

    def end(self) -> bytes:
        """Return the rest: the end, or that it never came."""
        self._reader.end()
        return self._take()

    def _take(self) -> bytes:
        written = b"".join(self._out)
        self._out.clear()
        return written

    # What the reader tells

    def begin(self, head: AnswerHead) -> None:
        """Write that the message begins; what the prompt took is known at its end."""
        self._write("message_start", message=self._writer.begun(head, []))

    def open(self, block: AnswerBlock) -> None:
        """Write that a block begins."""
        self._kinds.add(block.kind)
        if self._writer.shows(block):
            started = empty_block(block)
            self._write("content_block_start", index=self._index, content_block=started)

    def grow(self, block: AnswerBlock, text: str) -> None:
        """Write what a block has more."""
        if self._writer.shows(block):
            kind, field = _DELTAS[block.kind]
            delta = {"type": kind, field: text}
            self._write("content_block_delta", index=self._index, delta=delta)

    def close(self, block: AnswerBlock, *, whole: bool) -> None:
        """Write that a block is over; why the last one was cut off is said at the end."""
        del whole
        if self._writer.shows(block):
            self._write("content_block_stop", index=self._index)
            self._index += 1

    def finish(self, ending: AnswerEnding) -> None:
        """Write why the message stopped and what it used."""
        delta = self._writer.stop(ending, self._kinds)
        self._write("message_delta", delta=delta, usage=usage(ending.tokens))
        self._write("message_stop")

    def fail(self, message: str, code: str) -> None:
        """Write that the message broke off."""
        del code
        self._write("error", error={"type": "api_error", "message": message})

    def _write(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"type": kind, **fields})
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
