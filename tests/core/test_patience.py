"""Silence of a peer that waits for a core, and of one that is dead."""

from __future__ import annotations

import pytest

from atoll.core.patience import Patience

EVERY_S = 0.25
LIMIT_S = 2.0


def ticked(until_s: float, every_s: float = EVERY_S, start_s: float = 0.0) -> Patience:
    patience = Patience(EVERY_S)
    now_s = start_s
    while now_s <= until_s:
        patience.tick(now_s)
        now_s += every_s
    return patience


def dead_after(patience: Patience, heard_s: float) -> float:
    """Seconds of silence until a peer counts as dead, while this process runs as it should."""
    now_s = heard_s
    while not patience.is_silent("n", heard_s, LIMIT_S, now_s):
        now_s += EVERY_S
        patience.tick(now_s)
        assert now_s < heard_s + 100
    return now_s - heard_s


def test_on_a_quiet_machine_the_limit_holds() -> None:
    patience = ticked(20.0)
    for beat in range(80):
        patience.hear("n", beat * EVERY_S)
    assert dead_after(patience, 20.0) == pytest.approx(LIMIT_S + EVERY_S)


def test_who_was_late_itself_waits_longer_and_reads_first() -> None:
    patience = ticked(10.0)
    # Stopped for three seconds: the silence of others in that time is no fault of theirs.
    patience.tick(13.25)
    assert not patience.is_silent("n", 10.0, LIMIT_S, 13.25)
    assert dead_after(patience, 13.25) > 2 * LIMIT_S
    # It is forgotten by and by.
    later = ticked(10.0)
    later.tick(13.25)
    for step in range(1200):
        later.tick(13.5 + step * EVERY_S)
    assert dead_after(later, 313.5) < 1.1 * LIMIT_S + EVERY_S


def test_a_peer_that_was_late_is_waited_for() -> None:
    patience = ticked(10.0)
    patience.hear("n", 8.0)
    patience.hear("n", 9.75)
    assert dead_after(patience, 10.0) > LIMIT_S + 3.0
    # Others are not.
    assert patience.is_silent("m", 10.0, LIMIT_S, 12.5)


def test_a_peer_that_says_how_late_it_is_is_waited_for() -> None:
    patience = ticked(10.0)
    patience.tell("n", 1.0, 10.0)
    assert dead_after(patience, 10.0) == pytest.approx(LIMIT_S + 3.0, abs=2 * EVERY_S)


def test_the_time_in_which_a_peer_was_dead_is_no_delay() -> None:
    patience = ticked(10.0)
    patience.hear("n", 2.0)
    patience.restart("n")
    patience.hear("n", 10.0)
    assert dead_after(patience, 10.0) == pytest.approx(LIMIT_S + EVERY_S)


def test_whatever_the_delay_a_dead_peer_is_found() -> None:
    patience = ticked(10.0)
    patience.tell("n", 1e5, 10.0)
    assert dead_after(patience, 10.0) <= LIMIT_S + 30.0 + EVERY_S
