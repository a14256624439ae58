"""Streams of `/v1/responses`: numbered events, each item added, filled and done."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.runtime.gateway.dialects.chat import AnswerBlock, AnswerEnding, AnswerHead
from atoll.runtime.gateway.dialects.pieces import ChatStreamReader
from atoll.runtime.gateway.dialects.responses.answer import Item, ResponseWriter, content_part

_EVENTS = {
    "text": "output_text",
    "refusal": "refusal",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
"""What events of a block are called."""
_DONE = {"text": "text", "refusal": "refusal", "reasoning": "text", "call": "arguments"}
"""The field with all of a block, in the event at its end."""


class ResponsesStream:
    """Writes the events of one response; `asked` is the model that was asked for."""

    def __init__(self, writer: ResponseWriter, asked: str, seed: str) -> None:
        self._writer = writer
        self._reader = ChatStreamReader(self, asked, seed)
        self._out: list[bytes] = []
        self._number = 0
        self._items: list[Item] = []
        self._place: dict[str, Any] = {}
        """Where text of the open block belongs."""
        self._head = AnswerHead(asked, 0)

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
        """Write that the response was created."""
        self._head = head
        for kind in ("created", "in_progress"):
            response = self._writer.response(head, "in_progress", [])
            self._write(f"response.{kind}", response=response)

    def open(self, block: AnswerBlock) -> None:
        """Write that an item was added."""
        number = len(self._items)
        self._place = {"item_id": self._writer.item_id(block, number), "output_index": number}
        if block.kind != "call":
            self._place["content_index"] = 0
        item = self._writer.item(block, len(self._items), "in_progress")
        self._write("response.output_item.added", output_index=len(self._items), item=item)
        if block.kind != "call":
            self._write("response.content_part.added", **self._place, part=content_part(block, ""))

    def grow(self, block: AnswerBlock, text: str) -> None:
        """Write what an item has more."""
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        kind = f"response.{_EVENTS[block.kind]}.delta"
        self._write(kind, **self._place, delta=text, **more)

    def close(self, block: AnswerBlock, *, whole: bool) -> None:
        """Write that an item is done."""
        place, text = self._place, block.text
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if block.kind == "call":
            more["name"] = block.name
        more[_DONE[block.kind]] = text
        self._write(f"response.{_EVENTS[block.kind]}.done", **place, **more)
        if block.kind != "call":
            self._write("response.content_part.done", **place, part=content_part(block, text))
        status = "completed" if whole else "incomplete"
        item = self._writer.item(block, len(self._items), status)
        self._write("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def finish(self, ending: AnswerEnding) -> None:
        """Write that the response is complete, or as long as it may be."""
        response = self._writer.ended(self._head, self._items, ending)
        self._write(f"response.{response['status']}", response=response)

    def fail(self, message: str, code: str) -> None:
        """Write that the response failed."""
        self._write("error", code=code, message=message, param=None)
        error = {"code": "server_error", "message": message}
        response = self._writer.response(self._head, "failed", self._items, error=error)
        self._write("response.failed", response=response)

    def _write(self, kind: str, **fields: Any) -> None:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data)))
