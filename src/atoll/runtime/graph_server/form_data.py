"""Forms with files (multipart/form-data), parsed within bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.core.errors import MissingDependencyError
from atoll.runtime.openai import ApiError

_MAX_PARTS = 32
_MAX_VALUE_BYTES = 2**16
"""Of a field that is no file."""


@dataclass(slots=True)
class Form:
    """The fields of a form, and its files by field."""

    values: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


class _Collector:
    """Takes what the parser finds."""

    def __init__(self, max_file_bytes: int) -> None:
        self.form = Form()
        self.ended = False
        self._max_file_bytes = max_file_bytes
        self._parts = 0
        self._headers: dict[bytes, bytes] = {}
        self._name, self._value = b"", b""
        self._data = bytearray()
        self._field, self._is_file = "", False

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise ApiError(400, f"a form has at most {_MAX_PARTS} fields")
        self._headers, self._data = {}, bytearray()
        self._name, self._value = b"", b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name, self._value = b"", b""

    def on_headers_finished(self) -> None:
        from python_multipart.multipart import parse_options_header

        kind, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise ApiError(400, "a part of the form has no name")
        if name in self.form.values or name in self.form.files:
            raise ApiError(400, f"{name[:60]}: given twice", param=name[:60])
        self._field, self._is_file = name, b"filename" in options

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        most = self._max_file_bytes if self._is_file else _MAX_VALUE_BYTES
        if len(self._data) > most:
            raise ApiError(
                413,
                f"{self._field[:60]}: at most {most} bytes are taken",
                param=self._field[:60],
                code="request_too_large",
            )

    def on_part_end(self) -> None:
        if self._is_file:
            self.form.files[self._field] = bytes(self._data)
            return
        try:
            self.form.values[self._field] = self._data.decode()
        except UnicodeDecodeError:
            message = f"{self._field[:60]}: no text in UTF-8"
            raise ApiError(400, message, param=self._field[:60]) from None

    def on_end(self) -> None:
        self.ended = True


def read_form(content_type: bytes, body: bytes, max_file_bytes: int) -> Form:
    """Return the fields and files of a form; one that is broken or too large is an ApiError."""
    try:
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser, parse_options_header
    except ImportError as error:
        raise MissingDependencyError("python-multipart", "serve", needed_for="forms") from error

    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        raise ApiError(
            400, "send a form: multipart/form-data with a boundary", param="content-type"
        )
    found = _Collector(max_file_bytes)
    callbacks: Any = {
        name: getattr(found, name)
        for name in (
            *("on_part_begin", "on_part_data", "on_part_end", "on_header_field", "on_header_value"),
            *("on_header_end", "on_headers_finished", "on_end"),
        )
    }
    try:
        parser = MultipartParser(boundary, callbacks)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise ApiError(400, f"the form cannot be read: {error}"[:300]) from None
    if not found.ended:
        raise ApiError(400, "the form is cut short")
    return found.form
