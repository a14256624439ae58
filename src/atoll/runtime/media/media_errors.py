"""Errors of pictures, sounds and videos that clients send."""

from __future__ import annotations

from typing import Literal

MediaCode = Literal["invalid_media", "media_too_large", "unsupported_media"]
"""Cannot be read; more than the limits allow; of a kind that is not read here."""


class MediaError(Exception):
    """Media that cannot be taken: the client's fault. `message` is one line, `param` the field, if known."""

    def __init__(
        self, message: str, param: str | None = None, code: MediaCode = "invalid_media"
    ) -> None:
        message = " ".join(message.split())
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def too_large(message: str) -> MediaError:
    """Return the error for more than the limits allow."""
    return MediaError(message, code="media_too_large")


def unsupported(message: str) -> MediaError:
    """Return the error for a kind that is not read or written here."""
    return MediaError(message, code="unsupported_media")
