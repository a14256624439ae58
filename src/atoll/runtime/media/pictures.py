"""Pictures from strangers, decoded within bounds; and pictures written."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.core.errors import MissingDependencyError
from atoll.runtime.media.media_errors import MediaError, too_large, unsupported
from atoll.runtime.media.media_headers import gif_blocks, picture_size, png_chunks
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.sniff import sniff

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image as Picture

PICTURE_KINDS = ("png", "jpeg", "webp", "gif", "bmp")
_ORIENTATION = 0x0112
_BAND_PIXELS = 2**20
"""Converted at a time: each step of it makes another picture of that size."""


def decode_picture(data: bytes, limits: MediaLimits) -> NDArray[np.uint8]:
    """Return a picture as [height, width, 3], RGB; MediaError for what is none or too large.

    The first frame of a moving one, upright as its camera says, on white where it is transparent, shrunk to
    `limits.image_side`.
    """
    kind = sniff(data)
    check_bytes(data, limits.image_bytes, "picture")
    if kind is None:
        raise MediaError("no picture begins like this; send png, jpeg, webp, gif or bmp")
    if kind not in PICTURE_KINDS:
        raise unsupported(f"{kind} is not read as a picture; send png, jpeg, webp, gif or bmp")
    # By the header, before anything is decoded: a small file can claim a huge picture.
    check_pixels(picture_size(data, kind), limits, kind)
    if kind == "png":
        data, _ = png_chunks(data)
    elif kind == "gif":
        data, _ = gif_blocks(data)
    picture_library()
    try:
        with open_picture(data, kind, limits) as picture:
            return to_array(picture, limits.image_side)
    except MediaError:
        raise
    except Exception as error:  # at nonsense, a decoder may raise anything
        raise broken(kind, error) from error


def encode_png(array: NDArray[np.uint8]) -> bytes:
    """Return a picture [height, width, 3] or [height, width] as a PNG file."""
    stream = io.BytesIO()
    picture_library().fromarray(np.ascontiguousarray(array)).save(stream, "png")
    return stream.getvalue()


def picture_library() -> Any:
    """Return Pillow's module Image."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("pillow", "components", needed_for="pictures") from error
    return Image


def check_bytes(data: bytes, most: int, what: str) -> None:
    """Refuse nothing at all, and more than `most` bytes."""
    if not data:
        raise MediaError(f"the {what} is empty")
    if len(data) > most:
        raise too_large(f"the {what} is {len(data)} bytes; at most {most} are taken")


def check_pixels(size: tuple[int, int], limits: MediaLimits, kind: str) -> None:
    """Refuse pictures of more pixels than the limits allow."""
    width, height = size
    if width * height > limits.image_pixels:
        raise too_large(
            f"the {kind} is {width} x {height} pixels; at most {limits.image_pixels} are taken"
        )


def open_picture(data: bytes, kind: str, limits: MediaLimits) -> Picture:
    """Open a file of a kind whose header was checked; what the decoder makes of it is checked again."""
    # Only the decoder of the kind that was checked: others might read the file differently.
    picture: Picture = picture_library().open(io.BytesIO(data), formats=[kind.upper()])
    check_pixels(picture.size, limits, kind)
    return picture


def to_array(picture: Picture, max_side: int) -> NDArray[np.uint8]:
    """Decode the frame a picture stands at: RGB, upright, no side longer than `max_side` pixels."""
    # Read before decoding: later steps make new pictures, without what the camera wrote.
    turned = _orientation(picture)
    # A JPEG is decoded at a half, a quarter or an eighth of its size where that is enough.
    picture.draft("RGB", (max_side, max_side))
    picture.load()
    picture = _in_bands(picture, max(1, max(picture.size) // max_side))
    if max(picture.size) > max_side:
        scale = max_side / max(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        picture = picture.resize((width, height), resample=picture_library().Resampling.BOX)
    pixels = np.asarray(picture, dtype=np.uint8)
    return np.ascontiguousarray(_upright(pixels, turned))


def broken(kind: str, error: Exception) -> MediaError:
    """Return the error for a file that its decoder could not make sense of."""
    if type(error).__name__.startswith("DecompressionBomb"):
        return too_large(f"the {kind} has more pixels than the decoder takes")
    if type(error).__name__ == "UnidentifiedImageError":  # its text names an address in memory
        return MediaError(f"the {kind} cannot be decoded: its header is damaged")
    said = " ".join(str(error).split())[:120]
    return MediaError(f"the {kind} cannot be decoded: {said or type(error).__name__}")


def _in_bands(picture: Picture, factor: int) -> Picture:
    """Return a picture in RGB, reduced by a whole factor; a few rows at a time, which bounds its memory."""
    width, height = picture.size
    # Sides that the factor does not divide end in smaller boxes, as `reduce` has it.
    whole: Picture = picture_library().new("RGB", (-(-width // factor), -(-height // factor)))
    rows = factor * max(1, _BAND_PIXELS // (width * factor))
    for top in range(0, height, rows):
        band = _flat(picture.crop((0, top, width, min(height, top + rows))))
        whole.paste(band if factor == 1 else band.reduce(factor), (0, top // factor))
    return whole


def _flat(picture: Picture) -> Picture:
    if picture.mode.startswith("I"):
        # Sixteen bits of grey; converted as it stands, all but the darkest would be white.
        grey = (np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        picture = picture_library().fromarray(grey)
    return _opaque(picture)


def _opaque(picture: Picture) -> Picture:
    """Return a picture in RGB, with white behind what is transparent."""
    if not (picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info):
        return picture.convert("RGB")
    seen = picture.convert("RGBA")
    paper: Picture = picture_library().new("RGBA", seen.size, "white")
    paper.alpha_composite(seen)
    return paper.convert("RGB")


def _orientation(picture: Picture) -> int:
    """Return how the camera was held, 1 to 8 as in EXIF; 1 where that cannot be read."""
    try:
        held = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - what a camera wrote beside the picture does not spoil the picture
        return 1
    return held if isinstance(held, int) and 1 <= held <= 8 else 1


def _upright(pixels: NDArray[np.uint8], turned: int) -> NDArray[np.uint8]:
    """Undo what EXIF says was done: 2 to 4 mirrored or upside down, 5 to 8 on the side."""
    if turned >= 5:
        pixels = pixels.transpose(1, 0, 2)
        turned = {5: 1, 6: 2, 7: 3, 8: 4}[turned]
    return {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
    }[turned]
