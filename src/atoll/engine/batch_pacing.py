"""How many decode groups a first hop has under way: `routing.pacing` over the steps that nodes report.

Every hop sends a `StepReport` of its latest decode step along with the rows, so the reports of a whole route
are at its first hop when the tokens are. There each node gets a line, seconds = fixed + n x per sequence, and
the policy that also paces simulated pipelines says how many groups may be out for the sequences there are.

Nodes that run on the same cores or the same GPU report the same place. Their steps cannot overlap, and the
policy counts their work together: a second group would only halve the first and read all weights again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter, deque
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from statistics import median

import numpy as np

from atoll.engine.engine_messages import MAX_REPORTS, REPORT_COLUMNS, StepReport, Table, table_of
from atoll.routing.pacing import PacedNode, batches_in_flight

SEQUENCES = 512
"""Sequences up to which the number of groups is worked out; with more it stays."""
ENOUGH = 8
"""Steps of a node that must be known before its line is used."""
# Latest steps of a node to which its line is fitted.
_KEPT = 128
# New steps after which the lines are fitted again.
_RENEW_AFTER = 32
# The slope that is assumed, as a part of the fixed seconds, and how much it weighs against what was measured.
_PRIOR_RATIO = 1.0 / 8.0
_PRIOR_WEIGHT = 0.01
_MIN_BATCH_SHARE = 0.05
"""The share of a batch below which a node beside the usual route does not count."""
# Up to so many rows for each of ours a node is taken to serve this first hop alone.
_ALONE = 1.25
# What old rows lose with each report: whom else a node serves may change.
_FORGET = 1.0 / 64.0
_EDGES = np.array([0.0, float(SEQUENCES)])
_ASKED = np.arange(1, SEQUENCES + 1, dtype=np.float64)

Way = tuple[int, ...]
"""The nodes of a route, by their keys."""


@lru_cache(maxsize=4096)
def node_key(endpoint: str) -> int:
    """Return the number by which reports name the node at an endpoint."""
    return _number("node", endpoint)


def place_key(device: str) -> int:
    """Return a number that processes have in common if they run on the same cores or the same GPU."""
    machine = platform.node()
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.is_file():
        # Containers of one machine have names of their own, but share this.
        machine = boot.read_text(encoding="ascii").strip()
    if device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        return _number(machine, visible, device.partition(":")[2] or "0")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "all"
    return _number(machine, device, str(cores))


def _number(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    # Half of the range: tables hold signed numbers of 64 bits, and a report must not be negative.
    return int.from_bytes(digest) >> 1


def fit_line(steps: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Return fixed seconds and seconds per sequence of steps given as (sequences, seconds).

    Least squares through the median of each number of sequences: a step that something else held up does
    not count. Where all steps are about as large, the slope leans towards an eighth of the fixed part.
    """
    by_size: dict[int, list[float]] = {}
    for sequences, seconds in steps:
        by_size.setdefault(sequences, []).append(seconds)
    count = sum(map(len, by_size.values()))
    points = [(n, median(some), len(some) / count) for n, some in sorted(by_size.items())]
    mean_n = sum(share * n for n, _, share in points)
    mean_s = sum(share * s for _, s, share in points)
    spread = sum(share * (n - mean_n) ** 2 for n, _, share in points)
    joint = sum(share * (n - mean_n) * (s - mean_s) for n, s, share in points)
    prior = mean_s * _PRIOR_RATIO / (1.0 + _PRIOR_RATIO * mean_n)
    weight = _PRIOR_WEIGHT * mean_n**2
    slope = (joint + weight * prior) / (spread + weight)
    # Bounded so that neither the slope nor the fixed part is negative.
    slope = min(max(slope, 0.0), mean_s / mean_n)
    return mean_s - slope * mean_n, slope


class StepReporter:
    """Measures the decode steps of a node and keeps what hops before it have said of theirs."""

    def __init__(self, endpoint: str, place: int = 0) -> None:
        key = node_key(endpoint)
        self._own = StepReport(key, place or key, 0, 0, 0)
        self._heard: dict[int, StepReport] = {}

    def measure(self, units: Iterable[tuple[int, bool]], took_s: float) -> StepReport | None:
        """Note a step of units given as (rows, if a token is asked for); returns a report that is new."""
        kinds = [count == 1 and sample for count, sample in units]
        if not any(kinds):
            return None
        # Steps with parts of prompts in them say little about decodes.
        measured = (len(kinds), round(took_s * 1e9)) if all(kinds) else (0, 0)
        self._own = StepReport(*self._own[:2], self._own.rows + sum(kinds), *measured)
        return self._own

    def pass_on(self, reports: Table) -> None:
        """Keep what hops before this one say, for those after it."""
        for row in reports.tolist():
            report = StepReport(*row)
            # The latest are the last, so that the oldest are the first to be left out.
            self._heard.pop(report.node, None)
            if report.node != self._own.node:
                self._heard[report.node] = report

    def table(self, *, is_start: bool = False) -> Table:
        """Return what goes with a message: nothing from where its rows start, which knows its own steps."""
        if is_start:
            return table_of([], REPORT_COLUMNS)
        # One place is left for the node's own report, the last.
        heard = list(self._heard.values())[1 - MAX_REPORTS :]
        return table_of([*heard, self._own], REPORT_COLUMNS)


