"""Fabrics of thousands, by site: a registry for every site, and one for all with a summary of each.

A worker keeps the records of its own site whole, as in any fabric, and of all others what their speakers say:
one signed record a site, with the services there, how many serve each, how busy they are and whom to ask. Who
routes or looks (gateways, operators, hubs) follows the sites and sees every member, as in any fabric. Each of
these registries is a `Registry` with all its rules; parts are told apart by a short name, and "" is the one
for all. A fabric that is not by site has that part alone, and nothing here changes what it does.

    sites = SitedRegistry(..., site="3f2a9c01")      a worker's, with its part
    sites.tick(now_s) -> [(part, effect), ...]

The speaker of a site is the member, up and serving, whose session has the least digits: everybody in the site
knows who that is, and where it goes the next one speaks. Two who speak at once, after a partition say, do no
harm: who sees both believes the greater summary, whichever came first (`merge_summaries`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from atoll.fabric.identity.fabric_keys import is_hub, slot_of
from atoll.fabric.registry.effects import (
    Effect,
    Refusals,
    RegistrySettings,
    Sign,
    Speaks,
    Verify,
)
from atoll.fabric.registry.fabric_registry import Registry
from atoll.fabric.registry.peers import Load
from atoll.fabric.registry.records import Kind, Metadata, SessionState, SiteService
from atoll.fabric.registry.replica import Entry

ALL = ""
"""Part of a fabric that everybody keeps."""
MAX_SITES = 1024
MAX_SITES_OF_SLOT = 16
"""Sites in which nodes with one certificate may be."""
LOOK_S = 5.0
"""Between two looks of a speaker at its site; news wait so long, so that many are told at once."""
SETTLED_S = 10.0
"""Who became a member only now does not speak yet: others may not know of it."""
BUSY_EVERY_S = 300.0
"""Between two records of a speaker that tell only of load."""
_STEPS = 4
_MAX_SERVICES = 256
_MAX_ASKED = 3

Placed = tuple[str, Effect]
"""An effect, and the part that it is of."""


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """What is known of a site from afar."""

    site: str
    speaker: str
    """Session that said so, in the part of all."""
    signed_s: float
    services: tuple[SiteService, ...]

    @property
    def serving(self) -> int:
        """Services that are served, each as often as there are members that do."""
        return sum(service.serving for service in self.services)


def merge_summaries(
    a: Mapping[str, SiteSummary], b: Mapping[str, SiteSummary]
) -> dict[str, SiteSummary]:
    """Return what both say of sites: of two summaries of one site the greater, whichever came first."""
    merged = dict(a)
    for site, summary in b.items():
        held = merged.get(site)
        if held is None or _rank(summary) > _rank(held):
            merged[site] = summary
    return merged


def _rank(summary: SiteSummary) -> tuple[int, str, float, tuple[tuple[Any, ...], ...]]:
    # One of a part of a site that was cut off knows of fewer. The rest makes the order total.
    services = tuple(msgspec.structs.astuple(service) for service in summary.services)
    return (summary.serving, summary.speaker, summary.signed_s, services)


def summaries_of(entries: Iterable[Entry]) -> dict[str, SiteSummary]:
    """Return the summaries that records bring, one for each site."""
    merged: dict[str, SiteSummary] = {}
    for entry in entries:
        metadata, record = entry.metadata, entry.record
        if metadata.summary is None or record.state is not SessionState.SERVING:
            continue
        said = SiteSummary(metadata.site, record.sid, record.signed_s, metadata.summary)
        merged = merge_summaries(merged, {metadata.site: said})
    return merged


def speaker_of(members: Mapping[str, Entry], now_s: float) -> str | None:
    """Return the session that speaks for a site, of those that are up; None: nobody yet."""
    settled = [
        sid
        for sid, entry in members.items()
        if entry.record.state is SessionState.SERVING and now_s - entry.since_s >= SETTLED_S
    ]
    return min(settled, key=lambda sid: (sid[-16:], sid), default=None)


def summarise(
    members: Mapping[str, Entry], loads: Mapping[str, Load], ask: tuple[str, ...]
) -> tuple[SiteService, ...]:
    """Return the summary of a site's members that are up."""
    serving: dict[tuple[str, Kind], list[str]] = {}
    for sid, entry in members.items():
        if entry.record.state is SessionState.SERVING:
            for service in entry.metadata.services:
                if service.layers is None:
                    serving.setdefault((service.model, service.kind), []).append(sid)
    found = []
    for (model, kind), sids in sorted(serving.items())[:_MAX_SERVICES]:
        room = sum(members[sid].metadata.max_inflight or 0 for sid in sids)
        running = sum(loads[sid].running + loads[sid].waiting for sid in sids if sid in loads)
        # In steps: each is news that everybody hears of.
        busy = min(_STEPS, round(_STEPS * running / room)) / _STEPS if room else 0.0
        found.append(SiteService(model, kind, len(sids), room, busy, ask))
    return tuple(found)


