"""POST /v1/audio/speech, and speech in other answers: sounds of tasks as bytes, sentence by sentence.

A file (wav) comes whole, with its true length, unless `stream_format` asks for "audio" as it is spoken; pcm,
which has no length to say, always comes so. Then the length is not known when the headers are sent:
`x-atoll-usage` says how many characters were asked for, and whoever counts seconds counts bytes (16 bits a
sample at 24 kHz, after 44 bytes of header in a WAV file). Events (`stream_format: sse`) end with the seconds.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from atoll.core.request_parameters import Name
from atoll.runtime.graph_server.graph_request import GraphRequest, prime
from atoll.runtime.graph_server.request_fields import read_fields, refuse_unless
from atoll.runtime.http.handlers import Answer, ByteStream, EventStream, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.media.av_files import WRITERS, SoundWriter, need_av
from atoll.runtime.media.media_errors import MediaError
from atoll.runtime.media.sounds import (
    PCM_RATE_HZ,
    SOUND_TYPES,
    encode_wav,
    pcm16,
    wav_stream_header,
)
from atoll.runtime.openai import ApiError, error_body
from atoll.tasks.library.shapes import SpeechOrder, SpokenText

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SpokenAudio:
    """Sounds of one answer, in order; `form` is what they are written as while they come."""

    def __init__(self, form: str = "pcm") -> None:
        self._form = form
        self._writer: SoundWriter | None = None
        self.seconds = 0.0
        self.rate_hz = 0
        self.size = 0
        """Bytes of the samples that are kept."""
        self.sounds: list[NDArray[np.float32]] = []

    async def add(
        self, sound: dict[str, Any], request: GraphRequest, number: int = 0, *, keep: bool = True
    ) -> bytes:
        """Take the next sound of an answer, and return it as it is sent, nothing where it is kept."""
        samples = await request.array(sound["samples"], number)
        rate_hz = int(sound["rate_hz"])
        if self.rate_hz not in (0, rate_hz):
            raise ApiError(
                500, f"speech of {rate_hz} Hz after {self.rate_hz} Hz", kind="server_error"
            )
        self.rate_hz = rate_hz
        self.seconds += len(samples) / rate_hz
        if keep:
            self.sounds.append(samples)
            self.size += samples.nbytes
            return b""
        return await request.encode(samples.nbytes, lambda: self._written(samples))

    def end(self) -> bytes:
        """Return what is still to be sent after the last sound."""
        return b"" if self._writer is None else self._writer.end()

    def _written(self, samples: NDArray[np.float32]) -> bytes:
        if self._form not in WRITERS:
            return pcm16(samples)
        if self._writer is None:
            self._writer = SoundWriter(self._form, self.rate_hz, streamed=True)
        return self._writer.add(samples)

    def check_pcm(self, data: bytes) -> bytes:
        """Return samples that are sent without a header; they must be of the rate everybody expects."""
        if self.rate_hz != PCM_RATE_HZ:
            message = f"this voice has {self.rate_hz} Hz, and pcm is of {PCM_RATE_HZ}; ask for wav"
            raise ApiError(400, message, param="format")
        return data


def speech_bytes(speech: SpokenAudio, form: str) -> bytes:
    """Return everything that was kept as one file, or as bare samples ("pcm")."""
    whole = np.concatenate(speech.sounds) if speech.sounds else np.zeros(0, np.float32)
    if form == "pcm":
        return speech.check_pcm(pcm16(whole)) if speech.sounds else b""
    if form in WRITERS:
        writer = SoundWriter(form, speech.rate_hz or PCM_RATE_HZ, streamed=False)
        writer.add(whole)
        return writer.end()
    return encode_wav(whole, speech.rate_hz or PCM_RATE_HZ)


def check_form(form: str, param: str) -> None:
    """Refuse a format that cannot be written on this server."""
    if form in WRITERS:
        try:
            need_av(f"writing {form}")
        except MediaError as error:
            raise ApiError(400, f"{param}: {error.message}", param=param, code=error.code) from None


class SpeechFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request."""

    model: Name
    input: Annotated[str, Meta(min_length=1)]
    voice: Annotated[str, Meta(min_length=1, max_length=100)] = "heart"
    response_format: Literal["wav", "pcm", "mp3", "opus"] = "wav"
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0
    stream_format: Literal["audio", "sse"] | None = None
    instructions: str | None = None
    models: Any = None
    user: Any = None

    @property
    def is_streamed(self) -> bool:
        """Whether sound is sent as it is spoken."""
        return self.stream_format is not None or self.response_format == "pcm"


