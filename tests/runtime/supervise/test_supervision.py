"""Decisions about a process: no process, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.supervise.supervision import Action, ProcessState, RestartLimits, Supervision

LIMITS = RestartLimits(
    ready_s=10, backoff_s=1, backoff_most_s=4, calm_s=60, tries=3, unwell=2, term_s=5
)


def ready(now_s: float = 0.0) -> Supervision:
    core = Supervision(LIMITS)
    assert core.tick(now_s) is Action.START
    core.ready(now_s)
    assert core.state is ProcessState.READY
    return core


def test_starts_at_once_and_only_once() -> None:
    core = Supervision(LIMITS)
    assert core.tick(0) is Action.START
    assert core.tick(0.1) is None
    assert core.state is ProcessState.STARTING


def test_killed_once_when_not_ready_in_time() -> None:
    core = Supervision(LIMITS)
    core.tick(0)
    assert core.tick(10) is None
    assert core.tick(10.1) is Action.KILL
    assert core.tick(10.2) is None
    core.ready(10.2)
    assert core.runs
    core.exited(137, 10.3)
    assert core.state is ProcessState.WAITING
    assert core.reason == "not ready within 10 s"


def test_pauses_double_up_to_a_limit_and_begin_anew_after_calm() -> None:
    core, now_s, pauses = ready(), 0.0, []
    for _ in range(4):
        core.exited(1, now_s)
        pause_s = 0.0
        while core.tick(now_s + pause_s) is not Action.START:
            pause_s += 0.5
        pauses.append(pause_s)
        now_s += pause_s
        core.ready(now_s)
    assert pauses == [1, 2, 4, 4]
    core.exited(1, now_s + 61)
    assert core.tick(now_s + 61.9) is None
    assert core.tick(now_s + 62) is Action.START
    assert core.restarts == 5


@pytest.mark.parametrize("code", [2, 3, 6, 127])
def test_fatal_codes_are_final(code: int) -> None:
    core = ready()
    core.exited(code, 1)
    assert core.state is ProcessState.FAILED
    assert core.over
    assert core.tick(1000) is None


def test_given_up_when_never_ready() -> None:
    core, now_s = Supervision(LIMITS), 0.0
    for _ in range(3):
        assert core.tick(now_s) is Action.START
        core.exited(1, now_s)
        now_s += 100
    assert core.state is ProcessState.FAILED
    assert core.reason == "ended with code 1"


def test_unwell_in_a_row_is_killed() -> None:
    core = ready()
    assert core.probed("no token") is None
    assert core.probed(None) is None
    assert core.probed("no token") is None
    assert core.probed("no token") is Action.KILL
    assert core.probed("no token") is None
    core.exited(137, 1)
    assert (core.state, core.reason) == (ProcessState.WAITING, "no token")


def test_stop_terms_then_kills() -> None:
    core = ready()
    assert core.stop(1) is Action.TERM
    assert core.stop(2) is None
    assert core.tick(5.9) is None
    assert core.tick(6.1) is Action.KILL
    core.exited(137, 6.2)
    assert core.state is ProcessState.STOPPED


def test_stop_while_waiting_needs_no_signal() -> None:
    core = ready()
    core.exited(1, 0)
    assert core.stop(0.5) is None
    assert core.state is ProcessState.STOPPED
    assert core.tick(100) is None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["tick", "ready", "well", "unwell", "exit", "fatal", "stop"]),
        st.floats(0, 20),
    ),
    max_size=60,
)


@given(EVENTS)
def test_at_most_one_process_and_no_signal_without_one(events: list[tuple[str, float]]) -> None:
    core, now_s, running = Supervision(LIMITS), 0.0, False
    for name, later_s in events:
        now_s += later_s
        action = None
        if name == "tick":
            action = core.tick(now_s)
        elif name == "ready" and running:
            core.ready(now_s)
        elif name in ("well", "unwell"):
            action = core.probed(None if name == "well" else "ill")
        elif name in ("exit", "fatal") and running:
            core.exited(1 if name == "exit" else 2, now_s)
            running = False
        elif name == "stop":
            action = core.stop(now_s)
        if action is Action.START:
            assert not running
            running = True
        elif action is not None:
            assert running
        assert core.runs == running
