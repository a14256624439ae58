"""Seeded kills of executors of an any-to-any model: no client may see any of them.

Two executors each hear and see, think, and speak, behind a front and a gateway, all as `atoll serve` starts
them. Clients ask all the time: text, pictures, spoken questions answered aloud, transcriptions, speech. Again
and again executors are killed (SIGKILL): any one; one that a stream is just coming from; both of a kind, so
that requests must wait; the one that made the inputs of a stream and then the one it comes from, so that
inputs must be made again. Every answer is compared with the one to
the same request before the first kill: letter by letter, byte by byte. At the end nothing may be left: no
array, no process, no folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from atoll.cli.demo_speech import draw_circle
from atoll.cli.serving import fetch_components, local_fleet
from atoll.core.rng import stream
from atoll.plan.plan import Plan
from atoll.runtime.front.config import FrontService
from atoll.runtime.http.client import fetch
from atoll.runtime.local.build import LocalOptions
from atoll.runtime.task_fleet.deployment import PlacedExecutor, TaskDeployment
from atoll.runtime.task_fleet.endpoint import store_folder
from atoll.runtime.task_fleet.parts import tasks_over
from benchmarks.report import Figure, finish
from benchmarks.task_clients import (
    KINDS,
    AskError,
    ClientOrder,
    HeardReply,
    ask,
    chat_order,
    picture_part,
    sound_part,
    speech_order,
    transcription_order,
)
from benchmarks.task_leftovers import ProcessWatch, StoredArrays, count_arrays, strays

if TYPE_CHECKING:
    from atoll.runtime.local.fleet import LocalFleet

MODEL = "assistant"
CLIENTS = 4
_EARS = ("silero-vad", "moonshine-encoder", "moonshine-decoder", "smollm2-vision")
_COPIES = 2
_WAYS = ("any", "stream", "pair", "maker")
_SHARES = (0.3, 0.4, 0.15, 0.15)
_ANSWERS_BETWEEN = 2
"""Answers that must have come since a kill before the next; the two of a pair fall together."""
_STUCK_S = 240.0
"""How long the run waits for what must happen next before it is given up."""
_LEASES_S = 90.0
"""After this every lease has run out (`atoll.runtime.front.dispatch.LEASE_S`), with time to spare."""
_LOOK_S = 0.05
_WATCH_S = 0.5


@dataclass
class ChaosOutcome:
    """What clients saw of the kills, and what was left. Times are seconds."""

    kills: Counter[str] = field(default_factory=Counter)
    """By executor."""
    ways: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    took_s: dict[str, list[float]] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    """The longest silence of each stream."""
    back_s: list[float] = field(default_factory=list)
    """From a kill until the executor was ready again."""
    errors: int = 0
    wrong_answers: int = 0
    calm_differences: int = 0
    """Wrong answers among those with many clients and no kills; in `wrong_answers`, too."""
    failovers: int = 0
    remakes: int = 0
    arrays: StoredArrays | None = None
    arrays_at_end: int = 0
    free_after_s: float = 0.0
    orphans: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def leaked_handles(self) -> int:
        """Arrays that are left; one where nobody could count them."""
        return 1 if self.arrays is None else self.arrays.leaked + self.arrays.running


class TaskChaos:
    """A fleet under load, and what befalls it."""

    def __init__(
        self,
        fleet: LocalFleet,
        orders: Sequence[ClientOrder],
        seed: int,
        clients: int,
        watch: ProcessWatch,
        tell: Callable[[str], None],
    ) -> None:
        self.outcome = ChaosOutcome()
        self.watch = watch
        self._tell = tell
        self._waits: list[asyncio.Task[None]] = []
        self._fleet = fleet
        self._orders = orders
        self._clients = clients
        self._picks = stream(seed, "tasks_chaos", "orders")
        self._strikes = stream(seed, "tasks_chaos", "strikes")
        self._right: dict[str, HeardReply] = {}
        self._streams: dict[int, HeardReply] = {}
        self._number = 0
        self._answers = 0
        self._stopping = False
        self._groups: dict[str, list[str]] = {}
        for process, *_ in fleet.endpoints[0].endpoint.held:
            self._groups.setdefault(process.rpartition("-")[0], []).append(process)

    async def run(self, kills: int) -> None:
        """Learn the right answers, then strike while clients ask."""
        for order in self._orders:
            reply = HeardReply()
            await ask(self._fleet.url, order, reply)
            self._right[order.name] = reply
        watching = asyncio.create_task(self._watch())
        try:
            await self._calm()
            asking = [asyncio.create_task(self._ask_on()) for _ in range(self._clients)]
            try:
                async with asyncio.timeout(_STUCK_S * (1 + kills)):
                    while self.outcome.kills.total() < kills:
                        await self._strike(kills - self.outcome.kills.total())
                    await self._more_answers(_ANSWERS_BETWEEN)
            finally:
                self._stopping = True
                await asyncio.gather(*asking)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    # Clients

    async def _calm(self) -> None:
        """Ask everything once with many clients and no kills: what differs is not the kills' fault."""
        waiting = list(self._orders)

        async def work() -> None:
            while waiting:
                await self._ask(waiting.pop())

        await asyncio.gather(*(work() for _ in range(self._clients)))
        self.outcome.calm_differences = self.outcome.wrong_answers

    async def _ask_on(self) -> None:
        while not self._stopping:
            # Kinds alike, whatever the number of orders of each.
            kind = KINDS[int(self._picks.integers(len(KINDS)))]
            found = [order for order in self._orders if order.kind == kind]
            if found:
                await self._ask(found[int(self._picks.integers(len(found)))])

    async def _ask(self, order: ClientOrder) -> None:
        self._number += 1
        number, reply, outcome = self._number, HeardReply(), self.outcome
        self._streams[number] = reply
        began_s = time.monotonic()
        try:
            await ask(self._fleet.url, order, reply)
        except AskError as error:
            outcome.errors += 1
            after_s = time.monotonic() - began_s
            self._note(f"{order.name}, after {after_s:.1f} s: {error}")
        else:
            right = self._right[order.name]
            if not reply.is_same(right):
                outcome.wrong_answers += 1
                self._note(f"{order.name}: {reply.difference(right)}")
        finally:
            del self._streams[number]
        self._answers += 1
        outcome.requests[order.kind] += 1
        outcome.took_s.setdefault(order.kind, []).append(reply.took_s)
        if reply.pieces > 1:
            outcome.gaps_s.append(reply.gap_s)

    def _note(self, text: str) -> None:
        self.outcome.notes.append(text)
        self._tell(text)

    async def _more_answers(self, count: int) -> None:
        """Wait until so many more answers have come."""
        until = self._answers + count
        await self._until(lambda: self._answers >= until, f"{count} answers")

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(_STUCK_S):
                while not is_so():
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise AskError(f"no {what} within {_STUCK_S:g} s") from None

    # Kills

    async def _strike(self, left: int) -> None:
        """Kill one executor, or both of a kind so that requests must wait."""
        way = str(self._strikes.choice(_WAYS, p=_SHARES))
        await self._more_answers(_ANSWERS_BETWEEN)
        if way == "pair" and left > 1:
            await self._until(lambda: bool(self._whole_groups()), "kind of which all are ready")
            names = self._groups[self._choose(self._whole_groups())]
            for place in self._strikes.permutation(len(names)):
                await self._kill(names[int(place)], way)
            return
        if way == "maker" and left > 1:
            await self._strike_maker()
            return
        if way in ("stream", "maker"):
            await self._until(lambda: bool(self._streaming()), "stream")
            await self._kill(self._choose(self._streaming()), "stream")
            return
        await self._until(lambda: bool(self._ready_ones()), "executor that is ready")
        await self._kill(self._choose(self._ready_ones()), "any")

    async def _strike_maker(self) -> None:
        """Kill what made the inputs of a stream; once they are gone, kill where the stream comes from."""
        await self._until(lambda: bool(self._long_ways()), "stream over two executors")
        numbers = self._long_ways()
        number = numbers[int(self._strikes.integers(len(numbers)))]
        maker, next_one = self._streams[number].way[:2]
        await self._kill(maker, "maker")
        store = store_folder(self._fleet.home) / maker
        # What starts in its place empties its store before all else.
        await self._until(
            lambda: number not in self._streams or not any(store.glob("*.array")), "empty store"
        )
        if number in self._streams and self._is_ready(next_one):
            await self._kill(next_one, "maker")

    def _choose(self, names: Sequence[str]) -> str:
        return names[int(self._strikes.integers(len(names)))]

    def _is_ready(self, name: str) -> bool:
        process = self._fleet.agent.processes[name]
        return str(process.state) == "ready" and process.pid is not None

    def _ready_ones(self) -> list[str]:
        return [name for names in self._groups.values() for name in names if self._is_ready(name)]

    def _whole_groups(self) -> list[str]:
        return [group for group, names in self._groups.items() if all(map(self._is_ready, names))]

    def _streaming(self) -> list[str]:
        """Return the executors from which answers that have begun are coming, not those before them."""
        ways = [reply.way for reply in self._streams.values() if reply.pieces > 1]
        coming = {name for way in ways for name in way[1:] or way}
        return [name for name in self._ready_ones() if name in coming]

    def _long_ways(self) -> list[int]:
        """Return the streams that have begun and whose inputs another executor made."""
        return [
            number
            for number, reply in self._streams.items()
            if reply.pieces > 1 and len(reply.way) > 1 and all(map(self._is_ready, reply.way[:2]))
        ]

    async def _kill(self, name: str, way: str) -> None:
        await self._until(lambda: bool(self._streams), "request")
        self.watch.look()
        process = self._fleet.agent.processes[name]
        pid = process.pid
        if pid is None:
            return
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.outcome.kills[name] += 1
        self._tell(f"{self.outcome.kills.total()}. {name} ({way})")
        self.outcome.ways[way] += 1
        # It takes a moment until the agent knows.
        await self._until(lambda: process.pid != pid, f"end of {name}")
        self._waits.append(asyncio.create_task(self._time_return(name)))

    async def _time_return(self, name: str) -> None:
        began_s = time.monotonic()
        await self._until(lambda: self._is_ready(name), f"return of {name}")
        self.outcome.back_s.append(time.monotonic() - began_s)

    async def _watch(self) -> None:
        while True:
            self.watch.look()
            await asyncio.sleep(_WATCH_S)

    # What is left

    async def count_left(self) -> None:
        """Wait until every lease has run out, and count what is left nevertheless."""
        await asyncio.gather(*self._waits)
        endpoint = self._fleet.endpoints[0].endpoint
        urls = [spec.probe.url for spec in endpoint.nodes]  # type: ignore[attr-defined]
        store = store_folder(self._fleet.home)
        began_s = time.monotonic()
        await self._count_attempts(endpoint.backend.url)
        while True:
            found = await count_arrays(store, endpoint.backend.url, urls)
            waited_s = time.monotonic() - began_s
            if self.outcome.arrays is None:
                self.outcome.arrays_at_end = found.handles
            self.outcome.arrays, self.outcome.free_after_s = found, waited_s
            if self.outcome.leaked_handles == 0 or waited_s > _LEASES_S:
                return
            await asyncio.sleep(_WATCH_S)

    async def _count_attempts(self, front: str) -> None:
        """Read off the front how often an invocation went elsewhere, and how often an input was lost."""
        _, page = await fetch(f"{front}/metrics", timeout_s=10.0)
        for line in page.decode().splitlines():
            if line.startswith("atoll_front_invocations_total{"):
                count = int(float(line.rpartition(" ")[2]))
                self.outcome.failovers += count if 'outcome="lost"' in line else 0
                self.outcome.remakes += count if 'outcome="lost_handle"' in line else 0