def read_speech(request: Request) -> SpeechFields:
    """Read a request; what is wrong with it is an ApiError."""
    fields = read_fields(SpeechFields, request.body)
    refuse_unless(fields, {"instructions": ("",)})
    check_form(fields.response_format, "response_format")
    if fields.stream_format == "audio" and fields.response_format in WRITERS:
        # Nobody could say, or see from its bytes, how many seconds there were.
        message = f"stream_format: {fields.response_format} is streamed as sse; or leave it out"
        raise ApiError(400, message, param="stream_format")
    if not fields.input.strip():
        raise ApiError(400, "input: there is nothing to say", param="input")
    return fields


async def answer_speech(fields: SpeechFields, request: GraphRequest) -> Answer:
    """Let the task speak, and return the sound: as it comes, or whole."""
    most = request.limits.speech_chars
    if len(fields.input) > most:
        message = f"input: {len(fields.input)} characters; at most {most} are spoken"
        raise ApiError(400, message, param="input", code="string_above_max_length")
    request.usage.characters = len(fields.input)
    request.begin(SpeechOrder(fields.input, fields.voice, fields.speed), wants=("text", "audio"))
    if not fields.is_streamed:
        return await _whole(fields, request)
    sounds = _sounds(fields, request)
    if fields.stream_format == "sse":
        pieces = await prime(_events(sounds, request))
        return EventStream(pieces, request.headers())
    pieces = await prime(sounds)
    return ByteStream(pieces, SOUND_TYPES[fields.response_format], request.headers())


async def _whole(fields: SpeechFields, request: GraphRequest) -> Response:
    """Return all speech as one file."""
    spoken: SpokenText = await request.result()
    speech = SpokenAudio()
    for sound in spoken.audio:
        await speech.add(sound, request)
    if not speech.sounds:
        raise _nothing_spoken()
    request.usage.speech_s = speech.seconds
    form = fields.response_format
    data = await request.encode(speech.size, lambda: speech_bytes(speech, form))
    return Response(data, content_type=SOUND_TYPES[form], headers=request.headers())


async def _sounds(fields: SpeechFields, request: GraphRequest) -> AsyncGenerator[bytes, None]:
    speech = SpokenAudio(fields.response_format)
    try:
        async with contextlib.aclosing(request.events()) as events:
            async for event in events:
                if event.path[:1] != ("audio",) or not isinstance(event.value, dict):
                    continue
                headed = speech.rate_hz != 0
                data = await speech.add(event.value, request, keep=False)
                if fields.response_format == "pcm":
                    yield speech.check_pcm(data)
                elif fields.response_format == "wav":
                    yield data if headed else wav_stream_header(speech.rate_hz) + data
                elif data:
                    yield data
        if rest := speech.end():
            yield rest
    finally:
        # Not before: the headers, sent with the first sentence, would call it all.
        request.usage.speech_s = speech.seconds
    if speech.rate_hz == 0:
        raise _nothing_spoken()


def _nothing_spoken() -> ApiError:
    return ApiError(500, "nothing was spoken", kind="server_error")


async def _events(
    sounds: AsyncGenerator[bytes, None], request: GraphRequest
) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async for data in sounds:
            begun = True
            yield _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})
        usage = {"characters": request.usage.characters, **request.usage.media()}
        usage |= {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        yield _event({"type": "speech.audio.done", "usage": usage} | request.extras())
    except ApiError as error:
        if not begun:
            raise
        yield b"data: " + error_body(error.message, error.kind, error.param, error.code) + b"\n\n"
    finally:
        await sounds.aclose()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
