"""The instances behind a gateway: who they are, who is well, and who gets the next request.

Requests of a model go round its backends by interleaved weighted round robin (`atoll.routing`), so that
each gets the plan's share, smoothly. Left out are those that are down, ejected or full, and those with
more than one and a half times their share of what is running: a backend that grew slow is not piled upon.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from atoll.core.errors import InputError, UnknownNameError
from atoll.core.frozen import Frozen
from atoll.core.rng import stream
from atoll.routing import decisions
from atoll.routing.policies import policy_code
from atoll.runtime.outliers import Outliers, OutlierSettings

Kind = Literal["atoll", "vllm", "llamacpp", "sglang", "openai"]
SECRETS = frozenset({"api_key"})
"""Metadata that is never shown."""

_ALWAYS_RUNNING = 4
_MOST_OF_SHARE = 1.5
_SMOOTHING = 0.1


class Backend(Frozen):
    """One instance: an OpenAI endpoint."""

    id: str = Field(min_length=1, max_length=200)
    url: str
    """http:// or https://, host, port and perhaps a path that goes before /v1."""
    models: tuple[str, ...] = Field(min_length=1)
    weight: float = Field(1.0, ge=0)
    """Share of the requests among the backends of a model, in any unit; 0: only when no other is left."""
    kind: Kind = "openai"
    """How a broken stream is continued here."""
    max_inflight: int | None = Field(None, ge=1)
    metadata: dict[str, str] = Field(default_factory=dict)
    """`api_key` is sent as a bearer token; the rest is shown in the status."""

    @field_validator("url")
    @classmethod
    def _usable(cls, url: str) -> str:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError("a URL like http://127.0.0.1:8000 is needed")
        if parts.query or parts.fragment or parts.username or not url.isascii() or " " in url:
            raise ValueError("only scheme, host, port and path may be given")
        return url.rstrip("/").removesuffix("/v1")


class Member:
    """A backend of a pool with what is known of it now."""

    __slots__ = (
        "backend",
        "failures",
        "inflight",
        "mean_s",
        "most",
        "name",
        "outlier",
        "reason",
        "removed",
        "requests",
        "up",
    )

    def __init__(self, backend: Backend, outliers: Outliers) -> None:
        self.become(backend)
        self.outlier = outliers.add(backend.id)
        self.inflight = 0
        self.requests = 0
        self.failures = 0
        self.mean_s = 1.0
        self.up = True
        self.removed = False
        self.reason = ""

    def become(self, backend: Backend) -> None:
        """Take what a backend is; what is needed for every request is kept at hand."""
        self.backend = backend
        self.name = backend.id
        self.most = backend.max_inflight

    @property
    def state(self) -> str:
        """`up`, `down`, `ejected` or `removed`."""
        if self.removed:
            return "removed"
        if not self.up:
            return "down"
        return "up" if self.outlier.ejected_until_s is None else "ejected"

    def full(self) -> bool:
        """Whether it runs as many requests as it may."""
        return self.most is not None and self.inflight >= self.most


Listener = Callable[[str, Member], None]
"""Called with `added`, `changed`, `removed`, `down`, `up`, `ejected` or `restored`."""


