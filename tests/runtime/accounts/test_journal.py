"""Whatever the moment of death, every request is found exactly once."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.runtime.accounts import journal as module
from atoll.runtime.accounts import slots as slots_module
from atoll.runtime.accounts.journal import (
    FinishedRequest,
    JournalFolder,
    JournalFullError,
    UsageJournal,
    read_segment,
    recover,
)
from atoll.runtime.accounts.slots import WrittenSlots
from tests.runtime.accounts.helpers import record
from tests.seeds import slow_except

SLOTS = 8
FILES = (module.__file__, slots_module.__file__)


class Killed(BaseException):
    pass


@pytest.fixture(params=["mapped", "written"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """How slots reach the disk: by a map, or by `pwrite` where blocks cannot be taken beforehand."""
    kinds = {"mapped": frozenset({slots_module._file_system(tmp_path)}), "written": frozenset()}
    monkeypatch.setattr(slots_module, "_WRITES_IN_PLACE", kinds[request.param])
    return str(request.param)


def killed_at(line: int, run: Callable[[], object]) -> bool:
    """Run until so many lines of the journal were executed, then die; return whether it did."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


def found_by_next(base: Path) -> list[FinishedRequest]:
    """Start anew; return all finished requests that the start finds."""
    journal = UsageJournal.claim(base, slots=SLOTS)
    found = [done for path in journal.segments() for done in read_segment(path)]
    journal.release()
    return found


class Story:
    """A few requests, and what is certain about each of them."""

    def __init__(self, base: Path) -> None:
        self.journal = UsageJournal.claim(base, slots=SLOTS)
        self.possible: dict[str, set[tuple[str, int]]] = {}
        """By request: the outcomes and tokens that may be found; `none` if it may be missing."""
        self.slots: dict[str, int] = {}

    def run(self) -> None:
        self.open("a")
        self.deliver("a", 3)
        self.open("b")
        self.deliver("b", 1)
        self.close("a", 4)
        self.deliver("b", 7)
        self.open("c")
        self.journal.rotate()
        self.close("b", 9)
        self.deliver("c", 2)
        self.open("d")
        self.deliver("d", 6)

    def open(self, name: str) -> None:
        self.possible[name] = {("none", 0), ("crashed", 0)}
        self.slots[name] = self.journal.open("key", name, "m", "/v1/x", 5.0)
        self.possible[name] = {("crashed", 0)}

    def deliver(self, name: str, tokens: int) -> None:
        self.possible[name].add(("crashed", tokens))
        self.journal.delivered(self.slots[name], tokens)
        self.possible[name] = {("crashed", tokens)}

    def close(self, name: str, tokens: int) -> None:
        self.possible[name].add(("ok", tokens))
        done = record(name, prompt=0, completion=tokens)
        self.journal.close(self.slots[name], "key", tokens, 6.0, done)
        self.possible[name] = {("ok", tokens)}

    def die(self) -> None:
        # What the system does with the locks of a dead process.
        self.journal._folder.close()


def check(story: Story, found: list[FinishedRequest]) -> None:
    counts = Counter(done.op for done in found)
    assert set(counts.values()) <= {1}
    by_name = {d.record.request_id: (d.record.outcome, d.tokens) for d in found if d.record}
    assert len(by_name) == len(found)
    assert set(by_name) <= set(story.possible)
    for name, possible in story.possible.items():
        assert by_name.get(name, ("none", 0)) in possible, (name, by_name)


@pytest.mark.parametrize("every", slow_except([4], [4, 1]))
def test_a_death_at_any_line_loses_and_doubles_nothing(
    tmp_path: Path, kind: str, every: int
) -> None:
    line, alive = 0, False
    while not alive:
        base = tmp_path / str(line)
        story = Story(base)
        assert isinstance(story.journal._slots, WrittenSlots) == (kind == "written")
        alive = not killed_at(line, story.run)
        story.die()
        check(story, found_by_next(base))
        line += every
    assert line > 90


@pytest.mark.parametrize("every", slow_except([4], [4, 1]))
def test_a_death_at_any_line_of_the_recovery_changes_nothing(tmp_path: Path, every: int) -> None:
    line, alive = 0, False
    while not alive:
        base = tmp_path / str(line)
        story = Story(base)
        story.run()
        story.die()
        alive = not killed_at(line, partial(recover, base / "0"))
        check(story, found_by_next(base))
        line += every
    assert line > 20


def test_a_segment_cut_off_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    journal = UsageJournal.claim(tmp_path / "j", slots=SLOTS)
    for number in range(4):
        slot = journal.open("key", f"r{number}", "m", "/v1/x", 5.0)
        journal.close(slot, "key", number, 6.0, record(f"r{number}", completion=number))
    journal.rotate()
    (segment,) = journal.segments()
    whole = segment.read_bytes()
    complete = read_segment(segment)
    assert [done.tokens for done in complete] == [0, 1, 2, 3]
    ends = [0]
    for _ in complete:
        ends.append(ends[-1] + 8 + int.from_bytes(whole[ends[-1] : ends[-1] + 4], "little"))
    assert ends[-1] == len(whole)
    cut = tmp_path / "cut.done"
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        most = max(number for number, end in enumerate(ends) if end <= size)
        assert read_segment(cut) == complete[:most]
    journal.release()


