"""How fast this machine runs a layer range of a model: tables for planner and simulator.

A range is run as a node would run it, alone, on one batch at a time: prompts of several lengths, and several
numbers of sequences that each get one more token. Time is CPU time over threads, so that what else the
machine does counts little. A range half as long, ending at the same layer, tells what a step costs beside
its layers (the head, where there is one).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.plan.cluster import NodeProfile

PROMPTS = (1, 16, 64, 128, 256)
SEQUENCES = (1, 2, 4, 8, 16)
CONTEXT = 192
"""Tokens each sequence has before the one that is measured."""
_BLOCK = 16
Progress = Callable[[str], None]


class RangeTable(Frozen):
    """Seconds of a step of layers [start, end): by prompt tokens, and by decoding sequences."""

    start: int
    end: int
    prefill_s: tuple[tuple[int, float], ...]
    decode_s: tuple[tuple[int, float], ...]

    @property
    def layers(self) -> int:
        """How many layers were run."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How to measure: number format, threads, how often, and up to which sizes."""

    dtype: str = "float32"
    threads: int = 1
    repeats: int = 5
    prompts: Sequence[int] = PROMPTS
    sequences: Sequence[int] = SEQUENCES
    context: int = CONTEXT


def measure_range(
    folder: Path, start: int, end: int, options: ProfileOptions, progress: Progress | None = None
) -> RangeTable:
    """Load a layer range and time its steps."""
    import torch

    from atoll.engine.kv import BlockPool, BlockTable
    from atoll.engine.stage import SequenceRows, StageModel

    torch.set_num_threads(options.threads)
    longest = max(options.context + 1, *options.prompts)
    count = max(options.sequences) * (-(-longest // _BLOCK) + 1)
    stage = StageModel(folder, start, end, blocks=count, block_size=_BLOCK, dtype=options.dtype)
    pool = BlockPool(count, _BLOCK, prefix_caching=False)
    width = stage.config.hidden_size
    last = end == stage.total

    def rows(tables: Sequence[BlockTable], position: int, size: int) -> list[SequenceRows]:
        data = torch.zeros(size, dtype=torch.int64) if start == 0 else torch.zeros(size, width)
        if start and options.dtype != "float32":
            data = data.to(getattr(torch, options.dtype))
        return [SequenceRows(start, end, position, size, table, data, last) for table in tables]

    def time_step(sequences: int, position: int, size: int) -> float:
        tables = [pool.open([], b"", position + size) for _ in range(sequences)]
        for table in tables:
            pool.grow(table, position + size)
        batch = rows(tables, position, size)
        stage.forward(batch)
        times_s = []
        for _ in range(options.repeats):
            began_s = time.process_time()
            stage.forward(batch)
            times_s.append((time.process_time() - began_s) / options.threads)
        for table in tables:
            pool.close(table)
        return statistics.median(times_s)

    tell = progress or (lambda _text: None)
    prefill, decode = [], []
    for size in options.prompts:
        tell(f"layers [{start}, {end}): prompts of {size} tokens")
        prefill.append((size, time_step(1, 0, size)))
    for number in options.sequences:
        tell(f"layers [{start}, {end}): {number} sequences")
        decode.append((number, time_step(number, options.context, 1)))
    return RangeTable(start=start, end=end, prefill_s=tuple(prefill), decode_s=tuple(decode))


def profile_range(
    folder: Path,
    start: int,
    end: int,
    kv_bytes: int,
    options: ProfileOptions | None = None,
    progress: Progress | None = None,
) -> NodeProfile:
    """Measure a range and return it as the profile of a node type with so much room for KV.

    Exact for the range measured; other numbers of layers follow from it.
    """
    chosen = options or ProfileOptions()
    if end - start < 2:
        raise InputError("at least two layers are needed", field="layers", hint="measure more")
    full = measure_range(folder, start, end, chosen, progress)
    half = measure_range(folder, end - (end - start) // 2, end, chosen, progress)
    return profile_of(full, half, _kv_tokens(folder, end - start, kv_bytes, chosen.dtype))


def profile_of(full: RangeTable, half: RangeTable, kv_tokens: tuple[float, ...]) -> NodeProfile:
    """Turn the tables of a range and of a shorter one into a profile.

    A step of n takes step_s + layers c(n). step_s is what is left at n = 1 with no layers, on the line
    through both tables, and c(n) is such that the longer range takes exactly what was measured.
    """
    per_layer = (full.decode_s[0][1] - half.decode_s[0][1]) / (full.layers - half.layers)
    step_s = min(
        max(0.0, full.decode_s[0][1] - per_layer * full.layers),
        0.9 * min(seconds for _, seconds in (*full.decode_s, *full.prefill_s)),
    )

    def curve(points: Sequence[tuple[int, float]]) -> tuple[tuple[float, float], ...]:
        return tuple((float(n), (seconds - step_s) / full.layers) for n, seconds in points)

    return NodeProfile(
        max_layers=full.layers,
        kv_tokens=kv_tokens,
        prefill_s_per_layer=curve(full.prefill_s),
        decode_s_per_layer=curve(full.decode_s),
        step_s=step_s,
    )


def _kv_tokens(folder: Path, layers: int, kv_bytes: int, dtype: str) -> tuple[float, ...]:
    from atoll.engine.stage import load_config

    config = load_config(folder)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * heads * size * (4 if dtype == "float32" else 2)
    return tuple(float(kv_bytes // (per_token * held)) for held in range(1, layers + 1))
