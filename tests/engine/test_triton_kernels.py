"""Kernels that expand weights and KV cache in 8 and 4 bits, run by Triton's interpreter on cores.

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
    tables = torch.randperm(12)[:10].view(2, 5).int()
    lengths = torch.tensor([18, 7])
    for splits in (1, 2):
        out = triton_ops.paged_decode(
            q[:2].contiguous(), keys, values, tables, lengths, 0.25, page, splits=splits
        )
        for row in range(2):
            at = (tables[row].long()[:, None] * page + torch.arange(page)).flatten()[: lengths[row]]
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


@pytest.mark.parametrize("check", [CHECK, KV_CHECK, CHUNK_CHECK], ids=["weights", "kv", "chunks"])
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
