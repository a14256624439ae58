"""One session of `/v1/realtime`: sound that is held, the conversation, and the answer under way.

What a client says is taken in order. An answer runs beside that in a task of its own, as a chat that the
session asks its server for; whatever ends it, the client hears `response.done` for every `response.created`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import io
import logging
import secrets
import wave
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from atoll.core.errors import AtollError
from atoll.runtime.http.http_client import StatusError
from atoll.runtime.openai import ApiError
from atoll.runtime.realtime.realtime_events import (
    RATE_HZ,
    AnswerFields,
    AudioAppend,
    AudioClear,
    AudioCommit,
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ItemFields,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    SessionSettings,
    SessionUpdate,
    read_event,
)
from atoll.runtime.realtime.realtime_limits import RealtimeLimits
from atoll.runtime.realtime.turn_detection import Ear, TurnListener
from atoll.tasks.cutting import SentenceCutter

_LOG = logging.getLogger(__name__)
_BYTES_PER_MS = 2 * RATE_HZ // 1000
_MIN_COMMIT_MS = 100
_KEPT_MS = 1000
"""Silence before a turn that is held beside its padding: so late a beginning may be noticed."""
_TEMPERATURE = 0.8
"""OpenAI's, of sessions."""
_UNHEARD = 4
"""Sounds that are held although no answer has heard them to its end; older ones are left out."""
_MAX_CHARS = 2**21
"""Of all that is written in a conversation."""


