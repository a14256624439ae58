from __future__ import annotations

import fcntl
import os
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.runtime.executor import store as store_module
from atoll.runtime.executor.arrays import (
    INLINE_BYTES,
    ArrayParts,
    LostHandleError,
    identify_host,
    inline,
    list_handles,
    open_handle,
    replace_arrays,
    replace_handles,
)
from atoll.runtime.executor.outputs import OutputSaver
from atoll.runtime.executor.store import CACHE, ArrayStore, StoreFullError, default_store_root
from atoll.tasks.values import NOT_SUMMED, Handle

_BIG = INLINE_BYTES + 8


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _store(folder: Path, max_bytes: int = 2**20, clock: Any = None) -> ArrayStore:
    return ArrayStore(
        folder / "store", max_bytes, owner="me", address="h:1", clock=clock or Clock()
    )


@pytest.fixture(params=["written", "mapped"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written again as on a disk, or through their mapping as in shared memory."""
    monkeypatch.setattr(store_module, "_is_in_memory", lambda folder: request.param == "mapped")


def _files(store: ArrayStore) -> list[str]:
    """Arrays by the name of their file; those to be written again are left out."""
    return sorted(path.name for path in store.folder.iterdir() if path.suffix != ".part")


def _parts(store: ArrayStore) -> list[Path]:
    return [path for path in store.folder.iterdir() if path.suffix == ".part"]


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "float16", "int32", "float32", "int64", "float64"]
)
def test_arrays_come_back_as_they_were(tmp_path: Path, dtype: str) -> None:
    store = _store(tmp_path)
    array = (np.arange(6000).reshape(3, 20, 100) % 2).astype(dtype)
    for given_ in (array, array[:, ::2]):
        handle = store.put(given_, "you", 10.0)
        assert handle.is_inline == (given_.nbytes <= INLINE_BYTES)
        back = open_handle(handle, verify=True)
        assert back.dtype == given_.dtype
        assert np.array_equal(back, given_)
        assert not back.flags.writeable
    store.close()


def test_small_arrays_need_no_file_and_are_the_same_each_time(tmp_path: Path) -> None:
    store = _store(tmp_path)
    small = np.arange(INLINE_BYTES // 4, dtype=np.float32)
    handle = store.put(small, "you", 10.0)
    assert handle == store.put(small.copy(), "you", 10.0)
    assert handle.is_inline
    assert (_files(store), store.used_bytes, len(store)) == ([], 0, 0)
    assert np.array_equal(open_handle(handle), small)
    assert open_handle(inline(np.zeros((0, 4)))).shape == (0, 4)
    assert open_handle(inline(np.array(3.0, np.float32))) == np.float32(3.0)
    with pytest.raises(LostHandleError, match="damaged"):
        open_handle(replace(handle, data=b"\1" + handle.data[1:]))
    store.close()


def test_a_wrong_file_is_found(tmp_path: Path) -> None:
    store = _store(tmp_path)
    array = np.arange(_BIG, dtype=np.uint8)
    handle = store.put(array, "you", 10.0)
    path = Path(handle.path)
    assert path.read_bytes() == array.tobytes()
    assert handle.crc32 == NOT_SUMMED
    assert path.stat().st_mode & 0o777 == 0o600

    for wrong, words in (
        (replace(handle, host="elsewhere"), "another host"),
        (replace(handle, path=""), "another host"),
        (replace(handle, path="/etc/passwd"), "not that of an array"),
        (replace(handle, id="../x", path="/etc/../x.array"), "not that of an array"),
        (replace(handle, shape=(_BIG - 1,)), "bytes of"),
    ):
        with pytest.raises(LostHandleError, match=words):
            open_handle(wrong)

    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(LostHandleError, match=f"{_BIG - 1} bytes of {_BIG}"):
        open_handle(handle)
    path.write_bytes(b"\xff" + data[1:])
    summed = replace(handle, crc32=zlib.crc32(array.tobytes()))
    with pytest.raises(LostHandleError, match="damaged"):
        open_handle(summed, verify=True)
    target = tmp_path / "target"
    target.write_bytes(data)
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(LostHandleError):
        open_handle(handle)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LostHandleError, match="not one of ours"):
        open_handle(handle)
    path.unlink()
    with pytest.raises(LostHandleError, match="No such file"):
        open_handle(handle)
    store.close()


def test_number_formats_nobody_else_reads_are_refused(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for array in (np.zeros(_BIG, np.complex64), np.zeros(_BIG, ">f4"), np.zeros(_BIG, object)):
        with pytest.raises(InputError, match="cannot be handed over"):
            store.put(array, "you", 10.0)
    assert store.used_bytes == 0
    store.close()


def test_bfloat16_is_opened_as_the_upper_halves_of_floats() -> None:
    numbers = np.array([1.0, -2.5, 3e38, 0.0], np.float32)
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    handle = Handle("0" * 32, "", "", "", "", "bfloat16", (2, 2), NOT_SUMMED, halves.tobytes())
    opened = open_handle(handle)
    assert (opened.dtype.name, opened.shape) == ("uint16", (2, 2))
    back = (opened.astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(back.reshape(-1), numbers, rtol=2**-8)


def test_leases_run_out_unless_they_are_renewed(tmp_path: Path) -> None:
    clock = Clock()
    store = _store(tmp_path, clock=clock)
    array = np.zeros(_BIG, np.uint8)
    kept, gone = store.put(array, "you", 10.0), store.put(array, "you", 10.0)
    mapped = open_handle(gone)
    clock.now_s += 5.0
    assert store.renew([kept.id, "f" * 32], "you", 10.0) == 1
    clock.now_s += 5.0
    store.expire()
    assert _files(store) == [f"{kept.id}.array"]
    assert (store.used_bytes, len(store)) == (_BIG, 1)
    assert not mapped.any(), "who has it mapped keeps it"
    with pytest.raises(LostHandleError):
        store.open(gone.id)
    # Another holder keeps it beside the first.
    assert store.renew([kept.id], "other", 100.0) == 1
    store.release([kept.id], "you")
    assert store.open(kept.id).nbytes == _BIG
    store.release([kept.id], "stranger")
    assert len(store) == 1
    store.release([kept.id, kept.id], "other")
    assert (_files(store), store.used_bytes) == ([], 0)
    store.close()


def test_there_is_room_for_so_many_bytes_and_no_more(tmp_path: Path) -> None:
    store = _store(tmp_path, max_bytes=3 * _BIG)
    array = np.zeros(_BIG, np.uint8)
    held = [store.put(array, "you", 10.0) for _ in range(3)]
    with pytest.raises(StoreFullError, match="do not fit"):
        store.put(array, "you", 10.0)
    assert (store.used_bytes, len(_files(store))) == (3 * _BIG, 3)
    store.release([held[0].id], "you")
    store.put(array, "you", 10.0)
    store.close()


def test_copies_of_others_make_room(tmp_path: Path) -> None:
    store = _store(tmp_path, max_bytes=2 * _BIG)
    array = np.arange(_BIG, dtype=np.uint8)
    theirs = Handle(
        "a" * 32, "them", "h:2", "far", "/x", "uint8", (_BIG,), zlib.crc32(array.tobytes())
    )
    store.adopt(theirs, array.tobytes(), 60.0)
    store.adopt(theirs, array.tobytes(), 60.0)
    assert np.array_equal(store.open(theirs.id), array)
    assert store.used_bytes == _BIG
    for _ in range(2):
        store.put(array, "you", 10.0)
    assert store.get(theirs.id) is None
    assert store.used_bytes == 2 * _BIG
    for name in ("../../evil", "A" * 32, ""):
        with pytest.raises(LostHandleError, match="called so"):
            store.adopt(replace(theirs, id=name), array.tobytes(), 60.0)
    store.release([theirs.id], CACHE)
    store.close()


@pytest.mark.usefixtures("_both_ways")
def test_files_are_written_again_only_if_nobody_has_them_mapped(tmp_path: Path) -> None:
    clock = Clock()
    store = _store(tmp_path, clock=clock)
    free, mapped = (store.put(np.full(_BIG, n, np.uint8), "you", 10.0) for n in (1, 2))
    inode = Path(free.path).stat().st_ino
    array = open_handle(mapped)
    late = os.open(free.path, os.O_RDONLY)
    store.release([free.id, mapped.id], "you")
    assert [path.stat().st_ino for path in _parts(store)] == [inode]
    # The next one is shorter, and gets the file that nobody reads.
    again = store.put(np.full(_BIG - 4, 3, np.uint8), "you", 1000.0)
    assert Path(again.path).stat().st_ino == inode
    assert np.array_equal(open_handle(again, verify=True), np.full(_BIG - 4, 3, np.uint8))
    assert np.array_equal(array, np.full(_BIG, 2, np.uint8)), "who has it mapped keeps it"
    with pytest.raises(LostHandleError):
        open_handle(free)
    os.close(late)
    # One that is much too long is left alone, and none is kept for long.
    store.put(np.zeros(5 * _BIG, np.uint8), "them", 1.0)
    clock.now_s += 1.0
    store.expire()
    assert Path(store.put(np.zeros(_BIG, np.uint8), "you", 60.0).path).stat().st_size == _BIG
    assert len(_parts(store)) == 1
    clock.now_s += 11.0
    store.expire()
    assert _parts(store) == []
    store.close()


def test_a_file_that_gets_another_name_is_lost_to_who_comes_late(tmp_path: Path) -> None:
    store = _store(tmp_path)
    handle = store.put(np.ones(_BIG, np.uint8), "you", 10.0)
    Path(handle.path).rename(tmp_path / "other")
    (tmp_path / "store" / f"{handle.id}.array").write_bytes(bytes(_BIG))
    # Whoever opened the file before sees that the name means another one now.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "atoll.runtime.executor.arrays.os.open",
            lambda path, flags, real=os.open: real(tmp_path / "other", flags),
        )
        with pytest.raises(LostHandleError, match="gone"):
            open_handle(handle)
    # And a file that is being written is locked.
    with Path(handle.path).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LostHandleError, match="unavailable"):
            open_handle(handle)
    store.close()


@pytest.mark.usefixtures("_both_ways")
def test_spare_files_do_not_count_but_make_room(tmp_path: Path) -> None:
    store = _store(tmp_path, max_bytes=4 * _BIG)
    held = [store.put(np.zeros(_BIG, np.uint8), "you", 10.0) for _ in range(4)]
    store.release([handle.id for handle in held], "you")
    assert (store.used_bytes, len(_parts(store))) == (0, 4)
    store.put(np.zeros(3 * _BIG, np.uint8), "you", 10.0)
    assert sum(path.stat().st_size for path in store.folder.iterdir()) <= 4 * _BIG
    store.close()


@pytest.mark.usefixtures("_both_ways")
def test_a_full_disk_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)

    def write(file: int, data: memoryview, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("atoll.runtime.executor.spares.os.pwrite", write)
    with pytest.raises(StoreFullError, match="No space left"):
        store.put(np.zeros(_BIG, np.uint8), "you", 10.0)
    assert (store.used_bytes, _files(store)) == (0, [])
    store.close()


def test_a_store_is_emptied_of_arrays_and_is_one_process_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / ("0" * 32 + ".array")).write_bytes(b"old")
    (folder / ("1" * 32 + ".part")).write_bytes(b"old")
    (folder / "notes.txt").write_text("mine")
    store = _store(tmp_path)
    assert _files(store) == ["notes.txt"]
    with pytest.raises(InputError, match="another executor's"):
        _store(tmp_path)
    store.put(np.zeros(_BIG, np.uint8), "you", 10.0)
    store.close()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    again = _store(tmp_path)
    again.close()
    assert not folder.exists()
    with pytest.raises(StoreFullError, match="closed"):
        again.put(np.zeros(_BIG, np.uint8), "you", 10.0)


def test_where_stores_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARED_MEMORY", tmp_path)
    assert default_store_root(Path("/elsewhere"), 4096) == tmp_path
    assert default_store_root(Path("/elsewhere"), 2**62) == Path("/elsewhere")
    monkeypatch.setattr(store_module, "SHARED_MEMORY", tmp_path / "none")
    assert default_store_root(Path("/elsewhere"), 0) == Path("/elsewhere")
    assert identify_host() == identify_host() != ""


def test_values_with_arrays_and_back(tmp_path: Path) -> None:
    store = _store(tmp_path)
    big = np.arange(_BIG, dtype=np.uint8)
    output = {"a": [big, (np.float32(1.5), np.int64(2), np.bool_(True))], "b": big[:3], "c": None}
    value = replace_arrays(output, lambda array: store.put(array, "you", 10.0))
    assert value["a"][1] == [1.5, 2, True]
    assert [type(item) for item in value["a"][1]] == [float, int, bool]
    assert {handle.is_inline for handle in list_handles(value)} == {True, False}
    back = replace_handles(value, open_handle)
    assert np.array_equal(back["a"][0], big)
    assert np.array_equal(back["b"], big[:3])
    store.close()


def test_what_is_not_delivered_is_freed(tmp_path: Path) -> None:
    store = _store(tmp_path)
    saver = OutputSaver(store, "you", 10.0)
    big = np.zeros(_BIG, np.uint8)
    saver.save({"first": big})
    saver.delivered()
    saver.save({"second": big})
    assert len(store) == 2
    saver.abandon()
    assert len(store) == 1
    # The batch ends after nobody wants it any more.
    saver.save({"third": big})
    assert len(store) == 1
    store.close()


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "release", "renew", "tick"]), st.integers(0, 5)),
        max_size=25,
    ),
    st.booleans(),
)
def test_files_bytes_and_leases_agree(steps: list[tuple[str, int]], mapped: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "_is_in_memory", lambda folder: mapped)
        _follow(Path(folder), steps)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "turned", "release", "open", "let go"]), st.integers(0, 5)
        ),
        max_size=30,
    ),
    st.booleans(),
)
def test_what_is_read_is_what_was_put_however_files_are_used(
    steps: list[tuple[str, int]], mapped: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "_is_in_memory", lambda folder: mapped)
        store = _store(Path(folder))
        held: list[tuple[Handle, Any]] = []
        opened: list[tuple[Any, Any]] = []
        for turn, (step, number) in enumerate(steps):
            if step in {"put", "turned"}:
                array = np.full((70 - 5 * number, 40), turn, np.int16) + np.arange(
                    40, dtype=np.int16
                )
                array = array.T if step == "turned" else array
                held.append((store.put(array, "you", 10.0), array))
            elif step == "open" and held:
                handle, array = held[number % len(held)]
                opened.append((open_handle(handle), array))
            elif step == "release" and held:
                handle, _ = held.pop(number % len(held))
                store.release([handle.id], "you")
            elif step == "let go" and opened:
                opened.pop(number % len(opened))
            # Who has an array open keeps it, whatever is written meanwhile.
            for found, array in opened:
                assert np.array_equal(found, array)
        for handle, array in held:
            assert np.array_equal(open_handle(handle), array)
        store.close()


@pytest.mark.usefixtures("_both_ways")
def test_many_arrays_keep_few_files_open(tmp_path: Path) -> None:
    store = _store(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        handles = [store.put(np.full(_BIG, n, np.uint8), "you", 10.0) for n in range(100)]
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * 64
        assert [open_handle(handle)[-1] for handle in handles] == list(range(100))
        store.release([handle.id for handle in handles], "you")
        assert (store.used_bytes, _files(store)) == (0, [])
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_parts_of_an_array_that_are_missing_or_out_of_place_are_found() -> None:
    array = np.arange(300, dtype=np.uint8)
    data = array.tobytes()
    handle = Handle("0" * 32, "me", "h:1", "far", "", "uint8", (300,), NOT_SUMMED)
    good = [(0, data[:100]), (100, data[100:200]), (200, data[200:])]

    def take(parts: list[tuple[int, bytes]]) -> Any:
        taking = ArrayParts(handle)
        for at, part in parts:
            taking.add(at, part)
        return taking.finish()

    assert np.array_equal(take(good), array)
    for wrong in (
        good[:2],
        good[1:],
        [good[0], good[2]],
        [good[1], good[0], good[2]],
        [good[0], good[2], good[1]],
        [good[0], *good],
        [*good, (300, b"x")],
        [good[0], (100, data[100:199]), good[2]],
    ):
        with pytest.raises(LostHandleError):
            take(wrong)


def _follow(folder: Path, steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    store = _store(folder, max_bytes=5 * _BIG, clock=clock)
    handles: list[Handle] = []
    until_s: dict[str, float] = {}
    for step, number in steps:
        if step == "put" and len(until_s) < 5:
            handles.append(store.put(np.zeros(_BIG, np.uint8), "you", float(number + 1)))
            until_s[handles[-1].id] = clock.now_s + number + 1
        elif step == "put":
            with pytest.raises(StoreFullError):
                store.put(np.zeros(_BIG, np.uint8), "you", 1.0)
        elif step == "tick":
            clock.now_s += number / 2
            store.expire()
            until_s = {key: end_s for key, end_s in until_s.items() if end_s > clock.now_s}
        elif handles:
            chosen = handles[number % len(handles)].id
            if step == "release":
                store.release([chosen], "you")
                until_s.pop(chosen, None)
            elif store.renew([chosen], "you", float(number)):
                until_s[chosen] = max(until_s[chosen], clock.now_s + number)
        assert _files(store) == sorted(f"{key}.array" for key in until_s)
        assert store.used_bytes == _BIG * len(until_s)
    store.close()
