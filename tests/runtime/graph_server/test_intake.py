"""What clients bring: bounded while it is decoded, and released whatever happens."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import Any

import numpy as np
import pytest

from atoll.runtime.executor.store import StoreFullError
from atoll.runtime.graph_server.intake import MediaIntake, RequestMedia
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.media.sounds import encode_wav
from atoll.runtime.openai import ApiError
from atoll.tasks.values import Handle

SOUND = base64.b64encode(encode_wav(np.zeros(16_000, np.float32), 16_000)).decode()


class FakeStore:
    """Keeps handles by holder; may be told to be full, or to wait before it keeps anything."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.released: list[str] = []
        self.is_full = False
        self.gate = threading.Event()
        self.gate.set()

    def put(self, array: Any, holder: str, lease_s: float) -> Handle:
        del lease_s
        self.gate.wait()
        if self.is_full:
            raise StoreFullError("no room")
        name = f"{len(self.kept):032x}"
        self.kept[name] = holder
        return Handle(name, "graph-server", "", "", "/x", array.dtype.name, array.shape, 0)

    def release(self, numbers: list[str], holder: str) -> None:
        for number in numbers:
            assert self.kept[number] == holder
            self.released.append(number)


async def test_media_are_counted_and_released_once() -> None:
    store = FakeStore()
    intake = MediaIntake(MediaLimits(), store, 60.0)
    media = RequestMedia(intake, "r-1")
    sound = await media.sound(SOUND, "audio")
    assert sound.audio["rate_hz"] == 16_000
    assert sound.pieces == [sound.audio]
    assert (media.audio_s, media.kinds) == (1.0, {"audio"})
    media.close()
    media.close()
    assert store.released == list(store.kept)
    assert intake.busy_bytes == 0
    intake.close()


async def test_a_long_sound_is_there_whole_and_in_pieces() -> None:
    store = FakeStore()
    intake = MediaIntake(MediaLimits(audio_piece_s=2.0), store, 60.0)
    media = RequestMedia(intake, "r-1")
    samples = np.full(5 * 8_000, 0.5, np.float32)
    samples[11_000:13_000] = 0.0
    sound = await media.sound(encode_wav(samples, 8_000), "file")
    assert media.audio_s == 5.0
    assert sound.audio["samples"].shape == (40_000,)
    lengths = [piece["samples"].shape[0] for piece in sound.pieces]
    assert sum(lengths) == 40_000
    assert len(lengths) >= 3
    assert max(lengths) <= 16_000
    assert 11_000 < lengths[0] < 13_000, "cut where it is quiet"
    assert {piece["rate_hz"] for piece in sound.pieces} == {8_000}
    media.close()
    assert sorted(store.released) == sorted(store.kept)
    intake.close()


async def test_what_is_stored_after_its_request_has_gone_is_released_too() -> None:
    store = FakeStore()
    store.gate.clear()
    intake = MediaIntake(MediaLimits(), store, 60.0)
    media = RequestMedia(intake, "r-1")
    taking = asyncio.create_task(media.sound(SOUND, "audio"))
    while intake.busy_bytes == 0:
        await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    media.close()
    # The thread still holds its bytes, and is not forgotten.
    assert intake.busy_bytes == len(SOUND)
    store.gate.set()
    while intake.busy_bytes:
        await asyncio.sleep(0)
    assert store.released == list(store.kept) != []
    intake.close()


async def test_more_bytes_than_may_be_decoded_at_once_are_told_to_come_back() -> None:
    store = FakeStore()
    store.gate.clear()
    intake = MediaIntake(MediaLimits(), store, 60.0, max_bytes=len(SOUND) + 10)
    first, second = RequestMedia(intake, "r-1"), RequestMedia(intake, "r-2")
    taking = asyncio.create_task(first.sound(SOUND, "audio"))
    while intake.busy_bytes == 0:
        await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await second.sound(SOUND, "audio")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    # Answers are not held up by it.
    assert await intake.encode(10, lambda: b"x") == b"x"
    assert await intake.encode(2**20, lambda: b"x") == b"x"
    store.gate.set()
    await taking
    brought = await second.sound(SOUND, "audio")
    assert brought.audio["rate_hz"] > 0
    intake.close()


async def test_a_full_store_and_bad_media_are_told_apart() -> None:
    store = FakeStore()
    intake = MediaIntake(MediaLimits(audio_s=0.5), store, 60.0)
    media = RequestMedia(intake, "r-1")
    with pytest.raises(ApiError) as caught:
        await media.sound(SOUND, "messages[0]")
    assert (caught.value.status, caught.value.param) == (413, "messages[0]")
    intake.limits = MediaLimits()
    store.is_full = True
    with pytest.raises(ApiError) as caught:
        await media.sound(SOUND, "messages[0]")
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    intake.close()
