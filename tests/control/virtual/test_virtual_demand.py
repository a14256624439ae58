"""Traffic in virtual time: what is drawn has the rate it should, what is counted is all there."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.control.virtual.virtual_demand import (
    DAY_MINUTES,
    DemandSeries,
    TrafficStatistics,
    count_requests,
    draw_demand,
)
from atoll.core.errors import InputError
from atoll.workload.spec import workload_of
from tests.control.virtual.toys import problem


def test_a_week_has_the_mean_rate_of_its_service_and_a_rhythm() -> None:
    calm = TrafficStatistics(bursts_per_day=0.0)
    drawn = draw_demand(problem(40.0, 25.0), 28.0, 2, statistics=calm)
    rates = drawn.smooth()
    assert rates.mean(axis=1) == pytest.approx([40.0, 25.0], rel=0.03)
    weeks = rates[0].reshape(4, -1)
    # Weeks are alike: what differs between them is chance, much less than the rhythm.
    apart = (weeks - weeks.mean(axis=0)).std()
    assert apart == pytest.approx(40.0 * calm.deviation, rel=0.35)
    assert weeks.mean(axis=0).std() > 3.0 * apart


def test_bursts_come_as_often_as_stated() -> None:
    # The same luck with and without them, but for the counts of requests.
    law = TrafficStatistics(deviation=1e-9, bursts_per_day=1.0)
    rates = draw_demand(problem(400.0, 250.0), 60.0, 2, statistics=law).smooth(15)
    usual = np.median(rates[0][: 56 * DAY_MINUTES].reshape(8, -1), axis=0)
    raised = rates[0][: 56 * DAY_MINUTES].reshape(8, -1) > 1.08 * usual
    begun = (np.diff(raised.astype(int), axis=1) == 1).sum()
    assert 20 <= begun <= 75  # some are too low or short to be told from chance


def test_history_comes_before_and_the_rest_begins_with_the_week() -> None:
    drawn = draw_demand(problem(), 1.0, 2, history_days=2.0)
    assert drawn.history == 2 * DAY_MINUTES
    assert drawn.minutes == DAY_MINUTES
    assert drawn.rate_before(0, 0, 60) > 0.0
    assert drawn.smooth().shape == (2, DAY_MINUTES)


def test_rates_before_and_around_a_minute() -> None:
    series = DemandSeries(("chat",), np.array([[60, 120, 180, 240, 300]]), history=1)
    assert series.rate_before(0, 0, 5) == pytest.approx(1.0)
    assert series.rate_before(0, 2, 2) == pytest.approx(2.5)
    assert series.smooth(3)[0] == pytest.approx([2.0, 3.0, 4.0, 14.0 / 3.0])
    assert series.take(2).minutes == 2


def test_a_trace_is_counted_and_goes_on_from_its_start() -> None:
    asked = problem()
    workload = workload_of("poisson:2/s lengths=100x10 for=30min model=code")
    once = count_requests(workload, asked, None, seed=1)
    again = count_requests(workload, asked, 2.0 / 24.0, seed=1)
    assert once.minutes == 30
    assert again.minutes == 120
    assert once.counts[0].sum() == 0
    assert once.counts[1].sum() == pytest.approx(3600, rel=0.06)
    assert (again.counts[:, 30:60] == once.counts).all()


def test_a_trace_that_names_nobody_is_shared_out_by_rate() -> None:
    asked = problem(40.0, 10.0)
    counted = count_requests(workload_of("poisson:20/s lengths=100x10 for=10min"), asked, None)
    chat, code = counted.counts.sum(axis=1)
    assert chat == pytest.approx(4.0 * code, rel=0.1)


def test_a_trace_without_a_request_for_the_fleet_is_refused() -> None:
    with pytest.raises(InputError, match="no request"):
        count_requests(workload_of("poisson:0.001/s lengths=100x10 for=1s"), problem(), None)
