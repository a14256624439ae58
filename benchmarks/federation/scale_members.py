"""Membership of 10,000 nodes by site, simulated: memory, traffic and time to know.

The simulation (`benchmarks.site_world`) has sites of 200 members. All members of one of them are real, hubs,
gateways and twenty members of another site too; all others only speak, and one of each site says its
summary. A quarter of the sites changes its load every five minutes.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from functools import partial

from atoll.fabric.identity import fabric_keys as keys
from atoll.fabric.identity.identity import OPEN_FABRIC, Identity
from atoll.fabric.identity.record_trust import sign_record
from atoll.fabric.registry import sync
from atoll.fabric.registry.records import Record, SessionState, SiteService
from atoll.fabric.registry.sites import ALL, BUSY_EVERY_S, LOOK_S, SETTLED_S, SitedRegistry
from tests.fabric.registry.site_world import (
    HANDLE_S,
    LONGEST_LOOK_S,
    SETTINGS,
    VERIFY_S,
    RealMember,
    SiteWorld,
    describe,
    shared_records,
)

MODEL = "meta-llama/Llama-3.1-70B-Instruct"
SITE = 200
REAL = (SITE, 20)
"""Members of the first sites, of which all are real."""
HUBS, GATEWAYS = 3, 2
CHURN = 0.02
"""Of the members that go in an hour, and as many come."""
_START_S = 10.0
_REST_S = 120.0


class ScaledFabric:
    """A world of so many members, and what those that only speak do."""

    def __init__(self, members: int, seed: int = 1) -> None:
        self.members = members
        self.world = SiteWorld(hubs=HUBS, gateways=GATEWAYS, seed=seed)
        self.rng = random.Random(seed)
        self.sites = [f"site{number:03d}" for number in range(members // SITE)]
        self.real: dict[str, list[RealMember]] = {site: [] for site in self.sites[: len(REAL)]}
        self.others: dict[str, list[str]] = {site: [] for site in self.sites[len(REAL) :]}
        self.speakers: dict[str, str] = {}
        self.busy: dict[str, float] = {}

    def grow(self) -> float | None:
        """Start everybody within ten seconds; return how long after the last one all agree."""
        world = self.world
        for site, size in zip(self.sites, (*REAL, *[SITE] * len(self.others)), strict=True):
            for number in range(size):
                start = partial(self._start, site, f"n{number}")
                world.later(self.rng.uniform(0.0, _START_S), start)
        world.pass_time(_START_S)
        took_s = world.until(self.agreed)
        world.pass_time(SETTLED_S)
        for site in self.others:
            self.speakers[site] = world.speak("speaker", site, self._summary(site))
            world.later(self.rng.uniform(0.0, BUSY_EVERY_S), partial(self._work, site))
        world.pass_time(2 * LONGEST_LOOK_S)
        return took_s

    def _start(self, site: str, name: str) -> None:
        if site in self.real:
            self.real[site].append(self.world.start(name, site=site))
        else:
            self.others[site].append(self.world.speak(name, site))

    def _summary(self, site: str) -> tuple[SiteService, ...]:
        count = len(self.others[site])
        ask = tuple(n.registry.sid for n in self.world.nodes[:HUBS])
        busy = self.busy.get(site, 0.25)
        return (SiteService(MODEL, "llm", count, 256 * count, busy, ask),)

    def _say(self, site: str) -> None:
        self.world.say(self.speakers[site], self._summary(site))

    def _work(self, site: str) -> None:
        if self.rng.random() < 0.25:
            self.busy[site] = self.rng.choice((0.25, 0.5, 0.75))
            self._say(site)
        self.world.later(BUSY_EVERY_S, partial(self._work, site))

    def churn(self, seconds: float) -> None:
        """Have members of sites that only speak come and go."""
        for _ in range(round(self.members * CHURN * seconds / 3600)):
            site = self.rng.choice(list(self.others))
            at_s = self.rng.uniform(0.0, seconds)
            self.world.later(at_s, partial(self._turn_over, site))

    def _turn_over(self, site: str) -> None:
        gone = self.rng.choice(self.others[site])
        self.others[site].remove(gone)
        self.world.hush(gone)
        # It is told before its place is taken: two summaries for one that goes and one that comes.
        self.world.later(LOOK_S, partial(self._say, site))
        self.world.later(4 * LOOK_S, partial(self._start, site, "new"))
        self.world.later(5 * LOOK_S, partial(self._say, site))

    def agreed(self) -> bool:
        """Whether all who keep a part hold all of it."""
        hubs = self.world.nodes[: HUBS + GATEWAYS]
        here = {n.registry.sid: n for nodes in self.real.values() for n in nodes if n.up}
        for node in self.world.living:
            part = node.registry.site
            wanted = len(here) + sum(map(len, self.others.values()))
            if node in hubs:
                held = sum(len(p.peers()) for name, p in node.registry.parts.items() if name)
            else:
                held = len(node.registry.home.peers()) + 1
                wanted = sum(n.registry.site == part for n in here.values())
            if held < wanted:
                return False
        return self.world.agreed()

    def knowing(self, sid: str, site: str) -> Iterable[bool]:
        """Yield whether each who routes, or is of a site, knows a session to be up."""
        for node in self.world.living:
            if node.follows or node.registry.site == keys.part_of(site):
                yield self.world.knows(node, sid)

    def told(self, site: str) -> set[int]:
        """Return how many members of a site serve, as all others know it."""
        known = (n.registry.sites().get(site) for n in self.world.living)
        return {0 if summary is None else summary.serving for summary in known}

    def joins(self) -> tuple[float | None, float | None]:
        """Start a member; return when those of its site and all who route know it, and when all others do."""
        site = self.sites[0]
        serving = len([n for n in self.real[site] if n.up])
        node = self.world.start("late", site=site)
        self.real[site].append(node)
        began_s = self.world.now_s
        near_s = self.world.until(lambda: all(self.knowing(node.registry.sid, site)), step_s=0.002)
        self.world.until(lambda: self.told(site) == {serving + 1})
        return near_s, self.world.now_s - began_s

    def dies(self) -> tuple[float | None, float | None]:
        """Kill a member that speaks for its site, as both."""
        site = self.sites[0]
        serving = len([n for n in self.real[site] if n.up])
        node = next(n for n in self.real[site] if n.registry.speaks)
        sid, began_s = node.registry.sid, self.world.now_s
        self.world.kill(node)
        near_s = self.world.until(lambda: not any(self.knowing(sid, site)), step_s=0.002)
        self.world.until(lambda: self.told(site) == {serving - 1})
        return near_s, self.world.now_s - began_s

    def heals(self) -> float | None:
        """Cut half of a site off for 20 s, in which one joins; return how long the cure takes."""
        site = self.sites[0]
        half = self.real[site][::2]
        self.world.divide(half)
        self.world.pass_time(_START_S)
        self.real[site].append(self.world.start("near", site=site))
        self.world.pass_time(_START_S)
        self.world.heal()
        return self.world.until(self.agreed)

    def traffic(self, seconds: float) -> tuple[float, float, float]:
        """Let time pass; return bytes a second of worker and gateway, and CPU-s of a worker in an hour."""
        nodes = [n for n in self.real[self.sites[0]] if n.up]
        gateways = self.world.nodes[HUBS : HUBS + GATEWAYS]
        before = {id(n): (n.bytes, n.messages, n.verified) for n in (*nodes, *gateways)}
        self.churn(seconds)
        self.world.pass_time(seconds)
        bytes_s, gateway_s = (
            statistics.fmean((n.bytes - before[id(n)][0]) / seconds for n in some)
            for some in (nodes, gateways)
        )
        cpu_s = statistics.fmean(
            (n.verified - before[id(n)][2]) * VERIFY_S + (n.messages - before[id(n)][1]) * HANDLE_S
            for n in nodes
        )
        return bytes_s, gateway_s, cpu_s * 3600 / seconds


def memory_of(parts: Sequence[tuple[str, Sequence[bytes]]], *, follows: bool) -> float:
    """Return how many MB the registries of one process take with these records, none of it shared."""
    gc.collect()
    tracemalloc.start()
    identity = Identity.self_made(
        "h0" if follows else "m000", "x", "lab", "hub" if follows else "worker"
    )
    registry = SitedRegistry(
        identity.slot,
        describe(identity.slot),
        sign=partial(sign_record, identity, OPEN_FABRIC),
        verify=lambda _: None,
        rng=random.Random(1),
        now_s=1.8e9,
        state=SessionState.SERVING,
        settings=SETTINGS,
        site=ALL if follows else parts[0][0],
        follows=follows,
    )
    for name, packed in parts:
        for data in packed:
            (record,) = sync.decode_records(data)
            registry.pushed(name, record.slot, data, record.signed_s)
            registry.token_up(name, record.slot, record.sid, record.signed_s)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / 1e6


def packed_parts(fabric: ScaledFabric) -> dict[str, list[bytes]]:
    """Return the records of every part as a hub holds them, encoded."""
    hub = fabric.world.nodes[0].registry
    return {
        name: [
            sync.encode_message((e.record,)) for e in part.entries().values() if _lives(e.record)
        ]
        for name, part in hub.parts.items()
    }


def _lives(record: Record) -> bool:
    return record.state is SessionState.SERVING


def simulate(members: int, seconds: float = _REST_S) -> dict[str, float | None]:
    """Run it all with so many members; return the figures."""
    began = time.process_time()
    with shared_records():
        fabric = ScaledFabric(members)
        mass_s = fabric.grow()
        join_s, join_far_s = fabric.joins()
        fabric.world.pass_time(30.0)
        death_s, death_far_s = fabric.dies()
        heal_s = fabric.heals()
        fabric.world.pass_time(30.0)
        bytes_s, gateway_s, cpu_s = fabric.traffic(seconds)
        said = fabric.world.nodes[-1].registry.sites()
    parts = packed_parts(fabric)
    sizes = [len(data) for some in parts.values() for data in some]
    own = keys.part_of(fabric.sites[0])
    worker_mb = memory_of([(own, parts[own]), (ALL, parts[ALL])], follows=False)
    router_mb = memory_of(list(parts.items()), follows=True)
    spent_s = time.process_time() - began
    if len(said) != len(fabric.sites):
        raise RuntimeError(f"{len(said)} of {len(fabric.sites)} sites are known at the end")
    print(
        f"{members} members in {len(fabric.sites)} sites, {HUBS} hubs, {GATEWAYS} gateways; "
        f"a record is {statistics.fmean(sizes):.0f} bytes; simulated in {spent_s:.0f} CPU-s"
    )
    name = f"members{members}"
    return {
        f"{name}_mb": worker_mb,
        f"{name}_router_mb": router_mb,
        f"{name}_bytes_s": bytes_s,
        f"{name}_router_bytes_s": gateway_s,
        f"{name}_cpu_s_hour": cpu_s,
        f"{name}_join_s": join_s,
        f"{name}_join_far_s": join_far_s,
        f"{name}_death_s": death_s,
        f"{name}_death_far_s": death_far_s,
        f"{name}_mass_join_s": mass_s,
        f"{name}_heal_s": heal_s,
    }


_NOTES = {
    "mb": "registries of a worker",
    "router_mb": "of a hub or gateway, which keeps all records",
    "bytes_s": "of a worker, both ways; 2 % an hour come and go",
    "router_bytes_s": "of a gateway's registries",
    "cpu_s_hour": "of a worker, with 210 us a signature",
    "join_s": "its site and all who route know it",
    "join_far_s": "all others know of one more there",
    "death_s": "kill -9 of a speaker: its site and all who route",
    "death_far_s": "all others, from the next speaker",
    "mass_join_s": "all within 10 s; after the last",
    "heal_s": "half of a site cut off for 20 s",
}


def run(quick: bool) -> dict[str, float | None]:
    """Simulate; print the table and return the figures."""
    figures = simulate(1000 if quick else 10_000)
    for name, value in figures.items():
        kind = name.partition("_")[2]
        shown = "never" if value is None else f"{value:10.3f}"
        print(f"  {name:32s} {shown}  {_NOTES.get(kind, '')}".rstrip())
    return figures
