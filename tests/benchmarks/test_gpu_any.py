"""What an H200 served for `benchmarks.gpu_any`: complete, and what is made of it."""

from __future__ import annotations

import csv

import pytest

from benchmarks.hardware.gpu_any import (
    CARRIED,
    PICTURE,
    PICTURE_SHARE,
    RESULTS,
    TEXT,
    WAYS,
    Asked,
    BatchTime,
    _part,
    draw_arrivals,
    draw_mix,
    read,
)


def test_what_was_served_is_complete_and_near_what_is_simulated() -> None:
    """Both deployments had the same arrivals and no errors, and are near what is simulated."""
    with (RESULTS / "gpu_any.csv").open() as stream:
        rows = [Asked(**row) for row in csv.DictReader(stream)]
    assert not any(row.error for row in rows)
    assert all(float(row.ttft_ms) < float(row.e2e_ms) for row in rows)
    loads = [
        sorted((row.arrival_s, row.klass) for row in rows if (row.way, row.run) == (way, "load"))
        for way in WAYS
    ]
    assert loads[0] == loads[1]
    for way in WAYS:
        assert sum((row.way, row.run) == (way, "carried") for row in rows) == CARRIED
    note, found = read()
    assert "H200" in note["gpu"]
    for served, simulated, errors in found.values():
        assert errors == 0
        assert 0.85 < simulated.carried_per_s / served.carried_per_s < 1.15
        assert 0.85 < simulated.p95("ttft_ms") / served.p95("ttft_ms") < 1.15
    assert found["plan"][0].carried_per_s > found["monolith"][0].carried_per_s


def test_a_batch_is_fitted_by_a_fixed_time_and_one_for_each_item() -> None:
    items = {TEXT: 0.01, PICTURE: 0.08}
    times = [
        BatchTime("llm", klass, batch, 0.1, 0.9 + batch * each)
        for klass, each in items.items()
        for batch in (1, 8, 16)
    ]
    part = _part([*times, BatchTime("vision", PICTURE, 1, 0.0, 5.0)], "llm", 16)
    assert part.fixed_s == pytest.approx(0.9)
    assert part.item_s == pytest.approx(items)


def test_arrivals_are_the_same_for_every_deployment() -> None:
    first, again = (draw_arrivals(3.0, 40.0) for _ in range(2))
    assert first == again
    assert 80 < len(first) < 160
    assert all(0.0 < at < 40.0 for at, _, _ in first)
    kinds = [klass for _, klass in draw_mix(100, 5)]
    assert kinds.count(PICTURE) == round(100 * PICTURE_SHARE)
