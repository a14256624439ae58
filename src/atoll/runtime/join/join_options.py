"""Everything a node is told when it joins; the command line, a YAML file and the environment all end here."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, field_validator, model_validator

from atoll.core.errors import InputError, UsageError
from atoll.core.frozen import Frozen
from atoll.core.options import option
from atoll.core.quantities import Duration, UsdPerHour
from atoll.fabric.tunnel.accept import check_accept
from atoll.plan.name_types import refuse

if TYPE_CHECKING:
    from atoll.fabric.registry.records import Metadata


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


_OFFER = "What is offered"
_WATCH = "How the engine is watched"
_END = "How it ends"


class JoinOptions(Frozen):
    """Options of a node: its offer, how it is watched, and how it ends. Times are in seconds.

    Prices are in US dollars: `price` per hour of the whole node, `price_in` and `price_out` per million
    tokens. `hung`: an engine not well for so long is started anew. Descriptions are those of `atoll join`,
    whose options these are (see `atoll.cli.options`); a field without one stands only in a file.
    """

    fabric: str | None = option(
        None,
        "The join token, @FILE that holds it, or open://host:port.",
        env="ATOLL_FABRIC",
        repr=False,
    )
    command: Annotated[tuple[str, ...], BeforeValidator(_words)] = option(
        (), "The engine's command, after --. {port} in it becomes a free port.", argument=True
    )
    url: str | None = option(
        None, "Offer a server that runs already, or say where COMMAND answers."
    )
    port: int | None = option(None, "Where COMMAND listens, if it does not say.", ge=1, le=65535)

    name: str | None = option(
        *(None, "This node's name. Default: the host's."),
        env="ATOLL_NODE",
        min_length=1,
        max_length=100,
    )
    region: str = option("", "Where it stands.", env="ATOLL_REGION")
    site: str = option("", "The cluster it belongs to.", env="ATOLL_SITE")
    price: UsdPerHour | None = option(None, "Of the whole node: $1.86/h.", panel=_OFFER, ge=0)
    price_in: float | None = option(None, "USD per million tokens read.", panel=_OFFER, ge=0)
    price_out: float | None = option(None, "USD per million tokens written.", panel=_OFFER, ge=0)
    stability: Literal["spot", "batch", "standard", "reserved"] = option(
        "standard", "spot, batch, standard or reserved.", panel=_OFFER
    )
    max_inflight: int | None = option(None, "Requests taken at a time.", panel=_OFFER, ge=1)
    weight: float | None = option(None, "Share of the requests by a plan.", panel=_OFFER, ge=0)
    advertise: str | None = option(
        None, "URL at which gateways may reach the engine without the tunnel.", panel=_OFFER
    )
    tunnel: bool = option(
        True, "Take requests through hubs.", panel=_OFFER, flag="--tunnel/--no-tunnel"
    )
    accept: str | None = option(
        None, "Whose requests: any, self, allow:NAME,... or deny:NAME,...", panel=_OFFER
    )
    labels: dict[str, str] = option(
        {}, "KEY=VALUE, shown in `atoll nodes`.", panel=_OFFER, flag="--label"
    )
    gpus: str | None = option(None, "GPUs, if the driver cannot tell: L4:2.", panel=_OFFER)
    aliases: dict[str, str] = option(
        {}, "ALIAS=MODEL: a further name of a model.", panel=_OFFER, flag="--alias"
    )
    precision: str | None = option(None, "bf16, fp8, int4, ...", panel=_OFFER)
    context: int | None = option(None, "Most tokens of a request.", panel=_OFFER, ge=1)
    kind: Literal["llm", "embedding"] | None = option(None, "llm or embedding.", panel=_OFFER)
    service: str | None = option(
        *(None, "Name of a service that is no LLM."), panel=_OFFER, min_length=1, max_length=200
    )
    generic: bool = option(False, "Offer any HTTP service (with --service).", panel=_OFFER)

    engine_key: str | None = option(
        *(None, "API key of the engine."), panel=_WATCH, env="ATOLL_ENGINE_KEY", repr=False
    )
    """Sent to the engine as a bearer token."""
    health: str = option("/health", "Path that says it is well.", panel=_WATCH)
    health_interval: Duration = option(2.0, "Between looks: 2s.", panel=_WATCH, gt=0)
    health_failures: int = option(3, "Bad looks before it is withdrawn.", panel=_WATCH, ge=1)
    health_timeout: Duration = option(5.0, "Longest look: 5s.", panel=_WATCH, gt=0)
    ready: Duration = option(1800.0, "Longest start of the engine: 30min.", panel=_WATCH, gt=0)
    hung: Duration = option(300.0, "Started anew if not well for: 5min.", panel=_WATCH, gt=0)

    restart: bool = option(
        True,
        "Start an engine that has ended again; without, the node ends with it.",
        panel=_WATCH,
        flag="--restart/--no-restart",
    )

    drain: Duration = option(25.0, "To finish what runs when stopping: 25s.", panel=_END, ge=0)
    ends: str | None = option(
        None,
        "When this node ends: 2h, 2025-07-01T18:00. Slurm's limit is read by itself.",
        panel=_END,
    )
    notice: Duration = option(
        120.0, "How long before the end SIGUSR1 comes: 120s.", panel=_END, ge=0
    )
    spot: Literal["aws", "gcp", "azure"] | None = option(
        None, "Heed notices of aws, gcp or azure.", panel=_END
    )
    spot_url: str | None = None
    """Where such notices are asked for, if not where that cloud has them."""

    measure: bool = option(
        False,
        "Measure this machine before it joins, a few minutes: its GPU's operators, or its cores.",
    )
    accept_assignments: bool = option(
        False, "Let operators change what is served (`atoll assign`)."
    )
    models: str | None = option(
        None, "A folder from which operators may assign weights.", metavar="<path>"
    )
    proxy: str | None = option(None, "HTTP proxy to the hubs. Default: $https_proxy.", repr=False)

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
        from atoll.fabric.registry.records import Metadata

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
