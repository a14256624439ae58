"""Kernels that expand weights tile by tile, run by Triton's interpreter on cores.

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


def test_weights_expanded_in_the_kernel_give_what_plain_torch_gives() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
