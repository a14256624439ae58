"""Kernels for weights and KV cache in few bits, prompts and experts, run by Triton's interpreter on cores.

It is set before Triton is imported, so the checks run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs the extra 'engine'")
pytest.importorskip("triton", reason="Triton has no wheel for CPUs alone; any will do here")

pytestmark = pytest.mark.engine

CHECK = """
import torch
from pathlib import Path
from tempfile import TemporaryDirectory
from atoll.engine.triton_ops import stream_tiles
from tests.engine.test_matrix import ALL, make, weights

for variant in ALL:
    with TemporaryDirectory() as folder:
        whole, dense = make(Path(folder), variant, weights(48, 192))
    step = 32 if variant == "mxfp4" else 6
    cases = [(whole, dense), (whole.rows(10, 46), dense[10:46])]
    cases.append((whole.columns(step, 192), dense[:, step:]))
    for matrix, expanded in cases:
        for rows in (1, 5, 17):
            x = weights(rows, matrix.depth, seed=2)
            found = stream_tiles(x, matrix.tiles())
            torch.testing.assert_close(found, x @ expanded.t(), rtol=1e-4, atol=1e-4)
            half = stream_tiles(x.half(), matrix.tiles())
            torch.testing.assert_close(half.float(), x @ expanded.t(), rtol=2e-2, atol=5e-2)
"""

KV_CHECK = """
import torch
from atoll.engine import torch_ops, triton_ops

