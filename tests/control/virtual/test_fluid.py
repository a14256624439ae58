"""Requests as a fluid: nothing is lost from the books, and more capacity never keeps less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.control.virtual.fluid import PATIENCE_S, FluidQueue, KeptCurve

CURVE = KeptCurve((0.5, 1.0, 1.2), (1.0, 0.95, 0.5), 1.2)
STRETCHES = st.lists(
    st.tuples(st.floats(0.0, 500.0), st.sampled_from((0.5, 7.0, 60.0)), st.floats(0.0, 20.0)),
    min_size=1,
    max_size=20,
)


@given(STRETCHES, st.floats(0.0, 30.0))
def test_every_request_is_kept_late_or_lost(
    stretches: list[tuple[float, float, float]], lag_s: float
) -> None:
    queue = FluidQueue(CURVE, 2.0, lag_s)
    for arrived, seconds, capacity in stretches:
        served = queue.serve(arrived, seconds, capacity)
        assert min(served.kept, served.late, served.lost, queue.waiting) >= -1e-9
        assert served.kept + served.late + served.lost == pytest.approx(arrived)
        if capacity > 0.0:
            assert queue.waiting <= capacity * CURVE.stretch * PATIENCE_S * (1.0 + 1e-9) + 1e-9


@given(st.floats(1.0, 200.0), st.floats(0.5, 10.0), st.floats(1.0, 3.0))
def test_more_capacity_never_keeps_less(arrived: float, capacity: float, factor: float) -> None:
    less = FluidQueue(CURVE, 2.0).serve(arrived, 60.0, capacity)
    more = FluidQueue(CURVE, 2.0).serve(arrived, 60.0, capacity * factor)
    assert more.kept >= less.kept - 1e-9


def test_at_its_capacity_a_service_keeps_what_it_was_sized_for() -> None:
    served = FluidQueue(CURVE, 2.0).serve(600.0, 60.0, 10.0)
    assert served.kept == pytest.approx(570.0)
    assert served.lost == 0.0


def test_an_overload_is_felt_until_the_queue_is_worked_off() -> None:
    queue = FluidQueue(CURVE, 2.0)
    queue.serve(1800.0, 60.0, 10.0)  # thirty a second, twelve are finished
    assert queue.waiting == pytest.approx(12.0 * PATIENCE_S)
    after = queue.serve(60.0, 60.0, 10.0)
    assert after.kept < 30.0
    calm = queue.serve(60.0, 60.0, 10.0)
    assert queue.waiting == 0.0
    assert calm.kept > 50.0


def test_load_follows_with_the_time_of_an_answer() -> None:
    quick, slow = FluidQueue(CURVE, 2.0), FluidQueue(CURVE, 2.0, 30.0)
    for queue in (quick, slow):
        queue.serve(50.0, 10.0, 10.0)
    assert slow.serve(120.0, 10.0, 10.0).kept > quick.serve(120.0, 10.0, 10.0).kept + 20.0
