"""Limits on content of a request besides text: how much of each kind, and from where.

Nothing is decoded here. A backend would fetch whatever URL a client names, from where the backend stands;
so only what is sent along (data: URLs) passes, unless the settings say otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.openai import (
    AnyRequest,
    ApiError,
    ChatRequest,
    ContentPart,
    EmbeddingRequest,
    ImageRequest,
    Message,
    SpeechRequest,
    TokenizeRequest,
)

_DATA = re.compile(
    r"data:(?P<kind>image|video|audio|application)/(?P<format>[A-Za-z0-9.+-]{1,64})"
    r"(?:;[A-Za-z0-9=.+-]{1,64}){0,4};base64,"
)
_HEAD = 512
"""Characters within which the data of a data: URL begins."""
_REMOTE = re.compile(r"https?://[!-~]{1,4096}")
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_CHECKED = 2**19
"""Characters of base64 that are looked at, at either end; whoever decodes it sees the rest."""
_ACTIVE = re.compile(r"svg|xml|html|mpegurl|m3u", re.IGNORECASE)
"""Formats that name things to fetch themselves."""
_KINDS = {
    "image_url": ("images", "image_bytes", ("image",)),
    "video_url": ("videos", "video_bytes", ("video", "image", "application")),
    "audio_url": ("audios", "audio_bytes", ("audio", "application")),
    "input_audio": ("audios", "audio_bytes", ()),
}
"""For each field: the limit of how many, the limit of one in bytes, the kinds of data it may have."""


def check_content(request: AnyRequest, limits: MediaLimits, parts: int) -> None:
    """Refuse (ApiError) what a request brings beyond the limits; `parts`: pieces of messages at most.

    A request with nothing but text costs a look at its messages.
    """
    # Nearly all requests: only those with parts are looked at more closely.
    if type(request) is ChatRequest:
        for message in request.messages:
            if type(message.content) is list:
                _check_messages(request.messages, limits, parts)
                break
    elif isinstance(request, EmbeddingRequest):
        if isinstance(request.input, list) and len(request.input) > limits.inputs:
            raise _too_many("input", "texts", limits.inputs)
        if request.messages is not None:
            _check_messages(request.messages, limits, parts)
    elif isinstance(request, TokenizeRequest):
        # An engine that counts the tokens of a picture would fetch it, too.
        if request.messages is not None:
            _check_messages(request.messages, limits, parts)
    elif isinstance(request, SpeechRequest):
        if len(request.input) > limits.speech_chars:
            raise ApiError(
                400,
                f"input: {len(request.input)} characters are more than {limits.speech_chars}",
                param="input",
                code="string_above_max_length",
            )
    elif isinstance(request, ImageRequest) and (request.n or 1) > limits.generated_images:
        raise _too_many("n", "pictures", limits.generated_images)


def _check_messages(messages: Iterable[Message], limits: MediaLimits, max_parts: int) -> None:
    """Check all pieces of a conversation."""
    counts = dict.fromkeys(("images", "videos", "audios"), 0)
    parts = 0
    for at, message in enumerate(messages):
        content = message.content
        if not isinstance(content, list):
            continue
        # Counted before they are looked at: a client decides how many there are.
        parts += len(content)
        if parts > max_parts:
            raise _too_many("messages", "parts", max_parts)
        for number, part in enumerate(content):
            for field in _check_part(part, f"messages[{at}].content[{number}]", limits):
                kind = _KINDS[field][0]
                counts[kind] += 1
                if counts[kind] > getattr(limits, kind):
                    raise _too_many("messages", kind, getattr(limits, kind))


def _check_part(part: ContentPart, place: str, limits: MediaLimits) -> list[str]:
    """Check one piece; return the fields of it that hold pictures, sound or video."""
    fields = []
    for field, url in part.urls():
        param = f"{place}.{field}.url"
        fields.append(field)
        # Searched in the first characters only: the data behind them may have megabytes.
        found = _DATA.match(url, 0, _HEAD)
        if found is None:
            _check_remote(url, param, limits)
        elif found["kind"] not in _KINDS[field][2] or _ACTIVE.search(found["format"]):
            raise ApiError(
                400,
                f"{param}: {found['kind']}/{found['format'][:40]} is not taken here",
                param=param,
                code="unsupported_media_type",
            )
        else:
            _check_base64(url, found.end(), param, getattr(limits, _KINDS[field][1]))
    if part.input_audio is not None:
        fields.append("input_audio")
        param = f"{place}.input_audio.data"
        _check_base64(part.input_audio.data, 0, param, limits.audio_bytes)
    return fields


def _check_remote(url: str, param: str, limits: MediaLimits) -> None:
    """Refuse a URL that is not one of data, unless it may be fetched."""
    if _REMOTE.fullmatch(url, 0, 2 * 4096) is not None:
        if limits.remote_urls:
            return
        raise ApiError(
            400,
            f"{param}: URLs are not fetched here; send the content itself as a data: URL "
            "(data:image/png;base64,...)",
            param=param,
            code="remote_url_refused",
        )
    # Written like a URL, and yet none that could ever be fetched.
    if "://" in url[:64] or url[:64].strip().lower().startswith(("http", "file", "ftp")):
        code, what = "remote_url_refused", "URLs of this kind are never fetched"
    else:
        code, what = "invalid_url", "this is no data: URL in base64"
    raise ApiError(
        400, f"{param}: {what}; send data:TYPE/FORMAT;base64,...", param=param, code=code
    )


def _check_base64(text: str, start: int, param: str, max_bytes: int) -> None:
    """Refuse base64 that is too long, or that plainly is none."""
    length = len(text) - start
    # Only the last four characters can be padding; the text itself is not copied for this.
    padding = len(text) - len(text[-4:].rstrip("=")) - max(0, len(text) - 4)
    size = length * 3 // 4 - padding
    if size > max_bytes:
        raise ApiError(
            400,
            f"{param}: {size} bytes are more than {max_bytes}",
            param=param,
            code="media_too_large",
        )
    whole = length <= 2 * _CHECKED
    looked = text[start:] if whole else text[start : start + _CHECKED] + text[-_CHECKED:]
    rest = looked[: len(looked) - padding]
    wrong = (
        length < 1
        or length % 4
        or padding > 2
        or not rest.isascii()
        or bool(rest.encode().translate(None, _ALPHABET))
    )
    if wrong:
        raise ApiError(400, f"{param}: this is not base64", param=param, code="invalid_base64")


def _too_many(param: str, what: str, limit: int) -> ApiError:
    return ApiError(
        400, f"{param}: more than {limit} {what} in one request", param=param, code="too_many_parts"
    )
