"""A form (multipart/form-data) as far as a gateway has to know it: the model, and whether to stream.

Files pass unread. What two readers could understand differently (a field twice, a file where a field is
meant, text before the first part) is refused, so that the model whose use was allowed is the one that the
backend reads.
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from atoll.runtime.openai import ApiError, TranscriptionRequest

_PARTS = 64
_HEADERS = 8
_HEADER_BYTES = 1024
_NAME_BYTES = 512
_TYPE = re.compile(
    rb"multipart/form-data *; *boundary=(\"?)([0-9A-Za-z'()+_,./:=?-]{1,70})\1 *", re.IGNORECASE
)
_DISPOSITION = re.compile(
    rb"form-data; *name=\"([^\"\\\r\n]{1,100})\""
    rb"(?P<file>; *filename=\"(?:[^\"\r\n\\]|\\.){0,512}\")?"
    rb"(?P<file_too>; *filename\*=[^;\"\r\n]{1,512})?",
    re.IGNORECASE,
)
# The reader warns of every malformed form; the client is told, and strangers shall not fill the log.
logging.getLogger("python_multipart.multipart").setLevel(logging.CRITICAL)
_TRUE = frozenset({b"true", b"1", b"True"})
_FALSE = frozenset({b"false", b"0", b"False", b""})


class TranscriptionForm(NamedTuple):
    """Fields read from a form."""

    request: TranscriptionRequest
    content_type: bytes
    """With the boundary, as it is passed on."""
    model_at: tuple[int, int]
    """Where in the body the name of the model stands."""

    def with_model(self, body: bytes, model: str) -> bytes:
        """Return the body with another model in it."""
        start, end = self.model_at
        return body[:start] + model.encode() + body[end:]


class _PartReader:
    """Hears of the parts of a form, and keeps where the values of its short fields are."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._parts = 0
        self._header = self._value = b""
        self._name: bytes | None = None
        self._is_file = False
        self._first: int | None = None
        self._last = 0
        self.fields: dict[bytes, tuple[int, int]] = {}
        self.files: set[bytes] = set()
        self.ended = False

    def on_part_begin(self) -> None:
        """Forget the part before."""
        self._parts += 1
        if self._parts > _PARTS:
            raise _malformed(f"the form has more than {_PARTS} parts")
        self._name, self._is_file, self._first = None, False, None

    def on_header_begin(self) -> None:
        """Another header."""
        self._header = self._value = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        """Take the name of a header, or a piece of it."""
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """Take the value of a header, or a piece of it."""
        self._value += data[start:end]

    def on_header_end(self) -> None:
        """Look at a header that says what the part is called."""
        if self._header.strip().lower() != b"content-disposition":
            return
        found = _DISPOSITION.fullmatch(self._value.strip())
        if found is None or self._name is not None:
            raise _malformed("a part of the form has no plain name")
        self._name = found[1]
        self._is_file = found["file"] is not None or found["file_too"] is not None

    def on_headers_finished(self) -> None:
        """Refuse what cannot be told apart."""
        name = self._name
        if name is None:
            raise _malformed("a part of the form has no plain name")
        if name.lower() in (b"model", b"stream") and (self._is_file or name in self.fields):
            raise _malformed(f"{name.decode('latin-1')}: one plain field is needed")

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Note where the value is; it is read in place."""
        if self._is_file:
            return
        # Only a value in one stretch of the body can be read, and replaced, in place.
        if data is not self._body or (self._first is not None and start != self._last):
            # A piece that the reader had held back: no value that is looked at here has such.
            self._first = self._last = -1
            return
        if self._first is None:
            self._first = start
        self._last = end

    def on_part_end(self) -> None:
        """Keep what was found."""
        name = self._name or b""
        if self._is_file:
            self.files.add(name)
        else:
            first = self._first
            self.fields[name] = (0, 0) if first is None else (first, self._last)

    def on_end(self) -> None:
        """All parts were there."""
        self.ended = True


def read_form(content_type: bytes, body: bytes) -> TranscriptionForm:
    """Read the form of a transcription; what is wrong is an ApiError."""
    found = _TYPE.fullmatch(content_type)
    if found is None:
        raise ApiError(
            400,
            "content-type: multipart/form-data with a boundary is needed",
            param="content-type",
            code="invalid_form",
        )
    boundary = found[2]
    # Text before the first part is what two readers may understand differently.
    if not body.startswith(b"--" + boundary):
        raise _malformed("the form does not begin with its boundary")
    # Each costs the reader more than a microsecond, also those inside of a file: millions would hold up
    # whoever else waits.
    if body.count(b"\r\n--" + boundary) > _PARTS:
        raise _malformed(f"the form has more than {_PARTS} boundaries")
    reader = _PartReader(body)
    names = (
        *("on_part_begin", "on_part_data", "on_part_end", "on_header_begin", "on_header_field"),
        *("on_header_value", "on_header_end", "on_headers_finished", "on_end"),
    )
    try:
        parser = MultipartParser(
            boundary,
            {name: getattr(reader, name) for name in names},  # type: ignore[arg-type]
            max_header_count=_HEADERS,
            max_header_size=_HEADER_BYTES,
        )
        parser.write(body)
    except FormParserError as error:
        raise _malformed(f"the form cannot be read: {str(error)[:200]}") from None
    if not reader.ended:
        raise _malformed("the form is not complete")
    # What follows the last one may be understood differently, too.
    closing = b"\r\n--" + boundary + b"--"
    if body.partition(closing)[2].strip(b"\r\n"):
        raise _malformed("something follows the end of the form")
    return _check_fields(reader, content_type, body)


def _check_fields(reader: _PartReader, content_type: bytes, body: bytes) -> TranscriptionForm:
    if b"file" not in reader.files:
        raise _missing("file")
    at = reader.fields.get(b"model")
    if at is None:
        raise _missing("model")
    # A character has up to four bytes; what is longer, or in no one place, is no name.
    raw = body[at[0] : at[1]] if 0 < at[1] - at[0] <= 4 * _NAME_BYTES and at[0] > 0 else b""
    try:
        model = raw.decode()
    except UnicodeDecodeError:
        model = ""
    if not model or len(model) > _NAME_BYTES or not model.isprintable():
        raise ApiError(400, "model: a name of 1 to 512 characters is needed", param="model")
    start, end = reader.fields.get(b"stream", (0, 0))
    said = body[start:end] if 0 <= end - start <= 5 else b"?"
    if said not in _TRUE | _FALSE:
        raise ApiError(400, "stream: true or false is needed", param="stream")
    request = TranscriptionRequest(model=model, stream=said in _TRUE)
    return TranscriptionForm(request, content_type, at)


def _missing(name: str) -> ApiError:
    return ApiError(
        400, f"{name}: this field of the form is needed", param=name, code="missing_field"
    )


def _malformed(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_form")
