"""Cache on disk of the fast solver: capacities of roles, and the few templates made of them.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from atoll.plan.capacities import recall_rates, take_rates
from atoll.plan.handover import hop_link, recall_handovers, take_handovers
from atoll.plan.problem import Problem
from atoll.solve.templates.library import template_key

Arrays = Mapping[str, NDArray[Any]]

_MAGIC = b"atoll arrays 1\n"
_DTYPES = ("<f8", "<i8", "|i1")
_MAX_BYTES = 2**28
_MAX_FILE = 2**26
_ROOMS = ("catalog", "perf", "plan", "solve/templates", "solve/rent/fast", "workload")
"""Packages whose sources decide what is kept here."""

_MAX_RATES = 2048
_LAST: list[Any] = []
"""The catalog of the last plan, what was asked of it (`template_key`), hand-overs and rates."""


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
            if path.stat().st_size > _MAX_FILE:
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
        if len(data) > _MAX_FILE:
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
                if total <= _MAX_BYTES:
                    return
                total -= size
                path.unlink(missing_ok=True)
        except OSError:
            return


@contextmanager
def recalled(problem: Problem, catalog: Catalog, store: RoleCache | None) -> Iterator[None]:
    """Take over what is kept of a fleet, and keep what was asked for beside it in the end.

    Assembling and checking a plan asks for the capacities of the very nodes that it uses, wherever they
    stand. A process that has planned nothing yet takes them over from disk, under a key of all that they
    follow from; names of services are part of it, rates and prices are not.
    """
    if store is None or not code_digest():
        yield
        return
    asked = template_key(problem)
    if _LAST and _LAST[0] is catalog and _LAST[1] == asked:
        take_handovers(problem, catalog, _LAST[2])
        take_rates(problem, catalog, _LAST[3])
        yield
        _keep(problem, catalog, asked)
        return
    models = sorted({service.model for service in problem.services})
    specs = [catalog.model(name).llm for name in models]
    facts = f"{code_digest()} {facts_of(problem, catalog)} {specs!r}"
    key = f"recalled {asked} {facts}"
    found = store.read(key)
    if found is not None and "json" in found:
        _take(problem, catalog, found["json"].tobytes())
    before = len(recall_rates(problem, catalog))
    yield
    _keep(problem, catalog, asked)
    rates = recall_rates(problem, catalog)
    if before < len(rates) <= _MAX_RATES:
        text = json.dumps([rates, recall_handovers(problem, catalog)])
        store.write(key, {"json": np.frombuffer(text.encode(), np.int8)})


def _keep(problem: Problem, catalog: Catalog, asked: str) -> None:
    """Keep what was asked for in memory: a fleet is often planned again at other rates."""
    known = (recall_handovers(problem, catalog), recall_rates(problem, catalog))
    _LAST[:] = [catalog, asked, *known]


def _take(problem: Problem, catalog: Catalog, data: bytes) -> None:
    """Take over what was read, as far as it reads well."""
    try:
        rates, handovers = json.loads(data)
        take_handovers(problem, catalog, handovers)
        take_rates(problem, catalog, rates)
    except (ValueError, KeyError, TypeError):
        return
