"""Who may serve a request: trusted providers, regions, precision, context, GPUs, stability, nodes.

A key has a policy, a request may bring another in its headers, and both hold: `narrow` takes what both
allow. What a node does not say of itself counts against it: a policy fails closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from pydantic import Field, field_validator

from atoll.core.errors import AtollError
from atoll.core.frozen import Frozen
from atoll.fabric.registry.queries import is_gpu
from atoll.runtime.openai import ApiError

Stability = Literal["spot", "batch", "standard", "reserved"]
STABILITIES: tuple[str, ...] = get_args(Stability)
"""From the least to the most dependable."""

# Letters, the bits, and perhaps more after what is no digit: bf16, fp8_e4m3, q4_k_m, w8a8.
_BITS = re.compile(r"(?:[a-z]*fp|bf|tf|f|u?int|i?q|w|i)(\d{1,2})(?:[^0-9].*)?")
# Methods whose names say no bits: they are taken for 4.
_FOUR_BITS = ("awq", "gptq", "bnb")
# Entries of a list in a header, at most.
_LISTED = 64
_HEADERS = {
    b"x-atoll-providers": "providers",
    b"x-atoll-regions": "regions",
    b"x-atoll-min-precision": "min_precision",
    b"x-atoll-min-context": "min_context",
    b"x-atoll-gpus": "gpus",
    b"x-atoll-stability": "stability",
    b"x-atoll-node": "nodes",
}
_LISTS = frozenset({"providers", "regions", "gpus", "nodes"})
HEADERS = frozenset(_HEADERS)
"""The headers in which a request says who may serve it."""


def precision_bits(name: str) -> int:
    """Return the bits of a weight for the name of a precision ("bf16", "Q4_K_M"); 0: not known."""
    text = name.strip().lower()
    match = _BITS.fullmatch(text)
    if match is not None:
        return int(match[1])
    return 4 if text.startswith(_FOUR_BITS) else 0


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """One node's offer to serve one model, as policies look at it."""

    node: str = ""
    """Name of the node."""
    sid: str = ""
    provider: str = ""
    verified: bool = True
    """Whether name and provider are those of a certificate."""
    region: str = ""
    precision: str = "unknown"
    context: int | None = None
    gpus: tuple[str, ...] = ()
    stability: str = "standard"
    engine: str = ""


class Policy(Frozen):
    """Demands on whoever serves; None: no demand. An empty tuple is met by nobody."""

    providers: tuple[str, ...] | None = None
    regions: tuple[str, ...] | None = None
    min_precision: str | None = None
    """Weights with at least as many bits: "bf16", "fp8", "int4"."""
    min_context: int | None = Field(None, ge=1)
    """Tokens of prompt and answer together."""
    gpus: tuple[str, ...] | None = None
    """GPU classes, any of which will do; "A100" also means "A100-80G"."""
    stability: Stability | None = None
    """At least this dependable."""
    nodes: tuple[str, ...] | None = None
    """Names ("lab/gpu1"), names of sites ("lab") or session ids."""
    allow_fallback: bool | None = None
    """False: never another model than the one asked for, whatever a request says."""

    @field_validator("min_precision")
    @classmethod
    def _check_precision(cls, name: str | None) -> str | None:
        if name is not None and not precision_bits(name):
            raise ValueError(f"{name[:40]!r} is no precision; write bf16, fp8, int4 or the like")
        return name

    def narrow(self, other: Policy | None) -> Policy:
        """Return the policy that is met by whoever meets both."""
        if other is None:
            return self
        return Policy(
            providers=_both(self.providers, other.providers),
            regions=_narrower(self.regions, other.regions, _within),
            min_precision=_higher(self.min_precision, other.min_precision),
            min_context=max(self.min_context or 0, other.min_context or 0) or None,
            gpus=_narrower(self.gpus, other.gpus, is_gpu),
            stability=_steadier(self.stability, other.stability),
            nodes=_narrower(self.nodes, other.nodes, _of_site),
            # False wins over True, and either over nothing.
            allow_fallback=False
            if False in (self.allow_fallback, other.allow_fallback)
            else self.allow_fallback or other.allow_fallback,
        )

    def refusal(self, offer: ModelOffer) -> str | None:
        """Return what an offer lacks ("provider", "region", ...), or None: it may serve."""
        if self.nodes is not None and not (
            offer.sid in self.nodes or any(_of_site(offer.node, n) for n in self.nodes)
        ):
            return "node"
        if self.providers is not None and not (offer.verified and offer.provider in self.providers):
            return "provider"
        if self.regions is not None and not any(_within(offer.region, r) for r in self.regions):
            return "region"
        if self.min_precision is not None and precision_bits(offer.precision) < precision_bits(
            self.min_precision
        ):
            return "precision"
        if self.min_context is not None and (offer.context or 0) < self.min_context:
            return "context"
        if self.gpus is not None and not any(is_gpu(g, c) for g in offer.gpus for c in self.gpus):
            return "gpu"
        if self.stability is not None and _rank(offer.stability) < _rank(self.stability):
            return "stability"
        return None

    @classmethod
    def from_headers(cls, headers: Mapping[bytes, bytes]) -> Self | None:
        """Return the policy that the headers of a request bring, or None; nonsense is an ApiError."""
        if HEADERS.isdisjoint(headers):
            return None
        fields: dict[str, object] = {}
        for header, field in _HEADERS.items():
            value = headers.get(header)
            if value is None:
                continue
            shown = header.decode()
            text = _text(shown, value)
            if field in _LISTS:
                fields[field] = items(shown, text)
            elif field == "min_context":
                # By the count of its digits first: no context needs more.
                if not (text.isascii() and text.isdigit() and len(text) < 13):
                    raise _refuse_header(shown, "a number of tokens is needed")
                fields[field] = int(text)
            else:
                fields[field] = text
        try:
            return cls.parse(fields)
        except AtollError as error:
            names = {field: header.decode() for header, field in _HEADERS.items()}
            raise _refuse_header(names.get(error.field or "", "x-atoll-*"), str(error)) from None


