"""Random cases by seed: which are asked for, and which a file has already."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar


class SeededOutcome(Protocol):
    """What was found of one case."""

    seed: int


Found = TypeVar("Found", bound=SeededOutcome)


def read_known(path: Path | None, make: Callable[..., Found]) -> dict[int, Found]:
    """Return by seed what a file of results has; nothing where there is no file."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {one.seed: one for one in (make(**json.loads(line)) for line in lines)}


def list_seeds(text: str | None, cases: int) -> Iterable[int]:
    """Return the seeds that "7", "100:200" or both with commas between name, else so many from 0 on."""
    if text is None:
        return range(cases)
    spans = (part.partition(":") for part in text.split(","))
    return [
        seed
        for first, _, last in spans
        for seed in range(int(first), int(last) if last else int(first) + 1)
    ]
