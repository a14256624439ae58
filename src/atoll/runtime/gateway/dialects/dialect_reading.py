"""Reading requests of dialects: what is not understood is refused by its name, never left out quietly."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from atoll.runtime.openai import ApiError, read_body

Read = TypeVar("Read")

_SPARE_LEVELS = 100
"""Of nesting, kept for what is put around a value when it is written again."""
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


def need(value: str | None, place: str, *, empty: bool = False) -> str:
    """Return a text that a request must have at a place; it may be `empty` only where that is said."""
    if value is None or (not value and not empty):
        raise wrong(place, "this is needed here")
    return value


def refuse_given(request: msgspec.Struct, fields: dict[str, tuple[str, str]]) -> None:
    """Refuse fields that were given (anything but null or false): reason and fix by their names."""
    for name, (reason, fix) in fields.items():
        value = getattr(request, name)
        if value is not None and value is not False:
            raise unsupported(name, reason, fix)


def is_writable(value: object) -> bool:
    """Return whether a value can be written as JSON within others; what was read may be nested too deeply."""
    for _ in range(_SPARE_LEVELS):
        value = [value]
    try:
        msgspec.json.encode(value)
    except RecursionError:
        return False
    return True


def write(body: dict[str, Any], names: dict[str, str]) -> bytes:
    """Return a body as JSON; `names`: fields that hold what a client may nest, and what it calls them."""
    for field, name in names.items():
        if field in body and not is_writable(body[field]):
            raise ApiError(400, f"{name}: nested too deeply", param=name, code="invalid_json")
    return msgspec.json.encode(body)