class Pool:
    """The backends of a gateway; they come, go and change while it runs. Not thread-safe."""

    def __init__(
        self,
        backends: Iterable[Backend] = (),
        *,
        outliers: OutlierSettings | None = None,
        policy: str = "iwrr",
        seed: int = 0,
    ) -> None:
        self.members: dict[str, Member] = {}
        self.listeners: list[Listener] = []
        self._outliers = Outliers(outliers)
        self._policy = policy_code(policy)
        self._seed = seed
        self.rings: dict[str, _Ring] = {}
        """By model; what is no key here is served by no backend."""
        for backend in backends:
            self.add(backend)

    @property
    def models(self) -> list[str]:
        """The models some backend serves, in the order they came."""
        return list(self.rings)

    def serves(self, model: str) -> bool:
        """Whether any backend, well or not, serves a model."""
        return model in self.rings

    def add(self, backend: Backend) -> None:
        """Use one more backend."""
        if backend.id in self.members:
            raise InputError(f"there is a backend {backend.id!r} already", field="id")
        member = Member(backend, self._outliers)
        self.members[backend.id] = member
        self._rebuild()
        self._tell("added", member)

    def update(self, backend: Backend) -> None:
        """Change what a backend is; running requests are not touched."""
        member = self._member(backend.id)
        if member.backend == backend:
            return
        member.become(backend)
        self._rebuild()
        self._tell("changed", member)

    def remove(self, name: str) -> None:
        """Send a backend nothing more; requests that run there end there."""
        member = self._member(name)
        del self.members[name]
        self._outliers.remove(name)
        member.removed = True
        self._rebuild()
        self._tell("removed", member)

    def replace(self, backends: Iterable[Backend]) -> None:
        """Make these the backends: add, change and remove what differs."""
        wanted = {b.id: b for b in backends}
        for name in [n for n in self.members if n not in wanted]:
            self.remove(name)
        for name, backend in wanted.items():
            if name in self.members:
                self.update(backend)
            else:
                self.add(backend)

    def set_health(self, name: str, up: bool, reason: str = "") -> None:
        """Say that a backend is dead (what runs there moves on) or well again."""
        member = self._member(name)
        was = member.up
        member.up, member.reason = up, "" if up else reason
        if up:
            self._outliers.restore(member.outlier)
        if was != up:
            self._tell("up" if up else "down", member)

    def pick(
        self, model: str, avoid: Collection[str] = (), *, squeeze: bool = False
    ) -> Member | None:
        """Return the backend for the next request of a model, or None: none can take it now.

        Backends in `avoid` are taken only if `squeeze` and nothing else is left; `squeeze` also goes over
        the limit of what a backend should run. Ejected backends are better than none.
        """
        ring = self.rings.get(model)
        if ring is None:
            return None
        only = ring.only
        if (
            only is not None
            and only.up
            and not avoid
            and (only.most is None or only.inflight < only.most)
        ):
            return only
        found = ring.pick(self._policy, avoid, ejected=False, full=False)
        if found is None:
            found = ring.pick(self._policy, avoid, ejected=True, full=False)
        if found is None and squeeze:
            found = ring.pick(self._policy, avoid, ejected=True, full=True)
        if found is None and squeeze and avoid:
            found = ring.pick(self._policy, (), ejected=True, full=True)
        return found

    def succeeded(self, member: Member, seconds: float) -> None:
        """Note that a backend answered a request in so many seconds."""
        member.mean_s += _SMOOTHING * (seconds - member.mean_s)
        record = member.outlier
        record.row = 0
        record.good += 1

    def failed(self, member: Member, now_s: float, reason: str) -> None:
        """Note that a backend failed a request (5xx, refused, broken, late)."""
        member.failures += 1
        member.reason = reason
        if self._outliers.failed(member.outlier, now_s):
            self._tell("ejected", member)

    def tick(self, now_s: float) -> None:
        """Let time pass: ejections end, success rates are compared."""
        back, out = self._outliers.tick(now_s)
        for names, event in ((back, "restored"), (out, "ejected")):
            for name in names:
                if name in self.members:
                    self._tell(event, self.members[name])

    def snapshot(self) -> list[dict[str, object]]:
        """Return what is known of every backend, for people; secrets are left out."""
        return [
            {
                "id": m.backend.id,
                "url": m.backend.url,
                "models": list(m.backend.models),
                "kind": m.backend.kind,
                "weight": m.backend.weight,
                "max_inflight": m.backend.max_inflight,
                "metadata": {k: v for k, v in m.backend.metadata.items() if k not in SECRETS},
                "state": m.state,
                "reason": m.reason,
                "inflight": m.inflight,
                "requests": m.requests,
                "failures": m.failures,
                "mean_s": round(m.mean_s, 6),
            }
            for m in self.members.values()
        ]

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise UnknownNameError("backend", name, self.members, field="id")
        return self.members[name]

    def _rebuild(self) -> None:
        models = dict.fromkeys(model for m in self.members.values() for model in m.backend.models)
        self.rings = {
            model: _Ring(
                [m for m in self.members.values() if model in m.backend.models],
                self.rings.get(model),
                self._seed,
            )
            for model in models
        }

    def _tell(self, event: str, member: Member) -> None:
        for listener in self.listeners:
            listener(event, member)


class _Ring:
    """The backends of one model with the state of the policy: source -> backends, as `decisions` has it.

    Plain lists instead of arrays: outside compiled code they are several times faster to index.
    """

    def __init__(self, members: list[Member], before: _Ring | None, seed: int) -> None:
        count = len(members)
        self.members = members
        self.only = members[0] if count == 1 else None
        weights = [m.backend.weight for m in members]
        # Weight 0 means last resort; all 0 means all alike.
        self.weight = weights if any(weights) else [1.0] * count
        self.spare = [m for m in members if m.backend.weight == 0.0] if any(weights) else []
        self.first = [0, count, *([count] * (count + 1))]
        self.target = list(range(1, count + 1))
        self.order = list(range(count))
        credit = before.credits() if before is not None else {}
        self.credit = [credit.get(m.name, 0.0) for m in members]
        self.random = stream(seed, "gateway").integers(1, 2147483398, size=2).tolist()

    def credits(self) -> dict[str, float]:
        return {m.name: c for m, c in zip(self.members, self.credit, strict=True)}

    def pick(
        self, policy: int, avoid: Collection[str], *, ejected: bool, full: bool
    ) -> Member | None:
        def usable(m: Member) -> bool:
            return (
                m.up
                and (ejected or m.outlier.ejected_until_s is None)
                and (full or not m.full())
                and m.name not in avoid
            )

        members = self.members
        open_ = [usable(m) for m in members]
        running = total = 0.0
        for m, weight, is_open in zip(members, self.weight, open_, strict=True):
            if is_open:
                running += m.inflight
                total += weight
        if total <= 0.0:
            return next((m for m in self.spare if usable(m)), None)
        share = _MOST_OF_SHARE * (running + 1) / total
        closed = [False]
        for m, weight, is_open in zip(members, self.weight, open_, strict=True):
            closed.append(not is_open or m.inflight > max(_ALWAYS_RUNNING, share * weight))
        edge = self._edge(policy, closed)
        return members[edge] if edge >= 0 else None

    def _edge(self, policy: int, closed: Any) -> int:
        # Any: lists stand in for arrays.
        first: Any = self.first
        target: Any = self.target
        weight: Any = self.weight
        order: Any = self.order
        credit: Any = self.credit
        if policy == decisions.ROUND_ROBIN:
            return decisions.round_robin(first, target, weight, order, credit, 0, closed)
        queue: Any = [0.0, *(float(m.inflight) for m in self.members)]
        load: Any = [0.0] + [
            m.inflight / w if w > 0 else 0.0 for m, w in zip(self.members, self.weight, strict=True)
        ]
        delay: Any = [m.mean_s for m in self.members]
        random: Any = self.random
        return decisions.next_hop(
            policy, first, target, weight, order, credit, delay, queue, load, random, 0, closed
        )
