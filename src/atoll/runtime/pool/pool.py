"""The instances behind a gateway: who they are, who is well, and who gets the next request.

Requests of a model go round its backends by interleaved weighted round robin (`atoll.routing`), so that
each gets the plan's share, smoothly. Left out are those that are down, ejected or full, and those with
more than one and a half times their share of what is running: a backend that grew slow is not piled upon.
Under the policy `learned` this holds where every backend of a model was given a weight; elsewhere the
traffic itself says how fast each is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from atoll.core.errors import InputError, UnknownNameError
from atoll.routing import decisions
from atoll.routing.policies import LEARNED, gateway_policy_code
from atoll.runtime.pool.backend_state import BackendState
from atoll.runtime.pool.member import SECRETS, Allow, Backend, Facts, Member, machine_of
from atoll.runtime.pool.outliers import Outliers, OutlierSettings
from atoll.runtime.pool.pairs import PairRing
from atoll.runtime.pool.rings import Ring, usable_by
from atoll.runtime.pool.routes import RoutesTold

# Weight of the newest value in a running mean.
_SMOOTHING = 0.1
_FADING = 0.005
"""Share of what is known of long requests that every shorter one takes away."""

Listener = Callable[[str, Member], None]
"""Called with `added`, `changed`, `removed`, `masked`, `down`, `up`, `slow`, `ejected`, `restored`, `drained`
or `returned`."""


class BackendPool:
    """The backends of a gateway; they come, go and change while it runs. Not thread-safe."""

    def __init__(
        self,
        backends: Iterable[Backend] = (),
        *,
        outliers: OutlierSettings | None = None,
        policy: str = "iwrr",
        seed: int = 0,
        learn: bool = False,
    ) -> None:
        self.members: dict[str, Member] = {}
        self.listeners: list[Listener] = []
        self._outliers = Outliers(outliers)
        self._drained: set[str] = set()
        """Machines that were taken out of service, also such as are away."""
        self._policy = gateway_policy_code(policy)
        self._seed = seed
        self.learns = learn or self._policy == LEARNED
        """Whether finished requests should be told to `learn`."""
        self.decisions = dict.fromkeys(("weights", "learned", "explored", "affinity"), 0)
        """How often one of several backends was chosen for which reason."""
        self.rings: dict[str, Ring] = {}
        """By model; what is no key here is served by no backend."""
        self.aliases: dict[str, tuple[str, ...]] = {}
        """The models behind other names."""
        self.hands_over = False
        """Whether any backend runs one phase alone."""
        self.ending = False
        """Whether any backend knows when it ends."""
        self.services: dict[str, Ring] = {}
        """By the name of a service that is no model."""
        self.routes: RoutesTold | None = None
        """Latest orders of a controller; None: none, so that backends' own weights hold."""
        for backend in backends:
            self.add(backend)

    @property
    def models(self) -> list[str]:
        """The models some backend serves, in the order they came."""
        return list(self.rings)

    def serves(self, model: str) -> bool:
        """Whether any backend, well or not, serves a model."""
        return model in self.rings

    def unserved(self) -> list[str]:
        """Return the models that are known, also from a controller, and have no backend that is up."""
        known = dict.fromkeys((*self.rings, *({} if self.routes is None else self.routes.models)))
        return [
            model
            for model in known
            if model not in self.rings
            or not any(member.serves for member in self.rings[model].members)
        ]

    def add(self, backend: Backend, facts: Facts | None = None) -> Member:
        """Use one more backend."""
        if backend.id in self.members:
            raise InputError(f"there is a backend {backend.id!r} already", field="id")
        member = Member(backend, self._outliers)
        member.know(facts)
        member.drained = member.machine in self._drained
        member.up = not member.drained
        self.members[backend.id] = member
        self._rebuild()
        self._tell("added", member)
        return member

    def update(self, backend: Backend, facts: Facts | None = None) -> None:
        """Change what a backend is; running requests are not touched."""
        member = self._member(backend.id)
        if member.node and facts is None:
            raise InputError("this is a node of the fabric", field="id", hint="name another")
        if member.backend == backend and member.facts == facts:
            return
        member.become(backend)
        member.know(facts)
        self._rebuild()
        self._tell("changed", member)

    def remove(self, name: str) -> None:
        """Send a backend nothing more; requests that run there end there."""
        member = self._member(name)
        del self.members[name]
        self._outliers.remove(name)
        # A node may come back, and is drained still; a backend that is configured anew begins in service.
        if not member.node:
            self._drained.discard(name)
        member.removed = True
        self._rebuild()
        self._tell("removed", member)

    def replace(self, backends: Iterable[Backend]) -> None:
        """Make these the backends: add, change and remove what differs; nodes of a fabric stay."""
        wanted = {b.id: b for b in backends}
        for name in [n for n, m in self.members.items() if n not in wanted and not m.node]:
            self.remove(name)
        for name, backend in wanted.items():
            if name in self.members:
                self.update(backend)
            else:
                self.add(backend)

    def route(self, routes: RoutesTold) -> None:
        """Take the weights that a controller gives; they hold for backends that come later too."""
        self.routes = routes
        self._rebuild()

    def set_health(self, name: str, up: bool, reason: str = "") -> None:
        """Say that a backend is dead (what runs there moves on) or well again."""
        member = self._member(name)
        was, masked, slow = member.well, member.masked, member.slow
        member.well, member.reason = up, "" if up else reason
        member.up = up and not member.drained
        member.masked = member.slow = False
        # One that was asked and is well need not sit out its ejection.
        if up:
            self._outliers.restore(member.outlier)
        # One that is masked counts as not well already; that it is dead is still news.
        if was != up or (masked and not up) or (slow and up):
            self._tell("up" if up else "down", member)

    def set_slow(self, name: str, reason: str) -> None:
        """Ask others before a backend that works and is late; what runs there goes on."""
        member = self._member(name)
        if member.well and not member.slow:
            member.slow, member.reason = True, reason
            self._tell("slow", member)

    def is_only(self, member: Member) -> bool:
        """Whether some model that a backend serves has no other backend to go to."""
        rings = (self.rings.get(model) for model in member.backend.models)
        return any(
            ring is not None and not any(m.up and m is not member for m in ring.members)
            for ring in rings
        )

    def mask(self, name: str, reason: str) -> None:
        """Send a backend nothing for the moment; what runs there is left alone."""
        member = self._member(name)
        if member.well:
            member.up = member.well = False
            member.masked, member.reason = True, reason
            self._tell("masked", member)

    def drain(self, name: str) -> None:
        """Take a machine out of service until `take_back`: what runs there goes on, and nothing new comes.

        That holds over its coming back: a node's next session is drained too.
        """
        machine = self._member(name).machine
        self._drained.add(machine)
        for member in [m for m in self.members.values() if m.machine == machine]:
            if not member.drained:
                member.drained, member.up = True, False
                self._tell("drained", member)

    def take_back(self, name: str) -> None:
        """Use a machine again that was drained; of a node also a session that is over may be named."""
        member = self.members.get(name)
        machine = machine_of(name) if member is None else member.machine
        self._drained.discard(machine)
        for each in [m for m in self.members.values() if m.machine == machine and m.drained]:
            each.drained, each.up = False, each.well
            self._tell("returned", each)

    def pick(
        self,
        model: str,
        avoid: Collection[str] = (),
        *,
        squeeze: bool = False,
        allow: Allow | None = None,
        prefer: str | None = None,
        now_s: float = 0.0,
    ) -> Member | None:
        """Return the backend for the next request of a model, or None: none can take it now.

        Backends in `avoid` are taken only if `squeeze` and nothing else is left; `squeeze` also goes over
        the limit of what a backend should run. Ejected backends are better than none. Those that `allow`
        says no to are never taken. `prefer` is taken if it is not too busy.
        """
        ring = self.rings.get(model)
        if ring is None:
            return None
        # One backend with room: there is nothing to weigh.
        only = ring.only
        if (
            only is not None
            and only.up
            and not avoid
            and (only.max_inflight is None or only.inflight < only.max_inflight)
            and (allow is None or allow(only))
        ):
            return only
        return self._pick(ring, avoid, squeeze, allow, prefer, now_s)

    def pick_service(
        self, name: str, avoid: Collection[str], now_s: float, allow: Allow | None = None
    ) -> Member | None:
        """Return the backend for the next request to a service that is no model."""
        ring = self.services.get(name)
        return None if ring is None else self._pick(ring, avoid, True, allow, None, now_s)

    def _pick(
        self,
        ring: Ring,
        avoid: Collection[str],
        squeeze: bool,
        allow: Allow | None,
        prefer: str | None,
        now_s: float,
    ) -> Member | None:
        # From the best to the worst: well ones; ejected ones; full ones; at last those that failed the
        # request.
        passes = [(avoid, False, False), (avoid, True, False)]
        if squeeze:
            passes.append((avoid, True, True))
            if avoid:
                passes.append(((), True, True))
        policy = self._policy
        # Weights that somebody chose are kept; only without them the speeds decide.
        if policy == LEARNED and ring.weighted:
            policy = decisions.ROUND_ROBIN
        for avoided, ejected, full in passes:
            usable = usable_by(avoided, allow, ejected=ejected, full=full)
            if policy == LEARNED:
                member, why = ring.learn(usable, prefer, now_s)
            else:
                member, why = ring.pick(policy, usable, prefer)
            if member is not None:
                self.decisions[why] += 1
                return member
        return None

    def learn(
        self, member: Member, model: str, work: float, seconds: float, beside: float, now_s: float
    ) -> None:
        """Note that a request of so much work took so long with so many others beside it."""
        ring = self.rings.get(model)
        speed = None if ring is None else ring.speed_of(member)
        if ring is not None and speed is not None:
            speed.observe(work, seconds, beside, now_s)
            # The first value is taken as it is.
            ring.mean_work += _SMOOTHING * (work - ring.mean_work) if ring.mean_work else work
            ring.long_work = max(work, ring.long_work + _FADING * (work - ring.long_work))

    def note_success(self, member: Member, seconds: float) -> None:
        """Note that a backend answered a request in so many seconds."""
        member.mean_s += _SMOOTHING * (seconds - member.mean_s)
        record = member.outlier
        record.row = 0
        record.good += 1

    def note_failure(self, member: Member, now_s: float, reason: str) -> None:
        """Note that a backend failed a request (5xx, refused, broken, late)."""
        member.failures += 1
        member.reason = reason
        if self._outliers.note_failure(member.outlier, now_s):
            self._tell("ejected", member)

    def tick(self, now_s: float) -> None:
        """Let time pass: ejections end, success rates are compared."""
        back, out = self._outliers.tick(now_s)
        for names, event in ((back, "restored"), (out, "ejected")):
            for name in names:
                if name in self.members:
                    self._tell(event, self.members[name])

    def snapshot(self) -> list[BackendState]:
        """Return what is known of every backend, for people; secrets are left out."""
        return [
            BackendState(
                id=m.backend.id,
                url=m.backend.url,
                models=list(m.backend.models),
                kind=m.backend.kind,
                weight=m.backend.weight,
                routed=self._routed(m),
                max_inflight=m.backend.max_inflight,
                metadata={k: v for k, v in m.backend.metadata.items() if k not in SECRETS},
                state=m.state,
                reason=m.reason,
                inflight=m.inflight,
                requests=m.requests,
                failures=m.failures,
                mean_s=round(m.mean_s, 6),
            )
            for m in self.members.values()
        ]

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise UnknownNameError("backend", name, self.members, field="id")
        return self.members[name]

    def _routed(self, member: Member) -> dict[str, float]:
        """Return the weights that a member has by what a controller told, by model."""
        told = {} if self.routes is None else self.routes.models
        return {
            model: round(ring.weight_of(member), 6)
            for model in member.backend.models
            if model in told and (ring := self.rings.get(model)) is not None and ring.told
        }

    def _rebuild(self) -> None:
        members = list(self.members.values())
        by_model: dict[str, list[Member]] = {}
        for member in members:
            # A backend that names a model twice is in its ring once.
            for model in dict.fromkeys(member.backend.models):
                by_model.setdefault(model, []).append(member)
        self.rings = {
            model: self._make_ring(model, serving)
            for model, serving in by_model.items()
            # Whoever computes prompts for others answers nobody.
            if any(m.phase != "prefill" for m in serving)
        }
        aliases: dict[str, dict[str, None]] = {}
        for member in members:
            for alias, model in member.backend.aliases.items():
                aliases.setdefault(alias, {})[model] = None
        self.aliases = {alias: tuple(models) for alias, models in aliases.items()}
        self.hands_over = any(m.phase for m in members)
        self.ending = any(m.ends_s is not None for m in members)
        services = dict.fromkeys(name for m in members for name in m.backend.services)
        self.services = {
            name: Ring(
                [m for m in members if name in m.backend.services],
                self.services.get(name),
                self._seed,
            )
            for name in services
        }

    def _make_ring(self, model: str, serving: list[Member]) -> Ring:
        before = self.rings.get(model)
        answering = [m for m in serving if m.phase != "prefill"]
        prefills = [m for m in serving if m.phase == "prefill"]
        told = self._weigh(model, [*answering, *prefills])
        if not prefills and all(m.recomputes for m in answering):
            return Ring(answering, before, self._seed, told)
        pairs = {} if self.routes is None else self.routes.pair_shares(model)
        return PairRing(answering, prefills, before, self._seed, told, pairs)

    def partner(
        self, model: str, member: Member, avoid: Collection[str], allow: Allow | None = None
    ) -> Member | None:
        """Return a backend that may compute a prompt for `member`, in the place of one that failed."""
        ring = self.rings.get(model)
        if not isinstance(ring, PairRing):
            return None
        return ring.replace_partner(member, usable_by(avoid, allow, ejected=False, full=False))

    def _weigh(self, model: str, serving: list[Member]) -> list[float] | None:
        """Return weights by what a controller told of a model; None where it told nothing of these."""
        if self.routes is None:
            return None
        return self.routes.weigh(model, [member.seat(model) for member in serving])

    def _tell(self, event: str, member: Member) -> None:
        # What is said of a backend changes: its state goes on.
        if event != "changed":
            member.since_s = time.time()
        for listener in self.listeners:
            listener(event, member)
