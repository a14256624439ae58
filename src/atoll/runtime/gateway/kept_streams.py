"""Streams on disk, so that another gateway can go on with one whose gateway died.

A client that sends `x-atoll-resume: 1` gets a number with every event (`id: STREAM-N`), and what it is
sent is written to a file first. Whoever loses its connection asks again, the same request with
`last-event-id: STREAM-N`, at any gateway that has the folder: that one sends what came after event N, and
has a backend go on from there as it does when a backend dies (`resume`). The client has each event once,
and the ledgers of both gateways together have each token once.

A file is a list of frames: what was asked (`AskedStream`), pieces of the answer as backends sent them and
as the client saw them (`SentPiece`), who went on with it (`TakenStream`), and what is in the ledger
(`BilledTokens`). What is billed of a gateway that died is settled with its journal (`accounts.settlements`).
A gateway holds a lock on the files of its streams, which its death lets go of. As in the journal of accounts,
what is written survives the process, not a power cut. Files are for this user alone (they hold prompts and
answers), and are removed `keep_s` after the last piece.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import struct
import time
from pathlib import Path

import msgspec
from pydantic import Field

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.runtime.accounts.settlements import (
    Settlement,
    forget_settlement,
    settle,
    sweep_settlements,
)
from atoll.runtime.gateway import faults
from atoll.runtime.gateway.events import payload, split_events
from atoll.runtime.gateway.front_client import FrontClient
from atoll.runtime.http.http_request import Request
from atoll.runtime.http.http_server import Connection
from atoll.runtime.openai import ApiError, Usage

ASKED = b"x-atoll-resume"
LAST = b"last-event-id"
_EVENT_ID = re.compile(rb"([0-9a-f]{32})-([0-9]{1,12})")
_ENDING = ".stream"
_LENGTH = struct.Struct("<I")


class StreamsSettings(Frozen):
    """Where streams are kept for other gateways, and for how long."""

    folder: str = Field(min_length=1)
    """Of all gateways that may go on with each other's streams, on one machine or a shared file system."""
    keep_s: float = Field(300.0, gt=0)
    """So long after its last piece a stream may be taken up again."""


class AskedStream(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """What the client asked; `body` is what backends got, `digest` is of what the client sent."""

    digest: bytes
    path: bytes
    key_id: str | None
    request_id: bytes
    trace: str
    model: str
    body: bytes
    operation: str = ""
    """Under which the gateway that was asked has it in its ledger; "": it has none."""


class SentPiece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Events of a backend, and what the client saw of them; None: the same. The last one has the usage."""

    events: bytes
    shown: bytes | None = None
    last: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


class TakenStream(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """That another gateway went on with it, and what ledgers have of those before."""

    prompt_tokens: int
    completion_tokens: int
    operation: str = ""
    """Under which that gateway has it in its ledger."""


class BilledTokens(msgspec.Struct, frozen=True, array_like=True, tag="billed"):
    """That the gateway which had it let go of it, and what ledgers have by then, over all gateways."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


_Frame = AskedStream | SentPiece | TakenStream | BilledTokens
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Frame).decode


