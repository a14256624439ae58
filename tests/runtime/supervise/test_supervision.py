"""Decisions about a process: no process, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.supervise.supervision import Action, ProcessState, RestartLimits, Supervision

LIMITS = RestartLimits(
    ready_s=10, backoff_s=1, backoff_max_s=4, calm_s=60, tries=3, unwell=2, term_s=5
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


def test_who_gets_somewhere_or_has_no_core_has_more_time() -> None:
    core = Supervision(LIMITS)
    core.tick(0)
    core.advanced(9)
    assert core.tick(19) is None
    core.delayed(3)
    assert core.tick(22) is None
    assert core.tick(22.1) is Action.KILL


def pause_s_of(core: Supervision, now_s: float) -> float:
    """Wait until a process is started again; returns how long that took."""
    pause_s = 0.0
    while core.tick(now_s + pause_s) is not Action.START:
        pause_s += 0.25
    return pause_s


def test_pauses_double_up_to_a_limit_and_begin_anew_once_it_served() -> None:
    core, now_s, pauses = ready(), 0.0, []
    for _ in range(4):
        core.exited(1, now_s)
        pauses.append(pause_s_of(core, now_s))
        now_s += pauses[-1]
        core.ready(now_s)
    assert pauses == [1, 2, 4, 4]
    core.exited(1, now_s + 1)
    assert core.tick(now_s + 1) is Action.START
    core.exited(1, now_s + 1)
    assert pause_s_of(core, now_s + 1) == 1
    assert core.restarts == 6


def test_served_is_what_was_ready_for_longer_than_it_took_to_start() -> None:
    core = Supervision(LIMITS)
    core.tick(0)
    core.ready(8)
    core.exited(1, 15)
    assert core.tick(15) is None
    core.tick(16)
    core.ready(24)
    core.exited(1, 32.1)
    assert core.tick(32.1) is Action.START


def test_a_start_that_takes_an_age_is_paid_for_by_a_calm_while() -> None:
    core = Supervision(LIMITS.model_copy(update={"ready_s": 1000}))
    core.tick(0)
    core.ready(500)
    core.exited(1, 560)
    assert core.tick(560) is Action.START


@pytest.mark.parametrize("code", [2, 3, 6, 127])
def test_fatal_codes_are_final(code: int) -> None:
    core = Supervision(LIMITS)
    core.tick(0)
    core.exited(code, 1)
    assert core.state is ProcessState.FAILED
    assert core.over
    assert core.tick(1000) is None


def test_a_fatal_code_of_what_was_ready_before_is_an_end_like_others() -> None:
    core = ready()
    core.exited(137, 0)
    core.tick(1)
    # Its port was taken for a moment.
    core.exited(3, 1.1)
    assert core.state is ProcessState.WAITING


@pytest.mark.parametrize("ready", [True, False])
def test_what_is_not_to_be_started_again_is_not(ready: bool) -> None:
    made = Supervision(RestartLimits(again=False))
    assert made.tick(0.0) is Action.START
    if ready:
        made.ready(1.0)
    made.exited(137, 100.0)
    assert (made.state, made.restarts) == (ProcessState.FAILED, 0)


def test_what_was_ready_before_gets_more_tries() -> None:
    core, now_s, starts = ready(), 100.0, 0
    core.exited(137, now_s)
    while not core.over:
        now_s += 100
        assert core.tick(now_s) is Action.START
        core.exited(137, now_s)
        starts += 1
    assert starts == LIMITS.tries_again


@given(
    st.lists(st.tuples(st.floats(0.05, 0.5), st.floats(1.0, 7.0)), min_size=1, max_size=80),
)
def test_under_kills_a_second_apart_no_restart_waits(kills: list[tuple[float, float]]) -> None:
    # As the agent does it: a look every 50 ms. It takes up to half a second to start.
    core, now_s = Supervision(), 0.0
    assert core.tick(now_s) is Action.START
    for took_s, later_s in kills:
        core.ready(now_s + took_s)
        now_s += later_s
        core.exited(137, now_s)
        assert core.tick(now_s) is Action.START


@given(st.lists(st.floats(0.0, 0.2), min_size=1, max_size=20), st.floats(0.0, 2.0))
def test_what_dies_of_its_first_request_backs_off(lives_s: list[float], took_s: float) -> None:
    limits = RestartLimits()
    core, now_s = Supervision(limits), 0.0
    core.tick(now_s)
    for number, life_s in enumerate(lives_s):
        core.ready(now_s + took_s)
        now_s += took_s + life_s
        core.exited(139, now_s)
        due_s = min(limits.backoff_s * 2**number, limits.backoff_max_s)
        assert core.tick(now_s + due_s * 0.99) is None
        now_s += due_s * 1.01
        assert core.tick(now_s) is Action.START


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
def test_at_max_one_process_and_no_signal_without_one(events: list[tuple[str, float]]) -> None:
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
