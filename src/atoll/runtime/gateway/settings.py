"""Settings of a gateway: limits, deadlines, health checks, who listens where."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from atoll.core.frozen import Frozen
from atoll.runtime.gateway.budgets import MAX_BUDGETS, BudgetSettings
from atoll.runtime.gateway.cors import CorsSettings
from atoll.runtime.gateway.dialects.kept_responses import ResponsesSettings
from atoll.runtime.gateway.kept_streams import StreamsSettings
from atoll.runtime.http.http_request import (
    ConnectionDeadlines,
    ConnectionLimits,
    Count,
    Seconds,
)
from atoll.runtime.media.media_limits import MediaLimits
from atoll.runtime.openai import FORMS
from atoll.runtime.pool.member import ConfiguredBackend
from atoll.runtime.pool.outliers import OutlierSettings
from atoll.runtime.pool.routes import MAX_MODELS, ChoiceRoutes, ModelPromise
from atoll.runtime.realtime.realtime_limits import RealtimeLimits

_FORM_PATHS = frozenset(path.encode() for path in FORMS)


# Plain dataclasses, because they are looked at several times a request; checked where they are part of
# `GatewaySettings`.


@dataclass(frozen=True, slots=True)
class GatewayLimits(ConnectionLimits):
    """How much of everything is accepted."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    header_bytes: Count = 32 * 2**10
    media_body_bytes: Count = 64 * 2**20
    """Of a form with a file (`/v1/audio/transcriptions`) instead, where that is more."""
    content_parts: Count = 1024
    """Pieces (texts, pictures, sounds) in the messages of one request; more are answered with 400."""
    requests: Count = 4096
    """Running at the same time; more are answered with 503 and Retry-After."""
    answer_bytes: Count = 256 * 2**20
    """Of an answer that is not a stream."""

    def body_limit(self, path: bytes) -> int:
        """Return how many bytes the body of a request to a path may have."""
        is_form = path in _FORM_PATHS and self.media_body_bytes > self.body_bytes
        return self.media_body_bytes if is_form else self.body_bytes


@dataclass(frozen=True, slots=True)
class Deadlines(ConnectionDeadlines):
    """How long anything may take, in seconds. No hop is without one."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    connect_s: Seconds = 2.0
    first_token_s: Seconds = 60.0
    """From sending a streaming request to a backend to the first token (queue and prefill)."""
    prefill_s: Seconds = 30.0
    """For a prompt that another backend computes than the one that decodes; then a second one is asked."""
    between_tokens_s: Seconds = 15.0
    answer_s: Seconds = 600.0
    """For the answer to a request that does not stream."""
    request_s: Seconds = 3600.0
    """For a request over all its attempts."""
    retry_s: Seconds = 5.0
    """How long a request that failed before its first token looks for another backend."""
    resume_s: Seconds = 30.0
    """How long a stream that broke off looks for another backend."""


class HealthSettings(Frozen):
    """How backends are watched."""

    interval_s: float = Field(5.0, gt=0)
    timeout_s: float = Field(2.0, gt=0)
    failures: int = Field(2, ge=1)
    """Failed checks in a row until a backend counts as down."""
    path: str = "/health"
    enabled: bool = True


class GatewaySettings(Frozen):
    """All settings of a gateway but its backends."""

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    """0: any free port."""
    share_port: bool = False
    """Whether other gateways of this user may listen on the same port, each to a part of the connections."""
    attempts: int = Field(3, ge=1)
    """Backends a request is sent to, at most, without a token in between."""
    limits: GatewayLimits = GatewayLimits()
    media: MediaLimits = MediaLimits()
    """How much a request may bring of each kind; what of it needs decoding is checked by backends."""
    realtime: RealtimeLimits = RealtimeLimits()
    """How many sessions of `/v1/realtime` there may be, how long, and how much each may hold."""
    deadlines: Deadlines = Deadlines()
    health: HealthSettings = HealthSettings()
    outliers: OutlierSettings = OutlierSettings()
    policy: str = "iwrr"
    affinity: bool = False
    """Whether a conversation goes to the backend that served it before, unless that one is busy."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names of models."""
    choices: dict[str, ChoiceRoutes] = Field(default_factory=dict)
    """Names that several models answer to, each its share of the requests."""
    promises: dict[str, ModelPromise] = Field(default_factory=dict, max_length=MAX_MODELS)
    """Promises of models, so that it is seen who keeps them; a controller's word on a model counts more."""
    queue_s: float = Field(0.0, ge=0)
    """How long a request may wait for a backend with room; only with keys, a fabric or affinity."""
    handover_s: float = Field(10.0, ge=0)
    """So long before a node ends, what runs there is moved."""
    flap_s: float = Field(0.3, ge=0)
    """A node of a fabric that is back after less than this keeps what runs there."""
    direct: bool = True
    """Whether nodes of a fabric that say an address are asked there, without the tunnel."""
    admin_token: str | None = Field(None, min_length=1, repr=False)
    """Opens /atoll/v1 and /metrics on the public port; without one they need an API key of an admin."""
    admin_socket: str | None = None
    """Unix socket with both, for this user alone; None: gateway-PORT.sock in the runtime folder, or
    gateway-PORT-PID.sock where it shares the port; "": none."""
    metrics: str | None = None
    """HOST:PORT of this machine with /metrics alone, without a token, for Prometheus."""
    history: str | None = Field(None, max_length=4096)
    """Where its history is kept: a file, or the URL of a Prometheus that reads /metrics and is asked for it;
    None: a file of SQLite in the user's state folder, called by the port; "": nowhere."""
    budgets: tuple[BudgetSettings, ...] = Field((), max_length=MAX_BUDGETS)
    """What keys, owners or all may cost a month before it is an alarm; only with keys."""
    cors: CorsSettings | None = None
    """Whose pages may ask from a browser; None: no page of another origin."""
    streams: StreamsSettings | None = None
    """Where streams are kept that other gateways may go on with; None: nowhere."""
    responses: ResponsesSettings = ResponsesSettings()
    """For how long conversations of `/v1/responses` are kept (`previous_response_id`)."""
    access_log: bool = True
    on_full_disk: Literal["refuse", "serve"] = "refuse"
    """With keys, while the disk does not take what requests use: 503, or serve and mark the ledger."""

    @field_validator("metrics")
    @classmethod
    def _this_machine(cls, address: str | None) -> str | None:
        if address is not None:
            host, port = split_address(address)
            if not port.isascii() or not port.isdigit() or int(port) > 65535:
                raise ValueError("an address like 127.0.0.1:9464 is needed")
            if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
                raise ValueError(
                    "only an address of this machine may be given; from elsewhere, ask the public port "
                    "for /metrics with the admin token"
                )
        return address


def split_address(address: str) -> tuple[str, str]:
    """Return host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


class GatewayFile(GatewaySettings):
    """A configuration file: the settings and the backends."""

    backends: tuple[ConfiguredBackend, ...] = ()