class KeptStream:
    """One stream in its file, which this gateway has the lock of."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = -1
        self.failed = False
        """Whether the client was told that it broke off: that is no part of the answer."""
        self.asked: AskedStream | None = None
        """What an earlier gateway was asked; None: the stream began here."""
        self.pieces: list[SentPiece] = []
        """What earlier gateways sent; whoever goes on with the stream takes it."""
        self.operation = ""
        """Under which this gateway has it in its ledger; "": it has none."""
        self._billed = BilledTokens()
        """What earlier gateways wrote down, but for the last one if that died."""
        self._died: str | None = None
        """Operation of the last gateway, if that died."""

    @property
    def name(self) -> bytes:
        """By which clients know it."""
        return self._path.stem.encode()

    @property
    def folder(self) -> Path:
        """Where it is kept, and where it is settled what operations are billed."""
        return self._path.parent

    def begin(self, asked: AskedStream) -> None:
        """Write down what was asked, once there is an answer."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._handle = os.open(self._path, flags, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.drop()
            return
        self._append(asked)

    def take(self) -> None:
        """Take over what another gateway began: FileNotFoundError, or BlockingIOError if that one lives."""
        self._handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            frames, size = _read_frames(self._path.read_bytes())
            # Half a frame would hide those after it.
            os.ftruncate(self._handle, size)
        except BaseException:
            self.close()
            raise
        self.asked = next((f for f in frames if isinstance(f, AskedStream)), None)
        self.pieces = [f for f in frames if isinstance(f, SentPiece)]
        for frame in frames:
            if isinstance(frame, AskedStream | TakenStream):
                self._died = frame.operation
            if isinstance(frame, TakenStream | BilledTokens):
                self._billed = BilledTokens(frame.prompt_tokens, frame.completion_tokens)
            if isinstance(frame, BilledTokens):
                self._died = None

    def hand_over(self, tokens: int) -> tuple[int, int]:
        """Go on with it: return how many tokens of prompt and answer earlier gateways are billed.

        `tokens` are those of the answer in the file.
        """
        prompt, completion = self._billed.prompt_tokens, self._billed.completion_tokens
        if self._died is not None:
            # Those that died have written down what they had sent, and nothing of the prompt.
            theirs = Settlement(0, max(0, tokens - completion))
            if self._died:
                theirs = settle(self.folder, self._died, theirs)
            prompt, completion = (
                prompt + theirs.prompt_tokens,
                completion + theirs.completion_tokens,
            )
        self._billed = BilledTokens(prompt, completion)
        self._append(TakenStream(prompt, completion, self.operation))
        return prompt, completion

    def add(self, events: bytes, shown: bytes) -> None:
        """Write down a piece, before the client has it."""
        self._append(SentPiece(events, None if shown is events else shown))

    def end(self, events: bytes, shown: bytes, usage: Usage | None) -> None:
        """Write down the last piece."""
        used = usage or Usage()
        self._append(SentPiece(events, shown, True, used.prompt_tokens, used.completion_tokens))

    def bill(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Write down what this gateway bills; to be called before its ledger does."""
        before = self._billed
        if self.operation:
            settle(self.folder, self.operation, Settlement(prompt_tokens, completion_tokens))
        self._append(
            BilledTokens(
                before.prompt_tokens + prompt_tokens, before.completion_tokens + completion_tokens
            )
        )

    def let_go(self) -> None:
        """Let another gateway have the stream, now that the ledger has it."""
        if self.operation:
            forget_settlement(self.folder, self.operation)
        self.close()

    def _append(self, frame: _Frame) -> None:
        if self._handle < 0:
            return
        data = _encode(frame)
        try:
            written = os.write(self._handle, _LENGTH.pack(len(data)) + data)
        except OSError:
            written = 0
        if written < _LENGTH.size + len(data):
            # The disk is full: the stream goes on, but nobody can take it up.
            self.drop()

    def drop(self) -> None:
        """Keep the stream no longer."""
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _read_frames(data: bytes) -> tuple[list[_Frame], int]:
    """Return the frames of a file up to the first that is not whole, and their bytes."""
    frames: list[_Frame] = []
    size = 0
    while size + _LENGTH.size <= len(data):
        begin = size + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, size)[0]
        if end > len(data):
            break
        frames.append(_decode(data[begin:end]))
        size = end
    return frames, size


class KeptStreams:
    """The folder that gateways share."""

    def __init__(self, settings: StreamsSettings) -> None:
        self.settings = settings
        self._folder = Path(settings.folder).expanduser()

    def prepare(self) -> None:
        """Make the folder; InputError where that is not possible."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            usable = os.access(self._folder, os.R_OK | os.W_OK | os.X_OK)
        except OSError:
            usable = False
        if not usable:
            hint = "name a folder you may write to"
            raise InputError("cannot keep streams", path=self._folder, field="streams", hint=hint)

    def number(self, connection: Connection, request: Request) -> NumberedClient:
        """Return a client whose events are numbered, of a stream that begins or goes on (`last-event-id`)."""
        last = request.headers.get(LAST)
        if last is None:
            stream = KeptStream(self._path(secrets.token_hex(16)))
            return NumberedClient(connection, stream, request, 0)
        found = _EVENT_ID.fullmatch(last)
        if found is None:
            raise ApiError(400, f"{LAST.decode()} is none of this service", code="unknown_stream")
        stream = KeptStream(self._path(found[1].decode()))
        try:
            stream.take()
        except FileNotFoundError:
            raise faults.stream_gone() from None
        except BlockingIOError:
            raise ApiError(
                409, "another gateway still sends this stream", code="stream_busy", retry_after_s=1
            ) from None
        except (msgspec.MsgspecError, struct.error):
            raise faults.stream_gone() from None
        asked = stream.asked
        if asked is None:
            stream.close()
            raise faults.stream_gone()
        client = NumberedClient(connection, stream, request, int(found[2]))
        if (asked.digest, asked.path) != (client.digest, client.path):
            stream.close()
            raise ApiError(409, "this stream was asked for otherwise", code="other_request")
        # Dialects make the ids of an answer of these.
        request.id, request.trace = asked.request_id, asked.trace
        return client

    def sweep(self, now_s: float | None = None) -> None:
        """Remove files of streams that ended, or whose gateway died, long enough ago."""
        until_s = (time.time() if now_s is None else now_s) - self.settings.keep_s
        for path in self._folder.glob("*" + _ENDING):
            try:
                if path.stat().st_mtime < until_s:
                    stream = KeptStream(path)
                    stream.take()
                    stream.drop()
            except (OSError, msgspec.MsgspecError):
                # Somebody has it, or removed it; or it is no file of ours.
                continue
        sweep_settlements(self._folder, now_s)

    def _path(self, name: str) -> Path:
        return self._folder / (name + _ENDING)


class NumberedClient(FrontClient[Connection]):
    """Stands before a connection and numbers events; those up to `seen` the client has already."""

    def __init__(
        self, connection: Connection, stream: KeptStream, request: Request, seen: int
    ) -> None:
        super().__init__(connection)
        self.stream = stream
        self.digest = hashlib.sha256(request.body).digest()
        """Of what it asks, before that is translated."""
        self.path = request.path
        self.in_use = False
        """Whether a request is on its way that lets go of the stream when it ends."""
        self._seen = seen
        self._sent = 0

    def check_key(self, key_id: str | None) -> None:
        """Refuse (ApiError) to go on with a stream of another key."""
        asked = self.stream.asked
        if asked is not None and asked.key_id != key_id:
            raise faults.stream_gone()

    def begin(self, request: Request, key_id: str | None, model: str, body: bytes) -> None:
        """Keep the stream from here on; `body` is what backends get."""
        ids = (key_id, request.id, request.trace)
        self.stream.begin(
            AskedStream(self.digest, self.path, *ids, model, body, self.stream.operation)
        )

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        extra: bytes = b"",
    ) -> None:
        """Answer with a whole answer, which is not kept."""
        self._connection.respond(status, body, content_type, extra)

    def respond_error(self, error: ApiError) -> None:
        """Answer with an error."""
        self._connection.respond_error(error)

    def begin_stream(self, headers: bytes = b"") -> None:
        """Begin a stream of events."""
        self._connection.begin_stream(b"x-atoll-stream: %b\r\n%b" % (self.stream.name, headers))

    def send(self, data: bytes) -> None:
        """Send events that the client does not have yet."""
        if news := self._number(data):
            self._connection.send(news)

    def end_stream(self, data: bytes) -> None:
        """Send the last events, and end the stream."""
        self._connection.end_stream(self._number(data))

    def _number(self, data: bytes) -> bytes:
        news = []
        for event in split_events(data)[0]:
            # Comments are no part of the answer, and errors of a gateway are not the next one's.
            if payload(event) is None or self.stream.failed:
                news.append(event)
                continue
            self._sent += 1
            if self._sent > self._seen:
                news.append(b"id: %b-%d\n%b" % (self.stream.name, self._sent, event))
        return b"".join(news)
