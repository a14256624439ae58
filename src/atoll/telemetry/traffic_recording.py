"""Traces of real traffic without its content: Mooncake's JSON lines, to simulate and plan with.

A line holds when a request came (`timestamp`, milliseconds since the recording began), the tokens of its
prompt and answer (`input_length`, `output_length`), the model, and what its prompt shares with others
(`hash_ids`): one number for every 16 tokens of the prompt, the last block maybe shorter. Equal numbers
mean equal prompts up to the end of that block. The numbers are keyed hashes, each over the one before; the
key is random, stays in memory and is forgotten with the recorder, so nobody can test a guess at a prompt
against a recording, and two recordings have nothing in common.

Where a client sent token ids, blocks are 16 of them. Text is cut by a stand-in instead of the model's own
tokenizer, which a gateway does not have: every 4 bytes of UTF-8 count as a token. The lengths are always
those the engine counted; where they are longer than the stand-in's, the numbers go on, and where they are
shorter, the last block holds the rest. So shared prefixes are right in what they share, and about right
in how long that is.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.errors import InputError
from atoll.telemetry.background import Background

BLOCK_TOKENS = 16
STAND_IN_BYTES = 4
"""Bytes of text that count as a token where token ids are not known."""
_BLOCK_BYTES = BLOCK_TOKENS * STAND_IN_BYTES
_ID_BITS = 53
"""So that every reader of JSON has the numbers exactly."""
_HASHED_BYTES = 4 * 2**20
"""Of a request's body; larger ones are recorded without `hash_ids`."""
# Prompts wait in memory for the thread, up to so many bytes.
_WAITING_BYTES = 64 * 2**20

Prompt = bytes | Sequence[int]
"""The JSON body of a request as the client sent it, or the token ids of its prompt."""


class _Entry(NamedTuple):
    started_s: float
    model: str
    prompt: Prompt
    input_tokens: int
    output_tokens: int
    size: int


