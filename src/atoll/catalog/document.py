"""A YAML file read against its schema; every error names file, line, field and fix."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Annotated, Generic, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from atoll.catalog.name_lookup import printable
from atoll.catalog.overlay_schema import Overlay
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.files import YamlFile, load_yaml_file
from atoll.core.frozen import describe_fault, suggest_fix

Location = tuple[str | int, ...]


Content = TypeVar("Content", bound=BaseModel)


class SchemaDocument(Generic[Content]):
    """A YAML file, or its content as a mapping, and what its schema makes of it.

    Knows the line of every value. `what` names the kind of file in errors ("an overlay").
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | YamlFile | Mapping[str, object],
        schema: type[Content],
        what: str,
    ) -> None:
        self._file: YamlFile | None = None
        self._schema = schema
        data: object = source
        if isinstance(source, YamlFile):
            self._file = source
        elif not isinstance(source, Mapping):
            self._file = load_yaml_file(source)
        if self._file is not None:
            data = self._file.data
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            raise self.error(
                f"{what} is a mapping of sections", hint=f"start with {_list_names(schema)}"
            )
        self.data: Mapping[object, object] = data
        try:
            self.content = schema.model_validate(data)
        except ValidationError as error:
            raise self._invalid(_choose_error(error.errors(include_url=False))) from None

    @property
    def path(self) -> str | None:
        """The file it was read from, None if it was given as a mapping."""
        return None if self._file is None else self._file.path

    @property
    def folder(self) -> Path:
        """Where relative paths in the file start."""
        return Path() if self._file is None else Path(self._file.path).parent

    def error(self, message: str, *location: str | int, hint: str | None = None) -> InputError:
        """An error about the value at `location`."""
        return InputError(
            message,
            path=None if self._file is None else self._file.path,
            line=None if self._file is None else self._file.line(*location),
            field=_join_dotted(location) or None,
            hint=hint,
        )

    @contextmanager
    def at(self, *location: str | int) -> Iterator[None]:
        """Errors raised inside are about the value at `location`, or the field of it they name."""
        try:
            yield
        except UnknownNameError as error:
            hint = error.hint or "use a known name"
            raise self.error(error.message, *location, hint=hint) from None
        except InputError as error:
            if error.path is not None:  # about another file that this one names
                raise
            inner: Location = tuple(error.field.split(".")) if error.field else ()
            if inner[: len(location)] != tuple(map(str, location)):
                inner = (*location, *inner)
            raise self.error(error.message, *inner, hint=error.hint) from None

    def _invalid(self, detail: ErrorDetails) -> InputError:
        location = _place_as_written(detail, self.data)
        holder = _schema_at(self._schema, location[:-1])
        if detail["type"] == "extra_forbidden" and holder is not None:
            near = _nearest_field(str(location[-1]), holder)
            hint = f"write {near!r}" if near else f"known here: {_list_names(holder)}"
            return self.error(
                "there is no such field", *location, hint=hint + _example(holder, near)
            )
        if detail["type"] == "missing":
            return self.error("this field is required", *location, hint=f"add {location[-1]!r}")
        if detail["type"] == "quantity":
            fix = detail.get("ctx", {}).get("hint")
            return self.error(detail["msg"], *location, hint=fix if isinstance(fix, str) else None)
        example = "" if holder is None or not location else _example(holder, str(location[-1]))
        return self.error(_plain(detail), *location, hint=suggest_fix(detail) + example)


class Document(SchemaDocument[Overlay]):
    """An overlay as read and checked."""

    def __init__(self, source: str | os.PathLike[str] | Mapping[str, object]) -> None:
        super().__init__(source, Overlay, "an overlay")

    @property
    def overlay(self) -> Overlay:
        """The facts that the file adds or changes."""
        return self.content

    @property
    def name(self) -> str:
        """How facts of this overlay name their source."""
        return "overlay" if self.path is None else f"overlay {self.path}"


def _choose_error(details: list[ErrorDetails]) -> ErrorDetails:
    """The error to show: the first, unless what seems to be missing there is only misspelt."""
    first = details[0]
    if first["type"] != "missing":
        return first
    beside = (
        d for d in details if d["type"] == "extra_forbidden" and d["loc"][:-1] == first["loc"][:-1]
    )
    return next(beside, first)


def _place_as_written(detail: ErrorDetails, data: object) -> Location:
    """The error's place as the person wrote it, without the parts that pydantic puts in between."""
    location: list[str | int] = []
    parts = [part for part in detail["loc"] if part != "[key]"]
    for index, part in enumerate(parts):
        if isinstance(data, Mapping):
            keys = {str(key): key for key in data}
            if str(part) in keys:
                location.append(part)
                data = data[keys[str(part)]]
            elif detail["type"] == "missing" and index == len(parts) - 1:
                location.append(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            location.append(part)
            data = data[part]
    return tuple(location)


def _plain(detail: ErrorDetails) -> str:
    shown = repr(detail["input"])
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    message = describe_fault(detail)
    message = message[0].lower() + message[1:] if message else "invalid"
    return f"{message}, got {shown}"


def _join_dotted(location: Location) -> str:
    return ".".join(map(printable, location))


def _nearest_field(name: str, holder: type[BaseModel]) -> str | None:
    """The field that somebody meant: by another name for it, by its beginning, or by its letters."""
    known: Mapping[str, str | None] = getattr(holder, "also_called", {})
    if name in known:
        return known[name]
    begun = [field for field in holder.model_fields if field.startswith(f"{name}_")]
    begun += [field for field in holder.model_fields if name.startswith(f"{field}_")]
    return next(iter(begun or difflib.get_close_matches(name, holder.model_fields, n=1)), None)


def _example(holder: type[BaseModel], field: str | None) -> str:
    """How a field with an example is written, to stand behind a hint; else nothing."""
    info = None if field is None else holder.model_fields.get(field)
    return f", as in '{field}: {info.examples[0]}'" if info and info.examples else ""


def _list_names(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


def _schema_at(schema: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model that holds the value at `location`, walking the schema from the top."""
    current: object = schema
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            info = current.model_fields.get(str(part))
            current = None if info is None else info.annotation
        else:
            current = get_args(current)[-1] if get_args(current) else None
        current = _without_wrapping(current)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _without_wrapping(annotation: object) -> object:
    while get_origin(annotation) in (Annotated, Union, UnionType):
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
            continue
        options = [arg for arg in get_args(annotation) if arg is not type(None)]
        # Of "a name or a mapping", only the mapping has fields to speak of.
        models = [arg for arg in options if _is_model(_without_wrapping(arg))]
        annotation = (models or options)[0]
    return annotation


def _is_model(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
