"""The stage engine on one GPU: Llama-3.1-8B shapes, random bf16 weights, whole and cut in two.

Decode tokens/s over batch sizes at a context of 1024, prefill tokens/s, each as a share of the
memory bandwidth or the matrix throughput measured in the same run. Needs torch, triton and
transformers, nothing else. Run it where the GPU is:

    PYTHONPATH=src python -m benchmarks.engine_h200 --out benchmarks/results/engine_h200.csv
"""

from __future__ import annotations

import argparse
import csv
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, Figure, finish, leave_out

CONTEXT = 1024
BLOCK = 16
LAYERS = 32
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CUT_BATCHES = (1, 16, 64, 256)
STEPS = 32
BUDGET = 2048
PROMPTS = ((1, 1024), (1, 4096), (4, 2048), (8, 1024))
DECODE_BAR, CUT_BAR, PREFILL_BAR = 0.80, 0.72, 0.82
SUSTAINED_S = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case; `share` is of the limit, which is `limit_tokens_per_s`."""

    phase: str
    layout: str
    batch: int
    context: int
    tokens_per_s: float
    ms_per_step: float
    limit: str
    limit_tokens_per_s: float
    share: float


def llama_8b(layers: int = LAYERS) -> Any:
    """The shapes of Llama-3.1-8B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )


