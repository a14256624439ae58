"""The part of OpenAI's API that a gateway has to understand: requests as far as they are checked, errors.

Fields not named here pass through unread. What is named is checked while it is read, in one pass, so that
nonsense is answered with 400 at the door and never reaches an engine.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Fallbacks = Annotated[list[Name], Meta(max_length=64)] | None
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = str | Annotated[list[str], Meta(max_length=64)] | None


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


class StreamOptions(Struct):
    """What a stream holds besides text."""

    include_usage: bool | None = None


class ContentPart(Struct):
    """A piece of a message: text, an image, audio."""

    type: str


class Message(Struct):
    """A turn of a conversation."""

    role: Name
    content: str | list[ContentPart] | None = None


class ResponseFormat(Struct):
    """The form the answer must have."""

    type: str


class Generation(Struct, kw_only=True):
    """What requests that generate text share."""

    model: Name
    models: Fallbacks = None
    """Models that may serve instead, best first."""
    stream: bool | None = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    n: Choices | None = None
    max_tokens: NonNegative | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    stop: Stop = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class CompletionRequest(Generation, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | NonNegative | list[NonNegative]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: str | None = None


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: Name
    models: Fallbacks = None
    input: str | Annotated[list[str | NonNegative | list[NonNegative]], Meta(min_length=1)]
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


AnyRequest = ChatRequest | CompletionRequest | EmbeddingRequest

REQUESTS: dict[str, type[ChatRequest | CompletionRequest | EmbeddingRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
_DECODERS: dict[str, msgspec.json.Decoder[AnyRequest]] = {
    path: msgspec.json.Decoder(kind) for path, kind in REQUESTS.items()
}
_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


_LARGE_BYTES = 2**20
_MOST_PARTS = 2**19
"""Brackets that open in a large body; millions of small objects take seconds to read, whoever else waits."""


def read_request(path: str, body: bytes) -> AnyRequest:
    """Read and check the body of a request to one of `REQUESTS`; what is wrong is an ApiError."""
    if len(body) > _LARGE_BYTES and body.count(b"[") + body.count(b"{") > _MOST_PARTS:
        raise ApiError(400, "the request has too many parts", code="request_too_large")
    try:
        if not body.isascii():
            body.decode()
        return _DECODERS[path].decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        param = place[1] if place else None
        message = text if place is None else f"{param or 'body'}: {text[: place.start()]}"
        raise ApiError(400, message, param=param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json") from None


class Usage(Struct):
    """Tokens of a request as engines report them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


def usage_of(data: dict[str, object]) -> Usage:
    """Return a usage from plain data; what is not a number counts as 0."""

    def number(key: str) -> int:
        value = data.get(key)
        return value if isinstance(value, int) else 0

    return Usage(number("prompt_tokens"), number("completion_tokens"), number("total_tokens"))


class _AnswerBody(Struct):
    usage: Usage | None = None


_ANSWER = msgspec.json.Decoder(_AnswerBody)


def answer_usage(body: bytes) -> Usage | None:
    """Return the usage that a complete answer reports, if it does."""
    try:
        return _ANSWER.decode(body).usage
    except msgspec.DecodeError:
        return None


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


def with_model(body: bytes, model: str) -> bytes:
    """Return the body of a request with another model in it, and no list of models."""
    data: dict[str, object] = msgspec.json.decode(body)
    data.pop("models", None)
    data["model"] = model
    return msgspec.json.encode(data)
