"""Template libraries on disk, found by the content of what they were computed from.

The key covers capacities, node types, memory and limits, and no prices or availability: those may change
without a library being computed again. A file that cannot be read is computed again and replaced.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from atoll.core.errors import InputError
from atoll.core.files import atomic_write
from atoll.core.paths import cache_dir
from atoll.solve.templates.generate import (
    Progress,
    RoleTables,
    TemplateLibrary,
    generate,
    search_limits,
)

_VERSION = 4
_MAX_BYTES = 2 * 2**30


def library_key(tables: RoleTables, max_nodes: int) -> str:
    """Return a hash of everything a library depends on."""
    head = {
        "version": _VERSION,
        "node_types": tables.node_types,
        "memory": [round(value) for value in tables.memory_bytes],
        "limit": int(tables.memory_limit),
        "limits": search_limits(len(tables.node_types), max_nodes),
        "shape": tables.rates.shape,
        "rows": tables.rows,
    }
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(tables.rates).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class TemplateCache:
    """Libraries in a folder, the least recently used removed beyond 2 GiB."""

    folder: Path = field(default_factory=lambda: cache_dir() / "templates")

    def library(
        self,
        tables: RoleTables,
        max_nodes: int,
        *,
        progress: Progress | None = None,
        until: Callable[[], bool] | None = None,
    ) -> TemplateLibrary:
        """Return the library of a role, from disk if it was computed before; see `generate`.

        One that was cut short is not kept.
        """
        library = self.read(tables, max_nodes)
        if library is None:
            library = generate(tables, max_nodes, progress=progress, until=until)
            if library.max_nodes == search_limits(len(tables.node_types), max_nodes)[0]:
                self._write(self._path(tables, max_nodes), library)
        return library

    def library_or_fewer(self, whole: int) -> Callable[..., TemplateLibrary]:
        """Return what makes templates of a few nodes, or finds those of up to `whole` that were kept."""

        def make(
            tables: RoleTables,
            max_nodes: int,
            *,
            progress: Progress | None = None,
            until: Callable[[], bool] | None = None,
        ) -> TemplateLibrary:
            known = self.read(tables, whole)
            if known is not None:
                return known
            return generate(tables, max_nodes, progress=progress, until=until)

        return make

    def _path(self, tables: RoleTables, max_nodes: int) -> Path:
        return self.folder / f"{library_key(tables, max_nodes)}.npz"

    def read(self, tables: RoleTables, max_nodes: int) -> TemplateLibrary | None:
        """Return the library of a role if it was computed before."""
        path = self._path(tables, max_nodes)
        try:
            with np.load(path, allow_pickle=False) as data:
                counts, throughput = data["counts"], data["throughput"]
                multisets = int(data["multisets"])
            path.touch()
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        if counts.shape != (len(throughput), len(tables.node_types)) or counts.dtype != np.int8:
            return None
        limits = search_limits(len(tables.node_types), max_nodes)
        return TemplateLibrary(tables, counts, throughput, multisets, *limits)

    def _write(self, path: Path, library: TemplateLibrary) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            counts=library.counts,
            throughput=library.throughput,
            multisets=np.array(library.multisets),
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, buffer.getvalue())
        except (OSError, InputError):
            # A cache that cannot be written costs time, not correctness.
            return
        self._prune(path)

    def _prune(self, keep: Path) -> None:
        files = sorted(self.folder.glob("*.npz"), key=lambda p: p.stat().st_mtime)
        total = sum(p.stat().st_size for p in files)
        for path in files:
            if total <= _MAX_BYTES:
                return
            if path != keep:
                total -= path.stat().st_size
                path.unlink(missing_ok=True)