triton_ops.overlaps = lambda device: False
FP8 = torch.float8_e4m3fn
torch.manual_seed(1)
rows, heads, kv_heads, size, page = 5, 4, 2, 16, 4
for kind in (torch.float32, FP8):
    keys, values = (torch.zeros(12 * page, kv_heads, size).to(kind) for _ in range(2))
    own = [keys.clone(), values.clone()]
    qkv = 3.0 * torch.randn(rows, (heads + 2 * kv_heads) * size)
    qkv[0, -1], qkv[1, heads * size] = 1e4, 1e-3
    angle = torch.randn(rows, size // 2).repeat(1, 2)
    slots = torch.tensor([3, 40, 7, 0, 21])
    q = triton_ops.rope_store(qkv, angle.cos(), angle.sin(), slots, keys, values, heads)
    wanted = torch_ops.rope_store(qkv, angle.cos(), angle.sin(), slots, *own, heads)
    torch.testing.assert_close(q, wanted, rtol=1e-5, atol=1e-5)
    for found, expected in zip((keys, values), own):
        # A number that stands between two may be rounded to either.
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.13, atol=2e-3)
        assert (found.float() != expected.float()).float().mean() < 0.01
    for store in (keys, values):
        store.copy_(torch.randn(store.shape).to(kind))
    tables = torch.cat([torch.randperm(12)[:10], torch.zeros(5)]).view(3, 5).int()
    lengths = torch.tensor([18, 7, 0])
    # One part of each, two, parts of one tile, a last one that is shorter, and a row of no context.
    for wanted, multiple, triton_ops._TILE in (
        *((1, 64, 64), (2, 16, 16), (2, 8, 8), (7, 4, 4), (3, 8, 4), (2, 12, 4), (100, 4, 4)),
    ):
        triton_ops._PART, triton_ops._CUT_ROWS = multiple, 2
        parts = triton_ops.ContextParts(3, kv_heads, wanted, lengths.device)
        parts.cut(lengths)
        listed = [item for item in parts.items.tolist() if item[0] >= 0]
        usual = max(1, -(-25 // (wanted * multiple))) * multiple
        kept = 0
        for row, length in enumerate(lengths.tolist()):
            mine = sorted(item for item in listed if item[0] == row)
            share = mine[0][2]
            assert share % multiple == 0 and (share == multiple or share <= 2 * usual)
            assert len(mine) == max(1, -(-length // share))
            for number, item in enumerate(mine):
                assert item[:6] == [row, number, share, length, kept, len(mine)]
            kept += len(mine)
        assert kept == len(listed)
        sizes = [min(item[2], item[3]) for item in listed]
        ranks = [(size < usual) + (2 * size < usual) for size in sizes]
        assert ranks == sorted(ranks)
        out = triton_ops.paged_decode(
            q[:3].contiguous(), keys, values, tables, parts, 0.25, page
        )
        assert not out[2].any() and not parts.done.any()
        for row in range(2):
            at = (tables[row].long()[:, None] * page + torch.arange(page)).flatten()[: lengths[row]]
            k, v = (s.float()[at].repeat_interleave(heads // kv_heads, 1) for s in (keys, values))
            weight = torch.softmax(torch.einsum("hs,phs->hp", q[row], k) * 0.25, -1)
            plain = torch.einsum("hp,phs->hs", weight, v)
            torch.testing.assert_close(out[row], plain, rtol=1e-4, atol=1e-4)
        # The last five positions: fewer parts than were listed.
        out = triton_ops.paged_decode(
            q[:3].contiguous(), keys, values, tables, parts, 0.25, page, window=5
        )
        for row in range(2):
            at = (tables[row].long()[:, None] * page + torch.arange(page)).flatten()[: lengths[row]][-5:]
            k, v = (s.float()[at].repeat_interleave(heads // kv_heads, 1) for s in (keys, values))
            weight = torch.softmax(torch.einsum("hs,phs->hp", q[row], k) * 0.25, -1)
            plain = torch.einsum("hp,phs->hs", weight, v)
            torch.testing.assert_close(out[row], plain, rtol=1e-4, atol=1e-4)
"""

CHUNK_CHECK = """
import torch
from atoll.engine import triton_ops

torch.manual_seed(1)
page, size, spans = 4, 16, [(0, 40, 0), (40, 3, 17), (43, 90, 66)]
for heads, kv_heads in ((4, 2), (6, 2), (3, 3)):
    for kind in (torch.float32, torch.float8_e4m3fn):
        for window in (None, 5, 70):
            keys, values = (torch.randn(64 * page, kv_heads, size).to(kind) for _ in range(2))
            q = torch.randn(140, heads, size)
            tables = torch.stack([torch.randperm(64)[:60] for _ in spans]).int()
            each = triton_ops.tile_rows(heads, kv_heads, q.dtype)
            tiles = [
                (row + first, min(each, count - first), position + first, number)
                for number, (row, count, position) in enumerate(spans)
                for first in range(0, count, each)
            ]
            tiles += [(0, 0, 0, 0)] * 3
            out = torch.zeros_like(q)
            triton_ops.paged_chunks(
                q, keys, values, tables, torch.tensor(tiles), 0.25, page, window, out
            )
            for number, (row, count, position) in enumerate(spans):
                at = tables[number].long()[:, None] * page + torch.arange(page)
                at = at.flatten()[: position + count]
                group = heads // kv_heads
                k, v = (s.float()[at].repeat_interleave(group, 1) for s in (keys, values))
                scores = torch.einsum("rhs,phs->hrp", q[row : row + count], k) * 0.25
                own = position + torch.arange(count)[:, None]
                distance = own - torch.arange(position + count)
                seen = (distance >= 0) & (distance < (window or 1000))
                weight = torch.softmax(scores.masked_fill(~seen, -1e30), -1)
                plain = torch.einsum("hrp,phs->rhs", weight, v)
                torch.testing.assert_close(out[row : row + count], plain, rtol=1e-4, atol=1e-4)
            # Rows that belong to no prompt are not touched.
            assert not out[133:].any()
"""

EXPERT_CHECK = """
import torch
from atoll.engine import triton_ops

triton_ops.overlaps = lambda device: False
torch.manual_seed(1)
# Tiles of 16, 64 and 128 rows; widths that no block divides; rows that pad a step, all alike.
cases = [(1, 8, 2, 32, 16, 0), (5, 8, 3, 40, 24, 0), (40, 10, 4, 32, 72, 20)]
cases += [(150, 3, 2, 32, 16, 70), (20, 32, 4, 128, 64, 0)]
for rows, experts, top, width, inner, spare in cases:
    x = torch.randn(rows, width)
    x[rows - spare :] = 0.5
    gate_up = 0.3 * torch.randn(experts, 2 * inner, width)
    down = 0.3 * torch.randn(experts, width, inner)
    logits = torch.randn(2, rows, experts)
    # One expert that nobody is sent to, and one that everybody is.
    logits[:, :, experts // 2], logits[:, :, 1] = -9.0, 9.0
    logits[:, rows - spare :] = logits[:, -1:].clone()
    for normed in (True, False):
        chosen, shares = triton_ops.choose_experts(logits, top, normed=normed)
        odds = torch.softmax(logits.sum(0), -1)
        likely, wanted = odds.topk(top)
        assert chosen.long().equal(wanted)
        likely = likely / likely.sum(-1, keepdim=True) if normed else likely
        torch.testing.assert_close(shares, likely, rtol=1e-5, atol=1e-6)
    plain = torch.zeros(rows, width)
    for expert in range(experts):
        row, place = torch.where(chosen == expert)
        gate, up = (x[row] @ gate_up[expert].t()).chunk(2, -1)
        inside = torch.nn.functional.silu(gate) * up
        plain.index_add_(0, row, (inside @ down[expert].t()) * shares[row, place, None])
    found = triton_ops.run_experts(x, chosen, shares, gate_up, down)
    assert found.shape == (top, rows, width)
    torch.testing.assert_close(found.sum(0), plain, rtol=1e-4, atol=1e-4)
    half = [each.half() for each in (x, gate_up, down)]
    found = triton_ops.run_experts(half[0], chosen, shares, *half[1:])
    torch.testing.assert_close(found.float().sum(0), plain, rtol=2e-2, atol=5e-2)

from functools import partial
from torch.nn.functional import linear
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

triton_ops.RowLinear = lambda weight, bias, parts: partial(linear, weight=weight, bias=bias)
sizes = dict(hidden_size=32, num_experts=5, moe_intermediate_size=16, num_experts_per_tok=3)
blocks = [
    Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, norm_topk_prob=normed))
    for normed in (True, False)
]
mixtral = MixtralConfig(hidden_size=32, intermediate_size=24, num_local_experts=4)
blocks.append(MixtralSparseMoeBlock(mixtral))
for block in blocks:
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    x = torch.randn(6, 32)
    with torch.inference_mode():
        wanted = block(x[None])[0]
        torch.testing.assert_close(triton_ops.Experts(block)(x), wanted, rtol=1e-4, atol=1e-4)
        parts = triton_ops.Experts(block, parts=True)(x)
        torch.testing.assert_close(parts.sum(0), wanted, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.parametrize(
    "check",
    [CHECK, KV_CHECK, CHUNK_CHECK, EXPERT_CHECK],
    ids=["weights", "kv", "chunks", "experts"],
)
def test_kernels_give_what_plain_torch_gives(check: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", check],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:2000]
