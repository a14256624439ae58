"""Media that clients send: decoded in a few threads, within bounds, and stored as handles.

Bytes that wait to be decoded are counted over all requests, and a request that would bring too many is told
to come back. Everything that a request brought is released when it ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from atoll.runtime.executor.store import StoreFullError
from atoll.runtime.media.media_errors import MediaError
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.openai import ApiError
from atoll.tasks.values import Handle

if TYPE_CHECKING:
    from numpy.typing import NDArray

_THREADS = 2
_MAX_BYTES = 256 * 2**20
_SMALL_BYTES = 2**18
"""Size that takes about a millisecond to decode: less than a thread would cost."""
_STATUS = {"invalid_media": 400, "media_too_large": 413, "unsupported_media": 400}
MediaKind = Literal["image", "audio", "video"]
_Made = TypeVar("_Made")


class ArrayKeeper(Protocol):
    """Where arrays are kept (`atoll.runtime.executor.store.ArrayStore`)."""

    def put(self, array: NDArray[Any], holder: str, lease_s: float) -> Handle:
        """Keep an array for a holder."""
        ...

    def release(self, numbers: list[str], holder: str) -> None:
        """Give arrays up for a holder."""
        ...


class MediaIntake:
    """Decodes and stores for all requests of a graph server."""

    def __init__(
        self,
        limits: MediaLimits,
        store: ArrayKeeper,
        lease_s: float,
        *,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self.limits = limits
        self.store = store
        self.lease_s = lease_s
        self.max_bytes = max_bytes
        self.busy_bytes = 0
        """Bytes as they were sent that are being decoded or wait for it."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="intake")
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")

    async def work(self, size: int, param: str | None, make: Callable[[], _Made]) -> _Made:
        """Run something over `size` bytes in a thread; ApiError for what is wrong with them."""
        if self.busy_bytes + size > self.max_bytes:
            raise ApiError(
                503,
                f"{self.busy_bytes} bytes are being decoded; no more are taken now",
                kind="server_error",
                code="overloaded",
                retry_after_s=1,
            )
        self.busy_bytes += size
        running = asyncio.get_running_loop().run_in_executor(self._threads, make)
        # A thread cannot be stopped: its bytes count until it is done, whoever has gone meanwhile.
        running.add_done_callback(lambda done: self._done(done, size))
        try:
            return await asyncio.shield(running)
        except MediaError as error:
            raise _refuse(error, param) from error
        except StoreFullError as error:
            raise ApiError(
                503, error.message, kind="server_error", code="overloaded", retry_after_s=1
            ) from error

    async def encode(self, size: int, make: Callable[[], _Made]) -> _Made:
        """Make a part of an answer of `size` bytes, in a thread where that takes long.

        What is answered already is never refused for want of room.
        """
        if size <= _SMALL_BYTES:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._encoder, make)

    def close(self) -> None:
        """Take nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def _done(self, running: asyncio.Future[Any], size: int) -> None:
        self.busy_bytes -= size
        if not running.cancelled():
            # Where nobody waits any more, nobody else would look at it.
            running.exception()


@dataclass(frozen=True, slots=True)
class SoundBrought:
    """A sound as tasks take it, whole and in the pieces that ears hear at once."""

    audio: dict[str, Any]
    pieces: list[dict[str, Any]]


class RequestMedia:
    """Media of one request: how much of it there is, and where it is kept."""

    def __init__(self, intake: MediaIntake, holder: str) -> None:
        self.audio_s = 0.0
        self.image_pixels = 0
        self._counts: dict[MediaKind, int] = {}
        self._intake = intake
        self._holder = holder
        self._handles: list[str] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def kinds(self) -> set[MediaKind]:
        """The kinds of media that it brings."""
        return set(self._counts)

    async def picture(self, url: str, param: str) -> Handle:
        """Take a picture from a data: URL."""
        from atoll.runtime.media.data_urls import read_data_url
        from atoll.runtime.media.pictures import decode_picture

        limits = self._intake.limits
        self._count("image", limits.images, param)

        def make() -> tuple[Handle, int]:
            data = read_data_url(url, limits.image_bytes, remote_urls=limits.remote_urls)
            pixels = decode_picture(data, limits)
            return self._put(pixels), pixels.shape[0] * pixels.shape[1]

        handle, pixels = await self._intake.work(len(url), param, make)
        self.image_pixels += pixels
        return handle

    async def sound(self, data: str | bytes, param: str) -> SoundBrought:
        """Take a sound, as it was sent or in base64."""
        from atoll.components.sound import cut_at_quiet
        from atoll.runtime.media.data_urls import read_base64
        from atoll.runtime.media.sounds import decode_sound

        limits = self._intake.limits
        self._count("audio", limits.audios, param)

        def make() -> tuple[SoundBrought, float]:
            raw = read_base64(data, limits.audio_bytes) if isinstance(data, str) else data
            samples, rate_hz = decode_sound(raw, limits)
            audio = {"samples": self._put(samples), "rate_hz": rate_hz}
            parts = cut_at_quiet(samples, rate_hz, limits.audio_piece_s)
            pieces = [audio]
            if len(parts) > 1:
                pieces = [{"samples": self._put(part), "rate_hz": rate_hz} for part in parts]
            return SoundBrought(audio, pieces), len(samples) / rate_hz

        sound, seconds = await self._intake.work(len(data), param, make)
        self.audio_s += seconds
        return sound

    async def video(self, url: str, param: str) -> list[Handle]:
        """Take the frames of a video from a data: URL."""
        from atoll.runtime.media.data_urls import read_data_url
        from atoll.runtime.media.video import decode_video

        limits = self._intake.limits
        self._count("video", limits.videos, param)

        def make() -> tuple[list[Handle], int]:
            data = read_data_url(url, limits.video_bytes, remote_urls=limits.remote_urls)
            frames = decode_video(data, limits)
            pixels = sum(frame.shape[0] * frame.shape[1] for frame in frames)
            return [self._put(frame) for frame in frames], pixels

        handles, pixels = await self._intake.work(len(url), param, make)
        self.image_pixels += pixels
        return handles

    def close(self) -> None:
        """Release everything; what a thread still stores is released when it has."""
        with self._lock:
            self._closed = True
            handles, self._handles = self._handles, []
        if handles:
            self._intake.store.release(handles, self._holder)

    def _count(self, kind: MediaKind, most: int, param: str) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] > most:
            raise ApiError(400, f"{param}: at most {most} of type {kind} are taken", param=param)

    def _put(self, array: NDArray[Any]) -> Handle:
        """Store an array, in a thread."""
        handle = self._intake.store.put(array, self._holder, self._intake.lease_s)
        if not handle.is_inline:
            with self._lock:
                self._handles.append(handle.id)
                late = self._closed
            if late:
                self.close()
        return handle


def _refuse(error: MediaError, param: str | None) -> ApiError:
    where = error.param or param
    message = f"{where}: {error.message}" if where else error.message
    return ApiError(_STATUS[error.code], message, param=where, code=error.code)
