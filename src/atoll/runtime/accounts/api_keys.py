"""API keys: `atoll-ID-SECRET`, of which only the id and a hash of the secret are kept.

A secret has 256 random bits, so one SHA-256 of it is as safe as a slow hash and quick enough to be
computed for every request. The id is no secret: it finds the key, and may be printed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any, Literal, NamedTuple, TypedDict

from pydantic import Field, field_validator

from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.frozen import Frozen
from atoll.core.roles import Role
from atoll.runtime.pool.policy import Policy

_ID_LETTERS = string.ascii_lowercase + string.digits
_SECRET_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 12
_SECRET_LENGTH = 43
"""Of 62 letters each: 256 bits."""
_TEXT = re.compile(rb"atoll-([a-z0-9]{12})-([A-Za-z0-9]{43})")
_KNOWN_MODELS = 1024
_WORST = "0" * 64


class PresentedKey(NamedTuple):
    """A key as a client sent it; the secret itself is not kept."""

    id: str
    digest: str


class NewKey(Frozen):
    """A key to be made, as its maker describes it."""

    name: str = Field(min_length=1, max_length=120)
    owner: str = Field("", max_length=120)
    role: Role = "member"
    """Viewers ask no models."""
    models: tuple[str, ...] = ()
    """Names or patterns (`llama-*`); empty for all."""
    requests_per_min: int | None = Field(None, ge=1, le=10**9)
    tokens_per_min: int | None = Field(None, ge=1, le=10**12)
    """Of prompt and answer together, as are all tokens below."""
    tokens_per_day: int | None = Field(None, ge=1, le=10**15)
    """A day begins at midnight UTC."""
    tokens_per_month: int | None = Field(None, ge=1, le=10**15)
    tokens_total: int | None = Field(None, ge=1, le=10**15)
    audio_seconds_per_day: int | None = Field(None, ge=1, le=10**12)
    """Of sound heard and speech made together."""
    audio_seconds_per_month: int | None = Field(None, ge=1, le=10**12)
    audio_seconds_total: int | None = Field(None, ge=1, le=10**12)
    pixels_per_day: int | None = Field(None, ge=1, le=10**18)
    """Seen or drawn."""
    pixels_per_month: int | None = Field(None, ge=1, le=10**18)
    pixels_total: int | None = Field(None, ge=1, le=10**18)
    concurrent: int | None = Field(None, ge=1, le=10**6)
    """Requests at the same time; like all limits, of all gateways together."""
    strict: bool = False
    """Whether nothing goes over a limit, however many gateways there are: each waits for its part of it."""
    policy: Policy | None = None
    """Conditions on nodes that serve this key."""
    track: bool = True
    """False: nothing is written down but the token counts that quotas need."""
    expires_s: float | None = None
    """Unix time."""

    def to_json(self, *, indent: int | None = None) -> str:
        """Write as JSON; versions without strict keys read all others, and let these do nothing."""
        return self.model_dump_json(indent=indent, exclude=None if self.strict else {"strict"})

    @field_validator("name", "owner")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("use printable characters")
        return value

    @field_validator("models")
    @classmethod
    def _check_model_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not name or len(name) > 512 for name in value):
            raise ValueError("a model has a name of 1 to 512 characters")
        return value


class DescribedKey(TypedDict):
    """A key as it is shown: what its maker said of it (`NewKey`), and how it stands."""

    id: str
    state: Literal["active", "expired", "revoked"]
    name: str
    owner: str
    role: Role
    models: list[str]
    requests_per_min: int | None
    tokens_per_min: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    tokens_total: int | None
    audio_seconds_per_day: int | None
    audio_seconds_per_month: int | None
    audio_seconds_total: int | None
    pixels_per_day: int | None
    pixels_per_month: int | None
    pixels_total: int | None
    concurrent: int | None
    policy: dict[str, Any] | None
    track: bool
    expires_s: float | None
    created_s: float
    revoked_s: float | None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the database holds it."""

    id: str
    spec: NewKey
    created_s: float
    revoked_s: float | None
    version: int
    """Of the table of keys when this one last changed."""
    digest: str = field(default=_WORST, repr=False)
    """SHA-256 of the secret, in hex."""

    def state(self, now_s: float) -> str:
        """Return `active`, `expired` or `revoked`."""
        if self.revoked_s is not None:
            return "revoked"
        expires_s = self.spec.expires_s
        return "active" if expires_s is None or now_s < expires_s else "expired"

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return all that may be said of it, as JSON has it: not its digest."""
        return {
            "id": self.id,
            "state": self.state(now_s),
            **self.spec.model_dump(mode="json"),
            "created_s": self.created_s,
            "revoked_s": self.revoked_s,
        }

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> ApiKey:
        """Read what `describe` said."""
        spec = NewKey.parse({name: said[name] for name in NewKey.model_fields})
        return cls(said["id"], spec, said["created_s"], said["revoked_s"], 0)


def choose_key(known: Sequence[ApiKey], name: str) -> ApiKey:
    """Return the key with an id, or with a name that only one key has."""
    # Ids first: a name may be anything, another key's id too.
    matching = [key for key in known if key.id == name] or [
        key for key in known if key.spec.name == name
    ]
    if len(matching) > 1:
        ids = ", ".join(key.id for key in matching)
        raise UsageError(f"{len(matching)} keys are called {name!r}", hint=f"use an id: {ids}")
    if not matching:
        raise UnknownNameError("key", name, [k.id for k in known] + [k.spec.name for k in known])
    return matching[0]


def make_key() -> tuple[str, str, str]:
    """Return a new key: the text to show once, its id, and the hash to keep."""
    key_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
    secret = "".join(secrets.choice(_SECRET_LETTERS) for _ in range(_SECRET_LENGTH))
    return f"atoll-{key_id}-{secret}", key_id, _digest(secret.encode())


def read_bearer(authorization: bytes) -> PresentedKey | None:
    """Return the key in an Authorization header (`Bearer ...`); None where it holds none of ours."""
    if authorization[:7].lower() != b"bearer ":
        return None
    match = _TEXT.fullmatch(authorization[7:].strip())
    return PresentedKey(match[1].decode(), _digest(match[2])) if match else None


def matches(key: ApiKey | None, presented: PresentedKey) -> bool:
    """Return whether a presented key is this one, in a time that does not depend on the answer."""
    kept = _WORST if key is None else key.digest
    return hmac.compare_digest(kept, presented.digest) and key is not None


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


class ModelFilter:
    """Which models a key may use: decided once per name, then looked up."""

    __slots__ = ("_known", "_pattern")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(translate, patterns))) if patterns else None
        self._known: dict[str, bool] = {}

    def allow(self, model: str) -> bool:
        """Return whether a model may be used; case matters."""
        if self._pattern is None:
            return True
        known = self._known.get(model)
        if known is None:
            if len(self._known) >= _KNOWN_MODELS:
                self._known.clear()
            known = self._known[model] = self._pattern.fullmatch(model) is not None
        return known