class SitedRegistry:
    """The registries of one member; see the module."""

    def __init__(
        self,
        slot: str,
        metadata: Metadata,
        *,
        sign: Sign,
        verify: Verify,
        rng: random.Random,
        now_s: float,
        state: SessionState = SessionState.JOIN,
        settings: RegistrySettings | None = None,
        observer: bool = False,
        site: str = ALL,
        follows: bool = False,
    ) -> None:
        """Start a session in the part `site`; who `follows` keeps all parts there are."""
        self.site = site
        self.loads: Mapping[str, Load] = {}
        """Of members of the site, as far as this one hears them."""
        self._slot, self._sign, self._verify, self._rng = slot, sign, verify, rng
        self._settings = settings or RegistrySettings()
        self._follows = follows
        self._parts_of_slot: dict[str, set[str]] = {}
        self._look_s = now_s + LOOK_S
        self._said_s = now_s
        self.home = self._make(metadata, now_s, state, observer=observer)
        """The registry with this member's own record."""
        self.parts = {site: self.home}
        if site != ALL:
            self.parts[ALL] = self._make(metadata, now_s, SessionState.JOIN, observer=True)
        self.all = self.parts[ALL]

    def _make(
        self, metadata: Metadata, now_s: float, state: SessionState, *, observer: bool
    ) -> Registry:
        return Registry(
            self._slot,
            metadata,
            sign=self._sign,
            verify=self._verify,
            rng=self._rng,
            now_s=now_s,
            state=state,
            settings=self._settings,
            observer=observer,
        )

    # What is known

    @property
    def sid(self) -> str:
        """This member's own session."""
        return self.home.sid

    @property
    def refusals(self) -> Refusals:
        """What was refused by name or number, before any registry was asked."""
        return self.home.refusals

    @property
    def speaks(self) -> bool:
        """Whether this member speaks for its site."""
        return self.site != ALL and not self.all.observer

    @property
    def synced(self) -> bool:
        """Whether an exchange was completed in each part in which there is somebody to ask."""
        return self.all.synced and all(p.synced or not p.tokens() for p in self.parts.values())

    def get(self, sid: str) -> Entry | None:
        """Return what is known of a session; None if nothing."""
        for part in self.parts.values():
            entry = part.get(sid)
            if entry is not None:
                return entry
        return None

    def alive(self, sid: str) -> bool:
        """Whether the session's token is up here."""
        return any(part.alive(sid) for part in self.parts.values())

    def tokens(self) -> list[tuple[str, str]]:
        """Return the sessions of others whose tokens are up here, with their parts."""
        return [(name, sid) for name, part in self.parts.items() for sid in part.tokens()]

    def peers(self) -> dict[str, Entry]:
        """Return every other session that has not left; speakers count once, by their own."""
        if len(self.parts) == 1:
            return self.home.peers()
        return {
            sid: entry
            for part in self.parts.values()
            for sid, entry in part.peers().items()
            if entry.metadata.summary is None
        }

    def sites(self) -> dict[str, SiteSummary]:
        """Return what speakers who are up say of their sites, by the site's name."""
        known = self.all.entries()
        return summaries_of(entry for sid, entry in known.items() if self.all.alive(sid))

    def stats(self) -> dict[str, object]:
        """Return figures for metrics: members of all parts together, the rest of one's own part."""
        figures = self.home.stats()
        if len(self.parts) == 1:
            return figures
        held = [entry for part in self.parts.values() for entry in part.entries().values()]
        states = Counter(e.record.state for e in held if e.metadata.summary is None)
        return figures | {
            "sessions": {state.name.lower(): states[state] for state in SessionState},
            "alive": len(self.tokens()) + 1,
            "sites": len(self.sites()),
            "speaks": self.speaks,
        }

    # What happens

    def part(self, name: str, slot: str, now_s: float) -> Registry | None:
        """Return the registry of a part in which a slot says something; None: it is not kept here."""
        held = self.parts.get(name)
        if name == ALL or name == self.site:
            return held
        if not self._follows:
            return None
        places = self._parts_of_slot.setdefault(slot, set())
        if name not in places:
            if len(places) >= MAX_SITES_OF_SLOT and not is_hub(slot):
                return None
            places.add(name)
        if held is None and len(self.parts) <= MAX_SITES:
            metadata = self.all.own_entry.metadata
            held = self.parts[name] = self._make(metadata, now_s, SessionState.JOIN, observer=True)
            # Together they ask as often as one would.
            every_s = self._settings.pull_every_s * (len(self.parts) - 1)
            for other, registry in self.parts.items():
                if other != ALL:
                    registry.settings = replace(self._settings, pull_every_s=every_s)
        return held

    def token_up(self, name: str, slot: str, sid: str, now_s: float) -> list[Placed]:
        """A token of `sid` appeared in a part."""
        part = self.part(name, slot, now_s)
        return [] if part is None else _placed(name, part.token_up(slot, sid, now_s))

    def token_down(self, name: str, slot: str, sid: str, now_s: float) -> list[Placed]:
        """A token of `sid` disappeared from a part."""
        part = self.parts.get(name)
        return [] if part is None else _placed(name, part.token_down(slot, sid, now_s))

    def pushed(self, name: str, slot: str, data: bytes, now_s: float) -> list[Placed]:
        """Take in what a slot put into a part."""
        part = self.part(name, slot, now_s)
        return [] if part is None else _placed(name, part.pushed(data, now_s))

    def recheck(self, now_s: float) -> list[Placed]:
        """Verify peers again, after certificates were revoked."""
        return [
            placed
            for name, part in self.parts.items()
            for placed in _placed(name, part.recheck(now_s))
        ]

    # What this member says of itself

    def announce(
        self, now_s: float, state: SessionState | None = None, metadata: Metadata | None = None
    ) -> list[Placed]:
        """Raise this member's record."""
        return _placed(self.site, self.home.announce(now_s, state, metadata))

    def renew(self, now_s: float) -> list[Placed]:
        """Take a new session."""
        return _placed(self.site, self.home.renew(now_s))

    def leave(self, now_s: float) -> list[Placed]:
        """Say LEFT; nothing can be announced after."""
        silent = self._fall_silent(now_s) if self.speaks else []
        return silent + _placed(self.site, self.home.leave(now_s))

    # Time

    @property
    def due_s(self) -> float:
        """When `tick` has something to do next."""
        due_s = min(part.due_s for part in self.parts.values())
        return due_s if self.site == ALL else min(due_s, self._look_s)

    def tick(self, now_s: float) -> list[Placed]:
        """Do whatever is due."""
        effects = [
            placed
            for name, part in self.parts.items()
            for placed in _placed(name, part.tick(now_s))
        ]
        if self.site != ALL and now_s >= self._look_s:
            # By chance, as all look at the same members.
            self._look_s = now_s + LOOK_S * self._rng.uniform(0.5, 1.5)
            effects += self._look(now_s)
        return effects

    def _look(self, now_s: float) -> list[Placed]:
        """Speak for the site if that is this member's part, or no more."""
        home = self.home
        if home.observer or home.own_entry.record.state is SessionState.LEFT:
            return []
        members = {sid: entry for sid, entry in home.entries().items() if home.alive(sid)}
        if speaker_of(members, now_s) != home.sid:
            return self._fall_silent(now_s) if self.speaks else []
        own, said = home.own_entry.metadata, self.all.own_entry.metadata
        services = summarise(members, self.loads, self._whom_to_ask(own.site))
        summary = msgspec.structs.replace(
            Metadata(name=own.name, provider=own.provider, role=own.role),
            region=own.region,
            site=own.site,
            summary=services,
        )
        if self.speaks:
            if not _is_news(services, said.summary or (), now_s - self._said_s):
                return []
            self._said_s = now_s
            return _placed(ALL, self.all.announce(now_s, metadata=summary))
        self._said_s = now_s
        self.all.observer = False
        if self.all.own_entry.record.state is SessionState.LEFT:
            effects = self.all.renew(now_s, state=SessionState.SERVING, metadata=summary)
        else:
            effects = self.all.announce(now_s, SessionState.SERVING, summary)
        return _placed(ALL, [Speaks(True), *effects])

    def _fall_silent(self, now_s: float) -> list[Placed]:
        effects = self.all.leave(now_s)
        self.all.observer = True
        return _placed(ALL, [*effects, Speaks(False)])

    def _whom_to_ask(self, site: str) -> tuple[str, ...]:
        """Return the site's gateways, or hubs where it has none."""
        up = [(s, e) for s, e in self.all.peers().items() if self.all.alive(s)]
        gateways = [s for s, e in up if e.metadata.role == "gateway" and e.metadata.site == site]
        return tuple(sorted(gateways or [s for s, _ in up if is_hub(slot_of(s))])[:_MAX_ASKED])


def _is_news(now: tuple[SiteService, ...], said: tuple[SiteService, ...], since_s: float) -> bool:
    """Whether a summary is worth telling everybody: load alone is, now and then."""
    if now == said:
        return False
    calm = [
        tuple(msgspec.structs.replace(service, busy=0.0) for service in summary)
        for summary in (now, said)
    ]
    return calm[0] != calm[1] or since_s >= BUSY_EVERY_S


def _placed(name: str, effects: Iterable[Effect]) -> list[Placed]:
    return [(name, effect) for effect in effects]