def fallbacks(headers: Mapping[bytes, bytes]) -> tuple[str, ...]:
    """Return the models of the header `x-atoll-fallback`, which may serve instead, best first."""
    value = headers.get(b"x-atoll-fallback")
    if value is None:
        return ()
    return items("x-atoll-fallback", _text("x-atoll-fallback", value))


def items(header: str, text: str) -> tuple[str, ...]:
    """Return the entries of a list with commas; an empty list or entry is an ApiError."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts) or len(parts) > _LISTED:
        raise _refuse_header(header, f"1 to {_LISTED} names with commas between them are needed")
    return parts


def _text(header: str, value: bytes) -> str:
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        raise _refuse_header(header, "it is not UTF-8") from None


def _refuse_header(header: str, why: str) -> ApiError:
    return ApiError(400, f"{header}: {why}", param=header, code="invalid_header")


def _both(first: tuple[str, ...] | None, second: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    return tuple(name for name in first if name in second)


def _narrower(
    first: tuple[str, ...] | None,
    second: tuple[str, ...] | None,
    lies_in: Callable[[str, str], bool],
) -> tuple[str, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    # Where one entry lies in another the narrower one stays, whichever side named it.
    kept = [a for a in first if any(lies_in(a, b) for b in second)]
    kept += [b for b in second if b not in kept and any(lies_in(b, a) for a in first)]
    return tuple(kept)


def _within(place: str, wanted: str) -> bool:
    """Whether a place is the wanted one or lies in it: "eu" holds "eu-west-1" and "eu/zurich"."""
    return place == wanted or place.startswith((f"{wanted}-", f"{wanted}/"))


def _of_site(node: str, wanted: str) -> bool:
    """Whether a node is the wanted one or of that site: "lab" holds "lab/gpu1", but not "lab-2/gpu1"."""
    return node == wanted or node.startswith(f"{wanted}/")


def _higher(first: str | None, second: str | None) -> str | None:
    if first is None or second is None:
        return second if first is None else first
    return first if precision_bits(first) >= precision_bits(second) else second


def _steadier(first: Stability | None, second: Stability | None) -> Stability | None:
    if first is None or second is None:
        return second if first is None else first
    return first if _rank(first) >= _rank(second) else second


def _rank(stability: str) -> int:
    # What is not known ranks below all: a policy fails closed.
    return STABILITIES.index(stability) if stability in STABILITIES else -1