def timed(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one run, the mean of several on the wall between two synchronisations."""
    import torch

    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def measured_bandwidth() -> float:
    """Bytes per second of the memory: the better of a copy and a pure read."""
    import torch

    source = torch.ones(2 * 2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    size = source.numel() * 2
    copy = 2 * size / timed(lambda: target.copy_(source), 10)
    read = size / timed(lambda: torch.sum(source.view(torch.int32)), 10)
    return float(max(copy, read))


def measured_compute() -> float:
    """bf16 operations per second of the best of a few large matrix products."""
    import torch

    best = 0.0
    for m, n, k in ((8192, 8192, 8192), (8192, 14336, 4096), (16384, 4096, 14336)):
        a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        b = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
        best = max(best, 2 * m * n * k / timed(lambda a=a, b=b: a @ b.t(), 10))  # type: ignore[misc]
    return best


def sustained_compute() -> float:
    """bf16 operations per second of one of those products over and over, as long as a prefill lasts.

    A GPU that multiplies for tens of milliseconds reaches its power limit and slows down.
    """
    import torch

    m, n, k = 8192, 14336, 4096
    a = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    runs = int(SUSTAINED_S * 6e14 / (2 * m * n * k))
    return float(2 * m * n * k / timed(lambda: a @ b.t(), runs))


class Job:
    """Sequences of one stage at a given context, stepped together."""

    def __init__(self, stage: Any, batch: int, context: int) -> None:
        from atoll.engine.kv import BlockPool

        self.stage, self.batch = stage, batch
        self.pool = BlockPool(stage.cache.blocks, BLOCK, prefix_caching=False)
        room = context + STEPS + 8
        self.tables = [self.pool.open([], b"", room) for _ in range(batch)]
        for table in self.tables:
            self.pool.grow(table, room)
        self.position = context

    def step(self, data: list[Any]) -> Any:
        """Run one decode step; `data` has a token or a hidden row for each sequence."""
        from atoll.engine.model_stage import SequenceRows

        stage = self.stage
        rows = [
            SequenceRows(stage.start, stage.end, self.position, 1, table, data[i], sample=True)
            for i, table in enumerate(self.tables)
        ]
        self.position += 1
        return stage.forward(rows)


def decode_whole(stage: Any, batch: int) -> float:
    """Seconds of a decode step, choosing tokens greedily and feeding them back."""
    job = Job(stage, batch, CONTEXT)
    tokens = [[token] for token in range(batch)]

    def step() -> None:
        nonlocal tokens
        logits = job.step(tokens).logits
        tokens = [[token] for token in logits.argmax(dim=-1).tolist()]

    for _ in range(3):
        step()
    return timed(step, STEPS)


def prefill_whole(stage: Any, prompts: int, length: int) -> float:
    """Seconds to prefill several prompts in one batch."""
    from atoll.engine.kv import BlockPool
    from atoll.engine.model_stage import SequenceRows

    pool = BlockPool(stage.cache.blocks, BLOCK, prefix_caching=False)
    tables = [pool.open([], b"", length) for _ in range(prompts)]
    for table in tables:
        pool.grow(table, length)
    tokens = list(range(length))

    def run() -> None:
        rows = [
            SequenceRows(stage.start, stage.end, 0, length, table, tokens, sample=True)
            for table in tables
        ]
        stage.forward(rows).logits.argmax(dim=-1).cpu()

    return timed(run, 3)


def decode_bytes(config: Any, batch: int) -> int:
    """Bytes a decode step must read: every weight but the embedding, and the KV of every row."""
    width, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    per_layer = width * (2 * width + 2 * kv) + 3 * width * config.intermediate_size
    weights = config.num_hidden_layers * per_layer + width * config.vocab_size
    context = batch * CONTEXT * 2 * kv * config.num_hidden_layers
    return int(2 * (weights + context))


def prefill_operations(config: Any, prompts: int, length: int) -> int:
    """Multiplications and additions of a prefill; the head runs on one row a prompt."""
    width, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    per_layer = width * (2 * width + 2 * kv) + 3 * width * config.intermediate_size
    dense = 2 * config.num_hidden_layers * per_layer * prompts * length
    causal = 2 * config.num_hidden_layers * prompts * length * length * width
    return int(dense + causal + 2 * prompts * width * config.vocab_size)


def pin(shared: shared_memory.SharedMemory) -> None:
    """Let the device read and write shared memory by itself, as it does what nodes send."""
    import torch

    window = torch.frombuffer(shared.buf, dtype=torch.uint8)
    torch.cuda.init()
    torch.cuda.cudart().cudaHostRegister(window.data_ptr(), window.numel(), 0)


def second_half(pipe: Any, memory: str, blocks: int) -> None:
    """The process that holds layers [16, 32): hidden states in shared memory, tokens back."""
    import torch

    from atoll.engine.model_stage import StageModel
    from atoll.engine.rows import RowSlice

    shared = shared_memory.SharedMemory(memory)
    pin(shared)
    stage = StageModel.random(
        llama_8b(),
        LAYERS // 2,
        LAYERS,
        blocks=blocks,
        block_size=BLOCK,
        device="cuda",
        dtype="bfloat16",
    )
    stage.warm(max(CUT_BATCHES), None, None)
    pipe.send("ready")
    job: Job | None = None
    while (order := pipe.recv()) is not None:
        kind, batch = order
        if kind == "open":
            job = Job(stage, batch, CONTEXT)
            pipe.send("open")
            continue
        assert job is not None
        hidden = torch.frombuffer(shared.buf, dtype=torch.bfloat16, count=batch * stage.width)
        hidden = hidden.view(batch, stage.width)
        logits = job.step([RowSlice(hidden, row, 1) for row in range(batch)]).logits
        pipe.send(logits.argmax(dim=-1).tolist())
    # Views of the memory are still held; the end of the process lets go of it.


@contextmanager
def cut_in_two(blocks: int) -> Iterator[Callable[[int], float]]:
    """Two processes on one GPU; yields a function from batch size to seconds a step."""
    import torch

    from atoll.engine.model_stage import StageModel

    context = multiprocessing.get_context("spawn")
    shared = shared_memory.SharedMemory(create=True, size=max(CUT_BATCHES) * 4096 * 2)
    pin(shared)
    ours, theirs = context.Pipe()
    child = context.Process(target=second_half, args=(theirs, shared.name, blocks), daemon=True)
    child.start()
    half = LAYERS // 2
    stage = StageModel.random(
        llama_8b(), 0, half, blocks=blocks, block_size=BLOCK, device="cuda", dtype="bfloat16"
    )
    stage.warm(max(CUT_BATCHES), None, None)
    assert ours.recv() == "ready"

    def measure(batch: int) -> float:
        ours.send(("open", batch))
        assert ours.recv() == "open"
        job = Job(stage, batch, CONTEXT)
        tokens = [[token] for token in range(batch)]
        window = torch.frombuffer(shared.buf, dtype=torch.bfloat16, count=batch * stage.width)

        def step() -> None:
            nonlocal tokens
            window.view(batch, -1).copy_(job.step(tokens).joined)
            ours.send(("step", batch))
            tokens = [[token] for token in ours.recv()]

        for _ in range(3):
            step()
        return timed(step, STEPS)

    try:
        yield measure
    finally:
        ours.send(None)
        child.join(20)
        gc.collect()
        try:
            shared.close()
        except BufferError:
            print("(shared memory still viewed; left to the end of the process)")
        shared.unlink()


def exactness() -> bool:
    """Whether a small float32 model answers on this GPU as transformers does, token for token."""
    import torch
    from transformers import AutoModelForCausalLM

    from atoll.engine.kv import BlockPool
    from atoll.engine.model_stage import SequenceRows, StageModel

    config = llama_8b(4)
    config.update({"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000})
    config.update({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32})
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).cuda().eval()
    prompt = torch.randint(3, 1000, (1, 150))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stage = StageModel(folder, 0, 4, blocks=64, block_size=BLOCK, device="cuda")
        wanted = model.generate(
            prompt.cuda(), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    stage.warm(64, None, None)
    pool = BlockPool(64, BLOCK)
    table = pool.open([], b"", 200)
    tokens = prompt[0].tolist()
    position = 0
    # Two chunks, so that a chunk with a past is run too, and one by graph and one without; then decodes.
    for count in (64, 86, *[1] * 39):
        pool.grow(table, position + count)
        data = tokens[position : position + count]
        rows = SequenceRows(0, 4, position, count, table, data, sample=True)
        output = stage.forward([rows])
        position += count
        if position >= len(tokens):
            assert output.logits is not None
            tokens.append(int(output.logits[0].argmax()))
    return bool(tokens == wanted[0].tolist())


def whole(bandwidth: float, compute: float, batches: tuple[int, ...], blocks: int) -> list[Row]:
    """Measure the model in one process."""
    from atoll.engine.model_stage import StageModel

    config = llama_8b()
    stage = StageModel.random(
        config, 0, LAYERS, blocks=blocks, block_size=BLOCK, device="cuda", dtype="bfloat16"
    )
    stage.warm(BUDGET, None, None)
    rows = []
    for batch in batches:
        seconds = decode_whole(stage, batch)
        limit = batch * bandwidth / decode_bytes(config, batch)
        rows.append(row("decode", "whole", batch, CONTEXT, batch, seconds, "bandwidth", limit))
    for prompts, length in PROMPTS:
        seconds = prefill_whole(stage, prompts, length)
        tokens = prompts * length
        limit = tokens * compute / prefill_operations(config, prompts, length)
        rows.append(row("prefill", "whole", prompts, length, tokens, seconds, "compute", limit))
    return rows


def row(
    phase: str,
    layout: str,
    batch: int,
    context: int,
    tokens: int,
    seconds: float,
    kind: str,
    limit: float,
) -> Row:
    """Make a row and show it."""
    rate = tokens / seconds
    made = Row(
        phase,
        layout,
        batch,
        context,
        round(rate, 1),
        round(1e3 * seconds, 4),
        kind,
        round(limit, 1),
        round(rate / limit, 4),
    )
    print(
        f"  {phase:8s} {layout:6s} batch {batch:4d} context {context:5d}  {rate:12.0f} tokens/s  "
        f"{1e3 * seconds:8.2f} ms  {100 * rate / limit:5.1f} % of {kind}",
        flush=True,
    )
    return made


def main() -> None:
    """Measure everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes, no cut")
    out = ROOT / "benchmarks" / "results" / "engine_h200.csv"
    parser.add_argument("--out", type=Path, default=out, help="the CSV to write")
    options = parser.parse_args()
    import torch

    names = ("decode_b64_share_of_bw", "cut2_b64_share_of_bw", "prefill_share_of_peak")
    if not torch.cuda.is_available():
        leave_out("all: no GPU here")
        finish([Figure(name, None) for name in names])
        return
    exact = exactness()
    print(f"  float32 tokens equal transformers': {exact}", flush=True)
    bandwidth, compute = measured_bandwidth(), measured_compute()
    steady = sustained_compute()
    print(
        f"  memory {bandwidth / 1e12:.2f} TB/s, matrix products {compute / 1e12:.0f} TFLOP/s, "
        f"{steady / 1e12:.0f} sustained"
    )
    batches = (1, 64) if options.quick else BATCHES
    blocks = max(batches) * (-(-(CONTEXT + STEPS + 8) // BLOCK)) + 512
    rows = whole(bandwidth, compute, batches, blocks)
    gc.collect()
    torch.cuda.empty_cache()
    if not options.quick:
        with cut_in_two(blocks) as measure:
            for batch in CUT_BATCHES:
                limit = batch * bandwidth / decode_bytes(llama_8b(), batch)
                seconds = measure(batch)
                rows.append(
                    row("decode", "cut2", batch, CONTEXT, batch, seconds, "bandwidth", limit)
                )
    with options.out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(r) for r in rows)
    shares: list[float | None] = [
        next((r.share for r in rows if (r.phase, r.layout, r.batch) == ("decode", cut, 64)), None)
        for cut in ("whole", "cut2")
    ]
    shares.append(max(r.share for r in rows if r.phase == "prefill"))
    finish(
        [
            Figure(name, share, bar, at_least=True)
            for name, share, bar in zip(
                names, shares, (DECODE_BAR, CUT_BAR, PREFILL_BAR), strict=True
            )
        ],
        exact_float32=exact,
        prefill_share_of_sustained=round((shares[-1] or 0.0) * compute / steady, 4),
        bandwidth_tb_per_s=round(bandwidth / 1e12, 3),
        compute_tflop_per_s=round(compute / 1e12, 1),
        sustained_tflop_per_s=round(steady / 1e12, 1),
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=version("triton"),
        transformers=version("transformers"),
        date=time.strftime("%Y-%m-%d"),
    )


if __name__ == "__main__":
    main()