def deployment() -> TaskDeployment:
    """Return two executors of each kind, with one thread each."""
    kinds = {"ears": _EARS, "mind": ("smollm2",), "mouth": ("hibari",)}
    service = FrontService(
        name=MODEL,
        tasks=tasks_over([name for names in kinds.values() for name in names]),
        options={"voice_activity": True},
    )
    executors = tuple(
        PlacedExecutor(id=f"{kind}-{copy}", components={name: {} for name in names}, threads=1)
        for kind, names in kinds.items()
        for copy in range(_COPIES)
    )
    return TaskDeployment((service,), executors)


async def make_orders(url: str) -> list[ClientOrder]:
    """Return what clients ask; the model speaks the questions that it will hear."""
    questions = ("What is the capital of France?", "Tell me a story about the picture.")
    spoken = []
    for text in questions:
        reply = HeardReply()
        await ask(url, speech_order(text, MODEL, text), reply)
        spoken.append(bytes(reply.sound))
    red, blue = draw_circle((220, 30, 30)), draw_circle((30, 30, 220))
    look = {"type": "text", "text": "Write a long story about what you see."}
    return [
        chat_order("chat-sea", MODEL, "chat", "Tell me three things about the sea.", 40),
        chat_order("chat-two", MODEL, "chat", "Count from one to ten in words.", 32),
        chat_order("vision-red", MODEL, "vision", [picture_part(red), look], 40),
        chat_order("vision-blue", MODEL, "vision", [picture_part(blue), look], 40),
        chat_order("spoken-france", MODEL, "spoken", [sound_part(spoken[0])], 40, aloud=True),
        chat_order(
            "spoken-red",
            MODEL,
            "spoken",
            [picture_part(red), sound_part(spoken[1])],
            40,
            aloud=True,
        ),
        transcription_order("transcription-france", MODEL, spoken[0]),
        transcription_order("transcription-picture", MODEL, spoken[1]),
        speech_order("speech-short", MODEL, "Good morning. The tide is low today."),
        speech_order(
            "speech-long",
            MODEL,
            "The first ship left at dawn. The second one waited for the wind. "
            "Nobody saw the third. All of them came home before the winter.",
        ),
    ]


