"""How much of each kind a request may bring."""

from __future__ import annotations

from pydantic import Field

from atoll.core.frozen import Frozen


class MediaLimits(Frozen):
    """Limits per kind, of one item and of how many there are; each is checked before anything is decoded.

    Bytes are those sent, pixels those a picture has before it is shrunk, seconds those of the decoded sound.
    image_side, video_side: pictures and frames with longer sides are shrunk to this, in pixels, so that what
    is kept stays small whatever was sent; no component here looks at more.
    remote_urls: whether pictures may be fetched from URLs that a client names; off, since a server that
    fetches what strangers name reads what only it can reach.
    """

    image_bytes: int = Field(20 * 2**20, ge=1)
    image_pixels: int = Field(40_000_000, ge=1)
    image_side: int = Field(2048, ge=1)
    images: int = Field(16, ge=1)
    audio_bytes: int = Field(25 * 2**20, ge=1)
    audio_s: float = Field(600.0, gt=0)
    audio_piece_s: float = Field(30.0, ge=1)
    """Longer sounds are heard in pieces of at most so many seconds, cut in quiet places."""
    audios: int = Field(8, ge=1)
    video_bytes: int = Field(25 * 2**20, ge=1)
    video_s: float = Field(600.0, gt=0)
    """Of MP4 and WebM, which pack a long one well."""
    video_frames: int = Field(64, ge=1)
    video_side: int = Field(768, ge=1)
    videos: int = Field(2, ge=1)
    speech_chars: int = Field(4096, ge=1)
    inputs: int = Field(2048, ge=1)
    """Texts of one request for embeddings."""
    generated_images: int = Field(4, ge=1)
    remote_urls: bool = False
