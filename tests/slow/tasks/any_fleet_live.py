"""A mixed fleet for real: changes of mix and kills under load, and its plan against the best monolith.

    python -m benchmarks.any_fleet_live [--quick]

**Changes and kills.** A fleet that chats, sees and speaks is brought up by `atoll up` and operated by `atoll
operate`, here. Clients ask all the time, at a rate that does not wait for answers. Again and again the fleet
file says another mix of classes, and clients ask so. Where what runs does not do for that another plan comes
in force: executors start, take over, and are drained. Executors are killed (SIGKILL) meanwhile: in the midst
of a change, when all stands still, one that a stream is just coming from; and so is the graph server. Every
answer is compared with the one to the same request before the first of it, letter by letter, byte by byte. At
the end nothing may be left: no array, no process, no folder.

**Plan against monolith**: see `benchmarks.any_to_any.plan_monolith`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.rng import stream
from benchmarks.any_to_any.plan_monolith import COUNT, QUICK_COUNT, compare
from benchmarks.report import Figure
from tests.slow.tasks.checked_clients import AnswersSeen, CheckedClients, show_requests, until
from tests.slow.tasks.live_fleet import CLASSES, MIXES, RATE_PER_S, LiveFleet
from tests.slow.tasks.task_clients import AskError
from tests.slow.tasks.tasks_chaos import make_orders
from tests.slow.verdict import conclude

CHANGES, KILLS = 30, 20
QUICK_CHANGES, QUICK_KILLS = 6, 4
_WAYS = ("change", "stream", "calm", "server")
"""When an executor is killed: while the fleet changes, while it streams, when all stands; or the server."""
_SHARES = (0.35, 0.25, 0.2, 0.2)
_MOST_UNDER_WAY = 40
"""More requests than this are not begun: what cannot keep up shall not be buried."""
_COMPARED = (
    "plan_over_monolith_throughput",
    "plan_over_monolith_p95",
    "sim_vs_served_err",
    "sim_vs_served_err_mean",
)
_SETTLED_S = 1200.0
"""Where promises are broken, as on a busy machine, what is left over goes `ControlPolicy.recover_s` later."""
_REPLANNED_S = 90.0
"""How long another plan is waited for: what runs may do for the new mix, too."""
_SILENT_S = 240.0
"""How long clients wait for the next word: where the only executor of a kind dies, until another serves."""
_LEASES_S = 90.0
"""After this every lease has run out (`atoll.runtime.graph_server.dispatch.LEASE_S`), with time to spare."""


@dataclass
class LiveOutcome(AnswersSeen):
    """What clients saw of changes and kills, and what was left."""

    changes: int = 0
    plans: int = 0
    """Changes that brought another plan before the next step."""
    kills: Counter[str] = field(default_factory=Counter)
    """By way."""
    settle_s: list[float] = field(default_factory=list)
    """From a change or kill until the plan in force stood."""
    left: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0


class LiveRun:
    """A fleet under load, its changes and the kills."""

    def __init__(self, fleet: LiveFleet, seed: int, tell: Callable[[str], None]) -> None:
        self.outcome = LiveOutcome()
        self._fleet, self._tell = fleet, tell
        self._mix = MIXES[0]
        self._picks = stream(seed, "any_fleet_live", "orders")
        self._strikes = stream(seed, "any_fleet_live", "strikes")
        self._clients = CheckedClients(fleet.url, (), self.outcome, tell)
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self, changes: int, kills: int) -> None:
        """Learn the right answers, then change and kill while clients ask; count what is held then."""
        orders = await make_orders(self._fleet.url)
        wanted = tuple(order for order in orders if order.kind in CLASSES)
        limits = {"silent_s": _SILENT_S, "whole_s": 2.0 * _SILENT_S}
        self._clients = CheckedClients(self._fleet.url, wanted, self.outcome, self._tell, **limits)
        await self._clients.learn()
        steps = self._draw_steps(changes, kills)
        load = asyncio.create_task(self._ask_on())
        try:
            for number, ways in enumerate(steps):
                await self._step(number, ways)
            await self._clients.more_answers(3)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            self._tell(f"{len(self._asking)} requests are still answered")
            await asyncio.gather(*self._asking)
            self._tell("all are answered")
        try:
            await self._await_nothing_held()
        except AskError as error:
            self.outcome.left.append(str(error))

    def _draw_steps(self, changes: int, kills: int) -> list[list[str]]:
        """Return the kills of every change, by way: each way at least once where there are enough."""
        ways = [_WAYS[n % len(_WAYS)] for n in range(min(kills, len(_WAYS)))]
        more = self._strikes.choice(_WAYS, size=max(0, kills - len(ways)), p=_SHARES)
        steps: list[list[str]] = [[] for _ in range(changes)]
        for way in (*ways, *map(str, more)):
            steps[int(self._strikes.integers(changes))].append(way)
        return steps

    async def _step(self, number: int, ways: list[str]) -> None:
        """Change the mix, and kill while that is under way and after it."""
        before = self._plan_hash()
        self._mix = MIXES[(number + 1) % len(MIXES)]
        self._tell(f"change {number + 1}: {self._mix}")
        self._fleet.use(self._mix)
        with contextlib.suppress(AskError):
            await until(lambda: self._plan_hash() != before, "other plan", _REPLANNED_S)
        self.outcome.changes += 1
        self.outcome.plans += self._plan_hash() != before
        for way in sorted(ways, key=("change", "server", "stream", "calm").index):
            if way == "calm":
                await self._settle()
            await self._kill(way)
        await self._settle()

    async def _settle(self) -> None:
        began_s = time.monotonic()
        # By files alone, some of them many: not while clients wait for this loop.
        async with asyncio.timeout(_SETTLED_S):
            while not await asyncio.to_thread(self._fleet.is_settled):
                self._fleet.look()
                await asyncio.sleep(0.5)
        self.outcome.settle_s.append(time.monotonic() - began_s)

    def _plan_hash(self) -> str:
        found = self._fleet.plan()
        return "" if found is None else found.hash

    # Kills

    async def _kill(self, way: str) -> None:
        """Kill an executor, or the graph server, while somebody is being answered."""
        await until(lambda: bool(self._clients.streams), "request")
        if way == "server":
            # One must be left, or nobody could answer.
            await until(lambda: len(self._fleet.graph_servers()) > 1, "second graph server")
            there = self._fleet.graph_servers()
        else:
            there = self._fleet.executors()
        among = set(there)
        if way == "stream":
            await until(lambda: bool(self._streaming()), "stream")
            there, among = self._fleet.executors(), self._streaming()
        names = sorted(among & set(there))
        name = names[int(self._strikes.integers(len(names)))]
        pid = there[name][0]
        if self._fleet.kill(pid):
            self.outcome.kills[way] += 1
            self._tell(f"kill {self.outcome.kills.total()}: {name} ({way})")
        await self._clients.more_answers(2)

    def _streaming(self) -> set[str]:
        """Return the executors from which answers that have begun are coming."""
        ways = [reply.way for reply in self._clients.streams.values() if reply.pieces > 1]
        return {name for way in ways for name in way} & self._fleet.executors().keys()

    # Clients

    async def _ask_on(self) -> None:
        """Ask at a rate, whether answers come or not, as the mix in force says."""
        while True:
            await asyncio.sleep(float(self._picks.exponential(1.0 / RATE_PER_S)))
            kinds = list(CLASSES)
            shares = [self._mix.share(kind) for kind in kinds]
            kind = str(self._picks.choice(kinds, p=shares))
            found = [order for order in self._clients.orders if order.kind == kind]
            order = found[int(self._picks.integers(len(found)))]
            if len(self._asking) < _MOST_UNDER_WAY:
                asking = asyncio.create_task(self._clients.ask(order))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)

    async def _await_nothing_held(self) -> None:
        until_s = time.monotonic() + _LEASES_S
        while held := await self._fleet.count_arrays():
            if time.monotonic() > until_s:
                raise AskError(f"{held} arrays are held {_LEASES_S:g} s after the last request")
            await asyncio.sleep(0.5)


def shake(
    changes: int, kills: int, *, seed: int = 0, tell: Callable[[str], None] = lambda _text: None
) -> LiveOutcome:
    """Bring a fleet up here, change and strike it so many times under load, and count what is left of it."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="al-") as name:
        fleet = LiveFleet(Path(name))
        try:
            fleet.bring_up(MIXES[0])
            tell(f"up at {fleet.url}")
            run = LiveRun(fleet, seed, tell)
            with fleet.operated():
                try:
                    asyncio.run(run.run(changes, kills))
                except (AskError, TimeoutError) as error:
                    run.outcome.errors += 1
                    run.outcome.notes.append(f"given up: {error!r}")
            tell("taking it down")
            fleet.take_down()
            outcome = run.outcome
            outcome.left += fleet.leftovers()
            outcome.cpu_s = fleet.cpu_s
        finally:
            fleet.site.end()
    outcome.wall_s = time.monotonic() - began_s
    return outcome


