"""One backend of a pool: what it is, what a node says of itself, how it fares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from atoll.core.frozen import Frozen
from atoll.engines.table import ENGINES, UNKNOWN, list_kinds
from atoll.fabric.identity.fabric_keys import slot_of
from atoll.runtime.pool.model_facts import ModelFacts
from atoll.runtime.pool.outliers import Outliers
from atoll.runtime.pool.policy import ModelOffer
from atoll.runtime.pool.routes import Seat

SECRETS = frozenset({"api_key"})
"""Metadata that is never shown."""
STAND_IN = "stand_in"
"""Metadata that says which weights answer instead of which: every answer has it in a header."""
INSTANCE = "instance"
FLEET = "fleet"
"""Metadata that say as which instance of which fleet a controller knows a backend."""
HANDOVER = "handover"
"""Metadata of a backend that runs one phase alone: how KV cache is handed over and which, "nixl/prefill"."""
BOOTSTRAP = "bootstrap"
"""Metadata of one that computes prompts: "HOST PORT", where those that decode meet it."""
_SMOOTHING = 0.1
FABRIC = "fabric"
"""Scheme of the URLs of nodes that are reached through the fabric: fabric://SESSION."""


class Backend(Frozen):
    """One instance: an OpenAI endpoint."""

    id: str = Field(min_length=1, max_length=200)
    url: str
    """http:// or https://, host, port and perhaps a path that goes before /v1; or fabric://SESSION."""
    models: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    """Other HTTP services it has, by name."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names of its models."""
    weight: float = Field(1.0, ge=0)
    """Share of the requests among the backends of a model, in any unit; 0: only when no other is left."""
    kind: str = UNKNOWN
    """Its engine, by name: how it is asked, and how a broken stream is continued here."""
    max_inflight: int | None = Field(None, ge=1)
    metadata: dict[str, str] = Field(default_factory=dict)
    """`api_key` is sent as a bearer token; the rest is shown in the status."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in list_kinds():
            raise ValueError(f"a backend is one of {', '.join(list_kinds())}")
        return kind

    @field_validator("url")
    @classmethod
    def _usable(cls, url: str) -> str:
        parts = urlsplit(url)
        # `port` raises where there is no number, or one that is too large.
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https", FABRIC) or not parts.hostname or port == 0:
            raise ValueError("a URL like http://127.0.0.1:8000 is needed")
        if parts.query or parts.fragment or parts.username or not url.isascii() or " " in url:
            raise ValueError("only scheme, host, port and path may be given")
        # Paths of requests begin with /v1 themselves.
        return url.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if not self.models and not self.services:
            raise ValueError("models: at least one is needed")
        return self

    @property
    def weighted(self) -> bool:
        """Whether somebody chose its weight."""
        return "weight" in self.model_fields_set


class ConfiguredBackend(Backend):
    """A backend that a person named, in a file or through the admin API.

    It is no node of a fabric, and has no provider: that is what a certificate says, and it has none.
    """

    @model_validator(mode="after")
    def _claims_nothing(self) -> Self:
        if urlsplit(self.url).scheme == FABRIC:
            raise ValueError("url: nodes of a fabric come by themselves; give http:// or https://")
        if "provider" in self.metadata:
            raise ValueError("metadata: a provider is named by a certificate only; leave it out")
        return self


@dataclass(frozen=True, slots=True)
class Facts:
    """Statements of a fabric's node about itself that do not change how to ask it."""

    offers: dict[str, ModelOffer] = field(default_factory=dict)
    """By model."""
    ends_s: float | None = None
    usd_per_mtoken_in: float | None = None
    usd_per_mtoken_out: float | None = None