class Recorder:
    """Writes requests to a file, in a thread of its own.

    A file that is there is kept as `PATH.1`, the one before as `PATH.2`, and so on; the same happens when
    the file has grown to `max_bytes`. At most `keep` older files stay. Only the owner may read them.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int = 256 * 2**20, keep: int = 4
    ) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._keep = keep
        self._began_s = time.time()
        self._secret = secrets.token_bytes(32)
        # Each is written by one thread only, so that neither needs a lock.
        self._given_bytes = self._taken_bytes = 0
        self._written = 0
        self._skipped = self._refused = 0
        try:
            self._open()
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise InputError(
                f"cannot write the recording: {reason}", path=path, hint="write it somewhere else"
            ) from error
        self._thread: Background[_Entry] = Background("atoll-recorder", self._write)

    def record(
        self, started_s: float, model: str, prompt: Prompt, input_tokens: int, output_tokens: int
    ) -> None:
        """Note a request that ended; `started_s` is Unix time. Costs the caller about a microsecond.

        Requests without a prompt or an answer (errors) are left out; so is, by not calling this, whatever
        a key's owner does not want recorded.
        """
        size = len(prompt)
        if input_tokens < 1 or output_tokens < 1:
            self._skipped += 1
        elif self._given_bytes - self._taken_bytes + size > _WAITING_BYTES:
            self._refused += 1
        elif self._thread.offer(
            _Entry(started_s, model, prompt, input_tokens, output_tokens, size)
        ):
            self._given_bytes += size

    def stats(self) -> dict[str, int]:
        """Return how many requests were written, lost (the disk or the thread was too slow) and left out."""
        lost = self._thread.lost + self._refused
        return {"written": self._written, "lost": lost, "skipped": self._skipped}

    @property
    def error(self) -> str:
        """Why lines were lost last; empty where none were."""
        return self._thread.error

    def close(self) -> None:
        """Write what waits, and forget the key."""
        self._thread.close()
        self._file.close()
        self._secret = b""

    def _open(self) -> None:
        if self._path.exists():
            # From the oldest on, so that none is overwritten before it has moved.
            for number in range(self._keep, 0, -1):
                older = self._rotated_path(number - 1)
                if older.exists():
                    os.replace(older, self._rotated_path(number))
        self._path.unlink(missing_ok=True)
        # With O_EXCL a link that somebody has put there is not followed.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "wb", buffering=0)
        self._size = 0

    def _rotated_path(self, number: int) -> Path:
        return Path(f"{self._path}.{number}") if number else self._path

    def _write(self, batch: list[_Entry]) -> None:
        self._taken_bytes += sum(entry.size for entry in batch)
        data = b"".join(self._line(entry) for entry in batch)
        if self._size and self._size + len(data) > self._max_bytes:
            self._file.close()
            self._open()
        written = 0
        # A write without a buffer may take a part only.
        while written < len(data):
            written += self._file.write(data[written:])
        self._size += len(data)
        self._written += len(batch)

    def _line(self, entry: _Entry) -> bytes:
        row = {
            "timestamp": max(0, round((entry.started_s - self._began_s) * 1000)),
            "input_length": entry.input_tokens,
            "output_length": entry.output_tokens,
            "hash_ids": block_ids(self._secret, entry.model, entry.prompt, entry.input_tokens),
            "block_tokens": BLOCK_TOKENS,
            "model": entry.model,
        }
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def block_ids(secret: bytes, model: str, prompt: Prompt, input_tokens: int) -> list[int]:
    """Return one number for every 16 tokens of a prompt of `input_tokens` tokens.

    None where the prompt cannot be read or is very large.
    """
    content: Prompt = prompt
    if isinstance(prompt, bytes):
        if len(prompt) > _HASHED_BYTES:
            return []
        try:
            content = prompt_of(json.loads(prompt))
        except (ValueError, RecursionError):
            return []
    count = -(-input_tokens // BLOCK_TOKENS)
    if isinstance(content, bytes):
        pieces = (content[at : at + _BLOCK_BYTES] for at in range(0, len(content), _BLOCK_BYTES))
        return _chain(secret, model, pieces, count)
    packed = (
        b"".join(token.to_bytes(8, "little") for token in content[at : at + BLOCK_TOKENS])
        for at in range(0, len(content), BLOCK_TOKENS)
    )
    return _chain(secret, model, packed, count)


def _chain(secret: bytes, model: str, pieces: Iterable[bytes], count: int) -> list[int]:
    ids: list[int] = []
    # Begins with the model, so that prompts of two models have no numbers in common.
    before = blake2b(model.encode("utf-8", "replace"), key=secret, digest_size=16).digest()
    rest = iter(pieces)
    while len(ids) < count:
        piece = next(rest, b"") if len(ids) + 1 < count else b"".join(rest)
        before = blake2b(before + piece, key=secret, digest_size=16).digest()
        ids.append(int.from_bytes(before[:8], "little") >> (64 - _ID_BITS))
    return ids


def prompt_of(body: object) -> bytes | list[int]:
    """Return what the body of a request gives the model to read: text as bytes, or token ids.

    A conversation that goes on from another begins with the same bytes. Nothing for a body of no known
    form.
    """
    if not isinstance(body, dict):
        return b""
    messages = body.get("messages")
    if isinstance(messages, list):
        tools = body.get("tools")
        parts = [_canonical(tools)] if tools else []
        parts += [_message(each) for each in messages if isinstance(each, dict)]
        # A separator keeps two messages from reading like one.
        return b"".join(part + b"\x1e" for part in parts)
    prompt = body.get("prompt", body.get("input"))
    if isinstance(prompt, list):
        flat = [part for each in prompt for part in (each if isinstance(each, list) else [each])]
        # True and False are ints, too, but no tokens.
        if flat and all(type(part) is int and 0 <= part < 2**63 for part in flat):
            return flat
        return b"".join(_text(part) + b"\x1e" for part in flat)
    return _text(prompt)


def _message(message: dict[str, Any]) -> bytes:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    words = b"".join(
        _text(part.get("text"))
        if isinstance(part, dict) and part.get("type") == "text"
        else _text(part)
        for part in parts
    )
    more = {key: value for key, value in message.items() if key not in ("role", "content")}
    return _text(message.get("role")) + b"\x1f" + words + (_canonical(more) if more else b"")


def _text(value: object) -> bytes:
    if value is None:
        return b""
    return value.encode("utf-8", "replace") if isinstance(value, str) else _canonical(value)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
