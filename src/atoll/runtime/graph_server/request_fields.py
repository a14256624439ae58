"""Bodies of requests, read strictly: what is not known here would change nothing, and so is refused."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Struct

from atoll.runtime.openai import ApiError

_PLACE = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_CHOICE = "Invalid enum value"
_MAX_PARTS = 2**17
"""Brackets that open in a body; many small objects take long to read, whoever else waits."""
_Fields = TypeVar("_Fields", bound=Struct)


def read_fields(kind: type[_Fields], body: bytes) -> _Fields:
    """Read and check a JSON body; what is wrong or not known is an ApiError that names the field."""
    if body.count(b"[") + body.count(b"{") > _MAX_PARTS:
        raise ApiError(400, "the request has too many parts", code="request_too_large")
    try:
        body.decode()
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json") from None


def convert_fields(kind: type[_Fields], form: dict[str, str]) -> _Fields:
    """Check the fields of a form like those of a JSON body; numbers and truths are written as text."""
    try:
        return msgspec.convert(form, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None


def _explain(text: str, kind: type[Struct]) -> ApiError:
    place = _PLACE.search(text)
    param = place[1] if place else ""
    said = text[: place.start()] if place else text
    unknown = _UNKNOWN.search(said)
    if unknown is not None:
        param = f"{param}.{unknown[1]}" if param else unknown[1]
        return ApiError(400, f"{param}: not supported here; leave it out", param=param)
    if said.startswith(_CHOICE):
        said += "".join(f"; use {choices}" for choices in [_list_choices(kind, param)] if choices)
    return ApiError(400, f"{param or 'body'}: {said}", param=param or None)


def _list_choices(kind: type[Struct], param: str) -> str:
    """Return the values that a field may have, where it is one of a few."""
    here: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(kind)]
    for step in re.findall(r"[^.\[\]]+|\[[^\]]*\](?=$|[.\[])", param):
        here = [below for each in here for below in _below(each, step)]
    values = [
        v for each in here if isinstance(each, msgspec.inspect.LiteralType) for v in each.values
    ]
    return " or ".join(map(str, values))


def _below(kind: msgspec.inspect.Type, step: str) -> list[msgspec.inspect.Type]:
    """Return what may stand at a step of a path, whatever else may stand there."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return [below for each in kind.types for below in _below(each, step)]
    found: list[msgspec.inspect.Type] = []
    if isinstance(kind, msgspec.inspect.ListType) and step.startswith("["):
        found = [kind.item_type]
    elif isinstance(kind, msgspec.inspect.StructType):
        found = [field.type for field in kind.fields if field.encode_name == step]
    return [
        each
        for one in found
        for each in (one.types if isinstance(one, msgspec.inspect.UnionType) else (one,))
    ]


def refuse_unless(fields: Struct, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Refuse fields whose values would change the answer and cannot: all but None and the neutral ones."""
    for name, values in neutral.items():
        value = getattr(fields, name)
        if value is not None and value not in values:
            raise ApiError(400, f"{name}: not supported here; leave it out", param=name)
