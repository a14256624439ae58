"""A key at work: what it may do, what it is doing here, and why a request of it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from atoll.runtime.accounts.api_keys import ApiKey, ModelFilter
from atoll.runtime.accounts.key_limits import (
    TOTAL,
    Counted,
    KeyUsage,
    Periods,
    whole_seconds,
)
from atoll.runtime.accounts.rate_leases import SharedLimit
from atoll.runtime.openai import ApiError

if TYPE_CHECKING:
    from atoll.runtime.pool.policy import Policy


class Grant(NamedTuple):
    """Rights of a caller; the same object for every request of a key until the key changes."""

    key_id: str | None
    """None: nobody asked for a key."""
    owner: str
    policy: Policy | None
    track: bool
    """Whether details may be written down (ledger, traces, spans)."""
    models: tuple[str, ...]
    """Names or patterns (`llama-*`); empty for all."""


ANYBODY = Grant(None, "", None, True, ())
_METERED = {
    "tokens": ("tokens", 1, "tokens"),
    "audio_seconds": ("audio_ms", 1000, "seconds of sound"),
    "pixels": ("pixels", 1, "pixels"),
}
"""Quotas: the field that counts each, its unit there, its name."""


class ActiveKey:
    """A key and what it is doing here. Times are those of one monotonic clock, in seconds."""

    __slots__ = (
        "asked_s",
        "asks",
        "grant",
        "key",
        "models",
        "quotas",
        "requests",
        "running",
        "tokens",
        "touched_s",
        "usage",
    )

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.usage = KeyUsage()
        self.running = 0
        """Requests."""
        self.requests: SharedLimit | None = None
        self.tokens: SharedLimit | None = None
        self.asked_s = float("-inf")
        """When it last asked for something, or an answer of it grew."""
        self.change(key, now_s)

    def change(self, key: ApiKey, now_s: float) -> None:
        """Take what the key may do now; what it has used stays used."""
        spec = key.spec
        self.key = key
        self.touched_s = now_s
        """When it last asked for something, or was changed."""
        self.grant = Grant(key.id, spec.owner, spec.policy, spec.track, spec.models)
        self.asks = spec.role != "viewer"
        """Whether it may ask models at all."""
        self.models = ModelFilter(spec.models)
        self.requests = _resize(self.requests, spec.requests_per_min, now_s)
        self.tokens = _resize(self.tokens, spec.tokens_per_min, now_s)
        self.quotas = any(
            getattr(spec, f"{what}_{span}") is not None
            for what in _METERED
            for span in ("per_day", "per_month", "total")
        )

    def refusal(self, model: str, now_s: float, unix_s: float, now: Periods) -> ApiError | None:
        """Return why a request for a model is not let in: 403, 429, or None if it is."""
        self.touched_s = self.asked_s = now_s
        # From what is forbidden for good to what passes with time.
        if not self.asks:
            return role_forbids_error("A viewer's API key looks only: it asks no models.")
        if not self.models.allow(model):
            return model_not_allowed_error(model)
        max_running = self.key.spec.concurrent
        if max_running is not None and self.running >= max_running:
            return rate_limit_error(f"{max_running} requests of this API key run already.", 1)
        for limit, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            wait_s = 0.0 if limit is None else limit.wait_s(now_s)
            if limit is not None and wait_s > 0.0:
                message = f"Rate limit reached: {limit.limit:.0f} {what} a minute."
                return rate_limit_error(message, whole_seconds(wait_s))
        return self._over_quota(unix_s, now) if self.quotas else None

    def _over_quota(self, unix_s: float, now: Periods) -> ApiError | None:
        spec = self.key.spec
        # The longest first: what is used up there does not come back with the next day.
        for span, period, when, ends_s in (
            ("total", TOTAL, "in all", None),
            ("per_month", now.month, "this month", now.month_ends_s),
            ("per_day", now.day, "today", now.day_ends_s),
        ):
            limits = [(what, getattr(spec, f"{what}_{span}")) for what in _METERED]
            if all(quota is None for _, quota in limits):
                continue
            used = self.usage.count(period)
            for what, quota in limits:
                field, unit, name = _METERED[what]
                if quota is not None and getattr(used, field) >= quota * unit:
                    return ApiError(
                        429,
                        f"This API key has used its quota: {quota} {name} {when}.",
                        kind="insufficient_quota",
                        code="insufficient_quota",
                        retry_after_s=None if ends_s is None else whole_seconds(ends_s - unix_s),
                    )
        return None

    def grew(self, more: Counted, now_s: float) -> None:
        """Charge what a running request has delivered."""
        self.usage.running += more
        if self.tokens is not None and more.tokens:
            # An answer that grows needs a lease, though nothing is asked.
            self.asked_s = now_s
            self.tokens.charge(now_s, more.tokens)

    def ended(self, used: Counted, charged: Counted, day: str, now_s: float) -> None:
        """Charge a request that ended with so much, some of which is charged already."""
        self.running -= 1
        self.usage.running -= charged
        if self.tokens is not None:
            self.tokens.charge(now_s, used.tokens - charged.tokens)
        if self.quotas:
            self.usage.add(day, used)

    def limit_headers(self, now_s: float) -> tuple[tuple[bytes, bytes], ...]:
        """Return OpenAI's `x-ratelimit-*` headers; none without limits per minute."""
        headers: list[tuple[bytes, bytes]] = []
        for name, limit in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if limit is not None:
                left = max(0, int(limit.level(now_s)))
                headers += [
                    (b"x-ratelimit-limit-" + name, b"%d" % limit.limit),
                    (b"x-ratelimit-remaining-" + name, b"%d" % left),
                    (b"x-ratelimit-reset-" + name, b"%.3fs" % limit.full_s(now_s)),
                ]
        return tuple(headers)

    @property
    def unleased(self) -> bool:
        """Whether it has a limit a minute of which this gateway holds nothing."""
        return any(limit is not None and not limit.leased for limit in (self.requests, self.tokens))


def _resize(limit: SharedLimit | None, per_min: int | None, now_s: float) -> SharedLimit | None:
    """Return the limit for so much a minute, which may have changed; what was used stays used."""
    if per_min is None:
        return None
    if limit is None:
        return SharedLimit(per_min, now_s)
    limit.resize(per_min, now_s)
    return limit


def unknown_key_error(message: str) -> ApiError:
    """Return the error for a caller without a key that works."""
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def model_not_allowed_error(model: str) -> ApiError:
    """Return the error for a key that may not use a model."""
    return ApiError(
        403,
        f"This API key may not use the model {model!r}.",
        kind="permission_error",
        param="model",
        code="model_not_allowed",
    )


def role_forbids_error(message: str) -> ApiError:
    """Return the error for a caller whose role is not enough."""
    return ApiError(403, message, kind="permission_error", code="role_forbids")


def rate_limit_error(message: str, retry_after_s: int) -> ApiError:
    """Return the error for a key that asks too much at a time."""
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )


def no_room_error(message: str) -> ApiError:
    """Return the error for a gateway that cannot write down what a request would use."""
    return ApiError(503, message, kind="server_error", code="ledger_full", retry_after_s=5)
