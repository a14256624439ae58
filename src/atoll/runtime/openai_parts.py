"""The pieces a message of OpenAI's API may be made of: text, pictures, sound, video.

Every field that could name something to fetch is read here whatever the type of its piece says: a backend
that looks at other fields than the type asks for is told nothing that was not checked.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

PartType = Literal[
    "text", "refusal", "image_url", "input_audio", "video_url", "audio_url", "embeds"
]
"""`embeds` are vectors for an instance of the stage engine, which checks them itself."""
AudioFormat = Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm", "pcm16", "pcm"]


class MediaUrl(Struct, gc=False):
    """Where a picture, video or sound is: a data: URL, or one to fetch where that is allowed."""

    url: str
    detail: Annotated[str, Meta(max_length=64)] | None = None


class InputAudio(Struct, gc=False):
    """Sound that was sent along."""

    data: str
    """Base64."""
    format: AudioFormat


class ContentPart(Struct, gc=False):
    """A piece of a message; the field named like its type has what it is."""

    type: PartType
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = None
    input_audio: InputAudio | None = None
    video_url: MediaUrl | str | None = None
    audio_url: MediaUrl | str | None = None

    def __post_init__(self) -> None:
        """Refuse a piece without what its type promises."""
        if self.type != "embeds" and getattr(self, self.type) is None:
            raise ValueError(f"a part of type {self.type!r} needs the field {self.type!r}")

    def urls(self) -> list[tuple[str, str]]:
        """Return the URLs of the piece with the fields they stand in, whatever its type."""
        found = []
        for field in ("image_url", "video_url", "audio_url"):
            value = getattr(self, field)
            if value is not None:
                found.append((field, value if isinstance(value, str) else value.url))
        return found