async def chaos(
    tasks: TaskDeployment,
    make: Callable[[str], Awaitable[list[ClientOrder]]],
    *,
    kills: int,
    seed: int,
    clients: int = CLIENTS,
    tell: Callable[[str], None] = lambda _text: None,
) -> ChaosOutcome:
    """Serve a deployment here, strike it so many times while clients ask, and count what is left of it."""
    began_s = time.monotonic()
    plan = Plan(
        problem_hash="", problem_name="chaos", usd_per_hour=0, status="feasible", solver="hand"
    )
    watch = ProcessWatch()
    with local_fleet(
        plan,
        {},
        LocalOptions(),
        host="127.0.0.1",
        port=0,
        log=None,
        on_progress=lambda _name, _state, _reason: None,
        tasks=tasks,
    ) as fleet:
        home, store = fleet.home.folder, store_folder(fleet.home)
        await fleet.start()
        try:
            run = TaskChaos(fleet, await make(fleet.url), seed, clients, watch, tell)
            try:
                await run.run(kills)
                await run.count_left()
            except AskError as error:
                run.outcome.errors += 1
                run.outcome.notes.append(str(error))
        finally:
            watch.look()
            await fleet.stop(10.0)
    outcome = run.outcome
    left = {*watch.survivors(), *strays(home)}
    folders = [folder for folder in (home, store) if folder.exists()]
    outcome.orphans = len(left) + len(folders)
    outcome.notes += [f"left: process {pid}" for pid in sorted(left)]
    outcome.notes += [f"left: {folder.name}" for folder in folders]
    outcome.wall_s = time.monotonic() - began_s
    own = resource.getrusage(resource.RUSAGE_SELF)
    outcome.cpu_s = watch.total_cpu_s + own.ru_utime + own.ru_stime
    return outcome


