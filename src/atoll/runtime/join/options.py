"""Everything a node is told when it joins; the command line, a YAML file and the environment all end here."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic.config import JsonDict

from atoll.core.errors import InputError, UsageError
from atoll.core.frozen import Frozen
from atoll.core.quantities import Duration, UsdPerHour
from atoll.fabric.tunnel.accept import check_accept
from atoll.plan.names import refuse

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


_OFFER: JsonDict = {"panel": "What is offered"}
_WATCH: JsonDict = {"panel": "How the engine is watched"}
_END: JsonDict = {"panel": "How it ends"}


class JoinOptions(Frozen):
    """What a node offers, how it is watched, and how it ends. Times are in seconds.

    Prices are in US dollars: `price` per hour of the whole node, `price_in` and `price_out` per million
    tokens. `hung`: an engine not well for so long is started anew. Descriptions are those of `atoll join`,
    whose options these are (see `atoll.cli.options`); a field without one stands only in a file.
    """

    fabric: str | None = Field(
        None,
        repr=False,
        description="The join token, @FILE that holds it, or open://host:port.",
        json_schema_extra={"env": "ATOLL_FABRIC"},
    )
    command: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(
        (),
        description="The engine's command, after --. {port} in it becomes a free port.",
        json_schema_extra={"argument": True},
    )
    url: str | None = Field(
        None, description="Offer a server that runs already, or say where COMMAND answers."
    )
    port: int | None = Field(
        None, ge=1, le=65535, description="Where COMMAND listens, if it does not say."
    )

    name: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="This node's name. Default: the host's.",
        json_schema_extra={"env": "ATOLL_NODE"},
    )
    region: str = Field(
        "", description="Where it stands.", json_schema_extra={"env": "ATOLL_REGION"}
    )
    site: str = Field(
        "", description="The cluster it belongs to.", json_schema_extra={"env": "ATOLL_SITE"}
    )
    price: UsdPerHour | None = Field(
        None, ge=0, description="Of the whole node: $1.86/h.", json_schema_extra=_OFFER
    )
    price_in: float | None = Field(
        None, ge=0, description="USD per million tokens read.", json_schema_extra=_OFFER
    )
    price_out: float | None = Field(
        None, ge=0, description="USD per million tokens written.", json_schema_extra=_OFFER
    )
    stability: Literal["spot", "batch", "standard", "reserved"] = Field(
        "standard", description="spot, batch, standard or reserved.", json_schema_extra=_OFFER
    )
    max_inflight: int | None = Field(
        None, ge=1, description="Requests taken at a time.", json_schema_extra=_OFFER
    )
    weight: float | None = Field(
        None, ge=0, description="Share of the requests by a plan.", json_schema_extra=_OFFER
    )
    advertise: str | None = Field(
        None,
        description="URL at which gateways may reach the engine without the tunnel.",
        json_schema_extra=_OFFER,
    )
    tunnel: bool = Field(
        True,
        description="Take requests through hubs.",
        json_schema_extra=_OFFER | {"flag": "--tunnel/--no-tunnel"},
    )
    accept: str | None = Field(
        None,
        description="Whose requests: any, self, allow:NAME,... or deny:NAME,...",
        json_schema_extra=_OFFER,
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="KEY=VALUE, shown in `atoll nodes`.",
        json_schema_extra=_OFFER | {"flag": "--label"},
    )
    gpus: str | None = Field(
        None, description="GPUs, if the driver cannot tell: L4:2.", json_schema_extra=_OFFER
    )
    aliases: dict[str, str] = Field(
        default_factory=dict,
        description="ALIAS=MODEL: a further name of a model.",
        json_schema_extra=_OFFER | {"flag": "--alias"},
    )
    precision: str | None = Field(
        None, description="bf16, fp8, int4, ...", json_schema_extra=_OFFER
    )
    context: int | None = Field(
        None, ge=1, description="Most tokens of a request.", json_schema_extra=_OFFER
    )
    kind: Literal["llm", "embedding"] | None = Field(
        None, description="llm or embedding.", json_schema_extra=_OFFER
    )
    service: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Name of a service that is no LLM.",
        json_schema_extra=_OFFER,
    )
    generic: bool = Field(
        False, description="Offer any HTTP service (with --service).", json_schema_extra=_OFFER
    )

    engine_key: str | None = Field(
        None,
        repr=False,
        description="API key of the engine.",
        json_schema_extra=_WATCH | {"env": "ATOLL_ENGINE_KEY"},
    )
    """Sent to the engine as a bearer token."""
    health: str = Field(
        "/health", description="Path that says it is well.", json_schema_extra=_WATCH
    )
    health_interval: Duration = Field(
        2.0, gt=0, description="Between looks: 2s.", json_schema_extra=_WATCH
    )
    health_failures: int = Field(
        3, ge=1, description="Bad looks before it is withdrawn.", json_schema_extra=_WATCH
    )
    health_timeout: Duration = Field(
        5.0, gt=0, description="Longest look: 5s.", json_schema_extra=_WATCH
    )
    ready: Duration = Field(
        1800.0, gt=0, description="Longest start of the engine: 30min.", json_schema_extra=_WATCH
    )
    hung: Duration = Field(
        300.0, gt=0, description="Started anew if not well for: 5min.", json_schema_extra=_WATCH
    )

    drain: Duration = Field(
        25.0, ge=0, description="To finish what runs when stopping: 25s.", json_schema_extra=_END
    )
    ends: str | None = Field(
        None,
        description="When this node ends: 2h, 2025-07-01T18:00. Slurm's limit is read by itself.",
        json_schema_extra=_END,
    )
    notice: Duration = Field(
        120.0,
        ge=0,
        description="How long before the end SIGUSR1 comes: 120s.",
        json_schema_extra=_END,
    )
    spot: Literal["aws", "gcp", "azure"] | None = Field(
        None, description="Heed notices of aws, gcp or azure.", json_schema_extra=_END
    )
    spot_url: str | None = None
    """Where such notices are asked for, if not where that cloud has them."""

    accept_assignments: bool = Field(
        False, description="Let operators change what is served (`atoll assign`)."
    )
    models: str | None = Field(
        None,
        description="A folder from which operators may assign weights.",
        json_schema_extra={"metavar": "<path>"},
    )
    proxy: str | None = Field(
        None, repr=False, description="HTTP proxy to the hubs. Default: $https_proxy."
    )

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
