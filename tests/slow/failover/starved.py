"""Processes that get little of a core: slow is not dead, and no client may see more than waiting.

The site of `benchmarks.chaos`: two replicas of a tiny model, members, two hubs, two gateways. Nothing is
killed. All its processes are held to a share of their time, 50, 25 and 10 %, as by a CPU limit or by many
busy neighbours: each is stopped (SIGSTOP) and goes on (SIGCONT) in turns of its own, of a tenth of a second
to three seconds. Clients stream all the while and know what every answer must be.

false_deaths: processes started anew, nodes, workers and backends given up, though all of them lived.
errors, cut, token_mismatch, hung: answers that were not what an undisturbed run gave.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from atoll.core.rng import stream
from benchmarks.report import Figure
from tests.slow.failover.chaos_clients import ChaosClients, Seen
from tests.slow.failover.chaos_site import RESUME_S, ChaosSite
from tests.slow.verdict import conclude
from tests.tiny_model import write_tiny_model

SHARES = (0.5, 0.25, 0.1)
CLIENTS = 4
TOKENS = 40
_PERIOD_S = (0.1, 3.0)
_DEATHS = frozenset(
    {"tunnel.lost", "backend.down", "backend.masked", "backend.removed", "fabric.down"}
)
"""Events in the logs of gateways that say that somebody is taken for dead."""


class CpuLimit:
    """Holds processes to a share of their time until it is closed."""

    def __init__(self, pids: list[int], share: float, seed: int) -> None:
        self._chance = stream(seed, "starved", f"{share:g}")
        self._pids = pids
        self._tasks = [asyncio.create_task(self._hold(pid, share)) for pid in pids]

    async def _hold(self, pid: int, share: float) -> None:
        period_s = float(self._chance.uniform(*_PERIOD_S))
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(period_s * (1.0 - share))
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(period_s * share)

    async def close(self) -> None:
        """Let all go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class StarvedRun:
    """A site whose processes are starved, its clients, and who was taken for dead."""

    def __init__(self, site: ChaosSite) -> None:
        self.site = site
        self.key, self.ports, self.is_ready = site.key, site.ports, site.is_ready
        self.was_killed = site.was_killed
        self.dead_s = site.clock.longest_s
        self.clients = ChaosClients(self, RESUME_S, TOKENS)

    async def run(self, seconds: float, seed: int) -> Counter[str]:
        """Starve the site for so long at each share; returns who was taken for dead, by what was said."""
        await self.clients.learn(print)
        before = self._said()
        asking = asyncio.create_task(self.clients.run(CLIENTS))
        try:
            for share in SHARES:
                pids = self.site.workers()
                limit = CpuLimit(pids, share, seed)
                await asyncio.sleep(seconds)
                await limit.close()
                said = self._said() - before
                seen = self.clients.seen
                print(
                    f"{share:.0%} of {len(pids)} processes: {seen.answers} answers, {dict(said)}",
                    flush=True,
                )
        finally:
            self.clients.stop()
            await asking
        return self._said() - before

    def _said(self) -> Counter[str]:
        found = Counter[str](
            {f"restart {n}": p.restarts for n, p in self.site.agent.processes.items()}
        )
        for log in self.site.gateway_logs():
            for line in log.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    if said.get("event") in _DEATHS:
                        found[f"{said['event']}: {str(said.get('reason'))[:60]}"] += 1
        return found


async def starved(seconds: float, seed: int, folder: Path) -> tuple[Counter[str], Seen, float]:
    """Run it; returns who was taken for dead, what clients saw, and how long it took."""
    from atoll.runtime.local.fleet_state import remove_home

    site = ChaosSite(folder, write_tiny_model(folder / "tiny"))
    begun_s = time.monotonic()
    try:
        try:
            await site.open()
            run = StarvedRun(site)
            deaths = await run.run(seconds, seed)
        finally:
            await site.close()
    finally:
        remove_home(site.home.folder)
    return deaths, run.clients.seen, time.monotonic() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 s at each share instead of 60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for logs")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="starved") as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seconds = 10.0 if chosen.quick else 60.0
        deaths, seen, took_s = asyncio.run(starved(seconds, chosen.seed, folder))
    for note in (*deaths, *seen.notes[:20], *seen.slow[:5]):
        print(f"  {note}")
    more: dict[str, Any] = {"answers": seen.answers, "tokens": seen.delivered, "seconds": took_s}
    conclude(
        [
            Figure("false_deaths", deaths.total(), 0),
            Figure("errors", seen.errors + seen.no_replica, 0),
            Figure("cut", seen.truncated, 0),
            Figure("token_mismatch", seen.token_mismatch, 0),
            Figure("hung", seen.hung, 0),
            Figure("gap_s_max", max(seen.longest_s, default=0.0)),
        ],
        **more,
    )


if __name__ == "__main__":
    main()
