from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from atoll.core.errors import InputError
from atoll.perf.measurements import read_points

pytest.importorskip("torch", reason="needs the extra 'engine'")
pytestmark = pytest.mark.engine

from atoll.runtime.local.operator_profile import (  # noqa: E402
    Call,
    Heads,
    OperatorProfiler,
    OperatorSweep,
)

SMALL = OperatorSweep(
    weights=((64, 32), (48, 96)),
    rows=(1, 8),
    heads=(Heads(4, 2, 16),),
    prompts=((1, 16), (2, 32)),
    contexts=((1, 16), (3, 48)),
)


def count(calls: Sequence[Call]) -> float:
    """A timer that runs every call once and takes a microsecond for each."""
    for call in calls:
        call()
    return 1e-6 * len(calls)


def test_times_of_operators_are_read_as_measurements(tmp_path: Path) -> None:
    found = OperatorProfiler("L4", count, "cpu", SMALL).measure(lambda _done, _what: None)
    gemm, attention = (read_points(path) for path in found.write(tmp_path))
    assert (len(gemm), len(attention)) == (4, 4)
    assert set(gemm.group) == set(attention.group) == {"L4"}
    assert set(zip(gemm.sizes["n"], gemm.sizes["k"], strict=True)) == {(64, 32), (48, 96)}
    assert sorted(attention.labels["kind"]) == ["decode", "decode", "prefill", "prefill"]
    # Small operands are used in turns, so that no cache has them.
    assert min(gemm.seconds) > 100e-6


def test_cases_without_a_kernel_or_room_are_left_out(tmp_path: Path) -> None:
    def pick(calls: Sequence[Call]) -> float:
        if len(seen) < 3:
            seen.append(1)
            raise RuntimeError("no kernel")
        return count(calls)

    seen: list[int] = []
    found = OperatorProfiler("L4", pick, "cpu", SMALL).measure(lambda _done, _what: None)
    assert (len(found.gemm), len(found.attention)) == (1, 4)
    (path, _) = found.write(tmp_path / "new")
    with path.open() as stream:
        assert [row["n"] for row in csv.DictReader(stream)] == ["48"]

    def refuse(_calls: Sequence[Call]) -> float:
        raise RuntimeError("no kernel")

    with pytest.raises(InputError, match="none of the cases of gemm"):
        OperatorProfiler("L4", refuse, "cpu", SMALL).measure(lambda _done, _what: None)
