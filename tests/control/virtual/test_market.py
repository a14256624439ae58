"""Markets: what the generator's text says of its statistics, and files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from atoll.control.virtual.market import (
    COLUMNS,
    MarketSeries,
    MarketStatistics,
    draw_market,
    hold_market,
    read_market,
)
from atoll.core.errors import InputError
from tests.control.virtual.toys import problem
from tests.control.world import EAST, offer

SPOT = tuple(offer("L4:1", 1.0, 8, f"r{k}", "spot") for k in range(60))


def write_market(series: MarketSeries) -> Iterable[str]:
    """Yield the lines of a CSV file with a market, only what changes."""
    yield ",".join(COLUMNS)
    for i, time_s in enumerate(series.times_s):
        for k, sold in enumerate(series.offers):
            now = (series.usd[i, k], series.available[i, k])
            if i == 0 or now != (series.usd[i - 1, k], series.available[i - 1, k]):
                yield f"{time_s:.3f},{','.join(sold.key)},{now[0]:.6f},{now[1]}"


def test_spot_prices_have_the_statistics_that_are_stated() -> None:
    law = MarketStatistics(step_s=3600.0)
    drawn = draw_market(SPOT, 60.0, 5, law)
    hours = [drawn.index(3600.0 * k) for k in range(60 * 24)]
    logs = np.log(drawn.usd[hours])
    assert drawn.usd[hours].mean() == pytest.approx(1.0, abs=0.02)
    assert logs.std() == pytest.approx(law.deviation, rel=0.06)
    lag = round(law.reverts_s / 3600.0)
    around = logs - logs.mean()
    kept = float((around[:-lag] * around[lag:]).mean() / (around**2).mean())
    assert kept == pytest.approx(math.exp(-1.0), abs=0.06)


def test_machines_come_and_go_as_stated() -> None:
    law = MarketStatistics()
    drawn = draw_market(SPOT, 60.0, 5, law)
    spans = np.diff([*drawn.times_s, 60.0 * 86_400.0])
    gone = (spans[:, None] * (drawn.available == 0)).sum(axis=0) / spans.sum()
    assert gone.mean() == pytest.approx(law.down_s / (law.up_s + law.down_s), rel=0.12)


def test_only_spot_moves_and_never_above_on_demand() -> None:
    asked = problem()
    drawn = draw_market(asked.offers, 30.0, 1, MarketStatistics(deviation=1.5))
    prices = {one.key: one.usd_per_hour for one in asked.offers}
    for k, one in enumerate(drawn.offers):
        if one.market == "spot":
            cap = prices[one.region, one.node_type, "on-demand"]
            assert drawn.usd[:, k].max() == pytest.approx(cap)
            assert drawn.usd[:, k].min() < one.usd_per_hour
        else:
            assert (drawn.usd[:, k] == one.usd_per_hour).all()
            assert (drawn.available[:, k] == one.available).all()


def test_an_offer_has_the_same_luck_whatever_others_there_are() -> None:
    both, one = draw_market(SPOT[:2], 3.0, 9), draw_market(SPOT[:1], 3.0, 9)
    assert [o.usd_per_hour for o in both.at(50_000.0)][:1] == [
        o.usd_per_hour for o in one.at(50_000.0)
    ]


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    drawn = draw_market(SPOT[:3], 2.0, 4)
    path = tmp_path / "prices.csv"
    path.write_text("\n".join(write_market(drawn)) + "\n")
    read = read_market(path, SPOT[:3])
    for at in (0.0, 5_000.0, 100_000.0, 1e9):
        for a, b in zip(drawn.at(at), read.at(at), strict=True):
            assert a.key == b.key
            assert a.available == b.available
            assert a.usd_per_hour == pytest.approx(b.usd_per_hour, abs=1e-6)


def test_before_its_first_row_the_fleets_own_price_holds(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(f"time,region,node_type,market,price,available\n60,{EAST},L4:1,spot,0.5,2\n")
    given = (offer("L4:1", 0.3, 9, EAST, "spot"), offer("L4:1", 0.8, 9))
    read = read_market(path, given)
    before, after = ({o.market: o for o in read.at(t)} for t in (59.0, 60.0))
    assert (before["spot"].usd_per_hour, before["spot"].available) == (0.3, 9)
    assert (after["spot"].usd_per_hour, after["spot"].available) == (0.5, 2)
    assert after["on-demand"].usd_per_hour == 0.8


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n", "columns are not"),
        ("time,region,node_type,market,price,available\n", "no prices"),
        ("time,region,node_type,market,price,available\n0,x,L4:1,spot,1,1\n", "no offer of x"),
        ("time,region,node_type,market,price,available\n0,us-east,L4:1,spot,dear,1\n", "not a row"),
        ("time,region,node_type,market,price,available\n0,us-east,L4:1,spot,-1,1\n", "0 or more"),
    ],
)
def test_a_bad_file_is_refused_in_a_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_market(path, (offer("L4:1", 0.3, 9, EAST, "spot"),))


def test_the_mean_over_a_while_is_weighed_by_time(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    rows = (f"0,{EAST},L4:1,spot,1.0,3", f"75,{EAST},L4:1,spot,2.0,7")
    path.write_text("\n".join(("time,region,node_type,market,price,available", *rows)))
    (one,) = read_market(path, (offer("L4:1", 0.3, 9, EAST, "spot"),)).over(0.0, 100.0)
    assert one.usd_per_hour == pytest.approx(1.25)
    assert one.available == 7
    assert hold_market((one,)).next_change_s(0.0) == math.inf
