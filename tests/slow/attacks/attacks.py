"""Attacks on gateways as users run them, on a real instance behind one, and from hostile backends.

Each attack is done while well-behaved clients stream from both gateways and from the instance. After each,
all servers must be there, unrestarted, and say within five seconds that they are well.

- `server_down`: attacks after which one was not. `wrong_status`: attacks answered with a status that they do
  not name (a client's mistake is never 5xx, what was smuggled in never 200), or not as they ask otherwise.
- `rss_growth_factor`: the largest of, over all servers and attacks, the most memory a server had during an
  attack over what it had just before plus what its limits let that attack hold (a body, all bodies together,
  the largest answer); and of what each has at the end over what it had after warming up.
- `other_clients_delay_ms_max`: the longest that a well-behaved client waited for its next token, less the
  longest it waited before the attacks began. `unattacked_delay_ms_max` is the same of a client of a gateway
  beside, which nobody attacks: on a machine with other work to do, all wait.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.process_cpu import read_core_share, read_schedule_s
from benchmarks.report import Figure
from tests.slow.attacks import (
    attacks_backends,
    attacks_bodies,
    attacks_console,
    attacks_dialects,
    attacks_doors,
    attacks_floods,
    attacks_framing,
    attacks_prompts,
    attacks_slow,
)
from tests.slow.attacks.attacks_case import MIB, Attack
from tests.slow.attacks.attacks_site import UNATTACKED, AttackedSite
from tests.slow.attacks.attacks_watcher import Gap, read_gaps
from tests.slow.verdict import conclude

_CASE_S = 90.0
_QUIET_S = 5.0
_SETTLE_S = 6.0
"""After the last attack, before memory is looked at."""
_QUICK = 12
"""Attacks of a family in a quick run."""
_NICE = 5
"""Attackers are on other machines: here they leave the cores to those they attack."""


def all_attacks() -> list[Attack]:
    """Return every attack, in the order in which they are done."""
    parts = (
        attacks_framing,
        attacks_doors,
        attacks_console,
        attacks_bodies,
        attacks_prompts,
        attacks_dialects,
        attacks_backends,
        attacks_slow,
        attacks_floods,
    )
    return [attack for part in parts for attack in part.attacks()]


@dataclass
class Outcome:
    """What came of one attack."""

    attack: Attack
    began_s: float
    ended_s: float = 0.0
    wrong: str = ""
    down: list[str] = field(default_factory=list)
    growth: float = 1.0
    """The most memory of a server over what it had and what it may hold."""
    grown: str = ""
    """Which server that is, and how much it took."""
    left_bytes: int = 0
    """What the servers have in memory after it that they did not have before."""
    delay_s: float = 0.0
    unattacked_s: float = 0.0
    """What the client of a gateway that nobody attacks waited meanwhile."""


@dataclass
class Report:
    """What came of all attacks."""

    outcomes: list[Outcome]
    end_growth: dict[str, float]
    undisturbed_s: dict[str, float]
    client_errors: list[Gap]
    proxy: str
    core_share: float
    """Which share of the time that the servers wanted a core they had one."""


async def attack(
    site: AttackedSite, chosen: list[Attack], gaps: Path, quiet_s: float, *, verbose: bool = False
) -> Report:
    """Do the attacks, one after the other, and return what came of them."""
    await site.warm_up()
    await site.watch(gaps)
    await asyncio.sleep(1.5)
    began_s = time.monotonic()
    await asyncio.sleep(quiet_s)
    quiet_until_s = time.monotonic()
    site.note_idle()
    os.nice(_NICE)
    pids = [server.pid for server in site.servers.values()]
    schedule = read_schedule_s(pids)
    outcomes = []
    for each in chosen:
        outcomes.append(await _one(site, each))
        if verbose:
            _tell(outcomes[-1])
    core_share = read_core_share(schedule, read_schedule_s(pids))
    await asyncio.sleep(_SETTLE_S)
    end = {
        server.name: server.resident() / server.idle_bytes
        for server in site.servers.values()
        if server.idle_bytes
    }
    seen = read_gaps(gaps)
    quiet: dict[str, float] = defaultdict(float)
    for gap in seen:
        if began_s <= gap.ended_s < quiet_until_s:
            quiet[gap.client] = max(quiet[gap.client], gap.length_s)
    later = [gap for gap in seen if gap.ended_s >= quiet_until_s]
    disturbed = [gap for gap in later if gap.client != UNATTACKED]
    blame(outcomes, disturbed, quiet)
    compare(outcomes, [gap for gap in later if gap.client == UNATTACKED], quiet)
    errors = [gap for gap in disturbed if gap.wrong]
    return Report(outcomes, end, dict(quiet), errors, site.proxy_kind, core_share)


def _tell(outcome: Outcome) -> None:
    seconds = outcome.ended_s - outcome.began_s
    verdict = outcome.wrong or "; ".join(outcome.down) or "as it should be"
    name = f"{outcome.attack.family} / {outcome.attack.name}"
    print(f"{seconds:5.1f} s  {name}: {verdict[:160]}", file=sys.stderr, flush=True)


async def _one(site: AttackedSite, chosen: Attack) -> Outcome:
    before = {}
    for server in site.servers.values():
        server.forget_peak()
        before[server.name] = max(server.resident(), server.idle_bytes)
    outcome = Outcome(chosen, time.monotonic())
    try:
        outcome.wrong = await asyncio.wait_for(chosen.run(site), _CASE_S)
    except Exception as error:  # noqa: BLE001 - the next attack is done whatever became of this one
        outcome.wrong = f"{type(error).__name__}: {error}"
    outcome.down = await site.down()
    outcome.ended_s = time.monotonic()
    for server in site.servers.values():
        outcome.left_bytes += max(0, server.resident() - before.get(server.name, 0))
        is_gateway = server.name in ("open", "keyed")
        allowed = chosen.held_bytes if is_gateway else chosen.instance_bytes
        base, peak = before.get(server.name, 0), server.peak()
        if base and peak / (base + allowed) > outcome.growth:
            outcome.growth = peak / (base + allowed)
            outcome.grown = f"{server.name}: {(peak - base) / MIB:.0f} MiB more"
    return outcome


def blame(outcomes: list[Outcome], gaps: list[Gap], undisturbed_s: dict[str, float]) -> None:
    """Count each gap, beyond what is usual, for the attack that ran for most of it."""
    for gap in gaps:
        extra_s = gap.length_s - undisturbed_s.get(gap.client, 0.0)
        if extra_s <= 0.0 or not outcomes:
            continue
        start_s = gap.ended_s - gap.length_s

        def shared_s(
            outcome: Outcome, start_s: float = start_s, end_s: float = gap.ended_s
        ) -> float:
            return min(end_s, outcome.ended_s) - max(start_s, outcome.began_s)

        blamed = max(outcomes, key=shared_s)
        blamed.delay_s = max(blamed.delay_s, extra_s)


def compare(outcomes: list[Outcome], gaps: list[Gap], undisturbed_s: dict[str, float]) -> None:
    """Note with each attack what a client waited meanwhile that it does not reach."""
    for gap in gaps:
        extra_s = gap.length_s - undisturbed_s.get(gap.client, 0.0)
        for outcome in outcomes:
            if gap.ended_s - gap.length_s < outcome.ended_s and gap.ended_s > outcome.began_s:
                outcome.unattacked_s = max(outcome.unattacked_s, extra_s)


def show(report: Report) -> None:
    """Print a table of families, then what went wrong."""
    families: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in report.outcomes:
        families[outcome.attack.family].append(outcome)
    print(
        f"{'family':12s} {'cases':>5s} {'wrong':>5s} {'down':>5s} {'growth':>7s} {'other gap':>12s} "
        f"{'unattacked':>12s} {'s':>6s}"
    )
    for family, outcomes in families.items():
        wrong = sum(bool(o.wrong) for o in outcomes)
        down = sum(bool(o.down) for o in outcomes)
        growth = max(o.growth for o in outcomes)
        delay_ms = 1e3 * max(o.delay_s for o in outcomes)
        beside_ms = 1e3 * max(o.unattacked_s for o in outcomes)
        seconds = sum(o.ended_s - o.began_s for o in outcomes)
        print(
            f"{family:12s} {len(outcomes):5d} {wrong:5d} {down:5d} {growth:7.2f} "
            f"{delay_ms:9.0f} ms {beside_ms:9.0f} ms {seconds:6.1f}"
        )
    for outcome in report.outcomes:
        name = f"{outcome.attack.family} / {outcome.attack.name}"
        if outcome.wrong:
            print(f"  WRONG {name}: {outcome.wrong[:240]}")
        for why in outcome.down:
            print(f"  DOWN {name}: {why}")
        if outcome.growth > 1.3:
            print(f"  GROWN {name}: {outcome.growth:.2f} ({outcome.grown})")
        if outcome.left_bytes > 16 * MIB:
            print(f"  LEFT {name}: {outcome.left_bytes / MIB:.0f} MiB")
        if outcome.delay_s > 0.5:
            beside = f"unattacked {outcome.unattacked_s:.2f} s"
            print(f"  DELAY {name}: {outcome.delay_s:.2f} s ({beside})")
    for gap in report.client_errors[:10]:
        print(f"  CLIENT {gap.client} after {gap.length_s:.2f} s: {gap.wrong[:200]}")
    shown = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in report.undisturbed_s.items())
    print(f"  longest gaps undisturbed: {shown}; proxy in front: {report.proxy}")
    print(f"  of the time they wanted a core, the servers had one: {report.core_share:.0%}")
    ends = ", ".join(f"{name} {factor:.2f}" for name, factor in report.end_growth.items())
    print(f"  memory at the end over that after warming up: {ends}")


def chosen_attacks(*, quick: bool, only: str = "") -> list[Attack]:
    """Return the attacks of a run: all, or those whose family and name contain a text.

    A quick run has of each family some of those that are quick, evenly spread.
    """
    chosen = [each for each in all_attacks() if only in f"{each.family} / {each.name}"]
    if not quick:
        return chosen
    families: dict[str, list[Attack]] = defaultdict(list)
    for each in chosen:
        if each.quick:
            families[each.family].append(each)
    return [
        family[number * len(family) // min(len(family), _QUICK)]
        for family in families.values()
        for number in range(min(len(family), _QUICK))
    ]


async def _run(
    chosen: list[Attack], folder: Path, quiet_s: float, *, verbose: bool = False
) -> Report:
    site = AttackedSite(folder, with_model=any(each.needs_model for each in chosen))
    # Told to end, it ends what it started, too.
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        await site.open()
        return await attack(site, chosen, folder / "gaps", quiet_s, verbose=verbose)
    finally:
        await site.close()


def main() -> None:
    """Read the options, attack, and tell what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what is quick, under a minute")
    parser.add_argument("--only", default="", help="attacks whose family or name contain this")
    parser.add_argument("--verbose", action="store_true", help="tell of each as it is done")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO)
    chosen = chosen_attacks(quick=options.quick, only=options.only)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        quiet_s = 3.0 if options.quick else _QUIET_S
        report = asyncio.run(_run(chosen, Path(folder), quiet_s, verbose=options.verbose))
    show(report)
    outcomes = report.outcomes
    growth = max([o.growth for o in outcomes] + list(report.end_growth.values()), default=0.0)
    conclude(
        [
            Figure("cases", len(outcomes), 80, at_least=True),
            Figure("server_down", sum(bool(o.down) for o in outcomes), 0),
            Figure("wrong_status", sum(bool(o.wrong) for o in outcomes), 0),
            Figure("rss_growth_factor", round(growth, 3), 1.3),
            Figure(
                "other_clients_delay_ms_max",
                round(1e3 * max((o.delay_s for o in outcomes), default=0.0), 1),
                1000,
            ),
        ],
        unattacked_delay_ms_max=round(
            1e3 * max((o.unattacked_s for o in outcomes), default=0.0), 1
        ),
        other_clients_errors=len(report.client_errors),
        families=len({o.attack.family for o in outcomes}),
        proxy=report.proxy,
        core_share=round(report.core_share, 3),
        seconds=round(time.monotonic() - begun_s, 1),
    )


if __name__ == "__main__":
    main()
