"""What a gateway counts beyond requests: decisions, refusals, the fabric, the tunnel, keys.

Read from those who keep the numbers when Prometheus asks. Labels are reasons, states and providers of the
fabric: bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client.core import Metric

from atoll.telemetry.metrics import CounterFamily, make_counter, make_gauge

_PROVIDERS = 200
_CALLS = ("calls", "lost", "forged", "violations")


class CountsStats(Protocol):
    """What keeps figures of itself: the fabric, the tunnel's caller, accounts."""

    def stats(self) -> Mapping[str, Any]:
        """Return the figures by name."""
        ...


class CountsDecisions(Protocol):
    """A pool, as far as it counts why backends were chosen."""

    @property
    def decisions(self) -> Mapping[Any, int]:
        """Backends chosen, by reason."""
        ...


class CountsRefusals(Protocol):
    """A chooser, as far as it counts what special requests came to."""

    @property
    def stand_ins(self) -> Mapping[str, int]:
        """Requests served under another model's name, by why."""
        ...

    @property
    def refusals(self) -> Mapping[str, int]:
        """Requests that no node might serve, by what the nodes lacked."""
        ...

    @property
    def choices(self) -> CountsChoices:
        """Names that several models answer to."""
        ...


class CountsChoices(Protocol):
    """A table of choices between models, as far as it counts who answered."""

    requests: CounterFamily
    stand_ins: CounterFamily

    @property
    def by_name(self) -> Mapping[str, object]:
        """The choices that there are."""
        ...


class CountsFabric(Protocol):
    """A federation, as far as its parts count."""

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

    @property
    def pool(self) -> CountsDecisions:
        """The pool of backends, which counts how it chose among them."""
        ...

    @property
    def chooser(self) -> CountsRefusals:
        """What finds a backend for a special request."""
        ...

    @property
    def federation(self) -> CountsFabric | None:
        """The fabric, if there is one."""
        ...

    @property
    def accounts(self) -> CountsStats | None:
        """Keys and usage, if they are kept."""
        ...

    @property
    def detailed(self) -> bool:
        """Whether it is known which provider made an answer."""
        ...


class Series:
    """The series of a gateway that others keep."""

    def __init__(self, source: SeriesSource) -> None:
        self._source = source
        self._tokens = CounterFamily(
            "atoll_provider_tokens_total",
            "Tokens of answers, by the provider that made them.",
            ("provider",),
            limit=_PROVIDERS,
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
        choices = source.chooser.choices
        if choices.by_name:
            yield choices.requests.read()
            yield choices.stand_ins.read()
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
        make_gauge(
            "atoll_fabric_alive",
            "Sessions whose token is up, this one among them.",
            (),
            [((), float(stats.get("alive", 0)))],
        ),
        make_gauge(
            "atoll_fabric_hubs",
            "Hubs this gateway is connected to.",
            (),
            [((), float(stats.get("hubs", 0)))],
        ),
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
        make_gauge(
            "atoll_tunnel_streams",
            "Requests running through the tunnel.",
            (),
            [((), stats.get("open_calls", 0.0))],
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
        make_gauge(
            "atoll_accounts_unwritten",
            "Finished requests that the database does not have yet.",
            (),
            [((), float(stats.get("unwritten", 0)))],
        ),
        make_gauge(
            "atoll_accounts_database_up",
            "1 while the database of keys and usage answers.",
            (),
            [((), float(bool(stats.get("database_up"))))],
        ),
        make_gauge(
            "atoll_accounts_journal_full",
            "1 while what requests use cannot be written down.",
            (),
            [((), float(bool(stats.get("journal_full"))))],
        ),
        make_counter(
            "atoll_accounts_lost_total",
            "Requests served on a full disk that the ledger will not have.",
            (),
            [((), float(stats.get("lost", 0)))],
        ),
        make_gauge(
            "atoll_accounts_gateways",
            "Gateways that share limits through the database.",
            (),
            [((), float(stats.get("gateways", 1)))],
        ),
        make_gauge(
            "atoll_accounts_rates_shared",
            "1 while limits a minute are shared; 0: each gateway goes by an equal share of them.",
            (),
            [((), float(bool(stats.get("rates_shared", True))))],
        ),
    ]


def _rows(numbers: Mapping[Any, float]) -> list[tuple[tuple[str, ...], float]]:
    return [((str(name),), float(number)) for name, number in numbers.items()]
