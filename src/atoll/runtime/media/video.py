"""Video from strangers: a few frames.

Moving GIF, WebP and PNG through Pillow, and AVI of JPEGs ("MJPEG"), whose frames are pictures, need no heavy
library. MP4 and WebM are read where the extra "media" is installed (`av_files`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from atoll.runtime.media.av_files import decode_av_video
from atoll.runtime.media.media_errors import MediaError, too_large, unsupported
from atoll.runtime.media.media_headers import gif_blocks, picture_size, png_chunks
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.pictures import (
    broken,
    check_bytes,
    check_pixels,
    decode_picture,
    open_picture,
    picture_library,
    to_array,
)
from atoll.runtime.media.sniff import sniff

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_FRAMES = 10_000
_MAX_PIXELS = 250_000_000
"""Of all frames that have to be decoded: some seconds of work. The frame wanted last may need all before."""
_MAX_CHUNKS = 100_000


def decode_video(data: bytes, limits: MediaLimits) -> list[NDArray[np.uint8]]:
    """Return up to `limits.video_frames` frames, evenly spaced, each [height, width, 3]; or MediaError.

    The first frame is always among them. Sides are at most `limits.video_side`.
    """
    check_bytes(data, limits.video_bytes, "video")
    kind = sniff(data)
    if kind == "avi":
        return _avi(data, limits)
    if kind in ("mp4", "webm"):
        return decode_av_video(data, kind, limits)
    if kind not in ("gif", "webp", "png"):
        named = kind or "this kind of file"
        raise unsupported(
            f"{named} is not read as video; send a moving gif, webp or png, or an avi of JPEGs"
        )
    return _moving_picture(data, kind, limits)


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` numbers of 0 to `count` - 1, evenly spaced from 0 on."""
    taken = min(count, most)
    return [position * count // taken for position in range(taken)]


def _moving_picture(data: bytes, kind: str, limits: MediaLimits) -> list[NDArray[np.uint8]]:
    size = picture_size(data, kind)
    check_pixels(size, limits, kind)
    frames = 0
    if kind == "png":
        data, frames = png_chunks(data, moving=True)
    elif kind == "gif":
        data, reach = gif_blocks(data)
        frames = len(reach)
        if not frames:
            raise MediaError("the gif has no frames")
    picture_library()
    try:
        with open_picture(data, kind, limits) as picture:
            # WebP's own count is of frames that were found; the other two only claim theirs.
            claimed: int = getattr(picture, "n_frames", 1) if kind == "webp" else frames
            _check_work(claimed, claimed * size[0] * size[1], kind)
            shown = []
            for number in evenly(claimed, limits.video_frames):
                try:
                    picture.seek(number)
                except EOFError:
                    break
                shown.append(to_array(picture.copy(), limits.video_side))
            return shown
    except MediaError:
        raise
    except Exception as error:  # at nonsense, a decoder may raise anything
        raise broken(kind, error) from error


def _check_work(frames: int, pixels: int, kind: str) -> None:
    if frames > _MAX_FRAMES:
        raise too_large(f"the {kind} has {frames} frames; at most {_MAX_FRAMES} are taken")
    if pixels > _MAX_PIXELS:
        raise too_large(
            f"the frames of the {kind} are {pixels} pixels; at most {_MAX_PIXELS} are taken in all"
        )


def _avi(data: bytes, limits: MediaLimits) -> list[NDArray[np.uint8]]:
    places = _avi_frames(data)
    if not places:
        raise MediaError("the avi has no frames")
    wanted = [places[number] for number in evenly(len(places), limits.video_frames)]
    frames = [data[start:end] for start, end in wanted]
    if any(sniff(frame) != "jpeg" for frame in frames):
        raise unsupported("the avi holds other than JPEGs; send it as MJPEG, or a moving gif")
    sizes = [picture_size(frame, "jpeg") for frame in frames]
    _check_work(len(places), sum(width * height for width, height in sizes), "avi")
    small = limits.model_copy(update={"image_side": limits.video_side})
    return [decode_picture(frame, small) for frame in frames]


def _avi_frames(data: bytes) -> list[tuple[int, int]]:
    """Return where the frames of an AVI's first stream begin and end, in bytes."""
    frames = []
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            break
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"LIST":
            # Into the list of frames, over the others.
            at += 12 if data[at + 8 : at + 12] in (b"movi", b"rec ") else 8 + size + size % 2
            continue
        if name in (b"00dc", b"00db") and size:
            frames.append((at + 8, min(at + 8 + size, len(data))))
        at += 8 + size + size % 2
    else:
        raise MediaError(f"the avi has more than {_MAX_CHUNKS} chunks")
    return frames
