"""Server-sent events of a stream of chunks, and the journal of those a client has received.

On the way to the client events are bytes; they are read here only at the end of a stream, in a stream
that was moved, and when a stream has to move.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
# Events of so many bytes are kept as they came; more are read, and only what they say is kept.
_FOLD_BYTES = 512 * 2**10
# Pieces are joined when there are so many characters: at every piece, all before would be copied again.
_LOOSE_CHARS = 64 * 2**10

Chunk = dict[str, Any]
"""A chunk as plain data; what engines add to it is kept."""


def split_events(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete events in `data`, each with the blank line that ends it, and the rest."""
    if b"\r" in data:
        data = _unix(data)
    last = data.rfind(b"\n\n")
    if last < 0:
        return [], data
    events: list[bytes] = []
    begin = 0
    # One copy of each: an event may have megabytes.
    while (end := data.find(b"\n\n", begin)) >= 0:
        event = data[begin : end + 2]
        if event.strip(b"\n"):
            events.append(event)
        begin = end + 2
    return events, data[last + 2 :]


def _unix(data: bytes) -> bytes:
    # A lone CR at the end may be half of a CR LF: it waits for the next bytes.
    tail = b"\r" if data.endswith(b"\r") else b""
    kept = data[: len(data) - len(tail)]
    return kept.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail


class UnfinishedEvent:
    """The beginning of an event whose end has not come.

    Events may be large and come in many pieces: each is looked at once, and only where it begins.
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)

    def __len__(self) -> int:
        """Return how many bytes there are of it."""
        return len(self._data)

    def add(self, data: bytes) -> bytes | None:
        """Take what comes next; return all there is once an event ends in it."""
        # Its end are at most four bytes, of which the last is new.
        seam = bytes(self._data[-3:]) + data
        self._data += data
        if b"\n\n" not in (_unix(seam) if b"\r" in seam else seam):
            return None
        whole = bytes(self._data)
        # It may be large, and is not to be held twice.
        self._data.clear()
        return whole


def payload(event: bytes) -> bytes | None:
    """Return what the `data:` lines of an event say; None for a comment or an event without data."""
    # The usual form, one line of data, needs no loop.
    if event.startswith(b"data: ") and event.count(b"\n") == 2:
        return event[6:-2]
    values: list[bytes] = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            value = line[5:]
            values.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(values) if values else None


def read_chunk(data: bytes) -> Chunk | None:
    """Return a chunk from the payload of an event, or None where it is no JSON object."""
    try:
        chunk = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return chunk if isinstance(chunk, dict) else None


def event_of(chunk: Chunk) -> bytes:
    """Return the event that carries a chunk."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def comment_of(said: Mapping[str, object]) -> bytes:
    """Return a comment for those who read Atoll's; it is one line, and whoever reads events leaves it out."""
    return b": atoll " + msgspec.json.encode(said) + b"\n\n"


def choices_of(chunk: Chunk) -> list[Chunk]:
    """Return the choices of a chunk that are well formed."""
    choices = chunk.get("choices")
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def finishes(chunk: Chunk) -> bool:
    """Return whether a chunk ends one of its choices."""
    return any(choice.get("finish_reason") is not None for choice in choices_of(chunk))


def index_of(choice: Chunk) -> int:
    """Return which of the answers a choice belongs to."""
    index = choice.get("index", 0)
    return index if isinstance(index, int) else 0


def strings_of(choice: Chunk) -> list[tuple[tuple[str, ...], str]]:
    """Return the pieces of text in a choice by where they belong.

    A place is ("text",) or ("content",), ("refusal",), ("reasoning_content",) and the like, or
    ("tool", index, "name" | "arguments"), or ("audio", "transcript"), which is the text of an answer that is
    spoken. Roles and ids of tool calls are no text.
    """
    strings: list[tuple[tuple[str, ...], str]] = []
    if isinstance(choice.get("text"), str):
        strings.append((("text",), choice["text"]))
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return strings
    for key, value in delta.items():
        if isinstance(value, str) and key != "role":
            strings.append(((key,), value))
    audio = delta.get("audio")
    if isinstance(audio, dict) and isinstance(audio.get("transcript"), str):
        strings.append((("audio", "transcript"), audio["transcript"]))
    calls = delta.get("tool_calls")
    listed = calls if isinstance(calls, list) else []
    # What a call was before there were tools: one, without an id.
    legacy = [{"function": delta["function_call"]}] if "function_call" in delta else []
    for call in (*listed, *legacy):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            strings += [
                (("tool", str(call.get("index", 0)), key), function[key])
                for key in ("name", "arguments")
                if isinstance(function.get(key), str)
            ]
    return strings