class Member:
    """A backend of a pool with what is known of it now."""

    __slots__ = (
        "_area",
        "_area_s",
        "backend",
        "drained",
        "elsewhere",
        "ends_s",
        "facts",
        "failures",
        "first_s",
        "handover",
        "headers",
        "inflight",
        "listed",
        "masked",
        "max_inflight",
        "mean_s",
        "name",
        "node",
        "offers",
        "outlier",
        "phase",
        "reason",
        "recounts",
        "removed",
        "requests",
        "since_s",
        "slow",
        "up",
        "well",
    )

    def __init__(self, backend: Backend, outliers: Outliers) -> None:
        self.become(backend)
        self.outlier = outliers.add(backend.id)
        self.inflight = 0
        self.requests = 0
        self.failures = 0
        self.mean_s = 1.0
        self.first_s: float | None = None
        """Seconds to the first token of its streams, lately; None: there was none."""
        self.up = self.well = True
        """Whether it may be sent requests; `well`: it answers, whether or not it is drained."""
        self.slow = False
        """Too busy to answer a question about its health, though it works: others are asked first."""
        self.drained = False
        """Taken out of service by a person: it gets nothing more, and what runs there goes on."""
        self.since_s = 0.0
        """Unix time since which it is as it is."""
        self.recounts = False
        """Whether it was seen to count reasoning in events (`Engine.recounts`)."""
        self.masked = False
        """Not to be used for the moment, though what runs there goes on."""
        self.removed = False
        self.reason = ""
        self.elsewhere = 0
        """Requests that others have sent to it."""
        self.know(None)
        self._area = self._area_s = 0.0

    def become(self, backend: Backend) -> None:
        """Take what a backend is; what is needed for every request is kept at hand."""
        self.backend = backend
        self.listed: dict[str, ModelFacts] | None = None
        """Facts of its models by its own word; None: it was not asked yet."""
        self.name = backend.id
        self.max_inflight = backend.max_inflight
        self.node = backend.url.startswith(f"{FABRIC}:")
        """Whether it is a node of a fabric, which says by itself whether it is well."""
        self.handover, _, self.phase = backend.metadata.get(HANDOVER, "").partition("/")
        """How it hands KV cache over, and the phase that it runs alone; both empty: it runs all."""
        self.headers = _say_stand_in(backend.metadata.get(STAND_IN, ""))
        """Header lines that its answers carry."""

    def know(self, facts: Facts | None) -> None:
        """Take what is known of it beyond how to ask it."""
        self.facts = facts
        self.ends_s = None if facts is None else facts.ends_s
        """Unix time at which it ends, if it knows."""
        self.offers = {} if facts is None else dict(facts.offers)
        """Offers that policies look at, by model; `offer` has one for every model."""

    def offer(self, model: str) -> ModelOffer:
        """Return what policies look at; a backend of a configuration says it in its metadata."""
        offer = self.offers.get(model)
        if offer is None:
            offer = self.offers[model] = _offer(self.backend)
        return offer

    @property
    def instance(self) -> str:
        """Its name in its fleet; of a node that says none nobody knows, other backends go by their id."""
        return self.backend.metadata.get(INSTANCE) or ("" if self.node else self.name)

    @property
    def recomputes(self) -> bool:
        """Whether it computes prompts by itself that no other has computed."""
        engine = ENGINES.get(self.backend.kind)
        connector = None if engine is None else engine.connector
        return self.phase != "decode" or connector is None or connector.recomputes

    def seat(self, model: str) -> Seat:
        """Return what weights depend on; of a kind are those with equal GPUs and engines."""
        kind = (self.offer(model).gpus, self.backend.kind)
        return Seat(self.backend.metadata.get(FLEET, ""), self.instance, kind)

    def integrate_load(self, now_s: float) -> float:
        """Return the requests run here so far, summed over time in seconds. Call before they change."""
        self._area += self.inflight * (now_s - self._area_s)
        self._area_s = now_s
        return self._area

    @property
    def state(self) -> str:
        """`up`, `down`, `drained`, `ejected`, `slow` or `removed`."""
        # The strongest reason first: what is down and drained shows as down.
        if self.removed:
            return "removed"
        if not self.well:
            return "down"
        if self.drained:
            return "drained"
        if self.outlier.ejected_until_s is not None:
            return "ejected"
        return "slow" if self.slow else "up"

    @property
    def serves(self) -> bool:
        """Whether requests are sent to it, be it slow."""
        return self.state in ("up", "slow")

    @property
    def machine(self) -> str:
        """Identity that it keeps when it comes back: of a node whose session is over, its owner."""
        return machine_of(self.name) if self.node else self.name

    def full(self) -> bool:
        """Whether it runs as many requests as it may."""
        return self.max_inflight is not None and self.inflight >= self.max_inflight

    def note_first(self, seconds: float) -> None:
        """Note how long the first token of a stream took."""
        first_s = self.first_s
        self.first_s = seconds if first_s is None else first_s + _SMOOTHING * (seconds - first_s)


def machine_of(sid: str) -> str:
    """Return who owns the session of a node, which is what stays when it comes back."""
    return slot_of(sid)


def _say_stand_in(text: str) -> bytes:
    """Return the header that says that other weights answer than were asked for; nothing else gets in."""
    shown = "".join(letter for letter in text[:200] if " " <= letter <= "~")
    return f"x-atoll-stand-in: {shown}\r\n".encode() if shown else b""


def _offer(backend: Backend) -> ModelOffer:
    # Who runs it is not for its configuration to say: policies trust no provider without a certificate.
    metadata = backend.metadata
    context = metadata.get("context", "")
    return ModelOffer(
        node=backend.id,
        sid=backend.id,
        verified=False,
        region=metadata.get("region", ""),
        precision=metadata.get("precision", "unknown"),
        context=int(context) if context.isascii() and context.isdigit() else None,
        gpus=tuple(filter(None, metadata.get("gpus", "").split(","))),
        stability=metadata.get("stability", "standard"),
        engine=backend.kind,
    )


Allow = Callable[[Member], bool]
"""Whether a backend may serve a request."""