def show_shaken(outcome: LiveOutcome) -> None:
    """Print what clients saw."""
    show_requests(outcome)
    struck = ", ".join(f"{way} {times}" for way, times in sorted(outcome.kills.items()))
    print(
        f"{outcome.changes} changes of mix, {outcome.plans} of plan; {outcome.kills.total()} kills: {struck}"
    )
    for line in (*outcome.notes[:20], *(f"left: {each}" for each in outcome.left[:20])):
        print(f"  {line}")


def tell_aloud(text: str) -> None:
    """Say how it goes, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run_shaken(changes: int, kills: int) -> dict[str, float | int | None]:
    """Change and kill so often, show what clients saw, and return the figures."""
    outcome = shake(changes, kills, tell=tell_aloud)
    show_shaken(outcome)
    return {
        "changes": outcome.changes,
        "plan_changes": outcome.plans,
        "kills": outcome.kills.total(),
        "errors": outcome.errors,
        "wrong_answers": outcome.wrong_answers,
        "leaked": len(outcome.left),
        "requests": outcome.requests.total(),
        "gap_s_max": round(max(outcome.gaps_s, default=0.0), 3),
        "live_cpu_s": round(outcome.cpu_s, 1),
    }


def run_live(quick: bool) -> dict[str, float | int | None]:
    """Return what is measured live, see the module; `quick`: fewer changes and kills, and a short load."""
    shaken = run_shaken(*((QUICK_CHANGES, QUICK_KILLS) if quick else (CHANGES, KILLS)))
    compared = asyncio.run(compare(QUICK_COUNT if quick else COUNT))
    return {**{name: compared[name] for name in _COMPARED}, **shaken}


def main() -> None:
    """Print what was found, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="6 changes, 4 kills, a short load")
    parser.add_argument("--small", action="store_true", help="a change, 3 kills, no comparison")
    chosen = parser.parse_args()
    found = run_shaken(1, 3) if chosen.small else run_live(chosen.quick)
    bars = {"errors": 0.0, "wrong_answers": 0.0, "leaked": 0.0, "sim_vs_served_err": 0.15}
    conclude([Figure(name, value, bars.get(name)) for name, value in found.items()])


if __name__ == "__main__":
    main()
