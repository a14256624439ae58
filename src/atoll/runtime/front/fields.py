"""Bodies of requests, read strictly: what is not known here would change nothing, and so is refused."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from atoll.runtime.openai import ApiError

_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MOST_PARTS = 2**17
"""Brackets that open in a body; many small objects take long to read, whoever else waits."""
_Fields = TypeVar("_Fields", bound=Struct)


def read_fields(kind: type[_Fields], body: bytes) -> _Fields:
    """Read and check a JSON body; what is wrong or not known is an ApiError that names the field."""
    if body.count(b"[") + body.count(b"{") > _MOST_PARTS:
        raise ApiError(400, "the request has too many parts", code="request_too_large")
    try:
        body.decode()
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json") from None


def convert_fields(kind: type[_Fields], form: dict[str, str]) -> _Fields:
    """Check the fields of a form like those of a JSON body; numbers and truths are written as text."""
    try:
        return msgspec.convert(form, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


def _explain(text: str) -> ApiError:
    place = _PLACE.search(text)
    param = place[1] if place else ""
    said = text[: place.start()] if place else text
    unknown = _UNKNOWN.search(said)
    if unknown is not None:
        param = f"{param}.{unknown[1]}" if param else unknown[1]
        return ApiError(400, f"{param}: not supported here; leave it out", param=param)
    return ApiError(400, f"{param or 'body'}: {said}", param=param or None)


def refuse_unless(fields: Struct, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Refuse fields whose values would change the answer and cannot: all but None and the neutral ones."""
    for name, values in neutral.items():
        value = getattr(fields, name)
        if value is not None and value not in values:
            raise ApiError(400, f"{name}: not supported here; leave it out", param=name)
