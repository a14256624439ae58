"""Atoll's own engine beside vLLM on one GPU: the same weights, arrivals and gateway, one after the other.

The runs in `benchmarks/results/gpu_engine_*` were served by `benchmarks.gpu_engine_serve`, which says how: an
8B model in bf16, lengths of azure-conv, 8 and 16 requests/s, then twice what is planned to fit. Here they are
compared. What was not run is said to be.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.hardware.gpu_engine_serve import COMPILED, LOADS, PARTS
from benchmarks.hardware.gpu_fleet import UNFINISHED, Served
from benchmarks.report import RESULTS, Figure, finish, options


@dataclass(frozen=True, slots=True)
class Part:
    """A server as it was measured: requests by the name of their load, and what was noted beside."""

    loads: Mapping[str, list[Served]]
    note: Mapping[str, Any]

    def mean(self, load: str, column: str) -> float | None:
        """Return the mean of a column over answered requests of a load, in ms; None: none were answered."""
        answered = [row for row in self.loads.get(load, ()) if not row.error]
        return fmean(float(getattr(row, column)) for row in answered) if answered else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens made per second while requests waited; None: that was not run."""
        found = self.note.get(LOADS[-1])
        return None if found is None else float(found["tokens_per_s"])

    @property
    def errors(self) -> int:
        """Requests that were answered with an error or not at all, but for those cut off at the end."""
        rows = (row for load in self.loads.values() for row in load)
        return sum(row.error not in ("", UNFINISHED) for row in rows)


def read_parts(results: Path = RESULTS) -> dict[str, Part]:
    """Return the parts that were run, by name."""
    found = {}
    for name in PARTS:
        note, served = results / f"gpu_engine_{name}.json", results / f"gpu_engine_{name}.csv"
        if not note.is_file():
            continue
        loads: dict[str, list[Served]] = {}
        for row in _rows(served) if served.is_file() else ():
            request = Served(
                *(float(row["arrival_s"]), int(row["input"]), int(row["output"])),
                *(row["ttft_ms"], row["tpot_ms"], row["error"]),
            )
            loads.setdefault(row["load"], []).append(request)
        found[name] = Part(loads, json.loads(note.read_text()))
    return found


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as stream:
        yield from csv.DictReader(stream)


def judge(parts: Mapping[str, Part]) -> list[Figure]:
    """Return the figures with their bars."""
    theirs, ours, cut = (parts.get(name) for name in ("vllm", "atoll", "cut"))

    def ratio(a: Part | None, b: Part | None, load: str, column: str) -> float | None:
        if a is None or b is None:
            return None
        return _ratio(a.mean(load, column), b.mean(load, column))

    def noted(part: str, name: str) -> float | None:
        return parts[part].note.get(name) if part in parts else None

    tokens = None if ours is None or theirs is None else (ours.tokens_per_s, theirs.tokens_per_s)
    late = [noted(name, COMPILED) for name in ("atoll", "again", "cut") if name in parts]
    return [
        Figure("tpot_ratio_8", ratio(ours, theirs, "8", "tpot_ms"), 1.10, "ours over vLLM's"),
        Figure("tpot_ratio_16", ratio(ours, theirs, "16", "tpot_ms"), 1.15, "ours over vLLM's"),
        Figure("ttft_ratio_8", ratio(ours, theirs, "8", "ttft_ms"), 1.25, "ours over vLLM's"),
        Figure("ttft_ratio_16", ratio(ours, theirs, "16", "ttft_ms"), 1.25, "ours over vLLM's"),
        Figure(
            *("saturated_tokens_ratio", tokens and _ratio(*tokens), 0.85, "ours over vLLM's"),
            at_least=True,
        ),
        Figure("ready_s", noted("atoll", "ready_s"), 60.0, "compiling anew, s"),
        Figure("ready_weights_s", noted("atoll", "weights_s"), note="of these, loading weights"),
        Figure("ready_again_s", noted("again", "ready_s"), 25.0, "with kernels on disk, s"),
        Figure("ready_again_weights_s", noted("again", "weights_s"), note="of these, weights"),
        Figure("vllm_ready_s", noted("vllm", "ready_s"), note="s"),
        Figure(COMPILED, _total(late), 0.0, "kernels and graphs"),
        Figure("cut_tpot_ratio", ratio(cut, ours, "8", "tpot_ms"), 1.25, "two stages over one"),
        Figure("errors", sum(part.errors for part in parts.values()) if parts else None, 0.0),
    ]


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _total(counts: list[float | None]) -> float | None:
    """Return the sum; None where nothing was counted, or somewhere not."""
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def main() -> None:
    """Print the table and the figures."""
    options(__doc__ or "")
    parts = read_parts()
    print("part   load       requests errors  TTFT mean ms  TPOT mean ms  tokens/s")
    for name, part in parts.items():
        for load, rows in part.loads.items():
            errors = sum(row.error not in ("", UNFINISHED) for row in rows)
            times = (part.mean(load, "ttft_ms"), part.mean(load, "tpot_ms"))
            shown = ("-" if time is None else f"{time:.2f}" for time in times)
            rate = part.tokens_per_s if load == LOADS[-1] else None
            made = "" if rate is None else f"{rate:9.0f}"
            print(
                f"{name:6s} {load:10s} {len(rows):8d} {errors:6d}",
                *(f"{text:>13s}" for text in shown),
                made,
            )
    dates = sorted({str(part.note["date_utc"]) for part in parts.values()})
    finish(judge(parts), measured=dates, parts=list(parts))


if __name__ == "__main__":
    main()
