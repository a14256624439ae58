"""Limits on what a request may ask for, held before anything is tokenised or compiled.

What is over a limit is the client's mistake, and is told so (400): a node that found out would have wasted
its time, and a gateway would take it for the node's failure and try the next.
"""

from __future__ import annotations

from typing import Protocol

from atoll.runtime.openai import ApiError, ChatRequest, CompletionRequest

_SMALL_BYTES = 2**14
"""Larger requests are read in a thread, so that no stream waits until a long prompt is tokenised."""
_FORMS = (b"tools", b"response_format", b"guided_", b"\\u")
"""So are those whose answer has a form, which is compiled; names may be written with escapes."""
MOST_STOP_TOKENS = 1024
MOST_STOP_CHARS = 2**14
"""Of all stop strings together: every new token is compared with each."""


class ExtraFields(Protocol):
    """Fields beside OpenAI's that have limits."""

    min_tokens: int | None
    stop_token_ids: list[int] | None


def is_quick(body: bytes) -> bool:
    """Return whether a body is read in next to no time, so that it can be read between tokens."""
    return len(body) <= _SMALL_BYTES and not any(name in body for name in _FORMS)


def check_limits(request: ChatRequest | CompletionRequest, extras: ExtraFields) -> None:
    """Refuse (ApiError) what is more than the engine does, or what would silently be left out."""
    if extras.stop_token_ids is not None and len(extras.stop_token_ids) > MOST_STOP_TOKENS:
        raise _too_much("stop_token_ids", f"{MOST_STOP_TOKENS} tokens", len(extras.stop_token_ids))
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    chars = sum(map(len, stop))
    if chars > MOST_STOP_CHARS:
        raise _too_much("stop", f"{MOST_STOP_CHARS} characters", chars)
    most = request.max_tokens
    if isinstance(request, ChatRequest):
        most = request.max_completion_tokens or most
        if request.modalities is not None and "audio" in request.modalities:
            raise ApiError(400, 'this model answers in text: use ["text"]', param="modalities")
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    least = extras.min_tokens
    if least is not None and most is not None and least > most:
        message = f"min_tokens is {least}, more than the {most} tokens there may be"
        raise ApiError(400, message, param="min_tokens")


def _too_much(param: str, most: str, found: int) -> ApiError:
    return ApiError(
        400, f"{param}: at most {most}, these are {found}", param=param, code="too_many_parts"
    )
