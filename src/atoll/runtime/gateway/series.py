"""Metrics beyond requests: decisions, refusals, the fabric, the tunnel, keys.

Read from those who keep the numbers when Prometheus asks. Labels are reasons, states and providers of the
fabric: bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client.core import Metric

from atoll.runtime.gateway.chooser import BackendChooser
from atoll.runtime.pool.pool import BackendPool
from atoll.telemetry.metrics import CounterFamily, make_counter, make_gauge

_MAX_PROVIDERS = 200
"""Values of the label `provider`, so that the metric stays bounded."""
_CALLS = ("calls", "lost", "forged", "violations")


class CountsStats(Protocol):
    """Keeps figures of itself: the fabric, the tunnel's caller, accounts."""

    def stats(self) -> Mapping[str, Any]:
        """Return the figures by name."""
        ...


class CountsFabric(Protocol):
    """A federation, as far as its parts count: the registry, and the gateway's end of the tunnel."""

    @property
    def fabric(self) -> CountsStats:
        """The registry and its transport."""
        ...

    @property
    def caller(self) -> CountsStats:
        """The gateway's end of the tunnel."""
        ...


class SeriesSource(Protocol):
    """A gateway, as far as its parts count."""

    pool: BackendPool
    chooser: BackendChooser
    detailed: bool
    """Whether it is known which provider made an answer."""

    @property
    def federation(self) -> CountsFabric | None:
        """The fabric, if there is one."""
        ...

    @property
    def accounts(self) -> CountsStats | None:
        """Keys and usage, if they are kept."""
        ...


class Series:
    """The series of a gateway that others keep."""

    def __init__(self, source: SeriesSource) -> None:
        self._source = source
        self._tokens = CounterFamily(
            "atoll_provider_tokens_total",
            "Tokens of answers, by the provider that made them.",
            ("provider",),
            limit=_MAX_PROVIDERS,
        )

    def tokens(self, provider: str | None, count: int) -> None:
        """Count tokens of a provider."""
        self._tokens.child(provider or "").add(count)

    def read(self) -> Iterable[Metric]:
        """Return the series there are now."""
        source = self._source
        yield make_counter(
            "atoll_routing_decisions_total",
            "Backends chosen, by reason; alias and fallback: under another model's name.",
            ("reason",),
            _rows({**source.pool.decisions, **source.chooser.stand_ins}),
        )
        yield make_counter(
            "atoll_policy_refusals_total",
            "Requests that no node might serve, by what the nodes lacked.",
            ("reason",),
            _rows(source.chooser.refusals),
        )
        table = source.chooser.choice_table
        if table.by_name:
            yield table.requests.read()
            yield table.stand_ins.read()
        if source.detailed:
            yield self._tokens.read()
        if source.federation is not None:
            yield from _fabric(source.federation.fabric.stats())
            yield from _tunnel(source.federation.caller.stats())
        if source.accounts is not None:
            yield from _accounts(source.accounts.stats())


def _fabric(stats: Mapping[str, Any]) -> list[Metric]:
    spread_s = stats.get("spread_s")
    return [
        make_gauge(
            "atoll_fabric_members",
            "Sessions in the registry, by state.",
            ("state",),
            _rows(stats.get("sessions", {})),
        ),
        _gauge(
            "atoll_fabric_alive",
            "Sessions whose token is up, this one among them.",
            stats.get("alive", 0),
        ),
        _gauge("atoll_fabric_hubs", "Hubs this gateway is connected to.", stats.get("hubs", 0)),
        make_counter(
            "atoll_fabric_refused_total",
            "Records refused, by reason.",
            ("reason",),
            _rows(stats.get("refused", {})),
        ),
        make_gauge(
            "atoll_fabric_convergence_seconds",
            "From the signing of the last news to its arrival here.",
            (),
            [] if spread_s is None else [((), float(spread_s))],
        ),
    ]


def _tunnel(stats: Mapping[str, float]) -> list[Metric]:
    return [
        _gauge(
            "atoll_tunnel_streams",
            "Requests running through the tunnel.",
            stats.get("open_calls", 0.0),
        ),
        make_counter(
            "atoll_tunnel_calls_total",
            "Requests through the tunnel, and what went wrong with them, by kind.",
            ("kind",),
            [((kind,), stats.get(kind, 0.0)) for kind in _CALLS],
        ),
    ]


def _accounts(stats: Mapping[str, Any]) -> list[Metric]:
    return [
        make_counter(
            "atoll_keys_refused_total",
            "Requests refused for their key, by status.",
            ("status",),
            _rows(stats.get("refused", {})),
        ),
        _gauge(
            "atoll_accounts_unwritten",
            "Finished requests that the database does not have yet.",
            stats.get("unwritten", 0),
        ),
        _gauge(
            "atoll_accounts_database_up",
            "1 while the database of keys and usage answers.",
            bool(stats.get("database_up")),
        ),
        _gauge(
            "atoll_accounts_journal_full",
            "1 while what requests use cannot be written down.",
            bool(stats.get("journal_full")),
        ),
        make_counter(
            "atoll_accounts_lost_total",
            "Requests served on a full disk that the ledger will not have.",
            (),
            [((), float(stats.get("lost", 0)))],
        ),
        _gauge(
            "atoll_accounts_gateways",
            "Gateways that share limits through the database.",
            stats.get("gateways", 1),
        ),
        _gauge(
            "atoll_accounts_rates_shared",
            "1 while limits a minute are shared; 0: each gateway goes by an equal share of them.",
            bool(stats.get("rates_shared", True)),
        ),
    ]


def _gauge(name: str, help_text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return make_gauge(name, help_text, (), [((), float(value))])


def _rows(numbers: Mapping[Any, float]) -> list[tuple[tuple[str, ...], float]]:
    return [((str(name),), float(number)) for name, number in numbers.items()]
