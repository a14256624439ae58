"""POST /v1/chat/completions: text, pictures, sound and video in; text and speech out, whole or streamed.

Streamed, text comes as `delta.content`. Where speech is wanted, text comes as `delta.audio.transcript`
instead, and sound follows in `delta.audio.data` (base64 of 16-bit samples, 24 kHz) sentence by sentence, as
OpenAI's audio models send it; whole, `message.content` is null beside `message.audio`.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from atoll.core.request_parameters import (
    ANSWER_FIELDS,
    PARAMETERS,
    GraphParameters,
    Name,
    Positive,
)
from atoll.runtime.graph_server.graph_request import GraphRequest, prime
from atoll.runtime.graph_server.request_fields import read_fields, refuse_unless
from atoll.runtime.graph_server.speech_endpoint import SpokenAudio, check_form, speech_bytes
from atoll.runtime.http.handlers import Answer, EventStream, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.instance.tools.functions import MAX_DEPTH, too_deep
from atoll.runtime.openai import ApiError, StreamOptions, error_body, join_calls
from atoll.tasks.library.shapes import Reply, Turn
from atoll.tasks.task import Task
from atoll.workload.classes import Modality

DEFAULT_VOICE = "heart"


class UrlField(Struct, forbid_unknown_fields=True):
    """Where a picture or video is; `detail` is a hint that nothing here needs."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class SoundField(Struct, forbid_unknown_fields=True):
    """A sound in base64; what it is, is seen from its bytes."""

    data: str
    format: Annotated[str, Meta(max_length=20)]


class TextPiece(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text in a message."""

    text: str


class PicturePiece(Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    """A picture in a message."""

    image_url: UrlField


class SoundPiece(Struct, tag_field="type", tag="input_audio", forbid_unknown_fields=True):
    """A sound in a message."""

    input_audio: SoundField


class VideoPiece(Struct, tag_field="type", tag="video_url", forbid_unknown_fields=True):
    """A video in a message."""

    video_url: UrlField


AnyPiece = TextPiece | PicturePiece | SoundPiece | VideoPiece


class MessageFields(Struct, forbid_unknown_fields=True):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[AnyPiece], Meta(min_length=1)] | None = None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    audio: None = None
    """Speech of an earlier answer is not kept; its transcript is sent as `content` instead."""


class SpokenFields(Struct, forbid_unknown_fields=True):
    """How an answer is to sound."""

    voice: Annotated[str, Meta(min_length=1, max_length=100)] = DEFAULT_VOICE
    format: Literal["wav", "pcm16", "mp3", "opus"] = "wav"


class ChatFields(GraphParameters, kw_only=True, forbid_unknown_fields=True):
    """The body of a request, beside the parameters declared for the graph server."""

    model: Name
    messages: Annotated[list[MessageFields], Meta(min_length=1, max_length=4096)]
    modalities: Annotated[list[Literal["text", "audio"]], Meta(min_length=1)] | None = None
    audio: SpokenFields | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    # Nothing comes of these: they change no answer.
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def wants_audio(self) -> bool:
        """Whether the answer is to be spoken, too."""
        return "audio" in (self.modalities or ())

    def sampling(self) -> dict[str, Any]:
        """Return how the answer is drawn, as far as the client says."""
        given = {
            name: value
            for name, parameter in PARAMETERS.items()
            if parameter.use.graph == "taken" and (value := getattr(self, name)) is not None
        }
        if self.max_completion_tokens:
            given["max_tokens"] = self.max_completion_tokens
        if isinstance(self.stop, str):
            given["stop"] = [self.stop] if self.stop else []
        if not given.get("stop"):
            given.pop("stop", None)
        return given

    def form(self) -> dict[str, Any]:
        """Return the fields that give the answer a form, or ask what it is made of, where they change it."""
        asked = {
            group
            for name, group in ANSWER_FIELDS.items()
            if not _is_neutral(getattr(self, name), _NEUTRAL[name])
        }
        return {
            name: value
            for name, group in ANSWER_FIELDS.items()
            if group in asked and (value := getattr(self, name)) is not None
        }


_MAX_CHOICES = 8
"""Answers to one request; each is a run of its task."""
_MAX_LEVELS = MAX_DEPTH + 8
"""Of objects and lists in each other: those of a schema, and what it stands in."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
} | {
    name: parameter.use.neutral
    for name, parameter in PARAMETERS.items()
    if parameter.use.graph == "neutral"
}
"""Values of fields that change nothing; others would, and are refused unless the task obeys them."""


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or value in neutral


