"""What a gateway counts beyond requests: decisions, refusals, the fabric, the tunnel, keys.

Read from those who keep the numbers when Prometheus asks. Labels are reasons, states and providers of the
fabric: bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from atoll.telemetry.metrics import Count, Family, Gauge, Total

if TYPE_CHECKING:
    from atoll.runtime.gateway.app import Gateway

Rows = list[tuple[tuple[str, ...], float]]
_PROVIDERS = 200
_CALLS = ("calls", "lost", "forged", "violations")


class Series:
    """The series of a gateway that others keep."""

    def __init__(self, app: Gateway) -> None:
        self._app = app
        self._tokens = Family(
            "atoll_provider_tokens_total",
            "Tokens of answers, by the provider that made them.",
            Count,
            ("provider",),
            limit=_PROVIDERS,
        )

    def tokens(self, provider: str | None, count: int) -> None:
        """Count tokens of a provider."""
        self._tokens.child(provider or "").add(count)

    def read(self) -> Iterable[Family[Count] | Gauge]:
        """Return the series there are now."""
        app = self._app
        found: list[Family[Count] | Gauge] = [
            Total(
                "atoll_routing_decisions_total",
                "Backends chosen, by reason; alias and fallback: under another model's name.",
                ("reason",),
                lambda: _rows({**app.pool.decisions, **app.chooser.stand_ins}),
            ),
            Total(
                "atoll_policy_refusals_total",
                "Requests that no node might serve, by what the nodes lacked.",
                ("reason",),
                lambda: _rows(app.chooser.refusals),
            ),
        ]
        if app.detailed:
            found.append(self._tokens)
        if app.federation is not None:
            found += _fabric(app.federation.fabric.stats())
            found += _tunnel(app.federation.caller.stats())
        if app.accounts is not None:
            found += _accounts(app.accounts.stats())
        return found


def _fabric(stats: Mapping[str, Any]) -> list[Gauge]:
    spread_s = stats.get("spread_s")
    return [
        Gauge(
            "atoll_fabric_members",
            "Sessions in the registry, by state.",
            ("state",),
            lambda: _rows(stats.get("sessions", {})),
        ),
        Gauge(
            "atoll_fabric_alive",
            "Sessions whose token is up, this one among them.",
            (),
            lambda: [((), float(stats.get("alive", 0)))],
        ),
        Gauge(
            "atoll_fabric_hubs",
            "Hubs this gateway is connected to.",
            (),
            lambda: [((), float(stats.get("hubs", 0)))],
        ),
        Total(
            "atoll_fabric_refused_total",
            "Records refused, by reason.",
            ("reason",),
            lambda: _rows(stats.get("refused", {})),
        ),
        Gauge(
            "atoll_fabric_convergence_seconds",
            "From the signing of the last news to its arrival here.",
            (),
            lambda: [] if spread_s is None else [((), float(spread_s))],
        ),
    ]


def _tunnel(stats: Mapping[str, float]) -> list[Gauge]:
    return [
        Gauge(
            "atoll_tunnel_streams",
            "Requests running through the tunnel.",
            (),
            lambda: [((), stats.get("open_calls", 0.0))],
        ),
        Total(
            "atoll_tunnel_calls_total",
            "Requests through the tunnel, and what went wrong with them, by kind.",
            ("kind",),
            lambda: [((kind,), stats.get(kind, 0.0)) for kind in _CALLS],
        ),
    ]


def _accounts(stats: Mapping[str, Any]) -> list[Gauge]:
    return [
        Total(
            "atoll_keys_refused_total",
            "Requests refused for their key, by status.",
            ("status",),
            lambda: _rows(stats.get("refused", {})),
        ),
        Gauge(
            "atoll_accounts_unwritten",
            "Finished requests that the database does not have yet.",
            (),
            lambda: [((), float(stats.get("unwritten", 0)))],
        ),
        Gauge(
            "atoll_accounts_database_up",
            "1 while the database of keys and usage answers.",
            (),
            lambda: [((), float(bool(stats.get("database_up"))))],
        ),
    ]


def _rows(numbers: Mapping[Any, float]) -> Rows:
    return [((str(name),), float(number)) for name, number in numbers.items()]
