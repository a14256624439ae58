"""How fast this machine runs a layer range of a model: tables for planner and simulator.

A range is run as a node would run it, alone, on one batch at a time: prompts of several lengths, several
numbers of sequences that each get one more token, and both in one step, where weights are read once for
both. Time is CPU time over threads, so that what else the machine does counts little. A range half as long,
ending at the same layer, tells what a step costs beside its layers (the head, where there is one).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen
from atoll.plan.cluster import NodeProfile
from atoll.plan.cluster_profiles import at

PROMPTS = (1, 16, 64, 128, 256)
SEQUENCES = (1, 2, 4, 8, 16)
MIXED = ((64, 4), (128, 4))
CONTEXT = 192
"""Tokens each sequence has before the one that is measured."""
_BLOCK = 16
Progress = Callable[[str], None]


class RangeTable(Frozen):
    """Seconds of a step of layers [start, end): by prompt tokens, by decoding sequences, and of steps with
    both, as (prompt tokens, sequences, seconds).
    """

    start: int
    end: int
    prefill_s: tuple[tuple[int, float], ...]
    decode_s: tuple[tuple[int, float], ...]
    mixed_s: tuple[tuple[int, int, float], ...] = ()

    @property
    def layers(self) -> int:
        """How many layers were run."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How to measure: number format, threads, how often, and up to which sizes.

    `mixed` are the steps with a prompt of so many tokens beside so many sequences.
    """

    dtype: str = "float32"
    threads: int = 1
    repeats: int = 5
    prompts: Sequence[int] = PROMPTS
    sequences: Sequence[int] = SEQUENCES
    mixed: Sequence[tuple[int, int]] = MIXED
    context: int = CONTEXT


class RangeTimer:
    """A layer range that is loaded, and times its steps as often as asked."""

    def __init__(self, folder: Path, start: int, end: int, options: ProfileOptions) -> None:
        import torch

        from atoll.engine.kv import BlockPool
        from atoll.engine.model_stage import StageModel

        torch.set_num_threads(options.threads)
        self._options = options
        each = -(-(options.context + 1) // _BLOCK) + 1
        prompts = (*options.prompts, *(tokens for tokens, _ in options.mixed))
        max_sequences = max(*options.sequences, *(count for _, count in options.mixed), 1)
        count = max_sequences * each + -(-max(prompts) // _BLOCK) + 1
        self._stage = StageModel(
            folder, start, end, blocks=count, block_size=_BLOCK, dtype=options.dtype
        )
        self._pool = BlockPool(count, _BLOCK, prefix_caching=False)

    def measure(self, progress: Progress | None = None) -> RangeTable:
        """Time every kind of step; they take turns, so that none finds the caches as it left them."""
        tell = progress or (lambda _text: None)
        chosen, held = self._options, f"layers [{self._stage.start}, {self._stage.end})"
        prompts = [(size, 0) for size in chosen.prompts]
        decodes = [(0, number) for number in chosen.sequences]
        kinds = [*prompts, *decodes, *chosen.mixed]
        times_s: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
        for turn in range(chosen.repeats + 1):
            tell(f"{held}: turn {turn} of {chosen.repeats}")
            for kind in kinds:
                took_s = self._time_step(*kind)
                # The first of each kind also warms up.
                if turn:
                    times_s[kind].append(took_s)
        mean_s = {kind: statistics.fmean(some) for kind, some in times_s.items()}
        return RangeTable(
            start=self._stage.start,
            end=self._stage.end,
            prefill_s=tuple((size, mean_s[size, 0]) for size in chosen.prompts),
            decode_s=tuple((number, mean_s[0, number]) for number in chosen.sequences),
            mixed_s=tuple((*kind, mean_s[kind]) for kind in chosen.mixed),
        )

    def _time_step(self, prompt: int, sequences: int) -> float:
        """Return the seconds of a step with a prompt of so many tokens and so many sequences."""
        rows = [self._rows(0, prompt)] if prompt else []
        rows += [self._rows(self._options.context, 1) for _ in range(sequences)]
        began_s = time.process_time()
        self._stage.forward(rows)
        took_s = (time.process_time() - began_s) / self._options.threads
        for row in rows:
            self._pool.close(row.table)
        return took_s

    def _rows(self, position: int, size: int) -> Any:
        import torch

        from atoll.engine.model_stage import SequenceRows
        from atoll.engine.rows import RowSlice

        stage = self._stage
        table = self._pool.open([], b"", position + size)
        self._pool.grow(table, position + size)
        data: Any = [0] * size
        if stage.start:
            dtype = getattr(torch, self._options.dtype)
            data = RowSlice(torch.zeros(size, stage.config.hidden_size, dtype=dtype), 0, size)
        last = stage.end == stage.total
        return SequenceRows(stage.start, stage.end, position, size, table, data, last)


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
    full = RangeTimer(folder, start, end, chosen).measure(progress)
    half = RangeTimer(folder, end - (end - start) // 2, end, chosen).measure(progress)
    return profile_of(full, half, _kv_tokens(folder, end - start, kv_bytes, chosen.dtype))


def profile_of(
    full: RangeTable, half: RangeTable | None, kv_tokens: tuple[float, ...]
) -> NodeProfile:
    """Turn the tables of a range and, if there is one, of a shorter one into a profile.

    A step of n takes step_s + layers c(n). step_s is what is left at n = 1 with no layers, on the line
    through both tables, and c(n) is such that the longer range takes exactly what was measured. Steps with
    prompts and sequences tell what both share: the median of what they take less than their curves' sum.
    """
    step_s = 0.0
    if half is not None:
        per_layer = (full.decode_s[0][1] - half.decode_s[0][1]) / (full.layers - half.layers)
        step_s = min(
            max(0.0, full.decode_s[0][1] - per_layer * full.layers),
            0.9 * min(seconds for _, seconds in (*full.decode_s, *full.prefill_s)),
        )

    def curve(points: Sequence[tuple[int, float]]) -> tuple[tuple[float, float], ...]:
        return tuple((float(n), (seconds - step_s) / full.layers) for n, seconds in points)

    prefill, decode = curve(full.prefill_s), curve(full.decode_s)
    saved = [
        at(prefill, tokens) + at(decode, sequences) - (seconds - step_s) / full.layers
        for tokens, sequences, seconds in full.mixed_s
    ]
    fastest_s = min(seconds for _, seconds in (*prefill, *decode))
    return NodeProfile(
        max_layers=full.layers,
        kv_tokens=kv_tokens,
        prefill_s_per_layer=prefill,
        decode_s_per_layer=decode,
        step_s=step_s,
        shared_s_per_layer=min(max(0.0, statistics.median(saved or [0.0])), fastest_s),
    )


def _kv_tokens(folder: Path, layers: int, kv_bytes: int, dtype: str) -> tuple[float, ...]:
    from atoll.engine.model_stage import load_config

    config = load_config(folder)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * heads * size * (4 if dtype == "float32" else 2)
    return tuple(float(kv_bytes // (per_token * held)) for held in range(1, layers + 1))