def read_chat(request: Request) -> ChatFields:
    """Read a request; what is wrong with it is an ApiError."""
    fields = read_fields(ChatFields, request.body)
    if fields.wants_audio and fields.stream and (fields.audio or _WAV).format != "pcm16":
        raise ApiError(400, "audio.format: a stream needs pcm16", param="audio.format")
    check_form((fields.audio or _WAV).format, "audio.format")
    if fields.audio is not None and not fields.wants_audio:
        raise ApiError(
            400, 'audio: given, but modalities is not ["text", "audio"]', param="modalities"
        )
    return fields


_WAV = SpokenFields()


async def answer_chat(fields: ChatFields, request: GraphRequest) -> Answer:
    """Take in what the messages hold, let the task answer, and return its answer."""
    _refuse_what_is_not_obeyed(fields, request.task)
    turn = Turn(
        messages=[
            await _message(message, place, request) for place, message in enumerate(fields.messages)
        ],
        wants_audio=fields.wants_audio,
        voice=(fields.audio or _WAV).voice,
        sampling=fields.sampling(),
        form=fields.form(),
    )
    turns = [replace(turn, choice=number) for number in range(fields.n or 1)]
    wants: tuple[Modality, ...] = ("text", "audio") if fields.wants_audio else ("text",)
    request.begin(*turns, wants=wants, seed=fields.seed)
    writer = _ChatWriter(fields, request)
    if fields.stream:
        pieces = await prime(writer.stream())
        return EventStream(pieces, request.headers())
    try:
        return await writer.whole()
    except ApiError as error:
        raise _in_body(error) from error.__cause__


def _in_body(error: ApiError) -> ApiError:
    """Return an error that names a component's input as the body has it."""
    if error.param == "voice":
        error.param = "audio.voice"
    return error


def _refuse_what_is_not_obeyed(fields: ChatFields, task: Task[Any, Any]) -> None:
    """Refuse by name what would change the answer and that the task does nothing about."""
    obeyed = {name for name in _NEUTRAL if ANSWER_FIELDS.get(name, name) in task.obeys}
    refuse_unless(fields, {name: _NEUTRAL[name] for name in _NEUTRAL if name not in obeyed})
    if fields.n is not None and not 1 <= fields.n <= _MAX_CHOICES:
        raise ApiError(400, f"n: 1 to {_MAX_CHOICES} answers a request", param="n")
    for name, value in fields.form().items():
        _check_depth(value, name)
    if "tools" in task.obeys:
        return
    for place, message in enumerate(fields.messages):
        told = "role" if message.role == "tool" else "tool_calls" if message.tool_calls else None
        if told is not None or message.tool_call_id is not None:
            param = f"messages[{place}].{told or 'tool_call_id'}"
            raise ApiError(400, f"{param}: this model is told of no tools", param=param)


def _check_depth(value: Any, param: str) -> None:
    # Whoever hands it on calls itself for every level, in this process and others.
    if too_deep(value, _MAX_LEVELS):
        raise ApiError(400, f"{param}: at most {_MAX_LEVELS} levels", param=param)


