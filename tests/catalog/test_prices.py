from __future__ import annotations

import csv
from pathlib import Path

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.prices import Price, PriceTable, SpotPrice, default_prices

REFERENCE = Path(__file__).resolve().parents[3] / "shared/data/reference/gpu_prices.csv"
OTHER_GPUS = {"H100-MEGA", "H100-PCIe"}


def test_regions() -> None:
    assert default_prices().regions == (
        "aws/ap-northeast-2",
        "aws/us-east-1",
        "aws/us-east-2",
        "aws/us-west-2",
        "gcp/us-central1",
        "lambda/any",
        "runpod/any",
    )


def test_rows_are_unique_and_of_known_nodes() -> None:
    rows = default_prices().rows
    assert len({row.key for row in rows}) == len(rows) == 262
    catalog = Catalog.default()
    for row in rows:
        assert catalog.node(row.node_type).id == row.node_type
        assert row.snapshot is not None
        assert row.snapshot.startswith("2026-")
        assert row.offered + row.imputed + row.retired == 1
        cost = row.cost()
        assert cost is None or cost > 0
        spot = row.spot_usd_per_hour
        if spot is not None and spot.min is not None and spot.max is not None:
            assert spot.min <= spot.median <= spot.max


def test_a_row() -> None:
    (row,) = (
        r for r in default_prices() if r.place == "aws/us-west-2" and r.instance == "g6e.xlarge"
    )
    assert row == Price(
        cloud="aws",
        region="us-west-2",
        node_type="L40S:1",
        instance="g6e.xlarge",
        usd_per_hour=1.861,
        spot_usd_per_hour=SpotPrice(1.4588, 1.3021, 1.52),
        zones=4,
        snapshot="2026-08-22",
        vcpus=4.0,
        memory_gib=32.0,
    )
    assert (row.gpu, row.count) == ("L40S", 1)
    assert row.cost() == 1.861
    assert row.cost(spot=True) == 1.4588


def test_sizes_nobody_sells_are_absent_unless_asked_for() -> None:
    prices = default_prices()
    assert prices.query(region="us-east-2", gpu="L40S", count=2) == ()
    (row,) = prices.query(region="us-east-2", gpu="L40S", count=2, include_imputed=True)
    assert row.imputed
    assert row.instance is None
    assert row.usd_per_hour == pytest.approx(3.722, abs=0.01)


def test_retired_machines_are_absent_unless_asked_for() -> None:
    prices = default_prices()
    assert prices.query(region="us-east-2", gpu="V100-16") == ()
    assert len(prices.query(region="us-east-2", gpu="V100-16", include_retired=True)) == 3


def test_query_by_place_cloud_and_spot() -> None:
    prices = default_prices()
    assert prices.query(region="aws/us-east-2") == prices.query(region="us-east-2")
    assert {row.cloud for row in prices.query(region="GCP")} == {"gcp"}
    assert prices.query(region="lambda", spot=True) == ()
    assert all(row.spot_usd_per_hour for row in prices.query(region="aws", spot=True))
    spot_only = [row for row in prices.query(gpu="H200") if row.usd_per_hour is None]
    assert {row.instance for row in spot_only} == {"p5e.48xlarge"}


def test_cheapest() -> None:
    prices = default_prices()
    best = prices.cheapest("us-east-2", "L4:1")
    assert best is not None
    assert best.instance == "g6.xlarge"
    assert prices.cheapest("us-east-2", "L4:2") is None
    imputed = prices.cheapest("us-east-2", "L4:2", include_imputed=True)
    assert imputed is not None
    assert imputed.imputed
    assert prices.cheapest("us-east-2", "RTX4090:1") is None
    assert prices.cheapest("lambda", "H100:1", spot=True) is None
    spot = prices.cheapest("us-west-2", "H200:8", spot=True)
    assert spot is not None
    assert spot.instance == "p5e.48xlarge"
    for node, row in prices.cheapest_by_node("us-east-2", include_imputed=True).items():
        costs = [r.cost() for r in prices.query(region="us-east-2") if r.node_type == node]
        offered = [cost for cost in costs if cost is not None]
        assert row.cost() == min(offered) if offered else row.imputed


def test_the_twenty_node_types_of_coral_have_a_price() -> None:
    regions = ("us-east-2", "ap-northeast-2", "gcp/us-central1")
    for gpu in ("L40S", "L4", "A10G", "H100"):
        for count in (1, 2, 4, 8):
            node = f"{gpu}:{count}"
            found = [
                default_prices().cheapest(region, node, include_imputed=True) for region in regions
            ]
            assert any(found), node


def test_with_rows_replaces_in_place() -> None:
    table = PriceTable((Price("a", "r", "L4:1", "x", 1.0), Price("a", "r", "L4:1", "y", 2.0)))
    changed = table.with_rows(
        [Price("a", "r", "L4:1", "x", 3.0), Price("b", "r", "L4:1", "x", 4.0)]
    )
    assert [row.usd_per_hour for row in changed] == [3.0, 2.0, 4.0]
    assert table.with_rows([]) == table


def test_against_the_reference_file() -> None:
    if not REFERENCE.exists():
        pytest.skip("needs ../shared/data/reference/gpu_prices.csv beside the repository")
    rows = [
        row
        for row in csv.DictReader(REFERENCE.read_text().splitlines())
        if row["gpu"] not in OTHER_GPUS
    ]
    catalog = Catalog.default()
    assert len(rows) == len(catalog.prices)
    for row, price in zip(rows, catalog.prices, strict=True):
        assert (price.cloud, price.region) == (row["cloud"], row["region"])
        assert price.node_type == f"{catalog.gpu(row['gpu']).name}:{row['gpu_count']}"
        assert price.usd_per_hour == (float(row["ondemand_usd_h"] or 0) or None)
        median = row["spot_usd_h_median"]
        assert price.cost(spot=True) == (pytest.approx(float(median)) if median else None)
        assert price.offered == (row["offered"] == "yes")
        assert price.snapshot == row["snapshot"]