def lists_of(choice: Chunk) -> list[tuple[tuple[str, ...], Chunk, str]]:
    """Return what a choice lists token by token, ids and log-probabilities: its place, and what holds it."""
    found: list[tuple[tuple[str, ...], Chunk, str]] = [
        ((key,), choice, key)
        for key in ("token_ids", "prompt_token_ids")
        if isinstance(choice.get(key), list)
    ]
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        found += [
            (("logprobs", key), logprobs, key)
            for key, value in logprobs.items()
            if isinstance(value, list)
        ]
    return found


@dataclass(slots=True)
class DeliveredChoice:
    """One answer (choice) as far as the client has it."""

    tokens: int = 0
    """Tokens (`count_tokens`)."""
    token_ids: list[int] | None = field(default_factory=list)
    """None once a piece of text came without the ids of its tokens."""
    listed: dict[tuple[str, ...], int] = field(default_factory=dict)
    """How many ids and log-probabilities came, by place (`lists_of`)."""
    finished: bool = False
    spoken: bool = False
    """Whether sound was begun: no text holds its state."""
    audio_chars: int = 0
    """Of sound, in base64."""
    audio_id: str = ""
    sound_bytes: int = 0
    """Of sound, decoded."""
    sound_crc: int = 0
    """CRC-32 of that."""
    _blocks: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    """Text by place, in long parts: what is put together is copied."""
    _pieces: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    """Pieces that came since."""
    _loose: int = 0
    """Characters in that."""

    @property
    def strings(self) -> dict[tuple[str, ...], str]:
        """Return all text so far, by where it belongs."""
        self._pack()
        for parts in self._blocks.values():
            parts[:] = ["".join(parts)]
        return {place: parts[0] for place, parts in self._blocks.items()}

    def _pack(self) -> None:
        for place, pieces in self._pieces.items():
            self._blocks.setdefault(place, []).append("".join(pieces))
        self._pieces.clear()
        self._loose = 0

    @property
    def text(self) -> str:
        """The text of the answer itself, without reasoning or tool calls."""
        return self.strings.get(("content",), "") + self.strings.get(("text",), "")

    @property
    def only_text(self) -> bool:
        """Whether nothing but the text of the answer was sent."""
        return all(not s or p in (("content",), ("text",)) for p, s in self.strings.items())

    @property
    def only_calls(self) -> bool:
        """Whether nothing but the text of the answer and tool calls were sent."""
        return all(
            not s or p in (("content",), ("text",)) or p[0] == "tool"
            for p, s in self.strings.items()
        )

    def add(self, choice: Chunk, said: int | None = None) -> None:
        """Take in a choice of one more chunk; `said`: tokens that the answer has by then, by its engine."""
        self.tokens = count_tokens(choice, self.tokens, said)
        some = False
        for place, piece in strings_of(choice):
            self._pieces.setdefault(place, []).append(piece)
            self._loose += len(piece)
            some = some or bool(piece)
        if self._loose > _LOOSE_CHARS:
            self._pack()
        for place, holder, key in lists_of(choice):
            self.listed[place] = self.listed.get(place, 0) + len(holder[key])
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            if self.token_ids is not None:
                self.token_ids += ids
        elif some:
            self.token_ids = None
        if choice.get("finish_reason") is not None:
            self.finished = True
        delta = choice.get("delta")
        if isinstance(delta, dict) and delta.get("audio") is not None:
            self.spoken = True
            self.audio_chars += _audio_chars(choice)
            sound = sound_of(choice)
            self.sound_bytes += len(sound)
            self.sound_crc = zlib.crc32(sound, self.sound_crc)
            self.audio_id = self.audio_id or str((audio_of(choice) or {}).get("id", ""))


def audio_chars_in(data: bytes) -> int:
    """Return the characters of base64 sound that whole events bring."""
    if b'"audio"' not in data:
        return 0
    return sum(
        _audio_chars(choice)
        for event in split_events(data)[0]
        if (data_field := payload(event)) is not None
        for choice in choices_of(read_chunk(data_field) or {})
    )


def audio_of(choice: Chunk) -> Chunk | None:
    """Return what a choice says of an answer that is spoken: its id, transcript and sound."""
    delta = choice.get("delta")
    audio = delta.get("audio") if isinstance(delta, dict) else None
    return audio if isinstance(audio, dict) else None