def show(outcome: ChaosOutcome) -> None:
    """Print what happened, and the figures."""
    print(f"{'requests':14s} {'count':>6s} {'p50 s':>8s} {'p99 s':>8s} {'longest':>8s}")
    for kind in KINDS:
        took_s = outcome.took_s.get(kind, [0.0])
        middle, most = np.percentile(took_s, (50, 99))
        print(
            f"{kind:14s} {outcome.requests[kind]:6d} {middle:8.2f} {most:8.2f} {max(took_s):8.2f}"
        )
    print(f"{'killed':14s} {'times':>6s}")
    for name, times in sorted(outcome.kills.items()):
        print(f"{name:14s} {times:6d}")
    for way, times in sorted(outcome.ways.items()):
        print(f"  as {way:9s} {times:6d}")
    print(
        f"{outcome.failovers} invocations went elsewhere, {outcome.remakes} inputs were lost with their "
        f"executor; {outcome.arrays_at_end} arrays held at the end, free after {outcome.free_after_s:.1f} s"
    )
    for note in outcome.notes[:20]:
        print(f"  {note}")
    all_s = [seconds for each in outcome.took_s.values() for seconds in each]
    names = ("errors", "wrong_answers", "leaked_handles", "orphans")
    finish(
        [
            Figure("kills", outcome.kills.total()),
            *(Figure(name, getattr(outcome, name), 0) for name in names),
            Figure("requests", outcome.requests.total()),
            Figure("seconds_p50", _percentile(all_s, 50)),
            Figure("seconds_p99", _percentile(all_s, 99)),
            Figure("gap_s_p50", _percentile(outcome.gaps_s, 50)),
            Figure("gap_s_p99", _percentile(outcome.gaps_s, 99)),
            Figure("gap_s_max", _percentile(outcome.gaps_s, 100)),
            Figure("back_s_p50", _percentile(outcome.back_s, 50), None, "kill until ready again"),
            Figure("back_s_max", _percentile(outcome.back_s, 100)),
            Figure("failovers", outcome.failovers),
        ],
        remakes=outcome.remakes,
        calm_differences=outcome.calm_differences,
        killed=dict(sorted(outcome.kills.items())),
        ways=dict(sorted(outcome.ways.items())),
        kinds={kind: outcome.requests[kind] for kind in KINDS},
        wall_s=round(outcome.wall_s, 1),
        cpu_s=round(outcome.cpu_s, 1),
    )


def _percentile(seconds: list[float], percent: float) -> float | None:
    return round(float(np.percentile(seconds, percent)), 3) if seconds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=None, help="how many (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="ten kills")
    chosen = parser.parse_args()
    kills = chosen.kills or (10 if chosen.quick else 100)
    tasks = deployment()
    fetch_components(tasks)

    def tell(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    show(asyncio.run(chaos(tasks, make_orders, kills=kills, seed=chosen.seed, tell=tell)))


if __name__ == "__main__":
    main()