@given(data=st.data())
def test_damage_anywhere_never_invents_a_request(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("j")
    story = Story(base)
    story.run()
    story.die()
    target = data.draw(
        st.sampled_from(sorted(p for p in (base / "0").iterdir() if p.name != "lock"))
    )
    content = bytearray(target.read_bytes())
    # Of the file of slots, the part in use; a counter of tokens has no checksum.
    low = 16 + 8 * SLOTS if target.name == "slots" else 0
    at = data.draw(st.integers(low, low + 600 if low else len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    target.write_bytes(bytes(content))
    found = found_by_next(base)
    names = [done.record.request_id for done in found if done.record]
    assert len(names) == len(set(names)) == len(found)
    for done in found:
        assert done.record is not None
        said = (done.record.outcome, done.tokens)
        assert said in story.possible[done.record.request_id] | {("crashed", 3), ("crashed", 7)}


def test_a_file_of_slots_cut_off_anywhere_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.run()
    story.die()
    slots = tmp_path / "0" / "slots"
    whole = slots.read_bytes()
    found: list[FinishedRequest] = []
    for size in [*range(0, len(whole), 97), len(whole)]:
        slots.write_bytes(whole[:size])
        found = list(module._read_crashed(slots))
        assert {d.record.request_id for d in found if d.record} <= {"c", "d"}
    assert len(found) == 2


def test_folders_are_not_shared_and_dead_ones_are_adopted(tmp_path: Path) -> None:
    one, two = UsageJournal.claim(tmp_path, slots=SLOTS), UsageJournal.claim(tmp_path, slots=SLOTS)
    one.open("k", "first", "m", "e", 0.0)
    slot = two.open("k", "second", "m", "e", 0.0)
    two.delivered(slot, 4)
    for journal in (one, two):
        journal.release()
    three = UsageJournal.claim(tmp_path, slots=SLOTS)
    assert (three.recovered.crashed, three.recovered.finished) == (2, 0)
    found = [done for path in three.segments() for done in read_segment(path)]
    assert {d.record.request_id: d.tokens for d in found if d.record} == {"first": 0, "second": 4}
    assert three.bytes == sum(path.stat().st_size for path in three.segments()) > 0
    with pytest.raises(BlockingIOError):
        JournalFolder(tmp_path / "1")
    for path in three.segments():
        three.forget(path)
    assert three.bytes == 0
    JournalFolder(tmp_path / "1").close()  # free again, as it is empty
    three.release()


def test_slots_are_used_again_and_run_out(tmp_path: Path) -> None:
    journal = UsageJournal.claim(tmp_path, slots=2)
    for _ in range(20):
        journal.drop(journal.open("k", "r", "m", "e", 0.0))
    journal.open("k", "r", "m", "e", 0.0)
    journal.open("k", "r", "m", "e", 0.0)
    with pytest.raises(JournalFullError):
        journal.open("k", "r", "m", "e", 0.0)
    assert journal.running == 2
    journal.release()


def test_long_names_are_cut_only_in_the_slot(tmp_path: Path) -> None:
    journal = UsageJournal.claim(tmp_path, slots=SLOTS)
    name = "é" * 512
    slot = journal.open("k", "r" * 128, name, "e", 0.0)
    journal.open("k", "r" * 500, name, "e" * 500, 0.0)
    journal.close(slot, "k", 1, 1.0, record(model=name))
    journal.release()
    done, crashed = found_by_next(tmp_path)
    if done.record is not None and done.record.outcome == "crashed":
        done, crashed = crashed, done
    assert done.record is not None
    assert done.record.model == name
    assert crashed.record is not None
    assert crashed.record.model == "é" * 60


def test_a_full_disk_keeps_the_slot_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = UsageJournal.claim(tmp_path, slots=SLOTS)
    slots = [journal.open("k", f"r{i}", "m", "e", 0.0) for i in range(3)]
    journal.close(slots[0], "k", 1, 1.0, record("r0"))
    real = os.write

    def half(descriptor: int, data: bytes) -> int:
        real(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        journal.close(slots[1], "k", 1, 1.0, record("r1"))
        journal.close(slots[2], "k", 1, 1.0, record("r2"))
        journal.retry()
    assert journal.unwritten == 2
    journal.retry()
    assert journal.unwritten == 0
    journal.rotate()
    names = [d.record.request_id for p in journal.segments() for d in read_segment(p) if d.record]
    assert names == ["r0", "r1", "r2"]
    journal.release()


def test_files_are_private(tmp_path: Path) -> None:
    story = Story(tmp_path / "j")
    story.run()
    folder = tmp_path / "j" / "0"
    assert folder.stat().st_mode & 0o077 == 0
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0
    story.journal.release()


def test_a_folder_that_cannot_be_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        UsageJournal.claim(tmp_path / "file")
