"""A disk that is full refuses requests; it ends no process and loses nothing that was let in."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.runtime.accounts import journal as journal_module
from atoll.runtime.accounts import slots as module
from atoll.runtime.accounts.journal import JournalFullError, UsageJournal, read_segment, recover
from atoll.runtime.accounts.slots import (
    NO_MEDIA,
    MappedSlots,
    MediaCounts,
    WrittenSlots,
    read_slots,
)
from tests.runtime.accounts.full_disk import NO_TMPFS
from tests.runtime.accounts.helpers import record


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mapped", "written", "database", "serve"])
def test_a_disk_that_really_is_full_does_not_end_the_process(tmp_path: Path, kind: str) -> None:
    tmp_path = tmp_path / "disk"
    tmp_path.mkdir()
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may mount a tmpfs of its own (unshare --mount)")
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("unshare --mount is not allowed here")
    command = [sys.executable, "-m", "tests.runtime.accounts.full_disk", str(tmp_path), kind]
    done = subprocess.run(
        ["unshare", "--mount", *command], check=False, capture_output=True, text=True, timeout=120
    )
    if done.returncode == NO_TMPFS:
        pytest.skip("a tmpfs cannot be mounted here")
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_start_without_room_for_the_slots_is_an_error_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(InputError, match="no space left on device") as raised:
            UsageJournal.claim(tmp_path, slots=4)
    assert "free some space" in str(raised.value)
    UsageJournal.claim(tmp_path, slots=4).release()


def test_a_start_that_failed_leaves_what_it_found_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = UsageJournal.claim(tmp_path, slots=4)
    died.delivered(died.open("k", "ran", "m", "e", 0.0), 3)
    died._folder.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_space)
        with pytest.raises(InputError, match="no space left on device"):
            UsageJournal.claim(tmp_path, slots=4)
    journal = UsageJournal.claim(tmp_path, slots=4)
    assert journal.recovered.crashed == 1
    assert [p.name for p in tmp_path.iterdir()] == ["0"]
    journal.release()


def test_all_blocks_of_a_map_are_taken_before_it_is_used(tmp_path: Path) -> None:
    journal = UsageJournal.claim(tmp_path)
    file = tmp_path / "0" / "slots"
    if isinstance(journal._slots, WrittenSlots):
        pytest.skip("this file system cannot take blocks beforehand")
    assert file.stat().st_blocks * 512 >= file.stat().st_size > 8192 * 512
    journal.release()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_blocks_beforehand_stores_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    slots = module.make_slots(tmp_path / "slots", 4)
    assert type(slots) is WrittenSlots
    slots.put(2, b"request")
    slots.deliver(2, 7)
    assert list(read_slots(tmp_path / "slots")) == [(b"request", 7, NO_MEDIA)]
    slots.use_media(2, MediaCounts(1, 2, 2**40))
    assert list(read_slots(tmp_path / "slots")) == [(b"request", 7, MediaCounts(1, 2, 2**40))]
    slots.clear(2)
    assert not list(read_slots(tmp_path / "slots"))
    slots.close()


def test_a_file_system_that_copies_on_write_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    at = str(tmp_path).replace(" ", "\\040")
    monkeypatch.setattr(module, "_MOUNTS", mounts)
    for kind, expected in (("ext4", MappedSlots), ("btrfs", WrittenSlots), ("zfs", WrittenSlots)):
        mounts.write_text(f"a / ext4 rw 0 0\nb {at} {kind} rw 0 0\nc {at}x xfs rw 0 0\n")
        slots = module.make_slots(tmp_path / "slots", 4)
        assert type(slots) is expected
        slots.close()
    mounts.unlink()
    slots = module.make_slots(tmp_path / "slots", 4)
    assert type(slots) is WrittenSlots
    slots.close()


def test_what_the_disk_did_not_take_of_a_slot_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITES_IN_PLACE", frozenset())
    journal = UsageJournal.claim(tmp_path, slots=3)
    ends, runs = (journal.open("k", name, "m", "e", 0.0) for name in ("ends", "runs"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_space)
        with pytest.raises(JournalFullError, match="cannot be written down"):
            journal.open("k", "refused", "m", "e", 0.0)
        journal.delivered(runs, 5)
        assert journal.tokens(runs) == 5
        # The segment takes the frame, but its slot still looks as if it ran.
        journal.close(ends, "k", 4, 1.0, record("ends"))
        assert journal.unwritten == 3
        journal.rotate()
        # So the segment stays: by it a start after a crash would know that the request has ended.
        assert journal.segments() == []
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "0", copy)
        recovered = recover(copy)
        assert (recovered.finished, recovered.crashed) == (1, 1)
        with pytest.raises(JournalFullError, match="at once"):
            journal.open("k", "no slot", "m", "e", 0.0)
    journal.retry()
    assert journal.unwritten == 0
    assert [(s.tokens, b"runs" in s.request) for s in read_slots(tmp_path / "0" / "slots")] == [
        (5, True)
    ]
    assert {journal.open("k", "new", "m", "e", 0.0) for _ in range(2)} == {0, 1, 2} - {runs}
    journal.rotate()
    (segment,) = journal.segments()
    assert [done.tokens for done in read_segment(segment)] == [4]
    journal.release()


def test_a_file_system_that_may_only_be_read_is_a_plain_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        with pytest.raises(InputError, match="read-only file system") as raised:
            UsageJournal.claim(tmp_path, slots=4)
    assert "name a folder you may write to" in str(raised.value)


def test_spare_slots_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SPARE_BYTES", 400)
    journal = UsageJournal.claim(tmp_path, slots=1)
    taken = journal.open("k", "taken", "m", "e", 0.0)
    spare = [journal.open_spare() for _ in range(4)]
    assert len({taken, *spare}) == 5
    for number, slot in enumerate(spare):
        journal.delivered(slot, 7 + number)
        journal.use_media(slot, MediaCounts(pixels=number))
    assert [(journal.tokens(s), journal.media(s).pixels) for s in spare] == [
        (7, 0),
        (8, 1),
        (9, 2),
        (10, 3),
    ]
    assert journal.tokens(taken) == 0
    assert journal.running == 5
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        # Two frames fit into the memory for them; what comes then is forgotten, and said so.
        kept = [journal.close(s, "k", 8, 1.0, record(f"s{s}")) for s in spare]
        assert kept == [True, True, False, False]
        assert journal.close(taken, "k", 4, 1.0, record("taken"))
        assert journal.unwritten == 3
    journal.retry()
    assert journal.unwritten == journal.running == 0
    journal.rotate()
    (segment,) = journal.segments()
    named = [done.record.request_id for done in read_segment(segment) if done.record]
    assert named == [f"s{spare[0]}", f"s{spare[1]}", "taken"]
    assert journal.open("k", "again", "m", "e", 0.0) == taken
    journal.release()
