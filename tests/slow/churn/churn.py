"""Nodes come and go under load: clients see none of it, throughput follows the nodes, the books are right.

OpenFabric's figure 4 at process scale. Nodes with engines of a fixed speed, each a process of its own, join a
fabric of two hubs; clients that always want more stream answers from one gateway with keys and a ledger. The
number of nodes swings between a third of the most and the most, while nodes are killed (SIGKILL) and frozen
(SIGSTOP, thawed later), and hubs are killed and come back. All of it is drawn from a seed. Every token that
every client gets is compared with what it must be, and the ledger with what clients got.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import math
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.rng import stream
from benchmarks.report import ROOT, Figure
from tests.slow.churn.churn_clients import BIN_S, Clients, Seen
from tests.slow.churn.churn_processes import HUBS, NO_LEDGER, Ledger, Node, Site, kill
from tests.slow.verdict import conclude, percentile_ms

RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 4
STEP_S = 0.1
_MIN_SHARE = 1 / 3
_CLIENTS_PER_NODE = 6
_SWING_S = 150.0
_WINDOW_S = 3.0
_SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Size:
    """How large a run is."""

    seconds: float
    nodes: int
    kills: int
    hub_kills: int
    freezes: int
    swing_s: float = _SWING_S
    """From few nodes to many and back."""
    tokens: tuple[int, int] = (20, 60)
    """Of the shortest answer and the longest."""


FULL = Size(300.0, 24, 110, 4, 8)
QUICK = Size(60.0, 12, 20, 3, 5, 60.0)
SMALL = Size(20.0, 6, 6, 1, 1, 20.0, (10, 30))


@dataclass(frozen=True, slots=True, order=True)
class Blow:
    """Something that is to be broken."""

    at_s: float
    kind: str
    """`node`, `hub` or `freeze`."""
    seconds: float = 0.0
    """How long it lasts: a hub that is away, a node that is frozen."""


def blows(size: Size, seed: int) -> list[Blow]:
    """Return what is broken when, in order."""
    chance = stream(seed, "churn", "blows")
    span = size.seconds - 2 * _SETTLE_S

    def spread(count: int) -> list[float]:
        """Return times that are about evenly apart."""
        places = (np.arange(count) + chance.uniform(0.1, 0.9, count)) / max(1, count)
        return [_SETTLE_S + float(place) * span for place in places]

    found = [Blow(at_s, "node") for at_s in spread(size.kills)]
    found += [Blow(at_s, "hub", float(chance.uniform(1.0, 4.0))) for at_s in spread(size.hub_kills)]
    found += [
        Blow(at_s, "freeze", float(chance.uniform(0.3, 5.0))) for at_s in spread(size.freezes)
    ]
    return sorted(found)


def wanted(size: Size, at_s: float) -> int:
    """Return how many nodes there should be at a time: few at first, most half a swing later."""
    low = math.ceil(size.nodes * _MIN_SHARE)
    wave = 0.5 - 0.5 * math.cos(2 * math.pi * at_s / size.swing_s)
    return round(low + (size.nodes - low) * wave)


@dataclass
class Outcome:
    """What happened."""

    seen: Seen
    struck: Counter[str] = field(default_factory=Counter)
    added: int = 0
    ledger: Ledger = NO_LEDGER
    live: list[tuple[float, int]] = field(default_factory=list, repr=False)
    """Nodes that serve, from a time on."""
    marks: list[tuple[float, str]] = field(default_factory=list, repr=False)

    @property
    def ledger_diff(self) -> int:
        """Tokens and requests that ledger and clients count differently."""
        ledger, seen = self.ledger, self.seen
        return (
            abs(ledger.tokens - seen.delivered)
            + abs(ledger.attempted - seen.delivered)
            + abs(ledger.requests - seen.requests)
        )


class Churn:
    """A site under load, and what befalls it."""

    def __init__(self, site: Site, size: Size, seed: int, clients: Clients) -> None:
        self.outcome = Outcome(clients.seen)
        self._site = site
        self._size = size
        self._clients = clients
        self._blows = blows(size, seed)
        self._chance = stream(seed, "churn", "victims")
        self._nodes: list[Node] = []
        self._starting = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._began_s = time.monotonic()

    async def fill(self) -> None:
        """Start the first nodes."""
        await asyncio.gather(*(self._add() for _ in range(wanted(self._size, 0.0))))

    async def run(self) -> None:
        """Break things for as long as the run lasts, then let clients finish."""
        self._began_s = time.monotonic()
        self.outcome.added = 0
        self.outcome.live.clear()
        self._changed()
        asking = asyncio.create_task(self._clients.run(self._size.nodes * _CLIENTS_PER_NODE))
        left = list(self._blows)
        while (now_s := self._now_s()) < self._size.seconds:
            due = [blow for blow in left if blow.at_s <= now_s]
            # What finds nobody to strike waits until there is somebody.
            left = [blow for blow in left if blow not in due or not self._strike(blow)]
            for _ in range(wanted(self._size, now_s) - len(self._nodes) - self._starting):
                self._spawn(self._add())
            surplus = len(self._nodes) - wanted(self._size, now_s)
            for _ in range(surplus):
                # The plan wants fewer: what goes, goes without a word.
                self._kill("leave")
            await asyncio.sleep(0.05)
        self._clients.stop()
        await asyncio.gather(asking, *self._tasks)

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

    def _changed(self) -> None:
        serving = sum(not node.stopped for node in self._nodes)
        self.outcome.live.append((self._now_s(), serving))

    async def _add(self) -> None:
        self._starting += 1
        try:
            node = await self._site.start_node()
        finally:
            self._starting -= 1
        self._nodes.append(node)
        self.outcome.added += 1
        self._changed()

    def _strike(self, blow: Blow) -> bool:
        if blow.kind == "node":
            return self._kill("node")
        if blow.kind == "hub":
            self.outcome.struck["hub"] += 1
            number = self.outcome.struck["hub"] % HUBS
            self.outcome.marks.append((self._now_s(), "hub"))
            self._spawn(self._site.strike_hub(number, blow.seconds))
            return True
        node = self._victim()
        if node is not None:
            node.stopped = True
            self._spawn(self._freeze(node, blow.seconds))
        return node is not None

    def _victim(self) -> Node | None:
        awake = [node for node in self._nodes if not node.stopped]
        # One always stays: nothing can be served by nobody.
        return awake[int(self._chance.integers(len(awake)))] if len(awake) > 1 else None

    def _kill(self, why: str) -> bool:
        node = self._victim()
        if node is None:
            return False
        kill(node.process)
        self._nodes.remove(node)
        self.outcome.struck[why] += 1
        self.outcome.marks.append((self._now_s(), why))
        self._changed()
        return True

    async def _freeze(self, node: Node, seconds: float) -> None:
        node.process.send_signal(signal.SIGSTOP)
        self.outcome.struck["freeze"] += 1
        self.outcome.marks.append((self._now_s(), "freeze"))
        self._changed()
        await asyncio.sleep(seconds)
        node.process.send_signal(signal.SIGCONT)
        node.stopped = False
        self._changed()


async def churn(size: Size, seed: int, folder: Path) -> Outcome:
    """Run it in a folder."""
    site = Site(folder, WIDTH, STEP_S)
    try:
        await site.open()
        port, key = await site.start_gateway()
        clients = Clients(port, key, seed, size.tokens)
        run = Churn(site, size, seed, clients)
        await run.fill()
        await clients.served()
        await run.run()
        await site.stop_gateway()
        run.outcome.ledger = await site.ledger()
        return run.outcome
    finally:
        await site.close()


@dataclass(frozen=True, slots=True)
class Line:
    """A moment of the run."""

    at_s: float
    live: float
    """Nodes that served, on average over the time since the line before."""
    tokens_per_s: float


def time_line(outcome: Outcome, seconds: float) -> list[Line]:
    """Return nodes and throughput over time, every `BIN_S` seconds."""
    edges = np.arange(0.0, seconds + BIN_S / 2, BIN_S)
    changes = [(0.0, outcome.live[0][1]), *outcome.live] if outcome.live else [(0.0, 0)]
    times = np.array([at_s for at_s, _ in changes] + [max(seconds, changes[-1][0]) + 1.0])
    counts = np.array([count for _, count in changes], dtype=float)
    area = np.concatenate(([0.0], np.cumsum(np.diff(times) * counts)))
    mean = np.diff(np.interp(edges, times, area)) / BIN_S
    return [
        Line(float(edges[at + 1]), float(mean[at]), outcome.seen.bins[at] / BIN_S)
        for at in range(len(edges) - 1)
    ]


def correlation(lines: list[Line]) -> float | None:
    """Return how closely throughput follows the number of nodes, both over windows of some seconds."""
    each = max(1, round(_WINDOW_S / BIN_S))
    count = len(lines) // each
    live = np.array([line.live for line in lines[: count * each]]).reshape(count, each).mean(1)
    rate = np.array([line.tokens_per_s for line in lines[: count * each]])
    rate = rate.reshape(count, each).mean(1)
    if count < 3 or not live.std() or not rate.std():
        return None
    return float(np.corrcoef(live, rate)[0, 1])


def write_csv(path: Path, lines: list[Line]) -> None:
    """Write the time line."""
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("at_s", "live_nodes", "tokens_per_s"))
        writer.writerows((line.at_s, round(line.live, 3), line.tokens_per_s) for line in lines)


def draw(path: Path, lines: list[Line], outcome: Outcome) -> bool:
    """Draw nodes and throughput over time; return whether matplotlib is there to do so."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "churn"
    times = [line.at_s for line in lines]
    figure, left = plt.subplots(figsize=(9, 3.6))
    left.plot(times, [line.tokens_per_s for line in lines], color="tab:blue", linewidth=1)
    left.set_xlabel("time (s)")
    left.set_ylabel("tokens/s", color="tab:blue")
    left.set_ylim(bottom=0)
    right = left.twinx()
    right.step(times, [line.live for line in lines], color="tab:orange", linewidth=1.5)
    right.set_ylabel("live nodes", color="tab:orange")
    right.set_ylim(bottom=0)
    for at_s, kind in outcome.marks:
        if kind == "hub":
            left.axvline(at_s, color="tab:red", linestyle=":", linewidth=1)
    struck = outcome.struck
    left.set_title(
        f"{struck['node']} nodes killed, {struck['freeze']} frozen, {struck['hub']} hubs killed (dotted)"
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute instead of five")
    parser.add_argument("--small", action="store_true", help="six nodes for twenty seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for logs and the database")
    parser.add_argument("--results", type=Path, default=None, help="folder for plot and CSV")
    chosen = parser.parse_args()
    size = SMALL if chosen.small else QUICK if chosen.quick else FULL
    results = chosen.results or (None if size is not FULL else RESULTS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        seen = asyncio.run(churn(size, chosen.seed, folder))
    report(seen, size, results)


def report(outcome: Outcome, size: Size, results: Path | None) -> None:
    """Print the figures; write the time line and its drawing where wanted."""
    seen, struck = outcome.seen, outcome.struck
    lines = time_line(outcome, size.seconds)
    print(
        f"{size.seconds:.0f} s: {struck['node']} nodes killed and {struck['leave']} more to follow "
        f"the plan, {struck['freeze']} frozen, {struck['hub']} hubs killed, {outcome.added} added"
    )
    print(
        f"{seen.requests} answers, {seen.delivered} tokens, {outcome.ledger.moved} moved between nodes; "
        f"ledger: {outcome.ledger.requests} answers, {outcome.ledger.tokens} tokens"
    )
    for note in seen.notes[:20]:
        print(f"  {note}")
    if results is not None:
        write_csv(results / "churn.csv", lines)
        if not draw(results / "churn.svg", lines, outcome):
            print("skipped: the drawing (matplotlib is not installed)")
    follows = correlation(lines)
    conclude(
        [
            Figure("kills", struck["node"]),
            Figure("requests", seen.requests),
            Figure("errors", seen.errors, 0),
            Figure("truncated", seen.truncated, 0),
            Figure("reordered", seen.reordered, 0),
            Figure("ledger_diff", outcome.ledger_diff, 0),
            Figure("gap_ms_p99", percentile_ms(seen.gaps_s, 99)),
            Figure("gap_ms_p50", percentile_ms(seen.gaps_s, 50)),
            Figure("gap_ms_max", percentile_ms(seen.gaps_s, 100)),
            Figure("ttft_ms_p50", percentile_ms(seen.first_s, 50)),
            Figure("follows", None if follows is None else round(follows, 3), None, "correlation"),
        ],
        hub_kills=struck["hub"],
        freezes=struck["freeze"],
        left=struck["leave"],
        added=outcome.added,
        moved=outcome.ledger.moved,
        tokens=seen.delivered,
        seconds=size.seconds,
    )


if __name__ == "__main__":
    main()
