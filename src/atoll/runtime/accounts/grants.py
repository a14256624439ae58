"""A key at work: what it may do, what it is doing here, and why a request of it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from atoll.runtime.accounts.api_keys import ApiKey, ModelFilter
from atoll.runtime.accounts.count_leases import SharedCount
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
    from collections.abc import Callable

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
_SPANS = {"day": "per_day", "month": "per_month", "total": "total"}
"""Of quotas: as leases name them, and how a key's fields end."""
RUNNING = "running"
"""The lease on requests at the same time."""


class NoLeaseError(ApiError):
    """Refusal of a strict key that holds too little of a limit here; more may be lent in a moment."""


class ActiveKey:
    """A key and what it is doing here. Times are those of one monotonic clock, in seconds."""

    __slots__ = (
        "asked_s",
        "asks",
        "counts",
        "grant",
        "key",
        "models",
        "quotas",
        "requests",
        "reserved",
        "running",
        "tokens",
        "touched_s",
        "usage",
    )

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.usage = KeyUsage()
        self.running = 0
        """Requests."""
        self.reserved = 0
        """Tokens that running requests may still use; of strict keys only."""
        self.counts: dict[str, SharedCount] = {}
        """What it may have in use of limits that do not come back with time."""
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
        self.requests = _resize(self.requests, spec.requests_per_min, now_s, strict=spec.strict)
        self.tokens = _resize(self.tokens, spec.tokens_per_min, now_s, strict=spec.strict)
        quotas = {
            f"{_METERED[what][0]}_{span}": quota * _METERED[what][1]
            for what in _METERED
            for span, ending in _SPANS.items()
            if (quota := getattr(spec, f"{what}_{ending}")) is not None
        }
        self.quotas = bool(quotas)
        self._change_counts(quotas if spec.strict else {})

    def _change_counts(self, quotas: dict[str, int]) -> None:
        spec = self.key.spec
        limits = dict(quotas)
        if spec.concurrent is not None:
            limits[RUNNING] = spec.concurrent
        self.counts = {
            what: self.counts.get(what)
            or SharedCount(limit, self._reader(what), strict=spec.strict)
            for what, limit in limits.items()
        }
        for what, count in self.counts.items():
            count.limit, count.strict = limits[what], spec.strict

    def _reader(self, what: str) -> Callable[[], float]:
        """Return what says how much of a count was added here."""
        if what == RUNNING:
            return lambda: self.running
        field = what.rpartition("_")[0]
        if field == "tokens":
            return lambda: self.usage.spent.tokens + self.reserved
        return lambda: getattr(self.usage.spent, field)

    def uncounted(self, what: str, now: Periods) -> float:
        """Return what of a quota was used here and is not in the database yet."""
        field, _, span = what.rpartition("_")
        used: int = getattr(self.usage.uncounted(now.named(span)), field)
        return used

    def counted(self, what: str, now: Periods) -> float:
        """Return how much of what was added here to a quota is in the database, or of another period."""
        field = what.rpartition("_")[0]
        spent: int = getattr(self.usage.spent, field)
        return spent - self.uncounted(what, now)

    @property
    def reserves(self) -> bool:
        """Whether a request has to say how many tokens it uses at most."""
        spec = self.key.spec
        return spec.strict and (
            self.tokens is not None or any(what.startswith("tokens_") for what in self.counts)
        )

    def refusal(
        self, model: str, now_s: float, unix_s: float, now: Periods, need: int = 0
    ) -> ApiError | None:
        """Return why a request for a model is not let in: 403, 429, or None if it is.

        `need` is the most tokens that it can use, where the key `reserves`.
        """
        self.touched_s = self.asked_s = now_s
        # From what is forbidden for good to what passes with time.
        if not self.asks:
            return role_forbids_error("A viewer's API key looks only: it asks no models.")
        if not self.models.allow(model):
            return model_not_allowed_error(model)
        spec = self.key.spec
        running = self.counts.get(RUNNING)
        if running is not None and not running.has_room(1.0):
            message = f"{spec.concurrent} requests of this API key run already."
            return rate_limit_error(message, 1, self._error)
        amounts = ((self.requests, "requests", 1.0), (self.tokens, "tokens", need + self.reserved))
        for limit, what, amount in amounts:
            wait_s = 0.0 if limit is None else limit.wait_s(now_s, max(1.0, amount))
            if limit is not None and wait_s > 0.0:
                if need > limit.limit and what == "tokens":
                    return too_large_error(need, limit.limit)
                message = f"Rate limit reached: {limit.limit:.0f} {what} a minute."
                return rate_limit_error(message, whole_seconds(wait_s), self._error)
        over = self._over_quota(unix_s, now) if self.quotas else None
        return over or self._unleased_quota(need)

    @property
    def _error(self) -> type[ApiError]:
        # A strict key may be let in as soon as its leases are settled.
        return NoLeaseError if self.key.spec.strict else ApiError

    def _unleased_quota(self, need: int) -> ApiError | None:
        """Return the refusal where a lease on a quota has no room for a request."""
        for what, count in self.counts.items():
            if what == RUNNING:
                continue
            is_tokens = what.startswith("tokens_")
            if is_tokens and need > count.limit:
                return too_large_error(need, count.limit)
            if not count.has_room(max(1, need) if is_tokens else 1):
                message = "The rest of this API key's quota is reserved by requests that run."
                return rate_limit_error(message, 1, self._error)
        return None

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
        self.usage.spent += more
        if self.tokens is not None and more.tokens:
            # An answer that grows needs a lease, though nothing is asked.
            self.asked_s = now_s
            self.tokens.charge(now_s, more.tokens)

    def ended(self, used: Counted, charged: Counted, day: str, now_s: float) -> None:
        """Charge a request that ended with so much, some of which is charged already."""
        self.running -= 1
        self.usage.running -= charged
        self.usage.spent += used - charged
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
        """Whether it has a shared limit of which this gateway holds nothing."""
        limits = (self.requests, self.tokens, *self.counts.values())
        return any(limit is not None and not limit.leased for limit in limits)

    @property
    def shared(self) -> bool:
        """Whether it has a limit that gateways share by leases."""
        return self.requests is not None or self.tokens is not None or bool(self.counts)


def _resize(
    limit: SharedLimit | None, per_min: int | None, now_s: float, *, strict: bool
) -> SharedLimit | None:
    """Return the limit for so much a minute, which may have changed; what was used stays used."""
    if per_min is None:
        return None
    if limit is None:
        return SharedLimit(per_min, now_s, strict=strict)
    limit.resize(per_min, now_s)
    limit.strict = strict
    return limit


def too_large_error(need: int, limit: float) -> ApiError:
    """Return the error for a request that could never be let in."""
    return ApiError(
        400,
        f"This request may use {need} tokens, and {limit:.0f} are all that this API key ever has at once.",
        param="max_tokens",
        code="over_key_limit",
    )


def no_bound_error() -> ApiError:
    """Return the error for a request of a strict key that may use any number of tokens."""
    return ApiError(
        400,
        "Say max_tokens: the limits of this API key are strict, so every request has to be bounded.",
        param="max_tokens",
        code="max_tokens_needed",
    )


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


def rate_limit_error(
    message: str, retry_after_s: int, error: type[ApiError] = ApiError
) -> ApiError:
    """Return the error for a key that asks too much at a time."""
    return error(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )


def no_room_error(message: str) -> ApiError:
    """Return the error for a gateway that cannot write down what a request would use."""
    return ApiError(503, message, kind="server_error", code="ledger_full", retry_after_s=5)
