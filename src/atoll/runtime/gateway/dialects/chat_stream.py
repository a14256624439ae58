"""A stream of chat, taken apart: one block at a time is open, whatever the order of the deltas is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from atoll.runtime.gateway.dialects.chat_answer import (
    CUT,
    TEXTS,
    AnswerBlock,
    AnswerEnding,
    BlockKind,
    ChatHead,
    TokenCounts,
    call_name,
    counts_of,
    early_counts,
    head_of,
    matched_stop,
)
from atoll.runtime.gateway.events import (
    Chunk,
    choices_of,
    finishes,
    index_of,
    payload,
    read_chunk,
    split_events,
    strings_of,
)


class StreamTranslator(ABC):
    """Reads the bytes of one chat stream and writes the events of a dialect, block after block.

    Deltas of several calls may come mixed. A call is closed when its arguments are whole and another one
    has some; until then what the others bring is kept back. A call is opened with its first argument, so
    that its name is whole.
    """

    counts_first = False
    """Whether the head tells what the prompt took: until a chunk says so, or has text, it is not written."""

    def __init__(self, asked: str, seed: str) -> None:
        self._asked = asked
        self._seed = seed
        self._out: list[bytes] = []
        """Events of the dialect that nobody has taken yet."""
        self._carry = b""
        self._begun = False
        self._over = False
        self._open: AnswerBlock | None = None
        self._calls: dict[int, AnswerBlock] = {}
        self._waiting: list[AnswerBlock] = []
        """Calls that were not opened yet, with what they have so far."""
        self._reason: str | None = None
        self._stop: str | None = None
        self._tokens = TokenCounts()

    # What a dialect writes, in this order

    @abstractmethod
    def write_head(self, head: ChatHead) -> None:
        """The answer begins; called once, first."""

    @abstractmethod
    def write_open(self, block: AnswerBlock) -> None:
        """A block begins; the one before is closed."""

    @abstractmethod
    def write_text(self, block: AnswerBlock, text: str) -> None:
        """The open block has more text, which is in it already."""

    @abstractmethod
    def write_close(self, block: AnswerBlock, *, whole: bool) -> None:
        """The open block ends; it is not `whole` where the answer was cut off within it."""

    @abstractmethod
    def write_ending(self, ending: AnswerEnding) -> None:
        """The answer ends; all blocks are closed, and nothing follows."""

    @abstractmethod
    def write_failure(self, message: str, code: str) -> None:
        """The answer broke off; all blocks are closed, and nothing follows."""

    def _write_event(self, kind: str, data: dict[str, Any]) -> None:
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data)))

    def _take_written(self) -> bytes:
        written = b"".join(self._out)
        self._out.clear()
        return written

    # What the stream of chat says

    def feed(self, data: bytes) -> bytes:
        """Take bytes of a chat stream, cut anywhere; return the events of the dialect they bring."""
        events, self._carry = split_events(self._carry + data)
        for event in events:
            data_field = payload(event)
            if data_field is not None and not self._over:
                self._take(data_field)
        return self._take_written()

    def end(self) -> bytes:
        """The stream of chat is over: return the rest. A stream without its end ends as broken off."""
        if not self._over and self._reason is not None:
            self._finish()
        elif not self._over:
            self._fail("the stream broke off", "stream_interrupted")
        return self._take_written()

    def _take(self, data_field: bytes) -> None:
        if data_field == b"[DONE]":
            self._finish()
            return
        chunk = read_chunk(data_field)
        if chunk is None:
            self._fail("the backend's stream cannot be read", "upstream_error")
            return
        error = chunk.get("error")
        if error is not None:
            said = error if isinstance(error, dict) else {}
            message, code = said.get("message"), said.get("code")
            self._fail(
                message if isinstance(message, str) else "the stream broke off",
                code if isinstance(code, str) else "stream_interrupted",
            )
            return
        if not self.counts_first or early_counts(chunk).prompt or _says_something(chunk):
            self._begin(chunk)
        for choice in choices_of(chunk):
            # Dialects know one answer only.
            if index_of(choice) == 0:
                self._take_choice(choice)
        if isinstance(chunk.get("usage"), dict):
            self._tokens = counts_of(chunk["usage"])

    def _begin(self, chunk: Chunk) -> None:
        if not self._begun:
            self._begun = True
            self.write_head(head_of(chunk, self._asked))

    def _take_choice(self, choice: Chunk) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            for key, kind in TEXTS:
                text = delta.get(key)
                # Some engines send reasoning under both of its names.
                twice = key == "reasoning" and delta.get("reasoning_content")
                if isinstance(text, str) and text and not twice:
                    self._take_text(kind, text)
            calls = delta.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                if isinstance(call, dict):
                    self._take_call(call)
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._reason, self._stop = reason, matched_stop(choice)

    def _take_text(self, kind: BlockKind, text: str) -> None:
        # Calls that wait come before this text: the order of the answer is kept.
        if self._waiting or self._open is None or self._open.kind != kind:
            self._settle()
            self._switch(AnswerBlock(kind))
        self._grow(text)

    def _take_call(self, call: Chunk) -> None:
        index = call.get("index", 0)
        number = index if isinstance(index, int) else 0
        block = self._calls.get(number)
        function = call.get("function")
        said: Chunk = function if isinstance(function, dict) else {}
        if block is None:
            call_id = call.get("id")
            made = (
                # Engines may leave the id out: clients need one, so it is made here.
                call_id if isinstance(call_id, str) and call_id else call_name(self._seed, number)
            )
            self._calls[number] = block = AnswerBlock("call", made)
            self._waiting.append(block)
        waits = any(block is other for other in self._waiting)
        name, arguments = _string(said.get("name")), _string(said.get("arguments"))
        if waits:
            block.name += name
        if block is self._open:
            if arguments:
                self._grow(arguments)
        elif waits:
            if arguments:
                block.parts.append(arguments)
        elif arguments.strip():
            # Its block is closed at the client; blanks do no harm.
            self._fail("arguments came for a call that was over", "upstream_error")
            return
        self._advance()

    def _advance(self) -> None:
        """Open calls that wait, as far as that is possible by now."""
        waiting = self._waiting
        # The last one that waits may still get more of its name: it opens with its first argument.
        while waiting and (len(waiting) > 1 or waiting[0].parts):
            current = self._open
            # The arguments of the open call are not whole: it has to stay open.
            if current is not None and current.kind == "call" and not _is_json(current.text):
                return
            self._switch(waiting.pop(0))

    def _settle(self, *, whole: bool = True) -> None:
        """Open all calls that wait, one after the other, and close the last block."""
        while self._waiting:
            self._switch(self._waiting.pop(0))
        self._close(whole=whole)

    def _switch(self, block: AnswerBlock) -> None:
        self._close()
        self._open = block
        # What was kept back is written as if it came now.
        held, block.parts = block.parts, []
        self.write_open(block)
        for text in held:
            self._grow(text)

    def _close(self, *, whole: bool = True) -> None:
        block, self._open = self._open, None
        if block is not None:
            self.write_close(block, whole=whole)

    def _grow(self, text: str) -> None:
        block = self._open
        if block is not None:
            block.parts.append(text)
            self.write_text(block, text)

    def _finish(self) -> None:
        # A stream may end before its first chunk; a dialect always begins with its head.
        self._begin({})
        self._over = True
        self._settle(whole=self._reason not in CUT)
        ending = AnswerEnding(self._reason or "stop", self._stop, self._tokens)
        self.write_ending(ending)

    def _fail(self, message: str, code: str) -> None:
        self._begin({})
        self._over = True
        self._close(whole=False)
        self.write_failure(message, code)


def _says_something(chunk: Chunk) -> bool:
    return finishes(chunk) or any(
        text for choice in choices_of(chunk) for _, text in strings_of(choice)
    )


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True
