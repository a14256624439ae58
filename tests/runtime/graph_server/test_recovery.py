"""What is done about failures: never endless, never a dead executor while another lives."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.graph_server.recovery import GiveUp, Pause, Recovery, Remake, TroubleError, Try

NAMES = ("a", "b", "c")
CODES = ("lost", "overloaded", "draining", "failed", "lost_handle", "bad_input", "strange")


def first_open(closed: Collection[str]) -> str | None:
    return next((name for name in NAMES if name not in closed), None)


def trouble(code: str) -> TroubleError:
    return TroubleError(code, "it broke", handle="h" if code == "lost_handle" else None)


@given(
    st.lists(st.tuples(st.sampled_from(CODES), st.sets(st.sampled_from(NAMES))), max_size=40),
)
def test_the_dead_are_never_tried_while_others_live_and_everything_ends(
    story: list[tuple[str, set[str]]],
) -> None:
    recovery = Recovery("chat", NAMES, patience_s=5.0)
    now_s, waited_s = 0.0, 0.0
    for code, dead in [*story, *[("overloaded", set(NAMES))] * 200]:
        step = recovery.choose(dead, first_open, now_s)
        if isinstance(step, GiveUp):
            assert step.error.status == 503
            assert waited_s >= 5.0 - 1e-6
            return
        if isinstance(step, Pause):
            assert 0.0 < step.seconds <= 1.0
            now_s += step.seconds
            waited_s += step.seconds
            continue
        assert step.executor not in dead
        after = recovery.failed(step.executor, trouble(code))
        if isinstance(after, GiveUp):
            return
    pytest.fail("it went on for ever")


def test_what_is_bad_is_the_clients_fault() -> None:
    recovery = Recovery("chat", NAMES, 5.0)
    step = recovery.failed("a", TroubleError("bad_input", "no such voice", "voice"))
    assert isinstance(step, GiveUp)
    assert (step.error.status, step.error.param) == (400, "voice")


def test_a_component_that_breaks_on_two_executors_is_given_up() -> None:
    recovery = Recovery("chat", NAMES, 5.0)
    assert recovery.failed("a", trouble("failed")) is None
    assert recovery.choose((), first_open, 0.0) == Try("b")
    step = recovery.failed("b", trouble("failed"))
    assert isinstance(step, GiveUp)
    assert step.error.status == 500
    assert "chat failed at b: it broke" in step.error.message


def test_the_only_executor_is_tried_once_more_after_a_while() -> None:
    recovery = Recovery("chat", ("a",), 5.0)
    assert recovery.choose((), first_open, 0.0) == Try("a")
    assert recovery.failed("a", trouble("failed")) is None
    pause = recovery.choose((), first_open, 0.0)
    assert isinstance(pause, Pause)
    assert recovery.choose((), first_open, pause.seconds) == Try("a")
    assert isinstance(recovery.failed("a", trouble("failed")), GiveUp)


def test_waits_grow_up_to_a_bound_and_patience_ends() -> None:
    recovery = Recovery("chat", NAMES, 3.0)
    now_s, waits = 0.0, []
    while isinstance(step := recovery.choose(NAMES, first_open, now_s), Pause):
        waits.append(step.seconds)
        now_s += step.seconds
    assert waits[:3] == [0.05, 0.1, 0.2]
    assert max(waits) <= 1.0
    assert now_s == pytest.approx(3.0)
    assert isinstance(step, GiveUp)
    assert step.error.retry_after_s == 1


def test_an_invocation_that_kills_executors_does_not_kill_them_all() -> None:
    recovery = Recovery("chat", NAMES, 100.0)
    now_s, killed = 0.0, 0
    while not isinstance(step := recovery.choose((), first_open, now_s), GiveUp):
        if isinstance(step, Pause):
            now_s += step.seconds
            continue
        killed += 1
        if isinstance(recovery.failed(step.executor, trouble("lost")), GiveUp):
            break
    assert killed == 5


def test_losses_before_progress_do_not_count() -> None:
    recovery = Recovery("chat", NAMES, 5.0)
    for _ in range(20):
        assert recovery.failed("a", trouble("lost")) is None
        recovery.progressed()


def test_lost_inputs_are_made_again_but_not_for_ever() -> None:
    recovery = Recovery("chat", NAMES, 5.0)
    steps = [recovery.failed("a", trouble("lost_handle")) for _ in range(9)]
    assert steps[:8] == [Remake("h")] * 8
    assert isinstance(steps[8], GiveUp)


def test_nobody_runs_it() -> None:
    step = Recovery("chat", (), 5.0).choose((), first_open, 0.0)
    assert isinstance(step, GiveUp)
    assert step.error.code == "no_executor"


def test_one_that_comes_back_is_waited_for_where_nobody_is_there() -> None:
    recovery = Recovery("chat", (), 5.0, comes_back=True)
    pause = recovery.choose((), first_open, 0.0)
    assert isinstance(pause, Pause)
    recovery.candidates = ("b",)
    assert recovery.choose((), lambda _closed: "b", pause.seconds) == Try("b")


def test_out_of_time_is_a_timeout() -> None:
    step = Recovery("chat", NAMES, 5.0).failed("a", trouble("deadline"))
    assert isinstance(step, GiveUp)
    assert step.error.status == 504
