"""The base of every JSON-serialisable value: frozen, closed, comparable by content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import ErrorDetails

from atoll.core.errors import InputError

_SECRETS = ("token", "key", "secret", "password")
"""Fields with such a word in their name are not shown in errors."""


class Frozen(BaseModel):
    """A value that never changes, refuses unknown fields and survives JSON unchanged.

    Non-finite floats are refused because JSON cannot hold them; use None for "no bound". Fields
    must not be sets, whose order differs from run to run and with it the JSON text and the hash;
    use tuples. A dict field is shared, not copied, on `model_copy`; treat it as read-only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name, info in cls.model_fields.items():
            if _mentions_set(info.annotation):
                raise TypeError(f"{cls.__name__}.{name}: use a tuple; a set has no stable order")

    @classmethod
    def parse(cls, data: object, *, path: str | os.PathLike[str] | None = None) -> Self:
        """Validate plain data (from YAML, say); a bad field becomes one InputError naming it."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _input_error(error, path) from error

    @classmethod
    def from_json(cls, text: str | bytes, *, path: str | os.PathLike[str] | None = None) -> Self:
        """Read what `to_json` wrote; malformed or invalid text becomes an InputError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _input_error(error, path) from error

    def to_json(self, *, indent: int | None = None) -> str:
        """Write as JSON text with fields in declaration order; equal values give equal text."""
        return self.model_dump_json(indent=indent)

    def content_hash(self) -> str:
        """Return the hex sha256 of the canonical JSON: keys sorted, no spaces, no class name."""
        canonical = json.dumps(
            self.model_dump(mode="json"),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )
        return hashlib.sha256(canonical.encode()).hexdigest()


def without_blanks(*names: str) -> Any:
    """Return the serializer of a model that leaves out those of these fields that are None or empty.

    For fields that came later: files and messages without them keep their hash, and older readers, which
    refuse fields that they do not know, read them.
    """

    @model_serializer(mode="wrap")
    def write_the_rest(self: Any, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = write(self)
        blank: tuple[object, ...] = (None, (), [], {})
        return {name: x for name, x in fields.items() if name not in names or x not in blank}

    return write_the_rest


def _mentions_set(annotation: object) -> bool:
    if annotation in (set, frozenset) or get_origin(annotation) in (set, frozenset):
        return True
    return any(_mentions_set(argument) for argument in get_args(annotation))


def describe_fault(detail: ErrorDetails) -> str:
    """Say what is wrong with a value in words of the file it stands in, without names of classes."""
    kind = detail["type"]
    if kind in _WORDS:
        return _WORDS[kind]
    if kind == "json_invalid":
        reason = str(detail.get("ctx", {}).get("error", "")) or detail["msg"]
        return f"not valid JSON: {reason}"
    if kind == "too_short":
        return f"at least {detail['ctx']['min_length']} needed"
    if kind == "too_long":
        return f"at most {detail['ctx']['max_length']} allowed"
    # How pydantic marks what a validator of ours said.
    return detail["msg"].removeprefix("Value error, ")


def suggest_fix(detail: ErrorDetails) -> str:
    """Return what to change where a value is wrong: what its validator says, or what its kind asks for."""
    context: Mapping[str, object] = detail.get("ctx", {})
    hint = context.get("hint")
    if isinstance(hint, str):
        return hint
    kind = detail["type"]
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "missing":
        return f"add '{name}'"
    if kind == "extra_forbidden":
        return f"leave '{name}' out"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return "check the number and its unit"
    if kind in _FIXES:
        return _FIXES[kind]
    if kind.startswith(("float", "int", "finite")):
        return "write a plain number in the unit of the field's name"
    return "change it to what is asked for"


_WORDS = {
    "missing": "this field is required",
    "extra_forbidden": "there is no such field",
    "model_type": "a mapping is needed",
    "model_attributes_type": "a mapping is needed",
    "dataclass_type": "a mapping is needed",
    "dict_type": "a mapping is needed",
    "mapping_type": "a mapping is needed",
    "list_type": "a list is needed",
    "tuple_type": "a list is needed",
    "string_type": "text is needed",
}
"""Where pydantic would name a class or a type of Python."""
_FIXES = {
    "model_type": "write a mapping, one 'field: value' a line",
    "model_attributes_type": "write a mapping, one 'field: value' a line",
    "dataclass_type": "write a mapping, one 'field: value' a line",
    "dict_type": "write a mapping, one 'field: value' a line",
    "mapping_type": "write a mapping, one 'field: value' a line",
    "list_type": "write a list, one '- ' a line",
    "tuple_type": "write a list, one '- ' a line",
    "string_type": "put the text in quotes",
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "literal_error": "write what is named",
    "enum": "write one that is named",
    "too_short": "add what is missing",
    "too_long": "leave some out",
    "string_too_short": "write something there",
    "string_too_long": "shorten it",
    "json_invalid": "it is no JSON file or was cut short; write it anew",
}


def _input_error(error: ValidationError, path: str | os.PathLike[str] | None) -> InputError:
    details = error.errors(include_url=False)
    first = details[0]
    more = f" (and {len(details) - 1} more problems)" if len(details) > 1 else ""
    field = ".".join(str(part) for part in first["loc"]) or None
    return InputError(f"{_message(first)}{more}", path=path, field=field, hint=suggest_fix(first))


def _message(detail: ErrorDetails) -> str:
    said = describe_fault(detail)
    if detail["type"] in ("missing", "extra_forbidden", "quantity", "json_invalid"):
        return said
    if _is_secret(detail) or isinstance(detail["input"], Mapping | list | tuple):
        # What is inside may be nobody's business.
        return said
    return f"{said}, got {_short(detail['input'])}"


def _is_secret(detail: ErrorDetails) -> bool:
    name = str(detail["loc"][-1]).lower() if detail["loc"] else ""
    return any(word in name for word in _SECRETS)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
