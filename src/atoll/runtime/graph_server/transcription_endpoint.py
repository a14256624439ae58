"""POST /v1/audio/transcriptions: a form with a sound in, its words out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from atoll.core.request_parameters import Name, Temperature
from atoll.runtime.graph_server.form_data import read_form
from atoll.runtime.graph_server.graph_request import GraphRequest, prime
from atoll.runtime.graph_server.request_fields import convert_fields, refuse_unless
from atoll.runtime.http.handlers import Answer, EventStream, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.openai import ApiError
from atoll.tasks.library.shapes import Clip, Transcript

_LANGUAGE = Annotated[str, Meta(pattern="^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})?$")]


class TranscriptionFields(
    Struct,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"granularities": "timestamp_granularities[]"},
):
    """The fields of the form besides its file."""

    model: Name
    language: _LANGUAGE | None = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Temperature | None = None
    stream: bool = False
    prompt: str | None = None
    granularities: str | None = None
    chunking_strategy: str | None = None
    user: str | None = None


class TranscriptionOrder(Struct):
    """A request: its fields, and the sound as it was sent."""

    fields: TranscriptionFields
    sound: bytes

    @property
    def model(self) -> str:
        """The service that is asked."""
        return self.fields.model


def read_transcription(request: Request, limits: MediaLimits) -> TranscriptionOrder:
    """Read a request; what is wrong with it is an ApiError."""
    kind = request.headers.get(b"content-type", b"")
    form = read_form(kind, request.body, limits.audio_bytes)
    sound = form.files.pop("file", None)
    if sound is None:
        raise ApiError(400, "file: the sound is missing", param="file")
    if form.files:
        name = next(iter(form.files))[:60]
        raise ApiError(400, f"{name}: not supported here; leave it out", param=name)
    fields = convert_fields(TranscriptionFields, form.values)
    refuse_unless(
        fields,
        {"temperature": (0,), "prompt": ("",), "chunking_strategy": ("auto",)},
    )
    if fields.granularities not in (None, "segment"):
        param = "timestamp_granularities[]"
        raise ApiError(400, f"{param}: only segments have times here", param=param)
    if fields.stream and fields.response_format != "json":
        raise ApiError(400, "response_format: a stream needs json", param="response_format")
    return TranscriptionOrder(fields, sound)


async def answer_transcription(form: TranscriptionOrder, request: GraphRequest) -> Answer:
    """Let the task write down what is said."""
    fields = form.fields
    sound = await request.media.sound(form.sound, "file")
    request.begin(Clip(sound.audio, fields.language, sound.pieces), wants=("text",))
    if fields.stream:
        pieces = await prime(_events(request))
        return EventStream(pieces, request.headers())
    transcript: Transcript = await request.result()
    if fields.response_format == "text":
        body, kind = (transcript.text + "\n").encode(), "text/plain; charset=utf-8"
        return Response(body, content_type=kind, headers=request.headers())
    answer: dict[str, Any] = {"text": transcript.text, "usage": _usage(request)}
    if fields.response_format == "verbose_json":
        answer |= {
            "task": "transcribe",
            "language": fields.language or request.service.config.options.get("language", "en"),
            "duration": round(request.media.audio_s, 3),
            "segments": _segments(transcript),
        }
    answer |= request.extras(await request.more(transcript))
    return Response(msgspec.json.encode(answer), headers=request.headers())


def _segments(transcript: Transcript) -> list[dict[str, Any]]:
    """Return when somebody speaks, and what is said there where the task knows it of every segment."""
    segments: list[dict[str, Any]] = [
        {"id": number, "start": round(start_s, 3), "end": round(end_s, 3)}
        for number, (start_s, end_s) in enumerate(transcript.segments)
    ]
    texts = getattr(transcript, "texts", None) or [transcript.text]
    if len(texts) == len(segments):
        for segment, text in zip(segments, texts, strict=True):
            segment["text"] = text
    return segments


def _usage(request: GraphRequest) -> dict[str, Any]:
    seconds = round(request.media.audio_s, 3)
    return {"type": "duration", "seconds": seconds, "audio_seconds": seconds}


async def _events(request: GraphRequest) -> AsyncGenerator[bytes, None]:
    """Yield the words as events: all at once, since they are known together."""
    transcript: Transcript = await request.result()
    if transcript.text:
        yield _event({"type": "transcript.text.delta", "delta": transcript.text})
    done = {"type": "transcript.text.done", "text": transcript.text, "usage": _usage(request)}
    yield _event(done | request.extras(await request.more(transcript)))


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
