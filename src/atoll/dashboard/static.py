"""The files of the pages: read and packed at the start, so that nothing but them can be asked for."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.runtime.http.handlers import Response
from atoll.runtime.openai import ApiError

FOLDER = Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
_PACKED = (".html", ".js", ".css", ".json", ".svg", ".txt", ".md", ".webmanifest")
_MAX_COMPRESSED_SHARE = 0.95
"""Files that compress to more than this share of their size are sent as they are."""
_EMPTY = b"<!doctype html><title>Atoll</title><p>The pages of the dashboard are not installed."


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file, and the same packed where that is smaller."""

    content_type: str
    data: bytes
    packed: bytes | None
    tag: str


class StaticFiles:
    """The files of a folder, by their names in it; `follow` reads them anew for each request."""

    def __init__(self, folder: Path = FOLDER, *, follow: bool = False) -> None:
        self._folder = folder
        self._follow = follow
        self._files = _read_folder(folder)

    def serve(self, name: str, headers: Mapping[bytes, bytes]) -> Response:
        """Answer with a file; 404 for what was not there at the start."""
        if self._follow:
            self._files = _read_folder(self._folder)
        file = self._files.get(name)
        if file is None:
            raise ApiError(404, "there is no such file", code="not_found")
        return _answer(file, headers)

    def serve_index(self, headers: Mapping[bytes, bytes]) -> Response:
        """Answer with the page that all pages are."""
        if self._follow:
            self._files = _read_folder(self._folder)
        return _answer(self._files.get(_INDEX) or _pack(_INDEX, _EMPTY), headers)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files."""
        return tuple(self._files)


def _read_folder(folder: Path) -> dict[str, StaticFile]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _TYPES)
    return {
        path.relative_to(folder).as_posix(): _pack(path.name, path.read_bytes()) for path in paths
    }


def _pack(name: str, data: bytes) -> StaticFile:
    suffix = Path(name).suffix
    packed = gzip.compress(data, 9, mtime=0) if suffix in _PACKED else None
    if packed is not None and len(packed) > _MAX_COMPRESSED_SHARE * len(data):
        packed = None
    return StaticFile(_TYPES[suffix], data, packed, hashlib.sha256(data).hexdigest()[:24])


def _answer(file: StaticFile, headers: Mapping[bytes, bytes]) -> Response:
    packed = file.packed is not None and _takes_gzip(headers.get(b"accept-encoding", b""))
    tag = f'"{file.tag}{"-gz" if packed else ""}"'
    # Names stay from one version to the next, so a browser asks whether it has the right one.
    extra = [("etag", tag), ("cache-control", "no-cache"), ("vary", "accept-encoding")]
    known = headers.get(b"if-none-match", b"").decode("latin-1")
    if known and (
        known == "*" or tag in (part.strip().removeprefix("W/") for part in known.split(","))
    ):
        return Response(_body(file, packed=packed), 304, file.content_type, tuple(extra))
    if packed:
        extra.append(("content-encoding", "gzip"))
    return Response(_body(file, packed=packed), 200, file.content_type, tuple(extra))


def _body(file: StaticFile, *, packed: bool) -> bytes:
    return file.packed if packed and file.packed is not None else file.data


def _takes_gzip(accepted: bytes) -> bool:
    for part in accepted.lower().split(b","):
        coding, _, weight = part.partition(b";")
        if coding.strip() in (b"gzip", b"*"):
            return weight.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
    return False
