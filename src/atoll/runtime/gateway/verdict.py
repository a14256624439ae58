"""Whose fault an error of a backend is: its own, or that of the client it answers.

Engines answer some mistakes of clients with 500, or with an error as the first event of a stream: a grammar
that cannot be read, a schema that cannot be compiled. Another backend would say the same, so the client is
told what the first one said. Only what an engine says in so many words counts; any other 500 is tried
elsewhere.
"""

from __future__ import annotations

import re

import msgspec

from atoll.runtime.openai import ApiError

_TYPES = frozenset(
    {"BadRequestError", "invalid_request_error", "ValidationError", "RequestValidationError"}
)
_PHRASES = re.compile(
    r"(failed|unable|error|cannot|could not)\b.{0,20}\bpars(e|ing)\b.{0,20}\b(grammar|schema|regex)"
    r"|(invalid|unsupported|malformed|bad)\b.{0,20}\b(schema|grammar|regex|regular expression)"
    r"|(grammar|schema|regex)\b.{0,40}\b(is invalid|not supported|unsupported|conversion failed)"
    r"|\bBadRequestError\b",
    re.IGNORECASE,
)
_REASON_CHARS = 2000
_REPEATED = frozenset({408, 409, 425, 429})
"""Errors of clients that are worth another attempt."""


def fault_of_client(status: int, body: bytes) -> ApiError | None:
    """Return the error with which a client is answered, if an error of status 500 is its own fault."""
    if status != 500:
        return None
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        data = body[:_REASON_CHARS].decode(errors="replace")
    error = data.get("error", data) if isinstance(data, dict) else data
    return fault_in(error)


def fault_in(error: object) -> ApiError | None:
    """Return the error with which a client is answered, if what an engine says of it is its own fault."""
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, dict):
        return None
    message = error.get("message") or error.get("detail") or ""
    if not isinstance(message, str):
        return None
    message = message[:_REASON_CHARS]
    code = error.get("code")
    named = isinstance(code, int) and 400 <= code < 500 and code not in _REPEATED
    kind = error.get("type")
    typed = isinstance(kind, str) and kind in _TYPES
    if not named and not typed and _PHRASES.search(message) is None:
        return None
    param = error.get("param")
    return ApiError(
        code if named and isinstance(code, int) else 400,
        message or "the engine cannot serve this request",
        param=param if isinstance(param, str) else None,
        code="engine_refused",
    )


def reason_of(body: bytes) -> str:
    """Return what an error of a backend says, as one line."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    error = data.get("error", data) if isinstance(data, dict) else None
    said = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(said[:500].split()) if isinstance(said, str) else ""
