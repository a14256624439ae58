"""The part of OpenAI's API that a gateway has to understand: requests as far as they are checked, errors.

Fields not named here pass through unread. What is named is checked while it is read, in one pass, so that
nonsense is answered with 400 at once and never reaches an engine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from atoll.core.request_parameters import (
    Choices,
    Fallbacks,
    GatewayParameters,
    Name,
    NonNegative,
    Positive,
    Seed,
)

# The pieces a message of OpenAI's API may be made of: text, pictures, sound, video.
#
# Every field that could name something to fetch is read here whatever the type of its piece says: a backend
# that looks at other fields than the type asks for is told nothing that was not checked.

PartType = Literal[
    "text", "refusal", "image_url", "input_audio", "video_url", "audio_url", "embeds"
]
"""`embeds` are vectors for an instance of the stage engine, which checks them itself."""
AudioFormat = Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm", "pcm16", "pcm"]


class MediaUrl(Struct, gc=False):
    """Where a picture, video or sound is: a data: URL, or one to fetch where that is allowed."""

    url: str
    detail: Annotated[str, Meta(max_length=64)] | None = None


class InputAudio(Struct, gc=False):
    """Sound that was sent along."""

    data: str
    """Base64."""
    format: AudioFormat


class ContentPart(Struct, gc=False):
    """A piece of a message; the field named like its type has what it is."""

    type: PartType
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = None
    input_audio: InputAudio | None = None
    video_url: MediaUrl | str | None = None
    audio_url: MediaUrl | str | None = None

    def __post_init__(self) -> None:
        """Refuse a piece without what its type promises."""
        if self.type != "embeds" and getattr(self, self.type) is None:
            raise ValueError(f"a part of type {self.type!r} needs the field {self.type!r}")

    def urls(self) -> list[tuple[str, str]]:
        """Return the URLs of the piece with the fields they stand in, whatever its type."""
        found = []
        for field in ("image_url", "video_url", "audio_url"):
            value = getattr(self, field)
            if value is not None:
                found.append((field, value if isinstance(value, str) else value.url))
        return found


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Modalities = Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=2)] | None
Voice = Annotated[str, Meta(min_length=1, max_length=128)]
Short = Annotated[str, Meta(max_length=128)] | None

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
"""Shape of an error, as JSON schema."""


class ApiError(Exception):
    """A request that is answered with an error, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow
        """The methods that would be, for 405."""

    def body(self) -> bytes:
        """Return the JSON that OpenAI's clients read."""
        return error_body(self.message, self.kind, self.param, self.code)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return `{"error": {"message", "type", "param", "code"}}` as JSON."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def join_calls(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of an answer whole, from pieces of them as a stream has them."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": "function", "function": {"arguments": ""}})
        function, more = calls[piece["index"]]["function"], piece["function"]
        calls[piece["index"]]["function"] = {
            "name": function.get("name", "") + more.get("name", ""),
            "arguments": function["arguments"] + more["arguments"],
        }
    return calls


class StreamOptions(Struct):
    """Options of a stream besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Of vLLM and SGLang: the usage of its answer with every event."""


class Message(Struct, gc=False):
    """A turn of a conversation. Nothing read from JSON refers to itself: no garbage collector is needed."""

    role: Role
    content: str | list[ContentPart] | None = None


class ResponseFormat(Struct):
    """The form the answer must have."""

    type: str


class Generation(GatewayParameters, kw_only=True):
    """Fields of all requests that generate text, beside the parameters declared for the gateway."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    response_format: ResponseFormat | None = None


class SpokenAnswer(Struct):
    """How an answer is to sound."""

    voice: Voice | dict[str, Any] = "alloy"
    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"] = "wav"


class ChatRequest(Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    modalities: Modalities = None
    audio: SpokenAnswer | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    """Older name of tools: the stage engine knows it, others are told."""
    function_call: str | dict[str, Any] | None = None


_UNSAID = "\0"
"""Stands for a prompt that is not there; known by being this very object."""


class CompletionRequest(Generation, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | NonNegative | list[NonNegative]] = _UNSAID
    prompt_embeds: str | list[str] | None = None
    """Of vLLM and SGLang: vectors, in place of the prompt's tokens."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        """Refuse a request that asks nothing."""
        if self.prompt is _UNSAID:
            if not self.prompt_embeds:
                raise ValueError("Object missing required field `prompt`")
            self.prompt = []
        elif self.prompt == [] and not self.prompt_embeds:
            raise ValueError("the prompt is empty - at `$.prompt`")


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: Name
    models: Fallbacks = None
    input: str | Annotated[list[str | NonNegative | list[NonNegative]], Meta(min_length=1)]
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    messages: list[Message] | None = None
    """Some engines embed conversations, too."""


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize, as vLLM has it."""

    model: Name
    models: Fallbacks = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize, as vLLM has it."""

    model: Name
    models: Fallbacks = None
    tokens: list[NonNegative]


