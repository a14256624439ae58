"""Reads named tensors out of a folder of safetensors files, each by its byte range (mmap)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.engine.engine_errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.engine.rank_cut import TensorPiece

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MIXTRAL = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)
"""What Mixtral's checkpoints call experts, and what the model classes do."""

Progress = Callable[[int, int, str], None]
"""Called with (tensors read, tensors in all, name of the last)."""


class WeightReader:
    """The tensors of one model folder; only those asked for are read from disk.

    Expert weights that a checkpoint stores one by one (`experts.3.up_proj.weight`) are offered
    under the stacked names the model classes use (`experts.gate_up_proj`, `experts.down_proj`). Names of
    Mixtral's checkpoints are translated.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        # Of each name, the file and the name there.
        self._where = {
            _translate(stored): (file, stored) for stored, file in _locations(self.folder).items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._where or self._find_stacked(name) is not None

    def names(self) -> tuple[str, ...]:
        """Return the names of what is stored on disk, sorted."""
        return tuple(sorted(self._where))

    def read(self, name: str, piece: TensorPiece | None = None) -> Tensor:
        """Return one tensor, or a piece of it, on the CPU, in the type it is stored in.

        Of a piece nothing else is read from disk.
        """
        import torch

        if name in self._where:
            return self._read(name, piece)
        parts = self._find_stacked(name)
        if parts is None:
            raise WeightsError(
                f"the tensor {name!r} is in none of the files",
                path=self.folder,
                hint="download the model again",
            )
        if piece is None:
            return torch.stack([torch.cat([self._read(n) for n in expert]) for expert in parts])
        return torch.stack([self._read_expert(expert, piece) for expert in parts])

    def _read_expert(self, parts: list[str], piece: TensorPiece) -> Tensor:
        """Return a piece of one expert, whose parts lie under one another; the stack is dimension 0."""
        import torch

        if piece.dim != 1:
            inside = replace(piece, dim=piece.dim - 1)
            return torch.cat([self._read(name, inside) for name in parts])
        rows, first = [], 0
        for name in parts:
            end = first + self._shape(name)[0]
            own = [(max(a, first), min(b, end)) for a, b in piece.ranges]
            inside = replace(
                piece, dim=0, ranges=tuple((a - first, b - first) for a, b in own if a < b)
            )
            rows.append(self._read(name, inside))
            first = end
        return torch.cat(rows)

    def _find_stacked(self, name: str) -> list[list[str]] | None:
        """Return, per expert, the stored tensors that make up the stacked tensor `name`."""
        stem, _, last = name.rpartition(".")
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if kinds is None or not stem.endswith("experts"):
            return None
        experts: list[list[str]] = []
        # Experts are numbered from 0 without gaps; the first that is missing ends them.
        while all(f"{stem}.{len(experts)}.{kind}.weight" in self._where for kind in kinds):
            experts.append([f"{stem}.{len(experts)}.{kind}.weight" for kind in kinds])
        return experts or None

    def _shape(self, name: str) -> list[int]:
        file, stored = self._where[name]
        shape: list[int] = self._open(self.folder / file).get_slice(stored).get_shape()
        return shape

    def _read(self, name: str, piece: TensorPiece | None = None) -> Tensor:
        file, stored = self._where[name]
        path = self.folder / file
        try:
            tensor: Tensor
            if piece is None:
                tensor = self._open(path).get_tensor(stored)
            else:
                tensor = _cut(self._open(path).get_slice(stored), piece)
        except WeightsError:
            raise
        except Exception as error:  # the library raises its own, unrelated types
            raise WeightsError(
                f"the tensor {name!r} cannot be read: {error}",
                path=path,
                hint="the file is damaged or of another model; download it again",
            ) from error
        return tensor

    def _open(self, path: Path) -> Any:
        key = path.name
        if key not in self._files:
            self._files[key] = _safe_open(path)
        return self._files[key]


def _cut(stored: Any, piece: TensorPiece) -> Tensor:
    import torch

    before = (slice(None),) * piece.dim
    parts = [stored[(*before, slice(start, end))] for start, end in _joined(piece.ranges)]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=piece.dim)


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges with neighbours made one."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _safe_open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"not a readable safetensors file: {error}",
            path=path,
            hint="the file is damaged or cut short; download it again",
        ) from error


def _translate(stored: str) -> str:
    """Return what the model classes call a stored tensor."""
    if _MIXTRAL[0][0] in stored:
        for there, here in _MIXTRAL:
            stored = stored.replace(there, here)
    return stored


def _locations(folder: Path) -> dict[str, str]:
    """Return which file of the folder holds which tensor."""
    index = folder / INDEX
    if index.exists():
        try:
            mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            where = {str(name): str(file) for name, file in mapping.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"not a weight index: {error}", path=index) from error
        for file in sorted(set(where.values())):
            # An index may name files of its own folder only.
            if Path(file).name != file or not (folder / file).is_file():
                lost = next(name for name, place in sorted(where.items()) if place == file)
                raise WeightsError(
                    f"the file {file!r}, which holds {lost!r}, is missing",
                    path=folder,
                    hint="download the model again",
                )
        return where
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_safe_open(folder / SINGLE).keys(), SINGLE)
    raise WeightsError(
        f"there is neither {SINGLE} nor {INDEX}",
        path=folder,
        hint="name a folder with safetensors weights",
    )
