"""What the fast solver worked out, on disk: capacities of roles, and the few templates made of them.

Files are found by a hash of all that they follow from: what a role is asked, the facts of the model, of all
nodes and links on offer, and the very sources of the code that works capacities out. Templates are found by
the prices beside it, since those decide which kinds are combined. A file that cannot be read, or whose
checksum is wrong, is worked out again and replaced.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.catalog import Catalog
from atoll.core.errors import InputError
from atoll.core.files import atomic_write
from atoll.core.paths import cache_dir
from atoll.plan.handover import hop_link
from atoll.plan.problem import Problem

Arrays = Mapping[str, NDArray[Any]]

_MAGIC = b"atoll arrays 1\n"
_DTYPES = ("<f8", "<i8", "|i1")
_MOST_BYTES = 2**28
_MOST_FILE = 2**26
_ROOMS = ("catalog", "perf", "plan", "solve/templates", "solve/rent/fast", "workload")
"""Packages whose sources decide what is kept here."""


@cache
def code_digest() -> str:
    """Return a hash of the sources and constants that capacities and templates follow from; "" if unknown."""
    root = Path(__file__).parents[3]
    digest = hashlib.sha256(np.__version__.encode())
    paths = [path for room in _ROOMS for path in sorted((root / room).glob("*.py"))]
    try:
        for path in (*paths, root / "perf" / "data" / "constants.yaml"):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


def facts_of(problem: Problem, catalog: Catalog) -> str:
    """Return all facts of the nodes and links on offer that capacities of any service depend on."""
    places = sorted({(offer.region, offer.node_type) for offer in problem.offers})
    regions = sorted({region for region, _ in places})
    between = [catalog.links.between(a, b) for a in regions for b in regions if a != b]
    hops = [hop_link(catalog, node, region) for region, node in places]
    names = sorted({*problem.kinds, *(node for _, node in places)})
    return repr((places, hops, between, [catalog.node(name) for name in names]))


def pack(arrays: Arrays) -> bytes:
    """Return arrays as bytes: a line that names them, their content, and a checksum."""
    head = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    data = json.dumps(head).encode() + b"\n" + body
    return _MAGIC + zlib.crc32(data).to_bytes(4, "big") + data


def unpack(data: bytes) -> dict[str, NDArray[Any]] | None:
    """Return the arrays that `pack` made bytes of; None if these are no such bytes. They are read-only."""
    start = len(_MAGIC) + 4
    if not data.startswith(_MAGIC) or len(data) < start:
        return None
    if zlib.crc32(memoryview(data)[start:]) != int.from_bytes(data[len(_MAGIC) : start], "big"):
        return None
    try:
        at = data.index(b"\n", start) + 1
        head = json.loads(data[start : at - 1])
        found: dict[str, NDArray[Any]] = {}
        for name, (dtype, shape) in head.items():
            if dtype not in _DTYPES:
                return None
            number = math.prod(shape)
            found[name] = np.frombuffer(data, dtype, number, at).reshape(shape)
            at += found[name].nbytes
    except (ValueError, TypeError, AttributeError):
        return None
    return found if at == len(data) else None


@dataclass(frozen=True)
class RoleCache:
    """Arrays in a folder by key, the least recently used removed beyond 256 MiB."""

    folder: Path = field(default_factory=lambda: cache_dir() / "fast")

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.bin"

    def read(self, key: str) -> dict[str, NDArray[Any]] | None:
        """Return what was kept under a key, None if nothing was or it cannot be read."""
        path = self._path(key)
        try:
            if path.stat().st_size > _MOST_FILE:
                return None
            found = unpack(path.read_bytes())
            if found is not None:
                path.touch()
        except OSError:
            return None
        return found

    def write(self, key: str, arrays: Arrays) -> None:
        """Keep arrays under a key. A cache that cannot be written costs time, not correctness."""
        data = pack(arrays)
        if len(data) > _MOST_FILE:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path(key), data)
        except (OSError, InputError):
            return

    def prune(self) -> None:
        """Remove what was not used for longest, beyond what the folder may hold."""
        try:
            files = [(p.stat().st_mtime, p.stat().st_size, p) for p in self.folder.glob("*.bin")]
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total <= _MOST_BYTES:
                    return
                total -= size
                path.unlink(missing_ok=True)
        except OSError:
            return
