"""A thousand kills of everything there is, under load: no client may see any of them.

Two replicas of a tiny random model, cut differently, run as processes (nodes and instances, each with its
supervisor, forked from a fork server), joined to a fabric of two hubs; two gateways with one database and one
folder of streams serve (`chaos_site`). Clients stream greedy answers, sampled ones with seeds, two at once,
log-probabilities, answers by JSON schema and tool calls all the time (`chaos_clients`). Every half second to
ten seconds something is killed (SIGKILL), whatever state the rest is in. `benchmarks.chaos_fleet` is smaller;
it freezes processes and closes ports as well.

errors, truncated, token_mismatch, hung: answers that were not what an undisturbed run gave: ids of events,
text, calls, ids of tokens, log-probabilities, indices, reasons, usage.
moved: streams that another gateway went on with. retried: requests that had no event when their gateway died.
no_replica: errors while every replica was dead for longer than the stated limit (`RESUME_S`).
orphans: processes of the site, of any time, that still run at its end.
ledger_diff: over both gateways, requests whose ledger is wrong. Of a request whose client has an answer, the
rows of the ledger, one for each gateway that worked on it, must have as many tokens as its client got. Of one
whose gateway was killed before its client had anything, the ledger may have at most UNREAD tokens, those of
one piece that the gateway had written down and not sent, or that lay in the kernel.
gap_ms_p99: of the longest wait between two tokens in each answer; for a client whose gateway was killed, that
until the other gateway's first token counts, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.rng import stream
from benchmarks.report import Figure
from tests.slow.failover.chaos_clients import ChaosClients, Seen
from tests.slow.failover.chaos_site import RESUME_S, ChaosSite
from tests.slow.verdict import conclude, percentile_ms
from tests.tiny_model import write_tiny_model

CLIENTS = 6
TOKENS = 80
UNREAD = 16
_SHARES = {
    "node": 0.42,
    "instance": 0.2,
    "supervisor": 0.14,
    "fork_server": 0.08,
    "hub": 0.05,
    "gateway": 0.07,
    "member": 0.04,
}
_MIN_S, _MEAN_S, _MAX_S = 0.5, 2.0, 10.0
_TELL_S = 60.0
_BARS = ("errors", "truncated", "token_mismatch", "hung")


def pauses(seed: int, count: int, min_s: float, mean_s: float, max_s: float) -> list[float]:
    """Return times between kills, in seconds: exponential, cut to a range."""
    drawn = min_s + stream(seed, "chaos", "pauses").exponential(mean_s - min_s, count)
    return [float(each) for each in np.minimum(drawn, max_s)]


def ledger_diff(seen: Seen, rows: list[dict[str, Any]]) -> tuple[int, int, list[str]]:
    """Return how many requests the ledger has wrong, tokens that killed gateways had in flight, and notes."""
    ledger: dict[str, list[int]] = {}
    for row in rows:
        ledger.setdefault(row["request_id"], []).append(row["completion_tokens"])
    wrong, unread, notes = 0, 0, []
    for sending in seen.sendings:
        if not sending.sent:
            continue
        counts = ledger.pop(sending.request_id, [])
        if sending.cut:
            fine = len(counts) <= 1 and 0 <= sum(counts) - sending.seen <= UNREAD
            unread += max(0, sum(counts) - sending.seen)
        else:
            # A gateway that died before it wrote anything, or that had nothing to add, has no row, or an
            # empty one.
            rows_made = len(counts) <= 1 + sending.moved and (counts or not sending.seen)
            fine = bool(rows_made) and sum(counts) == sending.seen
        if not fine:
            wrong += 1
            notes.append(
                f"ledger: {sending.kind} {sending.request_id} gateway-{sending.gateway} has {counts}, "
                f"its client {sending.seen}{', cut' if sending.cut else ''}"
            )
    return wrong + len(ledger), unread, notes


class ChaosRun:
    """A site, its clients, and what befalls it."""

    def __init__(
        self, site: ChaosSite, seed: int, tokens: int, results: Path | None, only: str | None
    ) -> None:
        self.site = site
        self._shares = _SHARES if only is None else {only: 1.0}
        self.key, self.ports, self.was_killed = site.key, site.ports, site.was_killed
        self.is_ready = site.is_ready
        self.dead_s = site.clock.longest_s
        self.clients = ChaosClients(self, RESUME_S, tokens)
        self.kills: Counter[str] = Counter()
        self._chance = stream(seed, "chaos", "victims")
        self._results = results
        self._began_s = time.monotonic()

    async def run(self, waits_s: list[float], clients: int) -> None:
        """Learn the answers, then kill something after each of the pauses."""
        begun_s = time.monotonic()
        await self.clients.learn(print)
        print(f"answers learned in {time.monotonic() - begun_s:.0f} s", flush=True)
        self.clients.seen.first_s.clear()
        asking = asyncio.create_task(self.clients.run(clients))
        self._began_s = told_s = time.monotonic()
        try:
            for wait_s in waits_s:
                await asyncio.sleep(wait_s)
                self._strike()
                if time.monotonic() - told_s >= _TELL_S or asking.done():
                    told_s = time.monotonic()
                    self.tell()
                    if asking.done():
                        break
        finally:
            self.clients.stop()
            await asking
            self.tell()

    def _strike(self) -> None:
        kinds, shares = list(self._shares), list(self._shares.values())
        while True:
            kind = str(self._chance.choice(kinds, p=shares))
            names = self.site.victims(kind)
            if names and self.site.strike(kind, names[int(self._chance.integers(len(names)))]):
                self.kills[kind] += 1
                return
            if len(kinds) == 1:
                # None of them may be killed just now.
                return

    def tell(self) -> None:
        """Say how it goes, and write it down: a run that is interrupted is not lost."""
        figures = self.figures()
        print(f"{figures['seconds']:.0f} s: {json.dumps(figures)}", flush=True)
        if self._results is not None:
            self._results.write_text(
                json.dumps(figures | {"partial": True, **self._said()}, indent=1)
            )

    def _said(self) -> dict[str, Any]:
        seen = self.clients.seen
        return {"notes": seen.notes, "slow": seen.slow}

    def figures(self) -> dict[str, Any]:
        """Return what is known so far."""
        seen = self.clients.seen
        restarts = {n: p.restarts for n, p in self.site.agent.processes.items()}
        return {
            "kills": self.kills.total(),
            **{name: getattr(seen, name) for name in (*_BARS, "no_replica", "retried", "moved")},
            "gap_ms_p99": percentile_ms(seen.longest_s, 99),
            "gap_ms_p50": percentile_ms(seen.longest_s, 50),
            "gap_ms_max": percentile_ms(seen.longest_s, 100),
            "ttft_ms_p99": percentile_ms(seen.first_s, 99),
            "answers": seen.answers,
            "requests": seen.requests,
            "tokens": seen.delivered,
            "killed": dict(self.kills),
            "kinds": seen.kinds,
            "restarts": sum(restarts.values()),
            "seconds": round(time.monotonic() - self._began_s, 1),
        }


async def chaos_of_all(
    waits_s: list[float],
    seed: int,
    folder: Path,
    results: Path | None = None,
    tokens: int = TOKENS,
    only: str | None = None,
) -> dict[str, Any]:
    """Kill as often as there are pauses, `only` one kind of process if so asked; return all figures."""
    from atoll.runtime.local.fleet_state import remove_home

    model = write_tiny_model(folder / "tiny")
    site = ChaosSite(folder, model)
    try:
        try:
            await site.open()
            run = ChaosRun(site, seed, tokens, results, only)
            await run.run(waits_s, CLIENTS)
            figures = run.figures()
            await site.heal()
        finally:
            await site.close()
        rows = await site.operations()
        await asyncio.sleep(0.5)
    finally:
        remove_home(site.home.folder)
    seen = run.clients.seen
    wrong, unread, notes = ledger_diff(seen, rows)
    figures |= {
        "orphans": site.leftovers(),
        "ledger_diff": wrong,
        "unread": unread,
        "ledger_tokens": sum(row["completion_tokens"] for row in rows),
        "cut": sum(sending.cut for sending in seen.sendings),
        "notes": [*seen.notes, *notes],
        "slow": seen.slow,
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="40 kills instead of 1000")
    parser.add_argument("--kills", type=int, help="so many")
    parser.add_argument(
        "--apart",
        type=float,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds between kills, evenly drawn, instead of 0.5 to 10 with a mean of 2",
    )
    parser.add_argument("--only", choices=sorted(_SHARES), help="kill one kind of process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for logs and the database")
    parser.add_argument("--results", type=Path, help="file that is written every minute")
    chosen = parser.parse_args()
    kills = chosen.kills or (40 if chosen.quick else 1000)
    waits_s = pauses(chosen.seed, kills, _MIN_S, _MEAN_S, _MAX_S)
    if chosen.apart:
        min_s, max_s = chosen.apart
        drawn = stream(chosen.seed, "chaos", "apart").uniform(min_s, max_s, kills)
        waits_s = [float(each) for each in drawn]
    with tempfile.TemporaryDirectory(prefix="chaos") as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seen = asyncio.run(
            chaos_of_all(waits_s, chosen.seed, folder, chosen.results, only=chosen.only)
        )
    for line in (*seen["notes"][:30], *seen["slow"][:10]):
        print(f"  {line}")
    names = (*_BARS, "orphans", "ledger_diff")
    figures = [
        Figure("kills", seen["kills"], None if kills < 1000 else 1000, at_least=True),
        *(Figure(name, seen[name], 0) for name in names),
        Figure("gap_ms_p99", seen["gap_ms_p99"], 5000),
        Figure("no_replica", seen["no_replica"]),
    ]
    shown = {figure.name for figure in figures} | {"notes", "slow"}
    if chosen.results is not None:
        chosen.results.write_text(json.dumps(seen | {"partial": False}, indent=1))
    conclude(figures, **{name: value for name, value in seen.items() if name not in shown})


if __name__ == "__main__":
    main()