def sound_of(choice: Chunk) -> bytes:
    """Return the sound in a choice; none where it cannot be read."""
    data = (audio_of(choice) or {}).get("data")
    try:
        return base64.b64decode(data, validate=True) if isinstance(data, str) else b""
    except ValueError:
        return b""


def _audio_chars(choice: Chunk) -> int:
    data = (audio_of(choice) or {}).get("data")
    return len(data) if isinstance(data, str) else 0


def count_tokens(choice: Chunk, before: int, said: int | None) -> int:
    """Return the tokens of an answer with a choice of one more chunk; `before` it had so many.

    They are those named by the engine, else `said`, its own count, else those with log-probabilities, else
    chunks with text. Tokens whose text has not come are not counted: the next backend makes them again.
    """
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return before + len(ids)
    if not any(piece for _, piece in strings_of(choice)):
        return before
    return before + (_logprobs(choice) or 1) if said is None else max(before, said)


def said_tokens(chunk: Chunk) -> int | None:
    """Return the tokens of the answer that a chunk is of, by its engine's own count."""
    usage, timings = chunk.get("usage"), chunk.get("timings")
    said = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if said is None and isinstance(timings, dict):
        said = timings.get("predicted_n")
    # Of several answers in one chunk it says nothing.
    return said if isinstance(said, int) and len(choices_of(chunk)) == 1 else None


class TokenTally:
    """Tokens of the answers of a stream, counted as `DeliveredChoice` does while its events pass."""

    __slots__ = ("_answers", "total")

    def __init__(self) -> None:
        self._answers: dict[int, int] = {}
        self.total = 0

    def add(self, data: bytes) -> int:
        """Take in whole events; return the tokens of all answers."""
        answers = self._answers
        # A single event, the usual case, need not be split.
        if data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2:
            payloads = [data[6:-2]]
        else:
            payloads = [
                data_field
                for event in split_events(data)[0]
                if (data_field := payload(event)) is not None
            ]
        for data_field in payloads:
            chunk = read_chunk(data_field) or {}
            said = said_tokens(chunk)
            for choice in choices_of(chunk):
                index = index_of(choice)
                answers[index] = count_tokens(choice, answers.get(index, 0), said)
        self.total = sum(answers.values())
        return self.total


def _logprobs(choice: Chunk) -> int:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return 0
    listed = logprobs.get("content") or logprobs.get("tokens")
    return len(listed) if isinstance(listed, list) else 0


@dataclass(slots=True)
class Delivered:
    """All that a client has received of a stream."""

    head: Chunk | None = None
    """The first chunk: its id, time and model are those of the whole stream."""
    answers: dict[int, DeliveredChoice] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens over all answers."""
        return sum(answer.tokens for answer in self.answers.values())

    @property
    def audio_chars(self) -> int:
        """Sound over all answers, in characters of base64."""
        return sum(answer.audio_chars for answer in self.answers.values())

    def add(self, chunk: Chunk) -> None:
        """Take in one more chunk."""
        if self.head is None:
            self.head = chunk
        said = said_tokens(chunk)
        for choice in choices_of(chunk):
            self.answers.setdefault(index_of(choice), DeliveredChoice()).add(choice, said)


class StreamJournal:
    """The events a client has received: bytes until someone asks what they say."""

    __slots__ = ("_delivered", "_raw", "_size", "folded")

    def __init__(self) -> None:
        self._raw: list[bytes] = []
        self._size = 0
        self.folded = 0
        """Bytes of events that were read; what is kept of them is no more than that."""
        self._delivered = Delivered()

    def append(self, data: bytes) -> None:
        """Keep events that were sent; they are whole."""
        self._raw.append(data)
        self._size += len(data)
        # Long streams are read now and then, so that what is kept is their text and no more.
        if self._size > _FOLD_BYTES:
            self.read()

    @property
    def short(self) -> bool:
        """Whether no more than one piece was kept."""
        return len(self._raw) < 2 and self._delivered.head is None

    def read(self) -> Delivered:
        """Return what all the events kept so far say."""
        data = b"".join(self._raw)
        self._raw.clear()
        self._size = 0
        self.folded += len(data)
        for event in split_events(data)[0]:
            data_field = payload(event)
            chunk = read_chunk(data_field) if data_field is not None else None
            if chunk is not None:
                self._delivered.add(chunk)
        return self._delivered
