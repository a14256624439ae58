"""Events of `/v1/realtime`, as OpenAI has them: what clients send, checked; settings of a session."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from atoll.runtime.openai import ApiError

RATE_HZ = 24_000
"""Of sound in both directions; 16-bit samples, one channel."""
_Id = Annotated[str, Meta(min_length=1, max_length=64)]
_Text = Annotated[str, Meta(max_length=2**18)]
_MAX_TOKENS = 4096


class PcmFormat(Struct, forbid_unknown_fields=True):
    """The one format of sound."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24_000] = 24_000


class ServerVad(Struct, forbid_unknown_fields=True, frozen=True):
    """How turns are found: speech of probability `threshold` or more, then silence of some length."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=2000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=100, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class HeardFields(Struct, forbid_unknown_fields=True):
    """Whether the client is told what was heard. The model hears by itself: names change nothing."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class InputFields(Struct, forbid_unknown_fields=True):
    """What comes in."""

    format: PcmFormat | None = None
    turn_detection: ServerVad | UnsetType | None = UNSET
    transcription: HeardFields | UnsetType | None = UNSET
    noise_reduction: None = None


class OutputFields(Struct, forbid_unknown_fields=True):
    """What goes out."""

    format: PcmFormat | None = None
    voice: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    speed: Annotated[float, Meta(ge=1, le=1)] | None = None


class AudioFields(Struct, forbid_unknown_fields=True):
    """Sound in both directions."""

    input: InputFields | None = None
    output: OutputFields | None = None


class AnswerFields(Struct, forbid_unknown_fields=True):
    """What both a session and a single answer may say."""

    instructions: _Text | None = None
    output_modalities: (
        Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=1)] | None
    ) = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)] | Literal["inf"] | None = None
    audio: AudioFields | None = None
    tools: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    metadata: Any = None


class SessionFields(AnswerFields, forbid_unknown_fields=True):
    """A session, as its client wants it; what is left out stays as it was."""

    type: Literal["realtime"] = "realtime"
    model: str | None = None
    tracing: None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Meta(max_length=0)] | None = None


class ContentFields(Struct, forbid_unknown_fields=True):
    """A part of an item."""

    type: Literal["input_text", "input_audio", "output_text", "text", "output_audio"]
    text: _Text | None = None
    audio: str | None = None
    transcript: _Text | None = None


class ItemFields(Struct, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentFields], Meta(min_length=1, max_length=16)]
    type: Literal["message"] = "message"
    id: _Id | None = None
    object: Literal["realtime.item"] | None = None
    status: Any = None


class _ClientMessage(Struct, tag_field="type", forbid_unknown_fields=True):
    event_id: str | None = None


class SessionUpdate(_ClientMessage, tag="session.update", kw_only=True):
    """Change the session."""

    session: SessionFields


class AudioAppend(_ClientMessage, tag="input_audio_buffer.append", kw_only=True):
    """Sound, in base64."""

    audio: str


class AudioCommit(_ClientMessage, tag="input_audio_buffer.commit"):
    """Make a message of the sound that is held."""


class AudioClear(_ClientMessage, tag="input_audio_buffer.clear"):
    """Forget the sound that is held."""


class ItemCreate(_ClientMessage, tag="conversation.item.create", kw_only=True):
    """Add a message."""

    item: ItemFields
    previous_item_id: _Id | None = None


class ItemDelete(_ClientMessage, tag="conversation.item.delete", kw_only=True):
    """Take a message out."""

    item_id: _Id


class ItemTruncate(_ClientMessage, tag="conversation.item.truncate", kw_only=True):
    """Say how much of a spoken answer was heard."""

    item_id: _Id
    audio_end_ms: Annotated[int, Meta(ge=0)]
    content_index: Literal[0] = 0


class ResponseCreate(_ClientMessage, tag="response.create"):
    """Ask for an answer."""

    response: AnswerFields | None = None


class ResponseCancel(_ClientMessage, tag="response.cancel"):
    """Stop the answer under way."""

    response_id: _Id | None = None


ClientEvent = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | ItemCreate
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
)
_DECODER = msgspec.json.Decoder(ClientEvent)


def read_event(text: str) -> ClientEvent:
    """Read what a client sent; what is wrong with it is an ApiError."""
    try:
        event: ClientEvent = _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        said, _, where = str(error).partition(" - at `$.")
        param = where.rstrip("`") or None
        raise ApiError(
            400, f"{param}: {said}" if param else said, param=param, code="invalid_event"
        ) from error
    return event


class SessionSettings(Struct, frozen=True):
    """A session as it is."""

    model: str
    instructions: str = ""
    speaks: bool = True
    voice: str = "heart"
    max_tokens: int | None = None
    turns: ServerVad | None = ServerVad()
    transcribes: bool = False

    def changed(self, fields: AnswerFields) -> SessionSettings:
        """Return it with what a client said."""
        new: dict[str, Any] = {}
        if fields.instructions is not None:
            new["instructions"] = fields.instructions
        if fields.output_modalities is not None:
            new["speaks"] = fields.output_modalities == ["audio"]
        if fields.max_output_tokens is not None:
            most = fields.max_output_tokens
            new["max_tokens"] = None if isinstance(most, str) else most
        given = fields.audio or AudioFields()
        if given.output is not None and given.output.voice is not None:
            new["voice"] = given.output.voice
        if given.input is not None:
            if not isinstance(given.input.turn_detection, UnsetType):
                new["turns"] = given.input.turn_detection
            if not isinstance(given.input.transcription, UnsetType):
                new["transcribes"] = given.input.transcription is not None
        return msgspec.structs.replace(self, **new)

    def shown(self, session_id: str) -> dict[str, Any]:
        """Return it as clients are told."""
        pcm = {"type": "audio/pcm", "rate": RATE_HZ}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": session_id,
            "model": self.model,
            "instructions": self.instructions,
            "output_modalities": ["audio" if self.speaks else "text"],
            "max_output_tokens": "inf" if self.max_tokens is None else self.max_tokens,
            "tools": [],
            "tool_choice": "auto",
            "audio": {
                "input": {
                    "format": pcm,
                    "turn_detection": None
                    if self.turns is None
                    else msgspec.to_builtins(self.turns),
                    "transcription": {"model": self.model} if self.transcribes else None,
                    "noise_reduction": None,
                },
                "output": {"format": pcm, "voice": self.voice, "speed": 1.0},
            },
        }
