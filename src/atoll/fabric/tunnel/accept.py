"""Whose requests a worker takes: `Metadata.accept`, the same rule at the worker and in routing."""

from __future__ import annotations

from atoll.core.errors import UsageError

_FORMS = "any, self, allow:NAME,... or deny:NAME,..."


def check_accept(rule: str | None) -> None:
    """Raise UsageError unless the rule can be read."""
    if rule in (None, "any", "self"):
        return
    kind, colon, names = str(rule).partition(":")
    if kind not in ("allow", "deny") or not colon or not _names(names):
        raise UsageError(f"cannot read {rule!r}", field="accept", hint=f"one of {_FORMS}")


def accepts(rule: str | None, provider: str, caller_name: str, caller_provider: str) -> bool:
    """Whether a worker of `provider` takes requests of a caller.

    `self`: of its own provider only. Names in `allow:` and `deny:` are those of callers or of providers.
    A rule that cannot be read lets nobody in.
    """
    if rule is None or rule == "any":
        return True
    if rule == "self":
        return caller_provider == provider
    kind, _, rest = rule.partition(":")
    names = _names(rest)
    listed = not names.isdisjoint((caller_name, caller_provider))
    return listed if kind == "allow" else kind == "deny" and bool(names) and not listed


def _names(text: str) -> frozenset[str]:
    return frozenset(n.strip() for n in text.split(",") if n.strip())
