"""Batches on MI300X that were published are predicted by the stack that served them."""

from __future__ import annotations

from dataclasses import replace

from atoll.catalog import Catalog
from benchmarks.performance.mi300x import predict, read


def test_batches_of_two_stacks_are_read_and_predicted() -> None:
    rows = read()
    assert {row.stack for row in rows} == {"vLLM 0.10.0 on ROCm 6.4.1", "vLLM of 2024"}
    row = next(row for row in rows if row.batch == 8 and row.model == "llama-3.1-70b")
    predicted = predict(row, Catalog.default())
    # Steps wait for their host in that version: 1 ms, and 0.05 for each of eight sequences.
    assert 0.8 * row.seconds < predicted < 1.25 * row.seconds
    older = replace(row, stack="vLLM of 2024")
    assert 1.1 < predict(older, Catalog.default()) / predicted < 1.18
    assert predict(replace(row, output_tokens=2 * row.output_tokens), Catalog.default()) > predicted
