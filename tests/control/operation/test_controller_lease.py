"""One controller at a time, and terms that only grow."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.operation.controller_lease import FileLease, Lease, LeaseHeldError, keep_lease
from atoll.core.errors import InputError


def test_a_lease_is_renewed_and_taken_over_after_its_end(tmp_path: Path) -> None:
    lease = FileLease(tmp_path / "lease.json")
    first = lease.take("one", 100.0, 30.0)
    assert first == Lease(holder="one", term=1, ends_s=130.0)
    assert lease.take("one", 120.0, 30.0).term == 1
    with pytest.raises(LeaseHeldError, match=r"one operates this fleet .*wait 10 s"):
        lease.take("two", 140.0, 30.0)
    assert lease.take("two", 150.0, 30.0).term == 2
    with pytest.raises(LeaseHeldError):
        lease.take("one", 151.0, 30.0)


def test_who_slept_through_its_end_gets_a_new_term(tmp_path: Path) -> None:
    lease = FileLease(tmp_path / "lease.json")
    assert lease.take("one", 0.0, 10.0).term == 1
    assert lease.take("one", 11.0, 10.0).term == 2


def test_a_lease_that_is_given_back_need_not_be_waited_for(tmp_path: Path) -> None:
    lease = FileLease(tmp_path / "lease.json")
    mine = lease.take("one", 0.0, 100.0)
    lease.release(mine, 5.0)
    theirs = lease.take("two", 5.0, 100.0)
    assert theirs.term == 2
    lease.release(mine, 6.0)
    assert lease.read() == theirs


def test_what_is_no_lease_is_not_overwritten(tmp_path: Path) -> None:
    lease = FileLease(tmp_path / "lease.json")
    lease.path.write_text("something else")
    with pytest.raises(InputError, match="not a lease"):
        lease.take("one", 0.0, 10.0)
    assert lease.path.read_text() == "something else"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0.0, 20.0), st.floats(1.0, 30.0)), max_size=40
    )
)
def test_there_is_never_more_than_one_holder(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, float, float]]
) -> None:
    lease = FileLease(tmp_path_factory.mktemp("lease") / "lease.json")
    now_s, held = 0.0, dict[str, Lease]()
    newest = 0
    for holder, later_s, valid_s in steps:
        now_s += later_s
        try:
            found = lease.take(holder, now_s, valid_s)
        except LeaseHeldError:
            assert any(now_s < one.ends_s for name, one in held.items() if name != holder)
            continue
        assert not any(now_s < one.ends_s for name, one in held.items() if name != holder)
        assert found.term >= newest
        newest = found.term
        held[holder] = found


def test_a_lease_is_renewed_while_something_takes_long() -> None:
    renewed = threading.Event()

    class Noted:
        def take(self, holder: str, now_s: float, valid_s: float) -> Lease:
            assert (holder, now_s) == ("one", 7.0)
            renewed.set()
            return Lease(holder=holder, term=1, ends_s=now_s + valid_s)

    with keep_lease(Noted(), "one", lambda: 7.0, 0.003):
        assert renewed.wait(30.0)
    assert not [each for each in threading.enumerate() if each.name == "lease"]


def test_a_lease_that_another_has_is_not_renewed() -> None:
    refused = threading.Event()

    class Taken:
        def take(self, holder: str, now_s: float, valid_s: float) -> Lease:
            refused.set()
            raise LeaseHeldError("another acts")

    with keep_lease(Taken(), "one", lambda: 7.0, 0.003):
        assert refused.wait(30.0)
