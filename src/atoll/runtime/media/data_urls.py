"""Content of a URL in a request: data that stands in it, or, where allowed, what a public server sends."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from atoll.runtime.media.media_errors import MediaError, too_large, unsupported
from atoll.runtime.media.remote_media import read_remote

_MAX_HEADER = 256


def read_data_url(url: str, max_bytes: int, *, remote_urls: bool = False) -> bytes:
    """Return the bytes of "data:image/png;base64,...", at most `max_bytes`; MediaError for anything else.

    With `remote_urls`, http and https are fetched from public addresses; this may take seconds, so call it
    in a thread. Files and all other schemes are always refused. The type that the URL names is not looked at.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data" and ":" in url[:8]:
        return _read_data(url, max_bytes)
    if scheme in ("http", "https"):
        if not remote_urls:
            raise unsupported(
                "URLs are not fetched here; send the data itself, as data:TYPE;base64,..."
            )
        return read_remote(url, max_bytes)
    raise unsupported("only data URLs are read: data:TYPE;base64,...")


def _read_data(url: str, max_bytes: int) -> bytes:
    comma = url.find(",", 0, _MAX_HEADER)
    if comma < 0:
        raise MediaError("the data URL has no comma between its type and its data")
    if not url[5:comma].lower().endswith(";base64"):
        # Every byte is written as at most three characters.
        if len(url) - comma - 1 > 3 * max_bytes:
            raise too_large(f"the data URL holds more than {max_bytes} bytes")
        data = unquote_to_bytes(url[comma + 1 :])
        if len(data) > max_bytes:
            raise too_large(f"the data URL holds more than {max_bytes} bytes")
        return data
    return read_base64(url[comma + 1 :], max_bytes)


def read_base64(text: str, max_bytes: int) -> bytes:
    """Return the bytes of base64 without line breaks or other strange characters, at most `max_bytes`."""
    if len(text) // 4 * 3 - text[-2:].count("=") > max_bytes:
        raise too_large(f"the base64 holds more than {max_bytes} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the base64 is damaged: {error}") from None
