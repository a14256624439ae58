"""Everything a node is told when it joins; the command line, a YAML file and the environment all end here."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from atoll.core.errors import InputError, UsageError
from atoll.core.frozen import Frozen
from atoll.core.quantities import Duration, UsdPerHour
from atoll.fabric.registry.records import Metadata
from atoll.fabric.tunnel.accept import check_accept
from atoll.plan.names import refuse


def _words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _plain_url(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise refuse(InputError(f"{url!r} is no URL", hint="write http://127.0.0.1:8000"))
    if parts.username or not url.isascii() or " " in url:
        raise refuse(InputError("only scheme, host, port and path may be given"))
    return url.rstrip("/").removesuffix("/v1")


class JoinOptions(Frozen):
    """What a node offers, how it is watched, and how it ends. Times are in seconds.

    Prices are in US dollars: `price` per hour of the whole node, `price_in` and `price_out` per million
    tokens. `accept`: any, self, allow:NAME,... or deny:NAME,... `ends`: a time or "in how long".
    `notice_s`: how long before the end SIGUSR1 comes. `hung_s`: an engine not well for so long is started
    anew. `models`: a folder below which an assignment may name weights.
    """

    fabric: str | None = Field(default=None, repr=False)
    command: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    url: str | None = None
    port: int | None = Field(None, ge=1, le=65535)

    name: str | None = Field(None, min_length=1, max_length=100)
    region: str = ""
    site: str = ""
    price: UsdPerHour | None = Field(None, ge=0)
    price_in: float | None = Field(None, ge=0)
    price_out: float | None = Field(None, ge=0)
    stability: Literal["spot", "batch", "standard", "reserved"] = "standard"
    max_inflight: int | None = Field(None, ge=1)
    weight: float | None = Field(None, ge=0)
    advertise: str | None = None
    tunnel: bool = True
    proxy: str | None = Field(None, repr=False)
    accept: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    gpus: str | None = None

    service: str | None = Field(None, min_length=1, max_length=200)
    generic: bool = False
    kind: Literal["llm", "embedding"] | None = None
    precision: str | None = None
    context: int | None = Field(None, ge=1)
    aliases: dict[str, str] = Field(default_factory=dict)
    """Further names: alias -> model."""

    engine_key: str | None = Field(None, repr=False)
    """Sent to the engine as a bearer token."""
    health: str = "/health"
    health_interval: Duration = Field(2.0, gt=0)
    health_failures: int = Field(3, ge=1)
    health_timeout: Duration = Field(5.0, gt=0)
    ready: Duration = Field(1800.0, gt=0)
    hung: Duration = Field(300.0, gt=0)

    drain: Duration = Field(25.0, ge=0)
    ends: str | None = None
    notice: Duration = Field(120.0, ge=0)
    spot: Literal["aws", "gcp", "azure"] | None = None
    spot_url: str | None = None

    accept_assignments: bool = False
    models: str | None = None

    _urls = field_validator("url", "advertise", "spot_url")(_plain_url)

    @field_validator("health")
    @classmethod
    def _is_path(cls, path: str) -> str:
        if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
            raise refuse(InputError(f"{path!r} is no path", hint="write /health"))
        return path

    @field_validator("engine_key")
    @classmethod
    def _is_header(cls, key: str | None) -> str | None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise refuse(InputError("a key has printable characters only"))
        return key

    @field_validator("accept")
    @classmethod
    def _is_rule(cls, rule: str | None) -> str | None:
        try:
            check_accept(rule)
        except UsageError as error:
            raise refuse(InputError(error.message, hint=error.hint)) from error
        return rule

    @model_validator(mode="after")
    def _fits(self) -> JoinOptions:
        why = None
        if self.generic != (self.service is not None):
            why = "a generic service has a name", "--service NAME --generic"
        elif self.generic and not (self.command or self.url):
            why = "a generic service needs a command or a URL", "--url http://127.0.0.1:9000"
        elif not self.tunnel and self.advertise is None:
            why = "without the tunnel a node needs an address", "--advertise URL"
        if why is not None:
            # Not a ValueError, which would show all options, the token among them.
            raise refuse(InputError(why[0], hint=why[1]))
        return self

    @property
    def waits(self) -> bool:
        """Whether the node has nothing to serve by itself and waits for an assignment."""
        return not self.command and self.url is None

    def metadata(self, name: str, provider: str, role: str) -> Metadata:
        """Return what is said of the node apart from its hardware and what it serves."""
        assert role in ("hub", "worker", "gateway", "operator")
        return Metadata(
            name=name,
            provider=provider,
            role=role,  # type: ignore[arg-type]
            region=self.region,
            site=self.site,
            weight=self.weight,
            max_inflight=self.max_inflight,
            price_usd_per_hour=self.price,
            usd_per_mtoken_in=self.price_in,
            usd_per_mtoken_out=self.price_out,
            stability=self.stability,
            direct=self.advertise,
            accept=self.accept,
            labels=self.labels | ({"tunnel": "no"} if not self.tunnel else {}),
        )