async def _message(message: MessageFields, place: int, request: GraphRequest) -> dict[str, Any]:
    """Return a message as tasks take it."""
    role = "system" if message.role == "developer" else message.role
    taken = {"role": role, "content": await _content(message, place, request)}
    for name in ("tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value:
            _check_depth(value, f"messages[{place}].{name}")
            taken[name] = value
    return taken


async def _content(message: MessageFields, place: int, request: GraphRequest) -> Any:
    if message.content is None:
        if message.tool_calls:
            return ""
        raise ApiError(
            400, f"messages[{place}].content: needed", param=f"messages[{place}].content"
        )
    if isinstance(message.content, str):
        return message.content
    content: list[dict[str, Any]] = []
    for number, piece in enumerate(message.content):
        param = f"messages[{place}].content[{number}]"
        if isinstance(piece, TextPiece):
            content.append({"type": "text", "text": piece.text})
        elif isinstance(piece, PicturePiece):
            image = await request.media.picture(piece.image_url.url, f"{param}.image_url")
            content.append({"type": "image", "image": image})
        elif isinstance(piece, SoundPiece):
            sound = await request.media.sound(piece.input_audio.data, f"{param}.input_audio")
            content.append({"type": "audio", "audio": sound.audio, "pieces": sound.pieces})
        else:
            frames = await request.media.video(piece.video_url.url, f"{param}.video_url")
            content.append({"type": "video", "frames": frames})
    return content


class _ChatWriter:
    """Writes the answer to one request."""

    def __init__(self, fields: ChatFields, request: GraphRequest) -> None:
        self._fields = fields
        self._request = request
        self._created = int(time.time())
        self._audio_ids = [f"audio_{secrets.token_hex(12)}" for _ in request.answers]
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": kind,
            "created": self._created,
            "model": fields.model,
        }

    async def whole(self) -> Response:
        """Return the answer in one piece."""
        request = self._request
        replies: list[Reply] = await request.results()
        choices = []
        for index, (reply, answer) in enumerate(zip(replies, request.answers, strict=True)):
            message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
            if self._fields.wants_audio:
                # As OpenAI's audio models: the text of what is spoken is its transcript.
                message |= {"content": None, "audio": await self._spoken(reply, index)}
            if answer.calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = join_calls(answer.calls)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(answer.logprobs),
                    "finish_reason": answer.finish_reason,
                    **_extension(await request.more(reply, index)),
                }
            )
        body = self._head | {"choices": choices, "usage": request.usage.chat()} | request.extras()
        return Response(msgspec.json.encode(body), headers=request.headers())

    async def _spoken(self, reply: Reply, index: int) -> dict[str, Any]:
        speech = SpokenAudio()
        for sound in getattr(reply, "audio", None) or ():
            await speech.add(sound, self._request, index)
        self._request.usage.speech_s += speech.seconds
        form = (self._fields.audio or _WAV).format.removesuffix("16")
        data = await self._request.encode(speech.size, lambda: speech_bytes(speech, form))
        return {
            "id": self._audio_ids[index],
            "data": base64.b64encode(data).decode(),
            "transcript": reply.text,
            # Speech is not kept, so nothing can refer to it later.
            "expires_at": self._created,
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer event by event."""
        request = self._request
        speech = [SpokenAudio() for _ in request.answers]
        roles = b"".join(self._chunk(n, self._role()) for n in range(len(request.answers)))
        begun = False
        try:
            async with contextlib.aclosing(request.all_events()) as events:
                async for index, event in events:
                    delta: dict[str, Any] = {}
                    if event.path == ("text",) and event.value:
                        delta = self._text(index, event.value)
                    elif event.path[:1] == ("audio",) and isinstance(event.value, dict):
                        data = await speech[index].add(event.value, request, index, keep=False)
                        delta = self._sound(index, speech[index].check_pcm(data))
                    if new := self._news(index, delta):
                        yield (b"" if begun else roles) + new
                        begun = True
            request.usage.speech_s = sum(each.seconds for each in speech)
            yield (b"" if begun else roles) + await self._end()
        except ApiError as error:
            _in_body(error)
            if not begun:
                raise
            yield (
                b"data: " + error_body(error.message, error.kind, error.param, error.code) + b"\n\n"
            )

    def _role(self) -> dict[str, Any]:
        return {"role": "assistant"} | ({} if self._fields.wants_audio else {"content": ""})

    def _text(self, index: int, text: str) -> dict[str, Any]:
        if self._fields.wants_audio:
            return {"audio": {"id": self._audio_ids[index], "transcript": text}}
        return {"content": text}

    def _sound(self, index: int, data: bytes) -> dict[str, Any]:
        encoded = base64.b64encode(data).decode()
        return {"audio": {"id": self._audio_ids[index], "data": encoded}}

    def _news(self, index: int, delta: dict[str, Any]) -> bytes:
        """Return a chunk with a delta and what else has come of its answer; nothing where there is none."""
        answer = self._request.answers[index]
        calls, answer.calls = answer.calls, []
        logprobs, answer.logprobs = answer.logprobs, []
        if calls:
            delta = delta | {"tool_calls": calls}
        return self._chunk(index, delta, logprobs=logprobs) if delta or logprobs else b""

    async def _end(self) -> bytes:
        ends = []
        for index, answer in enumerate(self._request.answers):
            delta: dict[str, Any] = {}
            if self._fields.wants_audio:
                delta = {"audio": {"id": self._audio_ids[index], "expires_at": self._created}}
            last = index == len(self._request.answers) - 1
            extras = self._request.extras() if last else {}
            more = await self._request.more(answer.run.answer(), index)
            ends += [
                self._news(index, {}),
                self._chunk(index, delta, finish=answer.finish_reason, more=more, **extras),
            ]
        options = self._fields.stream_options
        if options is not None and options.include_usage:
            ends.append(self._event({"choices": [], "usage": self._request.usage.chat()}))
        return b"".join((*ends, b"data: [DONE]\n\n"))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
        more: dict[str, Any] | None = None,
        **extras: Any,
    ) -> bytes:
        shown = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish}
        return self._event({"choices": [choice | _extension(more)], **extras})

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": entries, "refusal": None} if self._fields.logprobs else None

    def _event(self, rest: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(self._head | rest) + b"\n\n"


def _extension(more: dict[str, Any] | None) -> dict[str, Any]:
    """Return what is added to a choice: what its answer holds beside OpenAI's shape."""
    return {"atoll": {"answer": more}} if more else {}
