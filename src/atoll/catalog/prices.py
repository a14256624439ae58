"""Prices of nodes: what a cloud asks per hour for a machine, on demand and on spot."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from atoll.catalog.name_lookup import fold
from atoll.catalog.resources import data_text
from atoll.core.ids import format_node_type, parse_node_type


@dataclass(frozen=True, slots=True)
class SpotPrice:
    """Spot price in USD per hour over a region's zones; min and max None if imputed."""

    median: float
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """One machine of one cloud in one region; prices in USD per hour for the whole node.

    `usd_per_hour` is None where the machine is sold on spot only. A row that is not `offered` is
    `imputed`, a pro-rata price of the nearest size sold, or `retired`, sold until `snapshot`.
    """

    cloud: str
    region: str
    node_type: str
    instance: str | None
    usd_per_hour: float | None
    spot_usd_per_hour: SpotPrice | None = None
    zones: int | None = None
    offered: bool = True
    imputed: bool = False
    retired: bool = False
    snapshot: str | None = None
    vcpus: float | None = None
    memory_gib: float | None = None
    note: str | None = None

    @property
    def gpu(self) -> str:
        """Canonical name of the GPU type."""
        gpu, _ = parse_node_type(self.node_type)
        return gpu

    @property
    def count(self) -> int:
        """GPUs in the node."""
        _, count = parse_node_type(self.node_type)
        return count

    @property
    def place(self) -> str:
        """Cloud and region, "aws/us-east-2"."""
        return f"{self.cloud}/{self.region}"

    @property
    def key(self) -> tuple[str, str, str, str | None]:
        """Identity of the row: cloud, region, node type, instance."""
        return (self.cloud, self.region, self.node_type, self.instance)

    def cost(self, *, spot: bool = False) -> float | None:
        """USD per hour on demand, or the median spot price; None where not sold that way."""
        if not spot:
            return self.usd_per_hour
        return None if self.spot_usd_per_hour is None else self.spot_usd_per_hour.median

    def is_in(self, region: str) -> bool:
        """Whether `region` names this row's region ("us-east-2"), place ("aws/...") or cloud."""
        return fold(region) in (fold(self.region), fold(self.place), fold(self.cloud))


@dataclass(frozen=True, slots=True)
class PriceTable:
    """All price rows, kept in the order of the data file."""

    rows: tuple[Price, ...]

    def __iter__(self) -> Iterator[Price]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def regions(self) -> tuple[str, ...]:
        """Every place with a price, "cloud/region", sorted."""
        return tuple(sorted({row.place for row in self.rows}))

    def query(
        self,
        *,
        region: str | None = None,
        gpu: str | None = None,
        count: int | None = None,
        spot: bool = False,
        include_imputed: bool = False,
        include_retired: bool = False,
    ) -> tuple[Price, ...]:
        """Rows that match every filter; `gpu` is a canonical name, `spot` asks for a spot price.

        Sizes nobody sells and machines no longer sold are left out unless asked for.
        """
        return tuple(
            row
            for row in self.rows
            if (region is None or row.is_in(region))
            and (gpu is None or row.gpu == gpu)
            and (count is None or row.count == count)
            and (not spot or row.spot_usd_per_hour is not None)
            and (
                row.offered
                or (row.imputed and include_imputed)
                or (row.retired and include_retired)
            )
        )

    def cheapest(
        self,
        region: str,
        node_type: str,
        *,
        spot: bool = False,
        include_imputed: bool = False,
    ) -> Price | None:
        """The cheapest machine of a canonical node type in a region, None if none is sold that way.

        Offered machines are preferred to imputed prices whatever they cost.
        """
        gpu, count = parse_node_type(node_type)
        rows = self.query(region=region, gpu=gpu, count=count, include_imputed=include_imputed)
        priced = [
            (not row.offered, cost, row)
            for row in rows
            if (cost := row.cost(spot=spot)) is not None
        ]
        return min(priced, key=lambda item: item[:2])[2] if priced else None

    def cheapest_by_node(
        self, region: str, *, spot: bool = False, include_imputed: bool = False
    ) -> dict[str, Price]:
        """For every node type sold in a region, its cheapest machine."""
        rows = self.query(region=region, include_imputed=include_imputed)
        prices = {
            node: self.cheapest(region, node, spot=spot, include_imputed=include_imputed)
            for node in dict.fromkeys(row.node_type for row in rows)
        }
        return {node: price for node, price in prices.items() if price is not None}

    def with_rows(self, rows: Iterable[Price]) -> PriceTable:
        """The table with rows added; a row of the same key replaces the old one in its place."""
        merged = {row.key: row for row in self.rows}
        merged.update((row.key, row) for row in rows)
        return PriceTable(tuple(merged.values()))


@cache
def default_prices() -> PriceTable:
    """The price snapshot that ships with Atoll."""
    return PriceTable(tuple(map(_price, csv.DictReader(data_text("prices.csv").splitlines()))))


def _price(row: dict[str, str]) -> Price:
    def number(key: str) -> float | None:
        return float(row[key]) if row[key] else None

    median = number("spot_median")
    zones = number("zones")
    return Price(
        cloud=row["cloud"],
        region=row["region"],
        node_type=format_node_type(row["gpu"], int(row["count"])),
        instance=row["instance"] or None,
        usd_per_hour=number("usd_per_hour"),
        spot_usd_per_hour=None
        if median is None
        else SpotPrice(median, number("spot_min"), number("spot_max")),
        zones=None if zones is None else int(zones),
        offered=row["status"] == "yes",
        imputed=row["status"] == "imputed",
        retired=row["status"] == "retired",
        snapshot=row["snapshot"],
        vcpus=number("vcpus"),
        memory_gib=number("memory_gib"),
        note=row["note"] or None,
    )
