"""Reading requests of dialects: what is not understood is refused by its name, never left out quietly."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from atoll.runtime.openai import ApiError, read_body

Read = TypeVar("Read")

PASSED = (
    "models",
    "seed",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "chat_template_kwargs",
)
"""Fields of chat requests that no dialect has, and that pass as they are."""
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")


def read(decoder: msgspec.json.Decoder[Read], body: bytes) -> Read:
    """Read and check a body; what is wrong is an ApiError that names the field."""
    try:
        return read_body(decoder, body)
    except ApiError as error:
        found = _UNKNOWN.search(error.message)
        if found is None:
            raise
        place = "" if error.param is None else f"{error.param}."
        raise unsupported(f"{place}{found[1]}", "this field is not known here") from None


def unsupported(param: str, reason: str, fix: str = "leave it out") -> ApiError:
    """Return the error for what a dialect has and this gateway has not."""
    return ApiError(400, f"{param}: {reason}; {fix}", param=param, code="unsupported_parameter")


def wrong(param: str, reason: str) -> ApiError:
    """Return the error for a field whose value makes no sense."""
    return ApiError(400, f"{param}: {reason}", param=param)


def refuse_given(request: msgspec.Struct, fields: dict[str, tuple[str, str]]) -> None:
    """Refuse fields that were given (anything but null or false): reason and fix by their names."""
    for name, (reason, fix) in fields.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            raise unsupported(name, reason, fix)


def passed_fields(request: msgspec.Struct) -> dict[str, Any]:
    """Return those fields of a request that pass as they are, if they were given."""
    return {name: value for name in PASSED if (value := getattr(request, name, None)) is not None}