class ClientSocket(Protocol):
    """Messages of a client (`atoll.runtime.http.websocket.WebSocket`)."""

    def __aiter__(self) -> AsyncIterator[str]:
        """Yield messages as they come."""
        ...

    async def send(self, text: str) -> None:
        """Send a message."""

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close in good order."""


Ask = Callable[[dict[str, Any]], AsyncGenerator[bytes, None]]
"""Asks for a streamed chat, and yields the lines of its events."""


@dataclass(slots=True, eq=False)
class _Item:
    """A message. `sounds` are WAV files that no answer has heard to its end, None in place of texts."""

    id: str
    role: str
    texts: list[str]
    sounds: list[bytes | None]
    status: str = "completed"
    audio_ms: float = 0.0
    """Length of what was spoken of it."""
    pieces: int = 0
    """Sounds that it was spoken in, one a sentence."""
    is_spoken: bool = False

    def shown(self) -> dict[str, Any]:
        """Return it as clients are told."""
        content: list[dict[str, Any]] = []
        for text, sound in zip(self.texts, self.sounds, strict=True):
            if self.role == "assistant":
                kind, name = ("output_audio", "transcript"), ("output_text", "text")
                chosen, key = kind if self.is_spoken else name
                content.append({"type": chosen, key: text})
            elif sound is not None:
                content.append({"type": "input_audio", "transcript": None})
            else:
                content.append({"type": "input_text", "text": text})
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status,
            "role": self.role,
            "content": content,
        }

    def message(self) -> dict[str, Any]:
        """Return it as a message of a chat."""
        if not any(self.sounds):
            return {"role": self.role, "content": "\n".join(self.texts)}
        parts: list[dict[str, Any]] = []
        for text, sound in zip(self.texts, self.sounds, strict=True):
            if sound is None:
                parts.append({"type": "text", "text": text})
            else:
                data = base64.b64encode(sound).decode()
                parts.append(
                    {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
                )
        return {"role": self.role, "content": parts}


@dataclass(slots=True, eq=False)
class _Response:
    """An answer under way, and the sounds that it hears."""

    id: str
    item: _Item
    settings: SessionSettings
    hears: list[tuple[_Item, int]]
    usage: dict[str, Any] | None = None
    finish: str | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Buffer:
    """Sound that was not committed: samples of 16 bits, and when they begin in all that came."""

    data: bytearray = field(default_factory=bytearray)
    start_ms: int = 0

    @property
    def end_ms(self) -> int:
        """When what came ends."""
        return self.start_ms + len(self.data) // _BYTES_PER_MS

    def take(self, start_ms: int, end_ms: int) -> bytes:
        """Return the sound between two times, and forget all before the second."""
        low, high = (max(0, at - self.start_ms) * _BYTES_PER_MS for at in (start_ms, end_ms))
        taken = bytes(self.data[low:high])
        self.drop(end_ms)
        return taken

    def drop(self, until_ms: int) -> None:
        """Forget what came before a time."""
        cut = min(max(0, until_ms - self.start_ms) * _BYTES_PER_MS, len(self.data))
        del self.data[:cut]
        self.start_ms += cut // _BYTES_PER_MS


class RealtimeSession:
    """A conversation over a WebSocket, until either side ends it or it has lasted as long as it may."""

    def __init__(
        self,
        socket: ClientSocket,
        ask: Ask,
        listen: Callable[[], Awaitable[Ear]],
        model: str,
        limits: RealtimeLimits,
    ) -> None:
        self.id = _name("sess")
        self._socket = socket
        self._ask = ask
        self._listen = listen
        self._limits = limits
        self._settings = SessionSettings(model)
        self._items: list[_Item] = []
        self._buffer = _Buffer()
        self._listener: TurnListener | None = None
        self._heard_from_ms = 0
        """When the listener began, in the time of the buffer."""
        self._turn: tuple[str, int] | None = None
        """The item that is being said, and when it began."""
        self._response: _Response | None = None
        self._owes = False
        """Whether a turn ended while an answer was under way that it does not interrupt."""
        self._events = 0

    async def run(self) -> None:
        """Take what the client says until the session ends."""
        try:
            async with asyncio.timeout(self._limits.session_s):
                await self._send("session.created", session=self._settings.shown(self.id))
                async for text in self._socket:
                    await self._take(text)
        except TimeoutError:
            limit = self._limits.session_s
            error = ApiError(400, f"a session lasts {limit:g} s at most", code="session_expired")
            await self._send_error(error)
            self._socket.close(1000, "session_expired")
        finally:
            if (response := self._response) is not None and response.task is not None:
                response.task.cancel()
                await asyncio.gather(response.task, return_exceptions=True)

    async def _take(self, text: str) -> None:
        event_id = None
        try:
            event = read_event(text)
            event_id = event.event_id
            await self._do(event)
        except ApiError as error:
            await self._send_error(error, event_id)

    async def _do(self, event: ClientEvent) -> None:
        match event:
            case AudioAppend():
                await self._append(event)
            case SessionUpdate():
                await self._update(event)
            case AudioCommit():
                await self._commit()
            case AudioClear():
                self._forget_sound()
                await self._send("input_audio_buffer.cleared")
            case ItemCreate():
                await self._create_item(event)
            case ItemDelete():
                self._items.remove(self._find(event.item_id))
                await self._send("conversation.item.deleted", item_id=event.item_id)
            case ItemTruncate():
                await self._truncate(event)
            case ResponseCreate():
                await self._respond(event.response)
            case ResponseCancel():
                await self._cancel(event)

    async def _update(self, event: SessionUpdate) -> None:
        model = event.session.model
        if model not in (None, self._settings.model):
            raise ApiError(400, "session.model: it is that of the address", param="session.model")
        self._settings = self._settings.changed(event.session)
        if self._settings.turns is None:
            self._listener = self._turn = None
        await self._send("session.updated", session=self._settings.shown(self.id))

    # Sound that comes in

    async def _append(self, event: AudioAppend) -> None:
        try:
            data = base64.b64decode(event.audio, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ApiError(400, "audio: not base64", param="audio") from error
        if len(data) % 2:
            raise ApiError(400, "audio: not whole samples of 16 bits", param="audio")
        held_ms = (len(self._buffer.data) + len(data)) // _BYTES_PER_MS
        if held_ms > self._limits.buffered_s * 1000:
            raise ApiError(
                400,
                f"audio: at most {self._limits.buffered_s:g} s are held; commit or clear them",
                param="audio",
                code="input_audio_buffer_full",
            )
        if self._settings.turns is not None and self._listener is None:
            await self._begin_listening()
        self._buffer.data += data
        rules, listener = self._settings.turns, self._listener
        if rules is None or listener is None:
            return
        samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768.0
        for turn in await asyncio.to_thread(listener.hear, samples, rules):
            at_ms = self._heard_from_ms + turn.at_ms
            if turn.kind == "started":
                await self._begin_turn(max(self._buffer.start_ms, at_ms - rules.prefix_padding_ms))
            elif self._turn is not None:
                await self._end_turn(at_ms + rules.silence_duration_ms)
        if self._turn is None:
            self._buffer.drop(self._buffer.end_ms - rules.prefix_padding_ms - _KEPT_MS)

    async def _begin_listening(self) -> None:
        try:
            self._listener = TurnListener(await self._listen())
        except AtollError as error:
            # The client may still say itself where a turn ends.
            self._settings = msgspec.structs.replace(self._settings, turns=None)
            raise ApiError(
                400,
                f"turns cannot be found here ({error}); commit sound yourself",
                param="session.audio.input.turn_detection",
                code="turn_detection_unavailable",
            ) from error
        self._heard_from_ms = self._buffer.end_ms

    async def _begin_turn(self, start_ms: int) -> None:
        rules = self._settings.turns
        self._turn = (_name("item"), start_ms)
        await self._send(
            "input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=self._turn[0]
        )
        if rules is not None and rules.interrupt_response:
            await self._interrupt("turn_detected")

    async def _end_turn(self, end_ms: int) -> None:
        assert self._turn is not None
        (item_id, start_ms), self._turn = self._turn, None
        end_ms = min(end_ms, self._buffer.end_ms)
        await self._send("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=item_id)
        await self._add_sound(item_id, self._buffer.take(start_ms, end_ms))
        if self._settings.turns is not None and self._settings.turns.create_response:
            if self._response is None:
                await self._respond(None)
            else:
                self._owes = True

    async def _commit(self) -> None:
        if len(self._buffer.data) < _MIN_COMMIT_MS * _BYTES_PER_MS:
            raise ApiError(
                400,
                f"there are less than {_MIN_COMMIT_MS} ms of sound to commit",
                code="input_audio_buffer_commit_empty",
            )
        item_id = self._turn[0] if self._turn is not None else _name("item")
        data = bytes(self._buffer.data)
        self._forget_sound()
        await self._add_sound(item_id, data)

    def _forget_sound(self) -> None:
        self._buffer.drop(self._buffer.end_ms)
        # What is heard next is the beginning of something else.
        self._listener = self._turn = None

    async def _add_sound(self, item_id: str, data: bytes) -> None:
        last = self._items[-1].id if self._items else None
        await self._send("input_audio_buffer.committed", previous_item_id=last, item_id=item_id)
        await self._add(_Item(item_id, "user", [""], [_wav(data)]))

    # The conversation

    async def _create_item(self, event: ItemCreate) -> None:
        item = _read_item(event.item)
        place = len(self._items)
        if event.previous_item_id == "root":
            place = 0
        elif event.previous_item_id is not None:
            place = self._items.index(self._find(event.previous_item_id)) + 1
        await self._add(item, place)

    async def _add(self, item: _Item, place: int | None = None) -> None:
        if len(self._items) >= self._limits.items:
            raise ApiError(
                400,
                f"a conversation has at most {self._limits.items} items; delete some",
                code="too_many_items",
            )
        if any(each.id == item.id for each in self._items):
            raise ApiError(400, f"item.id: {item.id} is there already", param="item.id")
        if sum(len(text) for each in (*self._items, item) for text in each.texts) > _MAX_CHARS:
            raise ApiError(
                400,
                f"a conversation has at most {_MAX_CHARS} characters; delete some items",
                code="conversation_too_large",
            )
        place = len(self._items) if place is None else place
        self._items.insert(place, item)
        self._unheard()
        told = {"previous_item_id": self._items[place - 1].id if place else None}
        await self._send("conversation.item.added", **told, item=item.shown())
        if item.status == "completed":
            await self._send("conversation.item.done", **told, item=item.shown())

    def _unheard(self) -> list[tuple[_Item, int]]:
        """Return sounds that no answer has heard to its end, and forget the oldest of too many."""
        found = [
            (item, place)
            for item in self._items
            for place, sound in enumerate(item.sounds)
            if sound is not None
        ]
        for item, place in found[:-_UNHEARD]:
            item.sounds[place] = None
        return found[-_UNHEARD:]

    def _find(self, item_id: str) -> _Item:
        for item in self._items:
            if item.id == item_id:
                return item
        raise ApiError(400, f"there is no item {item_id}", param="item_id", code="item_not_found")

    async def _truncate(self, event: ItemTruncate) -> None:
        item = self._find(event.item_id)
        if not item.is_spoken or event.audio_end_ms > item.audio_ms + 1:
            raise ApiError(
                400,
                f"audio_end_ms: {item.audio_ms:.0f} ms of it were spoken",
                param="audio_end_ms",
            )
        if self._response is not None and self._response.item is item:
            await self._interrupt("client_cancelled")
        text = item.texts[0]
        kept = int(len(text) * event.audio_end_ms / max(1.0, item.audio_ms))
        if kept < len(text):
            # Words that were begun count as heard no more.
            item.texts = [text[: kept + 1].rpartition(" ")[0]]
        item.audio_ms = event.audio_end_ms
        await self._send(
            "conversation.item.truncated",
            item_id=item.id,
            content_index=0,
            audio_end_ms=event.audio_end_ms,
        )

    # Answers

    async def _cancel(self, event: ResponseCancel) -> None:
        response = self._response
        if response is None or event.response_id not in (None, response.id):
            raise ApiError(
                400, "there is no such response under way", code="response_cancel_not_active"
            )
        await self._interrupt("client_cancelled")

    async def _respond(self, fields: AnswerFields | None) -> None:
        if self._response is not None:
            raise ApiError(
                400,
                f"{self._response.id} is under way",
                code="conversation_already_has_active_response",
            )
        settings = self._settings if fields is None else self._settings.changed(fields)
        item = _Item(_name("item"), "assistant", [""], [None], "in_progress")
        item.is_spoken = settings.speaks
        response = _Response(_name("resp"), item, settings, self._unheard())
        body = self._body(settings)
        await self._send("response.created", response=self._shown(response, "in_progress"))
        await self._add(item)
        told = {"response_id": response.id, "output_index": 0}
        await self._send("response.output_item.added", **told, item=item.shown())
        part = item.shown()["content"][0]
        await self._send("response.content_part.added", **self._where(response), part=part)
        self._response = response
        response.task = asyncio.create_task(self._answer(response, body))

    def _body(self, settings: SessionSettings) -> dict[str, Any]:
        """Return the chat that is asked for."""
        told = [item for item in self._items if item.role != "assistant" or item.texts[0]]
        messages = [item.message() for item in told]
        if settings.instructions:
            messages.insert(0, {"role": "system", "content": settings.instructions})
        if not messages:
            raise ApiError(400, "there is nothing to answer", code="conversation_empty")
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": _TEMPERATURE,
            # A task that is told none draws the same every time.
            "seed": secrets.randbelow(2**31),
        }
        if settings.speaks:
            body["modalities"] = ["text", "audio"]
            body["audio"] = {"voice": settings.voice, "format": "pcm16"}
        if settings.max_tokens is not None:
            body["max_completion_tokens"] = settings.max_tokens
        return body

    async def _answer(self, response: _Response, body: dict[str, Any]) -> None:
        """Pass an answer on as it comes, and say how it ended."""
        status, details = "failed", None
        try:
            async with contextlib.aclosing(self._ask(body)) as lines:
                async for line in lines:
                    if line.startswith(b"data: {"):
                        await self._pass(response, msgspec.json.decode(line[6:]))
            if response.finish == "length":
                status = "incomplete"
                details = {"type": "incomplete", "reason": "max_output_tokens"}
            elif response.finish is not None:
                status = "completed"
            else:
                details = _failure("server_error", "the answer broke off")
        except StatusError as error:
            details = _refusal(error)
        except ApiError as error:
            details = _failure(error.code or "server_error", error.message)
        except (AtollError, msgspec.DecodeError) as error:
            _LOG.warning("an answer failed: %s", error)
            details = _failure("server_error", "the answer broke off")
        # From here on the next may be asked for, as soon as the client hears of it.
        self._response = None
        await self._end(response, status, details)

    async def _pass(self, response: _Response, chunk: dict[str, Any]) -> None:
        """Pass a chunk of a streamed chat on."""
        if error := chunk.get("error"):
            raise ApiError(500, str(error.get("message")), code=error.get("code") or "server_error")
        if usage := chunk.get("usage"):
            response.usage = {
                "total_tokens": usage.get("total_tokens", 0),
                "input_tokens": usage.get("prompt_tokens", 0),
                "output_tokens": usage.get("completion_tokens", 0),
            }
        item = response.item
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            spoken = delta.get("audio") or {}
            if text := (spoken.get("transcript") or delta.get("content")):
                item.texts[0] += text
                kind = "output_audio_transcript" if item.is_spoken else "output_text"
                await self._send(f"response.{kind}.delta", **self._where(response), delta=text)
            if sound := spoken.get("data"):
                item.audio_ms += len(sound) * 3 / 4 / _BYTES_PER_MS
                item.pieces += 1
                await self._send(
                    "response.output_audio.delta", **self._where(response), delta=sound
                )
            response.finish = choice.get("finish_reason") or response.finish
            heard = ((choice.get("atoll") or {}).get("answer") or {}).get("heard")
            if heard and len(heard) == len(response.hears):
                await self._note_heard(response, heard)

    async def _note_heard(self, response: _Response, heard: list[str]) -> None:
        """Keep the words of sounds in their place: they need not be heard again."""
        for (item, place), text in zip(response.hears, heard, strict=True):
            item.texts[place], item.sounds[place] = text, None
            if response.settings.transcribes:
                await self._send(
                    "conversation.item.input_audio_transcription.completed",
                    item_id=item.id,
                    content_index=place,
                    transcript=text,
                    # It was heard for the answer, and counts there.
                    usage={"type": "duration", "seconds": 0.0},
                )

    async def _interrupt(self, reason: str) -> None:
        """End the answer under way, if there is one; of its words those stay that were spoken."""
        response, self._response = self._response, None
        if response is None or response.task is None:
            return
        response.task.cancel()
        await asyncio.gather(response.task, return_exceptions=True)
        item = response.item
        if item.is_spoken:
            cutter = SentenceCutter()
            spoken = [*cutter.feed(item.texts[0]), *cutter.finish()][: item.pieces]
            item.texts = [" ".join(str(each) for each in spoken)]
        await self._end(response, "cancelled", {"type": "cancelled", "reason": reason})

    async def _end(self, response: _Response, status: str, details: dict[str, Any] | None) -> None:
        item, where = response.item, self._where(response)
        item.status = "completed" if status == "completed" else "incomplete"
        text = item.texts[0]
        if item.is_spoken:
            await self._send("response.output_audio.done", **where)
            await self._send("response.output_audio_transcript.done", **where, transcript=text)
        else:
            await self._send("response.output_text.done", **where, text=text)
        shown = item.shown()
        await self._send("response.content_part.done", **where, part=shown["content"][0])
        told = {"response_id": response.id, "output_index": 0, "item": shown}
        await self._send("response.output_item.done", **told)
        if item in self._items:
            place = self._items.index(item)
            before = self._items[place - 1].id if place else None
            await self._send("conversation.item.done", previous_item_id=before, item=shown)
        await self._send("response.done", response=self._shown(response, status, details))
        if self._owes and self._response is None:
            self._owes = False
            try:
                await self._respond(None)
            except ApiError as error:
                await self._send_error(error)

    def _shown(
        self, response: _Response, status: str, details: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        settings = response.settings
        return {
            "id": response.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "output": [] if status == "in_progress" else [response.item.shown()],
            "conversation_id": self.id,
            "output_modalities": ["audio" if settings.speaks else "text"],
            "max_output_tokens": "inf" if settings.max_tokens is None else settings.max_tokens,
            "usage": response.usage,
        }

    @staticmethod
    def _where(response: _Response) -> dict[str, Any]:
        return {
            "response_id": response.id,
            "item_id": response.item.id,
            "output_index": 0,
            "content_index": 0,
        }

    async def _send(self, kind: str, **fields: Any) -> None:
        self._events += 1
        event = {"type": kind, "event_id": f"event_{self._events}", **fields}
        await self._socket.send(msgspec.json.encode(event).decode())

    async def _send_error(self, error: ApiError, event_id: str | None = None) -> None:
        told = {
            "type": error.kind,
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "event_id": event_id,
        }
        await self._send("error", error=told)


def _read_item(fields: ItemFields) -> _Item:
    """Return an item that a client wrote; sound in it is as that of the buffer."""
    texts, sounds = [], []
    for part in fields.content:
        sound = None
        if part.type == "input_audio":
            if fields.role != "user":
                raise ApiError(400, "item.content: only users bring sound", param="item.content")
            try:
                sound = _wav(base64.b64decode(part.audio or "", validate=True))
            except (binascii.Error, ValueError) as error:
                raise ApiError(400, "item.content: not base64", param="item.content") from error
        texts.append(part.text or part.transcript or "")
        sounds.append(sound)
    if fields.role == "assistant":
        texts, sounds = ["".join(texts)], [None]
    return _Item(fields.id or _name("item"), fields.role, texts, sounds)


def _wav(data: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE_HZ)
        written.writeframes(data)
    return file.getvalue()


def _failure(code: str, message: str) -> dict[str, Any]:
    return {"type": "failed", "error": {"type": code, "code": code, "message": message}}


def _refusal(error: StatusError) -> dict[str, Any]:
    """Return what the server said of a chat that it refused: a limit of the key, an unknown model."""
    try:
        said = msgspec.json.decode(error.body)["error"]
        return _failure(str(said.get("code") or said.get("type")), str(said["message"])[:1000])
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return _failure("server_error", f"the server answered with {error.status}")


def _name(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