class SpeechRequest(Struct, kw_only=True):
    """POST /v1/audio/speech."""

    model: Name
    models: Fallbacks = None
    input: Annotated[str, Meta(min_length=1)]
    voice: Voice | dict[str, Any]
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None
    stream_format: Literal["sse", "audio"] | None = None
    instructions: str | None = None

    @property
    def stream(self) -> bool:
        """Whether the answer comes as events."""
        return self.stream_format == "sse"


class ImageRequest(Struct, kw_only=True):
    """POST /v1/images/generations."""

    model: Name
    models: Fallbacks = None
    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    n: Choices | None = None
    size: Short = None
    quality: Short = None
    style: Short = None
    background: Short = None
    response_format: Literal["url", "b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    stream: bool | None = None
    seed: Seed | None = None
    user: str | None = None


class TranscriptionRequest(Struct, kw_only=True):
    """POST /v1/audio/transcriptions, a form; its file and other fields pass unread."""

    model: Name
    models: Fallbacks = None
    stream: bool | None = None


TokensRequest = TokenizeRequest | DetokenizeRequest
JsonRequest = (
    ChatRequest
    | CompletionRequest
    | EmbeddingRequest
    | SpeechRequest
    | ImageRequest
    | TokenizeRequest
    | DetokenizeRequest
)
AnyRequest = JsonRequest | TranscriptionRequest

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
SPEECH = "/v1/audio/speech"
IMAGES = "/v1/images/generations"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
REQUESTS: dict[str, type[JsonRequest]] = {
    CHAT: ChatRequest,
    "/v1/completions": CompletionRequest,
    EMBEDDINGS: EmbeddingRequest,
    SPEECH: SpeechRequest,
    IMAGES: ImageRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}
"""Endpoints that take JSON."""
FORMS: dict[str, type[TranscriptionRequest]] = {TRANSCRIPTIONS: TranscriptionRequest}
"""Endpoints that take multipart/form-data."""
_DECODERS: dict[str, msgspec.json.Decoder[JsonRequest]] = {
    path: msgspec.json.Decoder(kind) for path, kind in REQUESTS.items()
}
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


_LARGE_BYTES = 2**20
_MAX_PARTS = 2**19
"""Brackets that open in a large body; millions of small objects take seconds to read, whoever else waits."""
_MAX_NAMES = 2**18
"""Colons in a large body: an object of a million names takes as long. No text for a model has as many."""
_MAX_ITEMS = 2**22
"""Commas in a large body: as many numbers take 160 MiB."""
_MAX_QUOTES = 2**20
"""Quotes in a large body that are not part of a text: two for each."""


def parsed_bytes(body: bytes) -> int:
    """Return about how many bytes of memory a body takes once it is read, besides itself.

    Text takes as much again. A number takes 32 bytes and its place in a list 8, an object or list some 64.
    """
    return len(body) + 40 * body.count(b",") + 64 * (body.count(b"[") + body.count(b"{"))


_Read = TypeVar("_Read")


def read_request(path: str, body: bytes) -> JsonRequest:
    """Read and check the body of a request to one of `REQUESTS`; what is wrong is an ApiError."""
    return read_body(_DECODERS[path], body)


def read_body(decoder: msgspec.json.Decoder[_Read], body: bytes) -> _Read:
    """Read and check the body of a request; what is wrong is an ApiError that names the field."""
    if len(body) > _LARGE_BYTES and (
        body.count(b"[") + body.count(b"{") > _MAX_PARTS
        or body.count(b":") > _MAX_NAMES
        or body.count(b",") > _MAX_ITEMS
        or body.count(b'"') - body.count(b'\\"') > _MAX_QUOTES
    ):
        raise ApiError(400, "the request has too many parts", code="request_too_large")
    try:
        if not body.isascii():
            body.decode()
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        param = place[1] if place else None
        message = text if place is None else f"{param or 'body'}: {text[: place.start()]}"
        raise ApiError(400, message, param=param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json") from None


_MAX_USED = 2**40
"""Of anything, by one request; who reports more, or less than nothing, counts otherwise."""


class Usage(Struct):
    """Usage of a request as engines report it: numbers that can be none are 0, or as large as may be."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    audio_seconds: float = 0.0
    """Of sound that was heard."""
    speech_seconds: float = 0.0
    """Of speech that was made."""
    image_pixels: int = 0
    """Seen or drawn."""

    def __post_init__(self) -> None:
        """Bring every number into its bounds."""
        if (
            0 <= self.prompt_tokens <= _MAX_USED
            and 0 <= self.completion_tokens <= _MAX_USED
            and 0 <= self.total_tokens <= _MAX_USED
            and 0 <= self.image_pixels <= _MAX_USED
            and 0.0 <= self.audio_seconds <= _MAX_USED
            and 0.0 <= self.speech_seconds <= _MAX_USED
        ):
            return
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value <= _MAX_USED:
                setattr(self, name, type(value)(_MAX_USED if value > 0 else 0))

    @property
    def has_media(self) -> bool:
        """Whether anything but tokens was used."""
        return bool(self.audio_seconds or self.speech_seconds or self.image_pixels)


def usage_of(data: dict[str, object]) -> Usage:
    """Return a usage from plain data; what is not a number counts as 0.

    Tokens may also be called `input_tokens` and `output_tokens`, and heard sound `seconds`, as OpenAI does
    where the answer is no text.
    """

    def number(*keys: str) -> int:
        value = next((data[key] for key in keys if key in data), 0)
        return value if isinstance(value, int) else 0

    def seconds(*keys: str) -> float:
        value = next((data[key] for key in keys if key in data), 0.0)
        return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else 0.0

    return Usage(
        number("prompt_tokens", "input_tokens"),
        number("completion_tokens", "output_tokens"),
        number("total_tokens"),
        seconds("audio_seconds", "seconds"),
        seconds("speech_seconds"),
        number("image_pixels"),
    )


class _AnswerBody(Struct):
    usage: Usage | None = None


class _LooseBody(Struct):
    usage: dict[str, Any] | None = None


_ANSWER = msgspec.json.Decoder(_AnswerBody)
_LOOSE = msgspec.json.Decoder(_LooseBody)


def answer_usage(body: bytes) -> Usage | None:
    """Return the usage that a complete answer reports, if it does; ValueError: it is no JSON object."""
    try:
        return _ANSWER.decode(body).usage
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return None


def loose_usage(body: bytes) -> Usage | None:
    """Return the usage that an answer reports that is no text, under any of its names."""
    try:
        usage = _LOOSE.decode(body).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if usage is None else usage_of(usage)


def header_usage(header: bytes) -> Usage | None:
    """Return the usage in an `x-atoll-usage` header: a JSON object with the names of `Usage`."""
    try:
        data = msgspec.json.decode(header, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    return usage_of(data)


def upstream_error(status: int, body: bytes) -> bytes:
    """Return an engine's error in OpenAI's shape: as it is, if it is, else with its message put in."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        data = None
    if isinstance(data, dict):
        error = data.get("error")
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return body
        message = data.get("message") or data.get("detail") or error
        if message:
            return error_body(
                str(message), "invalid_request_error" if status < 500 else "server_error"
            )
    return error_body(
        f"the engine answered with status {status}",
        "invalid_request_error" if status < 500 else "server_error",
    )


def asks_for_usage(request: Struct) -> bool:
    """Return whether a client wants the usage at the end of its stream."""
    options = getattr(request, "stream_options", None)
    return isinstance(options, StreamOptions) and bool(options.include_usage)


def with_usage(request: Generation, body: bytes) -> bytes:
    """Return the body of a streaming request with `stream_options.include_usage` set."""
    if asks_for_usage(request):
        return body
    if request.stream_options is UNSET:
        # Nothing else changes, so nothing else is read and written again.
        start = body.index(b"{") + 1
        return b'{"stream_options":{"include_usage":true},' + body[start:]
    data: dict[str, object] = msgspec.json.decode(body)
    options = data.get("stream_options")
    data["stream_options"] = (options if isinstance(options, dict) else {}) | {
        "include_usage": True
    }
    return msgspec.json.encode(data)


def with_seed(request: Generation, body: bytes) -> bytes:
    """Return the body of a request that comes out the same when it is asked again, as far as a seed helps.

    Answers that text alone cannot continue (several at once, calls, forced forms, speech, prompts of vectors)
    go on elsewhere only by being repeated. Where the client does not care, a seed of ours makes that
    possible; `request` knows it.
    """
    if request.seed is not None or request.temperature == 0.0:
        return body
    form = request.response_format
    formed = form is not None and form.type != "text"
    told = any(getattr(request, name, None) for name in ("tools", "functions", "prompt_embeds"))
    spoken = "audio" in (getattr(request, "modalities", None) or ())
    if not formed and (request.n or 1) == 1 and not told and not spoken:
        return body
    if b'"seed"' in body and "seed" in msgspec.json.decode(body):
        return body
    request.seed = random.getrandbits(31)
    start = body.index(b"{") + 1
    return b'{"seed":%d,' % request.seed + body[start:]


def with_model(body: bytes, model: str) -> bytes:
    """Return the body of a request with another model in it, and no list of models."""
    data: dict[str, object] = msgspec.json.decode(body)
    data.pop("models", None)
    data["model"] = model
    return msgspec.json.encode(data)
