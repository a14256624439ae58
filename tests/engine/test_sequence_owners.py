"""Sequences whose scheduler is gone are dropped, and only those."""

from __future__ import annotations

import pytest

from atoll.engine.sequence_owners import BROKEN_S, SILENT_S, SequenceOwners

OURS, THEIRS = "tcp://a:1", "tcp://b:2"


@pytest.fixture
def owners() -> SequenceOwners:
    made = SequenceOwners()
    assert made.hear(OURS, "chat-0", 1, 0.0) == []
    assert made.hear(THEIRS, "chat-1", 2, 0.0) == []
    return made


def test_who_says_hello_stays(owners: SequenceOwners) -> None:
    for second in range(1000):
        assert owners.hear(OURS, "chat-0", 1, float(second)) == []
        assert owners.hear(THEIRS, "chat-1", 2, float(second)) == []
        assert owners.take_gone(float(second)) == []


def test_silence_is_no_death_for_a_long_time(owners: SequenceOwners) -> None:
    assert owners.take_gone(SILENT_S) == []
    owners.hear(OURS, "chat-0", 1, SILENT_S)
    assert owners.take_gone(SILENT_S + 1) == [THEIRS]
    assert owners.take_gone(SILENT_S + 1) == []


def test_a_broken_connection_and_silence_are(owners: SequenceOwners) -> None:
    owners.note_broken(OURS, 5.0)
    owners.note_broken("tcp://nobody:9", 5.0)
    assert owners.take_gone(5.0 + BROKEN_S) == []
    # It may only have been a cable.
    owners.hear(OURS, "chat-0", 1, 5.0 + BROKEN_S)
    assert owners.take_gone(6.0 + BROKEN_S) == []
    owners.note_broken(OURS, 10.0)
    owners.note_broken(OURS, 11.9)
    assert owners.take_gone(10.1 + BROKEN_S) == [OURS]


def test_a_new_one_voids_what_the_one_before_it_left(owners: SequenceOwners) -> None:
    assert owners.hear("tcp://a:3", "chat-0", 7, 1.0) == [OURS]
    # Started anew at the same endpoint.
    assert owners.hear("tcp://a:3", "chat-0", 8, 2.0) == ["tcp://a:3"]
    assert owners.hear("tcp://a:3", "chat-0", 8, 3.0) == []


def test_schedulers_without_names_share_nothing() -> None:
    owners = SequenceOwners()
    assert owners.hear(OURS, "", 1, 0.0) == owners.hear(THEIRS, "", 2, 0.0) == []