class NodePace:
    """State of a node as its first hop knows it: latest decode steps, its place, and whom else it serves."""

    def __init__(self) -> None:
        self.place: int | None = None
        self.steps: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._latest: StepReport | None = None
        self._sent = 0
        self._ours = self._all = 0.0

    def hear(self, report: StepReport) -> bool:
        """Take a report in; says if it tells of a step not known yet."""
        latest, self._latest = self._latest, report
        self.place = report.place
        # Compare what was sent from here with what the node has run since its report before.
        if latest is not None and report.rows > latest.rows:
            self._ours += self._sent - _FORGET * self._ours
            self._all += report.rows - latest.rows - _FORGET * self._all
            self._sent = 0
        elif latest is None or report.rows < latest.rows:
            # Rows counted from here on; a node that was started anew counts from 0.
            self._sent = 0
        if latest is not None and report.rows == latest.rows:
            return False
        if not report.sequences or not report.nanoseconds:
            return False
        self.steps.append((report.sequences, report.nanoseconds * 1e-9))
        return True

    def note_sent(self, rows: int) -> None:
        """Note that decodes were sent on a way over this node."""
        self._sent += rows

    @property
    def turns(self) -> float:
        """How many rows it runs for each one from here, which are more where others use it too."""
        found = self._all / self._ours if self._ours > 0.0 else 1.0
        return found if found > _ALONE else 1.0


class RoutePacer:
    """Decides how many decode groups a first hop may have under way, from what nodes report.

    Until every node of the way that most sequences take has reported `ENOUGH` steps it is as many as the way
    has places. Where ways have different lengths there is no limit: a group would count as under way until
    the last of it is back. `max_sequences` is how many sequences fit a group.
    """

    def __init__(self, max_sequences: int = SEQUENCES) -> None:
        self.stale = True
        self._max_sequences = max_sequences
        self._nodes: dict[int, NodePace] = {}
        self._ways: frozenset[Way] = frozenset()
        self._fresh = 0
        self._usual: Way = ()
        self._places = 1
        self._even = True
        self._lines: dict[int, tuple[float, float]] = {}
        self._hops_s: float | None = None
        self._table: list[int] = []

    def hear(self, report: StepReport) -> None:
        """Take a report in, from this node or from another."""
        pace = self._nodes.setdefault(report.node, NodePace())
        # What places there are matters at once.
        self.stale = self.stale or pace.place != report.place
        self._fresh += pace.hear(report)
        self.stale = self.stale or self._fresh >= _RENEW_AFTER

    def note_way(self, way: Way) -> None:
        """Note that a sequence takes this way."""
        self.stale = self.stale or way not in self._ways

    def note_group(self, ways: Iterable[Way]) -> None:
        """Note that decodes left on these ways."""
        for way, rows in Counter(ways).items():
            for key in way:
                if key in self._nodes:
                    self._nodes[key].note_sent(rows)

    def note_return(self, sequences: int, took_s: float) -> None:
        """Note how long a group was out alone: what hops take beside the steps, of which the least counts."""
        if not self._lines:
            return
        # A group counts as out after the step of the first hop, so that step is no part of its time.
        lines = [self._lines[key] for key in self._usual[1:] if key in self._lines]
        beside_s = max(0.0, took_s - sum(fixed + each * sequences for fixed, each in lines))
        known = beside_s if self._hops_s is None else self._hops_s
        # What holds a group up only adds time: smaller values are believed soon, larger ones slowly.
        self._hops_s = known + (0.25 if beside_s < known else 0.01) * (beside_s - known)

    def rebuild(self, ways: Iterable[Way]) -> None:
        """Work the numbers out again, for sequences that take these ways."""
        counts = Counter(ways)
        self.stale, self._fresh = False, 0
        self._ways = frozenset(counts)
        self._even = len({len(way) for way in counts}) <= 1
        self._lines, self._table = {}, []
        total = sum(counts.values())
        if not total:
            self._usual, self._places = (), 1
            return
        # Of ways that are equally common always the same one is taken.
        self._usual = min(counts, key=lambda way: (-counts[way], way))
        known = {key: self._nodes.setdefault(key, NodePace()) for way in counts for key in way}
        self._nodes = known
        # A node that has not been heard of may be anywhere.
        self._places = len(
            {(known[key].place, known[key].place is None and key) for key in self._usual}
        )
        # Without a line for each node of the usual way there is no table, and `batches` goes by places.
        if any(len(known[key].steps) < ENOUGH for key in self._usual):
            return
        nodes = []
        for key, pace in known.items():
            share = sum(count for way, count in counts.items() if key in way) / total
            on_way = key in self._usual
            if len(pace.steps) < ENOUGH or (share < _MIN_BATCH_SHARE and not on_way):
                continue
            fixed, each = self._lines[key] = fit_line(pace.steps)
            seconds = fixed + each * share * _EDGES
            nodes.append(PacedNode(_EDGES, seconds, pace.turns, on_way, pace.place))
        self._table = batches_in_flight(nodes, _ASKED, self._hops_s or 0.0).tolist()

    def batches(self, sequences: int) -> int:
        """Return how many groups may be under way while so many sequences decode."""
        if not self._even:
            # As many groups as sequences: no limit.
            return max(1, sequences)
        found = min(self._places, sequences)
        if self._table:
            found = self._table[min(sequences, SEQUENCES) - 1]
        # At least as many as are needed for all sequences to fit.
        return max(found, -(-sequences // self._max_sequences))
