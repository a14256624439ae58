"""The page of a gateway: what it counts itself, and what its parts count, by the narrow view on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.gateway.gateway_metrics import GatewayMetrics
from atoll.runtime.gateway.series import Series
from atoll.runtime.gateway.settings import GatewaySettings
from atoll.runtime.pool.pool import BackendPool


@dataclass
class Part:
    """Anything that counts."""

    found: dict[str, Any]

    def stats(self) -> dict[str, Any]:
        return self.found


def make_chooser(
    stand_ins: dict[str, int] | None = None, refusals: dict[str, int] | None = None
) -> BackendChooser:
    chooser = BackendChooser(BackendPool(), None, GatewaySettings())
    chooser.stand_ins.update(stand_ins or {})
    chooser.refusals.update(refusals or {})
    return chooser


@dataclass
class Federation:
    fabric: Part
    caller: Part


@dataclass
class Source:
    """No gateway, but all that the series need of one."""

    pool: BackendPool = field(default_factory=BackendPool)
    chooser: BackendChooser = field(default_factory=make_chooser)
    federation: Federation | None = None
    accounts: Part | None = None
    detailed: bool = False


def numbers(source: Source, series: Series | None = None) -> dict[tuple[str, ...], float]:
    metrics = GatewayMetrics(source.pool)
    metrics.more = (series or Series(source)).read
    page = metrics.page(3, 4).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_a_gateway_alone() -> None:
    found = numbers(Source(chooser=make_chooser({"alias": 2}, {"gpu": 5})))
    assert found["atoll_gateway_running",] == 3
    assert found["atoll_gateway_connections",] == 4
    assert found["atoll_routing_decisions_total", "alias"] == 2
    assert found["atoll_policy_refusals_total", "gpu"] == 5
    assert not any(name[0].startswith(("atoll_fabric", "atoll_keys")) for name in found)


def test_a_gateway_of_a_fabric_with_keys() -> None:
    source = Source(
        federation=Federation(
            Part({"sessions": {"serving": 2}, "alive": 3, "hubs": 1, "refused": {"late": 4}}),
            Part({"open_calls": 5.0, "calls": 6.0}),
        ),
        accounts=Part({"refused": {401: 7}, "unwritten": 8, "database_up": True}),
        detailed=True,
    )
    series = Series(source)
    series.tokens("ETH", 9)
    series.tokens(None, 1)
    found = numbers(source, series)
    assert found["atoll_fabric_members", "serving"] == 2
    assert found["atoll_fabric_refused_total", "late"] == 4
    assert found["atoll_tunnel_calls_total", "calls"] == 6
    assert found["atoll_tunnel_calls_total", "lost"] == 0
    assert found["atoll_keys_refused_total", "401"] == 7
    assert found["atoll_accounts_database_up",] == 1
    assert found["atoll_provider_tokens_total", "ETH"] == 9
    assert found["atoll_provider_tokens_total", ""] == 1
    assert ("atoll_fabric_convergence_seconds",) not in found


def test_a_number_that_is_none_does_not_end_the_page() -> None:
    fabric = Part({"spread_s": math.nan, "alive": math.inf, "sessions": {"x": math.nan}})
    found = numbers(Source(federation=Federation(fabric, Part({"calls": math.nan}))))
    assert math.isnan(found["atoll_fabric_convergence_seconds",])
    assert found["atoll_fabric_alive",] == math.inf
    assert math.isnan(found["atoll_tunnel_calls_total", "calls"])
    assert found["atoll_tunnel_calls_total", "violations"] == 0
